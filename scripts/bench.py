"""Measures the engine beside what was predicted: python -m scripts.bench --concurrency=1,8,32.

--workload=poisson --rate=2 --requests=64      requests that arrive by themselves
--ladder                                       what each idea is worth, one after another
--interference                                 a long prompt beside requests that decode
--host_cost                                    the host's part of a step
--decode=1x1024,16x1024 --random_weights       decode steps alone, of any model that fits
"""

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

START = time.time()  # before anything heavy is imported: the first token's time counts from here

from absl import flags  # noqa: E402

from configs.engine import Config  # noqa: E402
from configs.errors import InputError  # noqa: E402
from configs.hardware.spec import HardwareSpec  # noqa: E402
from configs.workload import Fixed, Workload  # noqa: E402
from inference.benchmark import measure, requests  # noqa: E402
from inference.benchmark.drive import GREEDY, Run  # noqa: E402
from inference.benchmark.metrics import Promise  # noqa: E402
from inference.benchmark.requests import TimedRequest  # noqa: E402
from inference.planner import report  # noqa: E402
from inference.planner.calibration import calibrate  # noqa: E402
from inference.request import SamplingParams  # noqa: E402
from scripts import common, so_far  # noqa: E402
from scripts.flags import bench_modes, file_flags, shared_flags, workload_flags  # noqa: E402
from scripts.reports import bench_plot, bench_text  # noqa: E402

_CONCURRENCY = flags.DEFINE_list("concurrency", ["1", "8", "32"], "Requests at the same time.")
_PREFILL_TOKENS = flags.DEFINE_integer(
    "prefill_tokens", 500, "Tokens of each of four prompts that measure prefill."
)
_REPEATS = shared_flags.REPEATS
_BESIDE = flags.DEFINE_string("beside", None, "JSON of another engine on the same work.")
_LADDER = flags.DEFINE_bool("ladder", False, "Add one idea after another, each on its own metric.")
_LADDER_RUNGS = flags.DEFINE_list("ladder_rungs", None, "Only these rungs of --ladder.")
_INTERFERENCE = flags.DEFINE_bool(
    "interference", False, "Time between tokens while a long prompt is prefilled."
)
_LONG_TOKENS = flags.DEFINE_integer("long_tokens", 4000, "--interference: tokens of that prompt.")
_RUNNING = flags.DEFINE_integer("running", 8, "--interference: requests that decode beside it.")
_RANDOM_WEIGHTS = flags.DEFINE_bool(
    "random_weights", False, "Draw the weights on the device: no checkpoint, no network."
)
_DECODE = flags.DEFINE_list(
    "decode", None, "Decode steps alone: sequences x context, such as 1x1024,16x1024."
)
_GAP = flags.DEFINE_bool("gap", False, "--decode: also what the engine adds to a step.")
_HOST_COST = flags.DEFINE_bool("host_cost", False, "The host's part of a step, without a device.")
_PLOT = file_flags.PLOT
for _module in (file_flags, so_far, workload_flags):
    flags.adopt_module_key_flags(_module)

_DRAWN = dataclasses.replace(GREEDY, temperature=0.8, top_p=0.95, top_k=50)


def main(argv: Sequence[str]) -> None:
    del argv
    every: tuple[Any, ...] = (_LADDER, _INTERFERENCE, _HOST_COST, _DECODE)
    modes = [f"--{flag.name}" for flag in every if flag.value not in (False, None)]
    if len(modes) > 1:
        raise InputError(f"give one of {', '.join(modes)}")
    usual = bench_modes.OPEN if workload_flags.is_open() else bench_modes.CLOSED
    common.check_flags(modes[0] if modes else usual, bench_modes.READ)
    if _REPEATS.value < 1:
        raise InputError(f"--repeats is at least 1, not {_REPEATS.value}")
    if _PLOT.value is not None:
        file_flags.check("plot", _PLOT.value, ".png")
        bench_plot.check()
    if _LADDER.value:
        from scripts.modes import bench_ablation

        bench_ablation.run(_REPEATS.value, _LADDER_RUNGS.value, _PLOT.value)
    elif _INTERFERENCE.value or _HOST_COST.value:
        from scripts.modes import bench_probes

        if _HOST_COST.value:
            bench_probes.host_cost()
        else:
            bench_probes.interference(_RUNNING.value, _LONG_TOKENS.value, _REPEATS.value)
    elif _DECODE.value is not None:
        from scripts.modes import bench_steps

        bench_steps.run(_DECODE.value, _open, _REPEATS.value, _GAP.value)
    elif workload_flags.is_open():
        _run_open()
    else:
        _run_closed()


@dataclasses.dataclass
class _Bench:
    """An engine, warm, and what predicts it."""

    engine: Any
    machine: HardwareSpec
    promise: Promise
    first_token_s: float
    warm_up_s: float

    def __post_init__(self) -> None:
        self._num_compiles = measure.count_compiles()

    @classmethod
    def of(cls, checkpoint: Any, config: Config, promise: Promise, first: TimedRequest) -> "_Bench":
        """Serves `first` before anything else, compiling what it needs, then compiles the rest."""
        engine = common.load_engine(checkpoint, config)
        measure.measure(engine, [first], 1)
        first_token_s = time.time() - START
        warm_up_s = common.warm_up(engine)
        machine = calibrate.this_machine(config.model.dtype)
        return cls(engine, machine, promise, first_token_s, warm_up_s)

    def serve(
        self, load: Sequence[TimedRequest], concurrency: int | None, params: SamplingParams
    ) -> tuple[dict[str, Any], list[Run]]:
        """A row: medians of the runs, beside what was predicted before them; and the runs."""
        config = self.engine.config
        expected = measure.predict(config, load, self.machine, 0.0, concurrency, params)
        predicted = measure.figures([expected], self.promise)
        before = self._num_compiles()
        with common.bars() as progress:
            runs = measure.measure(
                self.engine, load, _REPEATS.value, concurrency, params,
                lambda done: progress(done, len(load), "serving"),
            )  # fmt: skip
        row: dict[str, Any] = {"concurrency": concurrency, "requests": len(load)}
        row |= measure.figures(runs, self.promise)
        row |= {"compiles": self._num_compiles() - before, "predicted": predicted}
        return row | {"predicted_output_tok_s": predicted["output_tok_s"]}, runs

    def result(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """What is printed of any workload."""
        return {
            "rows": rows,
            "first_token_s": self.first_token_s,
            "warm_up_s": self.warm_up_s,
            "shapes": len(self.engine.scheduler.shapes),
            "predicted_by": report.predicted_by(self.machine),
        }


def _run_closed() -> None:
    """As many requests at a time as --concurrency says, one row each."""
    sizes, promise = _sizes(), workload_flags.promise()
    beside = _read_beside()
    resolved, config = common.resolve_config({"max_seqs": max(sizes)})
    if max(sizes) > config.engine.max_seqs:
        raise InputError(
            f"--concurrency={max(sizes)} is above engine.max_seqs={config.engine.max_seqs}"
        )
    vocab, length = config.model.vocab_size, _PREFILL_TOKENS.value
    prefill = requests.generate(Workload("closed", 4, prompt=Fixed(length), output=Fixed(1)), vocab)
    loads = {size: requests.generate(workload_flags.read(size), vocab) for size in sizes}
    for load in (prefill, *loads.values()):
        _check_fits(config, load)
    checkpoint, _ = _open(resolved)
    shortest = dataclasses.replace(loads[sizes[0]][0], num_new_tokens=1)
    bench = _Bench.of(checkpoint, config, promise, shortest)
    rows = {size: bench.serve(loads[size], size, GREEDY)[0] for size in sizes}
    largest = max(sizes)
    sampled, _ = bench.serve(loads[largest], largest, _DRAWN)
    runs = measure.measure(bench.engine, prefill, _REPEATS.value)
    result = bench.result([rows[size] for size in sizes]) | {
        "sampled": sampled,
        "sampled_share": sampled["output_tok_s"] / rows[largest]["output_tok_s"],
        "prefill_tok_s": 4 * length / statistics.median(run.seconds for run in runs),
    }
    if common.JSON.value:
        common.print_json(result, config)
    else:
        bench_text.show_closed(result, beside)
    if _PLOT.value is not None:
        file_flags.write(_PLOT.value, bench_plot.closed(result["rows"], config.model.name))


def _run_open() -> None:
    """Requests that arrive by themselves, one row."""
    workload, promise = workload_flags.read(), workload_flags.promise()
    lines = requests.read_trace(workload.trace, workload.num_requests) if workload.trace else []
    if lines and _RANDOM_WEIGHTS.value:
        raise InputError("a trace holds text: leave --random_weights out")
    resolved, config = common.resolve_config({})
    checkpoint, tokenizer = _open(resolved)
    vocab = config.model.vocab_size
    if lines:
        load = requests.from_trace(lines, vocab, tokenizer.encode, workload.seed)
    else:
        load = requests.generate(workload, vocab)
    _check_fits(config, load)
    first = dataclasses.replace(load[0], arrival_s=0.0, num_new_tokens=1)
    bench = _Bench.of(checkpoint, config, promise, first)
    row, runs = bench.serve(load, None, GREEDY)
    result = bench.result([row | {"workload": workload.kind, "rate": workload.rate}])
    if common.JSON.value:
        common.print_json(result, config)
    else:
        bench_text.show_open(result)
    if _PLOT.value is not None:
        file_flags.write(_PLOT.value, bench_plot.latencies(runs, config.model.name))


def _open(resolved: Any) -> tuple[Any, Any]:
    """The checkpoint and its tokenizer; neither with --random_weights."""
    return (None, None) if _RANDOM_WEIGHTS.value else common.open_checkpoint(resolved)


def _sizes() -> list[int]:
    try:
        sizes = [int(text) for text in _CONCURRENCY.value]
    except ValueError:
        raise InputError(f"--concurrency is a list of numbers, not {_CONCURRENCY.value}") from None
    if not sizes or min([*sizes, _PREFILL_TOKENS.value]) < 1:
        raise InputError("--concurrency and --prefill_tokens are at least 1")
    return sizes


def _check_fits(config: Config, load: Sequence[TimedRequest]) -> None:
    longest = max(request.num_tokens for request in load)
    if longest > config.max_context:
        raise InputError(
            f"requests grow to {longest} tokens, the context holds {config.max_context}: ask for "
            "shorter prompts or outputs"
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


if __name__ == "__main__":
    common.run(main)
