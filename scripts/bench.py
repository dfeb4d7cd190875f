"""Measures the engine under closed load: python -m scripts.bench --concurrency=1,8,32."""

import dataclasses
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

START = time.time()  # before anything heavy is imported: the first token's time counts from here

from absl import flags  # noqa: E402

from configs.engine import Config  # noqa: E402
from configs.errors import InputError  # noqa: E402
from configs.hardware.spec import HardwareSpec  # noqa: E402
from inference.planner import calibrate, report  # noqa: E402
from inference.request import SamplingParams  # noqa: E402
from scripts import common, lengths  # noqa: E402

_CONCURRENCY = flags.DEFINE_list("concurrency", ["1", "8", "32"], "Requests at the same time.")
_PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 64, "Random tokens a prompt.")
_NEW_TOKENS = lengths.NEW_TOKENS
flags.adopt_module_key_flags(lengths)
_PREFILL_TOKENS = flags.DEFINE_integer(
    "prefill_tokens", 500, "Tokens of each of four prompts that measure prefill."
)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Runs of each point; medians are reported.")
_BESIDE = flags.DEFINE_string("beside", None, "JSON of another engine on the same work.")

_COMPILED = "/jax/core/compile/backend_compile_duration"


def main(argv: Sequence[str]) -> None:
    del argv
    sizes = _sizes()
    beside = _read_beside()
    resolved, config = common.resolve_config({"max_seqs": max(sizes)})
    _check_fits(config, sizes)
    checkpoint, _ = common.open_checkpoint(resolved)
    engine = common.load_engine(checkpoint, config)
    rng = random.Random(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        vocab = config.model.vocab_size
        return [[rng.randrange(vocab // 500, vocab) for _ in range(length)] for _ in range(count)]

    greedy = SamplingParams(max_new_tokens=_NEW_TOKENS.value, ignore_eos=True)
    drawn = dataclasses.replace(greedy, temperature=0.8, top_p=0.95, top_k=50)
    one = dataclasses.replace(greedy, max_new_tokens=1)
    _timed(engine, prompts(1, _PROMPT_TOKENS.value), one)
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
    machine = calibrate.this_machine(config.model.dtype)
    num_compiles = _count_compiles()

    def measure_row(size: int, params: SamplingParams) -> dict[str, Any]:
        before = num_compiles()
        row = _measure(engine, prompts, size, params, machine)
        return row | {"compiles": num_compiles() - before}

    rows = [measure_row(size, greedy) for size in sizes]
    largest = max(sizes)
    sampled = measure_row(largest, drawn)
    length = _PREFILL_TOKENS.value
    seconds = [_timed(engine, prompts(4, length), one).seconds for _ in range(_REPEATS.value)]
    result = {
        "rows": rows,
        "sampled": sampled,
        "sampled_share": sampled["output_tok_s"] / rows[sizes.index(largest)]["output_tok_s"],
        "prefill_tok_s": 4 * length / statistics.median(seconds),
        "first_token_s": first_token_s,
        "warm_up_s": warm_up_s,
        "shapes": len(engine.scheduler.shapes),
        "predicted_by": report.predicted_by(machine),
    }
    common.print_json(result, config) if common.JSON.value else _print_table(result, beside)


def _sizes() -> list[int]:
    try:
        sizes = [int(text) for text in _CONCURRENCY.value]
    except ValueError:
        raise InputError(f"--concurrency is a list of numbers, not {_CONCURRENCY.value}") from None
    others = [_PROMPT_TOKENS, _PREFILL_TOKENS, _NEW_TOKENS, _REPEATS]
    if not sizes or min([*sizes, *(flag.value for flag in others)]) < 1:
        names = ", ".join(f"--{flag.name}" for flag in others)
        raise InputError(f"--concurrency, {names} are at least 1")
    return sizes


def _check_fits(config: Config, sizes: list[int]) -> None:
    longest = max(_PREFILL_TOKENS.value + 1, _PROMPT_TOKENS.value + _NEW_TOKENS.value)
    if longest > config.max_context:
        raise InputError(
            f"requests grow to {longest} tokens, the context holds {config.max_context}; lower "
            "--prompt_tokens, --new_tokens or --prefill_tokens"
        )
    if max(sizes) > config.engine.max_seqs:
        raise InputError(
            f"--concurrency={max(sizes)} is above engine.max_seqs={config.engine.max_seqs}"
        )


def _read_beside() -> dict[str, Any]:
    if _BESIDE.value is None:
        return {}
    try:
        figures = json.loads(Path(_BESIDE.value).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        figures = None
    if not isinstance(figures, dict):
        raise InputError(f"--beside={_BESIDE.value} is not a file with one JSON object")
    for name, value in figures.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name == "peer" and not isinstance(value, str):
            raise InputError(f"--beside={_BESIDE.value}: 'peer' is a name, not {value!r:.80}")
        if name != "peer" and not (is_number and 0 < value < math.inf):
            raise InputError(
                f"--beside={_BESIDE.value}: {name!r} is a positive number, not {value!r:.80}"
            )
    return figures


def _count_compiles() -> Callable[[], int]:
    """How many programs were compiled since this call, ours or not."""
    import jax

    events: list[str] = []

    def on_event(event: str, duration_secs: float, **more: str | int) -> None:
        if event == _COMPILED:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(on_event)
    return lambda: len(events)


@dataclasses.dataclass
class _Timed:
    """One run: wall time, time to the first token of each request, gaps between its tokens, and
    (seconds, share of held page tokens without a token) of each step.
    """

    seconds: float = 0.0
    firsts: list[float] = dataclasses.field(default_factory=list)
    gaps: list[float] = dataclasses.field(default_factory=list)
    waste: list[tuple[float, float]] = dataclasses.field(default_factory=list)


def _timed(engine: Any, prompts: list[list[int]], params: SamplingParams) -> _Timed:
    run, seen = _Timed(), None
    last: dict[int, float] = {}
    engine.records.clear()
    start = time.perf_counter()

    def on_update(update: Any) -> None:
        nonlocal seen
        now = time.perf_counter()
        if update.id in last:
            run.gaps.append(now - last[update.id])
        else:
            run.firsts.append(now - start)
        last[update.id] = now
        if engine.records[-1] is not seen:  # the first news of a step
            seen = engine.records[-1]
            run.waste.append((seen.seconds, _page_waste(engine)))

    completions = engine.generate(prompts, params, on_update)
    run.seconds = time.perf_counter() - start
    if any(completion.finish_reason == "error" for completion in completions):
        raise InputError("the model gave non-finite logits: there is no rate to tell")
    return run


def _page_waste(engine: Any) -> float:
    """Share of the pages' room that running sequences hold and have no token in."""
    size, held, filled = engine.config.engine.page_tokens, 0, 0
    for sequence in engine.scheduler.running:
        for pages in sequence.pages:
            kept = [i for i, page in enumerate(pages) if page]
            held += size * len(kept)
            filled += sum(min(max(sequence.num_computed_tokens - i * size, 0), size) for i in kept)
    return 1 - filled / held if held else 0.0


def _measure(
    engine: Any, prompts: Any, size: int, params: SamplingParams, machine: HardwareSpec
) -> dict[str, Any]:
    """One row: the median run's rate, latencies over all runs; the predicted rate is that of the
    last run's steps on the machine as calibrated, or else at the roofline.
    """
    runs = [
        _timed(engine, prompts(size, _PROMPT_TOKENS.value), params) for _ in range(_REPEATS.value)
    ]
    firsts = [seconds for run in runs for seconds in run.firsts]
    gaps = [seconds for run in runs for seconds in run.gaps] or [0.0]
    rates = [size * params.max_new_tokens / run.seconds for run in runs]
    waste = [step for run in runs for step in run.waste]
    model = engine.config.model
    predicted_s = sum(
        report.seconds(model, report.operations(model, step), machine) for step in engine.records
    )
    return {
        "concurrency": size,
        "output_tok_s": statistics.median(rates),
        "predicted_output_tok_s": size * params.max_new_tokens / predicted_s,
        "kv_waste": sum(s * share for s, share in waste) / sum(s for s, _ in waste),
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
            r["predicted_output_tok_s"],
        )
        for r in result["rows"]
    ]
    lines += [("prefill tok/s", result["prefill_tok_s"], "prefill_tok_s", None)]
    lines += [("first token, s", result["first_token_s"], "first_token_s", None)]
    print(f"{'':22}{'ridgeline':>10}{'predicted':>11}{peer:>12}{'ratio' if peer else '':>8}")
    for name, value, key, predicted in lines:
        shown = f"{predicted:11.1f}" if predicted else " " * 11
        other = beside.get(key)
        shown += f"{other:12.1f}{value / other:8.2f}" if other else ""
        print(f"{name:22}{value:10.1f}{shown}".rstrip())
    rows = result["rows"]
    print(
        f"page room without a token at {rows[-1]['concurrency']}: {rows[-1]['kv_waste']:.0%}; "
        f"programs compiled after warm-up: {sum(row['compiles'] for row in rows)}; "
        f"predicted by: {result['predicted_by']}"
    )
    print(
        f"sampled (temperature 0.8, top-p 0.95, top-k 50) runs at "
        f"{result['sampled_share']:.2f} x the greedy rate; "
        f"{result['shapes']} shapes compiled in {result['warm_up_s']:.0f} s"
    )


if __name__ == "__main__":
    common.run(main)
