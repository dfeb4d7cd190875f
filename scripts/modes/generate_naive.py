"""`generate --naive`: decodes prompts without a cache and then with it, and compares the rates."""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from inference.planner import report
from inference.planner.calibration import lookup
from inference.request import SamplingParams
from inference.runtime import naive
from inference.scheduling.sequence import Sequence as Decoded

if TYPE_CHECKING:
    from inference.engine import Engine


def compare(
    engine: "Engine", prompts: Sequence[list[int]], params: SamplingParams
) -> tuple[list[dict[str, object]], dict[str, float]]:
    """Decodes prompts with and without a cache; results, and times without compilation."""
    params = dataclasses.replace(params, seed=params.seed or 0)
    model = engine.config.model
    decoded, naive_s, first_token_s = [], 0.0, 0.0
    start = time.perf_counter()

    def on_token(token: int) -> None:
        nonlocal first_token_s
        first_token_s = first_token_s or time.perf_counter() - start

    for number, prompt in enumerate(prompts):
        eos_ids = frozenset(() if params.ignore_eos else engine.eos_ids)
        room = engine.config.max_context - len(prompt)
        request_params = dataclasses.replace(
            params, max_new_tokens=min(params.max_new_tokens, room)
        )
        sequence = Decoded(
            number, request_params, list(prompt), len(prompt), eos_ids, params.seed or 0
        )
        naive_s += sum(naive.decode(engine.model_runner.params, model, sequence, on_token))
        decoded.append(sequence)
    engine.generate(prompts[:1], dataclasses.replace(params, max_new_tokens=2))  # compiles
    start_cached = time.perf_counter()
    completions = [engine.generate([prompt], params)[0] for prompt in prompts]
    cached_s = time.perf_counter() - start_cached
    machine = lookup.this_machine(model.dtype, model=model)
    sizes = [(s.num_prompt_tokens, s.num_output_tokens) for s in decoded]
    predicted_naive = sum(report.naive_seconds(model, machine, *s, naive.BLOCK) for s in sizes)
    predicted_cached = sum(report.cached_seconds(engine.config, machine, *s) for s in sizes)
    num_tokens = sum(new for _, new in sizes)
    stats = {
        "prompt_tokens": sum(length for length, _ in sizes),
        "output_tokens": num_tokens,
        "ttft_s": first_token_s,
        "output_tok_s": num_tokens / naive_s,
        "predicted_step_s": predicted_naive / num_tokens,
        "measured_step_s": naive_s / num_tokens,
        "naive_tok_s": num_tokens / naive_s,
        "cached_tok_s": num_tokens / cached_s,
        "measured_ratio": naive_s / cached_s,
        "predicted_ratio": predicted_naive / predicted_cached,
        "equal_tokens": [c.token_ids for c in completions] == [s.output_tokens for s in decoded],
    }
    return [_result(engine, sequence) for sequence in decoded], stats


def summary(stats: Mapping[str, float]) -> str:
    return (
        f"naive {stats['naive_tok_s']:.2f} tokens/s, cached {stats['cached_tok_s']:.2f}: "
        f"{stats['measured_ratio']:.1f} x measured, {stats['predicted_ratio']:.1f} x predicted; "
        f"tokens {'equal' if stats['equal_tokens'] else 'differ'}"
    )


def _result(engine: "Engine", sequence: Decoded) -> dict[str, object]:
    assert engine.tokenizer is not None
    is_sound = all(map(math.isfinite, sequence.results.logprobs))
    reason = "stop" if sequence.is_end(sequence.tokens[-1]) else "length"
    return {
        "text": engine.tokenizer.decode(sequence.output_tokens),
        "token_ids": sequence.output_tokens,
        "prompt_tokens": sequence.num_prompt_tokens,
        "finish_reason": reason if is_sound else "error",
        "logprobs": sequence.results.logprobs if is_sound else None,  # JSON has no NaN
        "top_logprobs": None,
    }
