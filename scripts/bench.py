"""Measures the engine beside what was predicted: python -m scripts.bench --concurrency=1,8,32.

--workload=poisson --rate=2 --requests=64      requests that arrive at times of their own
--ablation                                     what each technique is worth, one after another
--interference                                 a long prompt beside requests that decode
--host_cost                                    the host's part of a step
--decode=1x1024,16x1024 --random_weights       decode steps alone, for any model that fits
"""

from scripts import interrupts  # noqa: F401

# isort: split
import dataclasses
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
from inference.benchmark import first_start, measure, requests  # noqa: E402
from inference.benchmark.drive import GREEDY, Run  # noqa: E402
from inference.benchmark.metrics import SloTargets  # noqa: E402
from inference.benchmark.requests import TimedRequest  # noqa: E402
from inference.checkpoints import mapped  # noqa: E402
from inference.planner import cache_policy, report  # noqa: E402
from inference.planner.calibration import lookup  # noqa: E402
from inference.request import SamplingParams  # noqa: E402
from scripts import common  # noqa: E402
from scripts.flags import (  # noqa: E402
    deployment_flags,
    file_flags,
    json_lines_flag,
    shared_flags,
    workload_flags,
)
from scripts.modes import bench_modes  # noqa: E402
from scripts.reports import bench_text  # noqa: E402
from scripts.reports.plots import bench_plot  # noqa: E402

_CONCURRENCY = flags.DEFINE_string("concurrency", "1,8,32", "Requests at a time.")
_PREFILL_TOKENS = flags.DEFINE_integer(
    "prefill_tokens", 500, "Tokens of each of four prompts that measure prefill."
)
_REPEATS = shared_flags.REPEATS
_BESIDE = flags.DEFINE_string("beside", None, "JSON file of another engine's figures.")
_ABLATION = flags.DEFINE_bool(
    "ablation", False, "Add one technique after another, each judged by its own metric."
)
_ABLATION_ONLY = flags.DEFINE_list("ablation_only", None, "Only these of --ablation, by name.")
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
for _module in (file_flags, json_lines_flag, deployment_flags, workload_flags):
    flags.adopt_module_key_flags(_module)

_DRAWN = dataclasses.replace(GREEDY, temperature=0.8, top_p=0.95, top_k=50)


def main(argv: Sequence[str]) -> None:
    del argv
    every: tuple[Any, ...] = (_ABLATION, _INTERFERENCE, _HOST_COST, _DECODE)
    modes = [f"--{flag.name}" for flag in every if flag.value not in (False, None)]
    if len(modes) > 1:
        raise InputError(f"give one of {', '.join(modes)}")
    usual = bench_modes.OPEN if workload_flags.is_open() else bench_modes.CLOSED
    common.check_flags(modes[0] if modes else usual, bench_modes.READ)
    if _REPEATS.value < 1:
        raise InputError(f"--repeats is at least 1, not {_REPEATS.value}")
    file_flags.check_plot()
    if _ABLATION.value:
        from scripts.modes import bench_ablation

        bench_ablation.run(_REPEATS.value, _ABLATION_ONLY, _PLOT.value)
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
    """A warm engine, and the hardware that predictions are made for."""

    engine: Any
    machine: HardwareSpec
    slo: SloTargets
    first_token_s: float
    warm_up_s: float

    def __post_init__(self) -> None:
        self._num_compiles = measure.count_compiles()

    @classmethod
    def of(cls, checkpoint: Any, config: Config, slo: SloTargets, first: TimedRequest) -> "_Bench":
        """Serves `first`, compiling what that needs, before it compiles the rest."""
        engine = common.load_engine(checkpoint, config)
        measure.measure(engine, [first], 1)
        first_token_s = time.time() - START
        warm_up_s = common.warm_up(engine)
        machine = first_start.calibration(engine, anew=True, say=common.say)
        machine = machine or lookup.this_machine(config.model.dtype)
        return cls(engine, machine, slo, first_token_s, warm_up_s)

    def serve(
        self, load: Sequence[TimedRequest], concurrency: int | None, params: SamplingParams
    ) -> tuple[dict[str, Any], list[Run]]:
        """A row of medians beside what was predicted before the runs; and the runs."""
        config = self.engine.config
        expected = measure.predict(config, load, self.machine, 0.0, concurrency, params)
        predicted = measure.figures([expected], self.slo)
        before = self._num_compiles()
        with common.bars() as progress:
            runs = measure.measure(
                self.engine, load, _REPEATS.value, concurrency, params,
                lambda done: progress(done, len(load), "serving"),
            )  # fmt: skip
        row: dict[str, Any] = {"concurrency": concurrency, "requests": len(load)}
        row |= measure.figures(runs, self.slo)
        row |= {"compiles": self._num_compiles() - before, "predicted": predicted}
        row |= {"snapshots": config.num_snapshots, "snapshot_bytes": config.state_bytes(0)}
        return row | {"predicted_output_tok_s": predicted["output_tok_s"]}, runs

    def result(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """What every workload prints."""
        return {
            "rows": rows,
            "first_token_s": self.first_token_s,
            "warm_up_s": self.warm_up_s,
            "shapes": len(self.engine.scheduler.shapes),
            "predicted_by": report.predicted_by(self.machine),
            "page_groups": [
                group.spec.sight for group in self.engine.config.cached_model.page_groups
            ],
            "snapshot_tokens": cache_policy.snapshot_tokens(self.engine.config),
        }


def _run_closed() -> None:
    """One row for each number of requests at a time that --concurrency lists."""
    sizes, slo = shared_flags.whole_numbers(_CONCURRENCY), workload_flags.slo()
    if _PREFILL_TOKENS.value < 1:
        raise InputError(f"--prefill_tokens is at least 1, not {_PREFILL_TOKENS.value}")
    beside = _read_beside()
    expected = workload_flags.read(max(sizes)).expected_tokens
    resolved, config = common.resolve_config({"max_seqs": max(sizes), "expected_tokens": expected})
    common.check_together(config, "bench")
    most = config.mesh.num_groups * config.engine.max_seqs
    if max(sizes) > most:
        each = "" if most == config.engine.max_seqs else f" on each of {config.mesh}"
        raise InputError(
            f"--concurrency={max(sizes)} is above engine.max_seqs={config.engine.max_seqs}{each}"
        )
    drawn, length = (config.model.vocab_size, config.max_context), _PREFILL_TOKENS.value
    loads = {size: requests.generate(workload_flags.read(size), *drawn) for size in sizes}
    if length >= config.max_context:
        raise InputError(f"--prefill_tokens is below the context of {drawn[1]}, not {length}")
    alone = Workload("closed", 4, prompt=Fixed(length), output=Fixed(1))
    prefill = requests.generate(alone, *drawn)
    checkpoint = _open(resolved)
    shortest = dataclasses.replace(loads[sizes[0]][0], num_new_tokens=1)
    bench = _Bench.of(checkpoint, config, slo, shortest)
    served = {size: bench.serve(loads[size], size, GREEDY) for size in sizes}
    rows = {size: row for size, (row, _) in served.items()}
    decoded = [record for run in served[min(sizes)][1] for record in run.records]
    largest = max(sizes)
    sampled, _ = bench.serve(loads[largest], largest, _DRAWN)
    runs = measure.measure(bench.engine, prefill, _REPEATS.value)
    prefill_tok_s = 4 * length / statistics.median(run.seconds for run in runs)
    model = bench.engine.config.model
    rates = lookup.rates_now(report.product_formats(model))
    result = bench.result([rows[size] for size in sizes]) | {
        "sampled": sampled,
        "sampled_share": sampled["output_tok_s"] / rows[largest]["output_tok_s"],
        "prefill_tok_s": prefill_tok_s,
        **dataclasses.asdict(
            report.shares(bench.engine.config, decoded, length, prefill_tok_s, rates)
        ),
    }
    if common.JSON.value:
        common.print_json(result, config)
    else:
        bench_text.show_closed(result, beside)
    if _PLOT.value is not None:
        file_flags.write(_PLOT.value, bench_plot.closed(result["rows"], config.model.name))


def _run_open() -> None:
    """One row of requests that arrive at times of their own."""
    workload, slo = workload_flags.read(), workload_flags.slo()
    lines = requests.read_trace(workload.trace, workload.num_requests) if workload.trace else []
    if lines and _RANDOM_WEIGHTS.value:
        raise InputError("a trace holds text: leave --random_weights out")
    resolved, config = common.resolve_config({"expected_tokens": workload.expected_tokens})
    common.check_together(config, "bench")
    checkpoint = _open(resolved)
    drawn = config.model.vocab_size, config.max_context
    if lines:
        load = requests.from_trace(
            lines, *drawn, lambda text: checkpoint.load_tokenizer().encode(text), workload.seed
        )
    else:
        load = requests.generate(workload, *drawn)
    first = dataclasses.replace(load[0], arrival_s=0.0, num_new_tokens=1)
    bench = _Bench.of(checkpoint, config, slo, first)
    row, runs = bench.serve(load, None, GREEDY)
    result = bench.result([row | {"workload": workload.kind, "rate": workload.rate}])
    if common.JSON.value:
        common.print_json(result, config)
    else:
        bench_text.show_open(result)
    if _PLOT.value is not None:
        file_flags.write(_PLOT.value, bench_plot.latencies(runs, config.model.name))


def _open(resolved: Any) -> Any:
    """The checkpoint; None with --random_weights."""
    return None if _RANDOM_WEIGHTS.value else common.open_checkpoint(resolved)


def _read_beside() -> dict[str, Any]:
    if _BESIDE.value is None:
        return {}
    figures = mapped.read_json(Path(_BESIDE.value))
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
