"""`bench` with an engine of its own: closed and open loads, beside what was predicted."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.engine import Config
from configs.errors import InputError
from configs.hardware.spec import HardwareSpec
from configs.workload import Fixed, Workload
from inference.benchmark import agents, first_start, measure, requests
from inference.benchmark.drive import GREEDY, Run
from inference.benchmark.metrics import SloTargets
from inference.benchmark.requests import TimedRequest
from inference.checkpoints import mapped
from inference.planner import cache_policy, report
from inference.planner.calibration import lookup
from inference.planner.calibration import measure as machine_rates
from inference.request import SamplingParams
from scripts import common
from scripts.flags import file_flags, json_lines_flag, workload_flags
from scripts.reports import bench_text, rate_shares
from scripts.reports.plots import bench_plot

if TYPE_CHECKING:
    from inference.checkpoints.checkpoint import Checkpoint
    from inference.checkpoints.resolve import Resolved
    from inference.engine import Engine

_DRAWN = dataclasses.replace(GREEDY, temperature=0.8, top_p=0.95, top_k=50)


@dataclasses.dataclass(frozen=True)
class Options:
    """Flags besides the workload; `start_s` is the process's, as `time.time` counts, `open_`
    returns the checkpoint of a resolved model, or None, and `plot` is the file of a picture.
    """

    start_s: float
    open_: Callable[["Resolved"], "Checkpoint | None"]
    is_random: bool
    repeats: int
    plot: str | None


@dataclasses.dataclass
class _Bench:
    """A warm engine, and the hardware that predictions are made for."""

    engine: "Engine"
    machine: HardwareSpec
    slo: SloTargets
    repeats: int
    first_token_s: float
    warm_up_s: float

    def __post_init__(self) -> None:
        self._num_compiles = measure.count_compiles()

    @classmethod
    def of(
        cls,
        checkpoint: "Checkpoint | None",
        config: Config,
        slo: SloTargets,
        first: TimedRequest,
        options: Options,
    ) -> "_Bench":
        """Serves `first`, compiling what that needs, before it compiles the rest."""
        engine = common.load_engine(checkpoint, config)
        measure.measure(engine, [first], 1)
        first_token_s = time.time() - options.start_s
        warm_up_s = common.warm_up(engine)
        machine = first_start.calibration(engine, anew=True, say=common.say)
        machine = machine or lookup.this_machine(config.model.dtype)
        return cls(engine, machine, slo, options.repeats, first_token_s, warm_up_s)

    def serve(
        self, load: Sequence[TimedRequest], concurrency: int | None, params: SamplingParams
    ) -> tuple[dict[str, Any], list[Run]]:
        """A row of medians beside what was predicted before the runs; and the runs."""
        config = self.engine.config
        expected = measure.predict(config, load, self.machine, 0.0, concurrency, params)
        predicted: dict[str, Any] = measure.figures([expected], self.slo)
        num_requests = agents.num_requests(load)
        before = self._num_compiles()
        with common.bars() as progress:
            runs = measure.measure(
                self.engine, load, self.repeats, concurrency, params,
                lambda done: progress(done, num_requests, "serving"),
            )  # fmt: skip
        row: dict[str, Any] = {"concurrency": concurrency, "requests": num_requests}
        row |= measure.figures(runs, self.slo)
        if num_requests > len(load):
            row["turns"] = agents.by_turn(runs, config.page_tokens)
            predicted["turns"] = agents.by_turn([expected], config.page_tokens)
        row |= {"compiles": self._num_compiles() - before, "predicted": predicted}
        row |= {"snapshots": config.num_snapshots, "snapshot_bytes": config.state_bytes(0)}
        return row | {"predicted_output_tok_s": predicted["output_tok_s"]}, runs

    def result(self, rows: list[dict[str, object]]) -> dict[str, Any]:
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


def run_closed(sizes: list[int], prefill_tokens: int, beside: str | None, options: Options) -> None:
    """One row for each number of requests at a time, beside another engine's figures in a file."""
    slo = workload_flags.slo()
    if prefill_tokens < 1:
        raise InputError(f"--prefill_tokens is at least 1, not {prefill_tokens}")
    peer = _read_beside(beside)
    expected = workload_flags.read(max(sizes)).expected_tokens
    resolved, config = common.resolve_config({"max_seqs": max(sizes), "expected_tokens": expected})
    common.check_together(config, "bench")
    max_requests = config.mesh.num_groups * config.engine.max_seqs
    if max(sizes) > max_requests:
        of_each = "" if max_requests == config.engine.max_seqs else f" on each of {config.mesh}"
        raise InputError(
            f"--concurrency={max(sizes)} is above engine.max_seqs={config.engine.max_seqs}{of_each}"
        )
    drawn, length = (config.model.vocab_size, config.max_context), prefill_tokens
    loads = {size: requests.generate(workload_flags.read(size), *drawn) for size in sizes}
    if length >= config.max_context:
        raise InputError(f"--prefill_tokens is below the context of {drawn[1]}, not {length}")
    alone = Workload("closed", 4, prompt=Fixed(length), output=Fixed(1))
    prefill = requests.generate(alone, *drawn)
    checkpoint = options.open_(resolved)
    shortest = dataclasses.replace(loads[sizes[0]][0], num_new_tokens=1)
    bench = _Bench.of(checkpoint, config, slo, shortest, options)
    served = {}
    for size in sizes:
        served[size] = bench.serve(loads[size], size, GREEDY)
        json_lines_flag.print_line(bench.result([row for row, _ in served.values()]))
    rows = {size: row for size, (row, _) in served.items()}
    largest = max(sizes)
    decoded, batched = (
        [record for run in served[size][1] for record in run.records]
        for size in (min(sizes), largest)
    )
    sampled, _ = bench.serve(loads[largest], largest, _DRAWN)
    runs = measure.measure(bench.engine, prefill, options.repeats)
    prefill_tok_s = 4 * length / statistics.median(run.seconds for run in runs)
    model = bench.engine.config.model
    formats = rate_shares.product_formats(model)
    rates, peaks = lookup.rates_now(formats), machine_rates.peaks()
    result = bench.result([rows[size] for size in sizes]) | {
        "sampled": sampled,
        "sampled_share": sampled["output_tok_s"] / rows[largest]["output_tok_s"],
        "prefill_tok_s": prefill_tok_s,
        "peaks": peaks,
        "product_peak": machine_rates.product_peak(formats[0], peaks),
        **dataclasses.asdict(
            rate_shares.shares(bench.engine.config, decoded, batched, length, prefill_tok_s, rates)
        ),
    }
    if json_lines_flag.is_json():
        common.print_json(result, config)
    else:
        bench_text.show_closed(result, peer)
    if options.plot is not None:
        file_flags.write(options.plot, bench_plot.closed(result["rows"], config.model.name))


def run_load(options: Options, concurrency: int | None = None) -> None:
    """One row of a workload that arrives by itself, or of so many agents at a time."""
    workload, slo = workload_flags.read(concurrency), workload_flags.slo()
    lines = requests.read_trace(workload.trace, workload.num_requests) if workload.trace else []
    if lines and options.is_random:
        raise InputError("a trace holds text: leave --random_weights out")
    resolved, config = common.resolve_config({"expected_tokens": workload.expected_tokens})
    common.check_together(config, "bench")
    checkpoint = options.open_(resolved)
    drawn = config.model.vocab_size, config.max_context
    if lines:
        assert checkpoint is not None
        load_tokenizer = checkpoint.load_tokenizer
        load = requests.from_trace(
            lines, *drawn, lambda text: load_tokenizer().encode(text), workload.seed
        )
    elif workload.kind == "agents":
        load = agents.sessions(workload, *drawn)
    else:
        load = requests.generate(workload, *drawn)
    first = dataclasses.replace(load[0], arrival_s=0.0, num_new_tokens=1, turns=())
    bench = _Bench.of(checkpoint, config, slo, first, options)
    row, runs = bench.serve(load, concurrency, GREEDY)
    result = bench.result([row | {"workload": workload.kind, "rate": workload.rate}])
    if common.JSON.value:
        common.print_json(result, config)
    else:
        bench_text.show_open(result)
    if options.plot is not None:
        file_flags.write(options.plot, bench_plot.latencies(runs, config.model.name))


def _read_beside(path: str | None) -> dict[str, object]:
    if path is None:
        return {}
    figures = mapped.read_json(Path(path))
    for name, value in figures.items():
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else 0
        if name == "peer" and not isinstance(value, str):
            raise InputError(f"--beside={path}: 'peer' is a name, not {value!r:.80}")
        if name != "peer" and not 0 < number < math.inf:
            raise InputError(f"--beside={path}: {name!r} is a positive number, not {value!r:.80}")
    return figures
