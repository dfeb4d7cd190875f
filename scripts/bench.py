"""Measures the engine under closed load: python -m scripts.bench --concurrency=1,8,32."""

import dataclasses
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

START = time.time()  # before anything heavy is imported: the first token's time counts from here

from absl import flags  # noqa: E402

from configs.errors import InputError  # noqa: E402
from inference.request import SamplingParams  # noqa: E402
from scripts import common  # noqa: E402

_CONCURRENCY = flags.DEFINE_list("concurrency", ["1", "8", "32"], "Requests at the same time.")
_PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 64, "Random tokens a prompt.")
_NEW_TOKENS = flags.DEFINE_integer("new_tokens", 48, "Tokens to generate a request.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Runs of each point; medians are reported.")
_BESIDE = flags.DEFINE_string("beside", None, "JSON of another engine on the same work.")


def main(argv: Sequence[str]) -> None:
    del argv
    sizes = _sizes()
    beside = _read_beside()
    resolved, config = common.resolve_config({"max_seqs": max(sizes)})
    checkpoint, _ = common.open_checkpoint(resolved)
    engine = common.load_engine(checkpoint, config)
    rng = random.Random(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        vocab = config.model.vocab_size
        return [[rng.randrange(vocab // 500, vocab) for _ in range(length)] for _ in range(count)]

    greedy = SamplingParams(max_new_tokens=_NEW_TOKENS.value, ignore_eos=True)
    drawn = dataclasses.replace(greedy, temperature=0.8, top_p=0.95, top_k=50)
    one = dataclasses.replace(greedy, max_new_tokens=1)
    engine.generate(prompts(1, _PROMPT_TOKENS.value), one)
    first_token_s = time.time() - START
    with common.bars() as progress:
        done = 0

        def compiled() -> None:
            nonlocal done
            done += 1
            progress(done, len(engine.scheduler.shapes), "compiling steps")

        start = time.perf_counter()
        engine.warm_up(compiled)
        warm_up_s = time.perf_counter() - start
    rows = [_measure(engine, prompts, size, greedy) for size in sizes]
    largest = max(sizes)
    sampled = _measure(engine, prompts, largest, drawn)
    seconds = [_timed(engine, prompts(4, 500), one)[0] for _ in range(_REPEATS.value)]
    result = {
        "rows": rows,
        "sampled": sampled,
        "sampled_share": sampled["output_tok_s"] / rows[sizes.index(largest)]["output_tok_s"],
        "prefill_tok_s": 2000 / statistics.median(seconds),
        "first_token_s": first_token_s,
        "warm_up_s": warm_up_s,
        "shapes": len(engine.scheduler.shapes),
    }
    common.print_json(result, config) if common.JSON.value else _print_table(result, beside)


def _sizes() -> list[int]:
    try:
        sizes = [int(text) for text in _CONCURRENCY.value]
    except ValueError:
        raise InputError(f"--concurrency is a list of numbers, not {_CONCURRENCY.value}") from None
    if not sizes or min([*sizes, _PROMPT_TOKENS.value, _NEW_TOKENS.value, _REPEATS.value]) < 1:
        raise InputError(
            "--concurrency, --prompt_tokens, --new_tokens and --repeats are at least 1"
        )
    return sizes


def _read_beside() -> dict[str, Any]:
    if _BESIDE.value is None:
        return {}
    try:
        figures = json.loads(Path(_BESIDE.value).read_text(encoding="utf-8"))
        assert isinstance(figures, dict)
        return figures
    except (OSError, ValueError, AssertionError):
        raise InputError(f"--beside={_BESIDE.value} is not a file with one JSON object") from None


def _timed(
    engine: Any, prompts: list[list[int]], params: SamplingParams
) -> tuple[float, list[float], list[float]]:
    """Wall time, time to the first token of each request, and the gaps between its tokens."""
    start = time.perf_counter()
    last: dict[int, float] = {}
    firsts: list[float] = []
    gaps: list[float] = []

    def on_update(update: Any) -> None:
        now = time.perf_counter()
        if update.id in last:
            gaps.append(now - last[update.id])
        else:
            firsts.append(now - start)
        last[update.id] = now

    engine.generate(prompts, params, on_update)
    return time.perf_counter() - start, firsts, gaps


def _measure(engine: Any, prompts: Any, size: int, params: SamplingParams) -> dict[str, Any]:
    """One row: the median run's rate, latencies over all runs."""
    runs = [
        _timed(engine, prompts(size, _PROMPT_TOKENS.value), params) for _ in range(_REPEATS.value)
    ]
    firsts = [seconds for _, run_firsts, _ in runs for seconds in run_firsts]
    gaps = [seconds for _, _, run_gaps in runs for seconds in run_gaps] or [0.0]
    rates = [size * params.max_new_tokens / seconds for seconds, _, _ in runs]
    return {
        "concurrency": size,
        "output_tok_s": statistics.median(rates),
        "ttft_p50_s": _quantile(firsts, 0.5),
        "ttft_p99_s": _quantile(firsts, 0.99),
        "itl_p50_s": _quantile(gaps, 0.5),
        "itl_p99_s": _quantile(gaps, 0.99),
    }


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _print_table(result: dict[str, Any], beside: dict[str, Any]) -> None:
    peer = beside.get("peer", "")
    lines = [
        (
            f"output tok/s at {r['concurrency']}",
            r["output_tok_s"],
            f"output_tok_s_{r['concurrency']}",
        )
        for r in result["rows"]
    ]
    lines += [("prefill tok/s", result["prefill_tok_s"], "prefill_tok_s")]
    lines += [("first token, s", result["first_token_s"], "first_token_s")]
    print(f"{'':22}{'ridgeline':>10}{peer:>12}{'ratio' if peer else '':>8}")
    for name, value, key in lines:
        other = beside.get(key)
        print(f"{name:22}{value:10.1f}" + (f"{other:12.1f}{value / other:8.2f}" if other else ""))
    print(
        f"sampled (temperature 0.8, top-p 0.95, top-k 50) runs at "
        f"{result['sampled_share']:.2f} x the greedy rate; "
        f"{result['shapes']} shapes compiled in {result['warm_up_s']:.0f} s"
    )


if __name__ == "__main__":
    common.run(main)
