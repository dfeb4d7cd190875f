"""Where a step's time goes on this machine's CPU, and how it grows: measured and predicted.

    python -m scripts.reports.performance [--model=smollm2-135m] [--weights=file]

measures, and writes the tables of docs/performance.md and its picture, or --output. One engine does
everything, within 5 minutes on two cores. The planner's constants come from the engine's own steps,
as after a first start (`inference/benchmark/first_start.py`).
"""

import dataclasses
import datetime
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax.stages
from absl import app, flags

from configs.engine import Config, EngineConfig
from configs.hardware.spec import HardwareSpec
from configs.workload import Fixed, Workload
from inference.benchmark import drive, first_start, measure, requests, steps
from inference.checkpoints import resolve
from inference.engine import Engine
from inference.files import local_machine
from inference.planner import cost, report
from inference.planner.calibration import calibrate, lookup
from inference.planner.calibration import measure as machine_rates
from inference.planner.calibration.verify import Point
from inference.planner.cost import Operation, Precision
from inference.runtime import compilation_cache
from inference.scheduling import step_shapes
from inference.scheduling.step_schedule import StepRecord
from inference.scheduling.step_shapes import StepShape
from scripts.reports import rate_shares, step_trace
from scripts.reports.pages.markdown import bullets, fill, prose, table
from scripts.reports.pages.results import COLORS
from scripts.reports.plots import figures
from scripts.reports.plots.figures import Axes
from scripts.reports.step_trace import TracedStep

_MODEL = flags.DEFINE_string("model", "smollm2-135m", "a model, as scripts.generate takes it")
_WEIGHTS = flags.DEFINE_string("weights", None, "bfloat16, float32 or file, as scripts.generate's")
_OUTPUT = flags.DEFINE_string("output", "docs/performance.md", "the page")
_PAGE = Path("docs/performance.md")

_REQUESTS, _CONTEXTS = (1, 2, 4, 8, 16, 32, 64), (128, 256, 512, 1024, 2048, 4096, 8192)
_SHOWN = (1, 8, 32)  # requests whose steps are taken apart
_CONTEXT, _PROMPT, _NEW = 128, 112, 32  # the engine's loads lie around that context
_CHUNKS, _LONG_PROMPT = 8, 500
_TURNS, _REPEATS, _TRACED = 3, 3, 5
_MANY = 8  # requests whose step is timed over contexts, beside that of one


@dataclasses.dataclass(frozen=True)
class Step:
    """A step that is timed: a point, and the shape of the executable that the engine runs it in."""

    point: Point
    shape: StepShape
    config: Config

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Operations as the planner counts them."""
        queries = 1 if self.point.rows else self.point.chunk_tokens
        rows = tuple((queries, context) for context in self.point.contexts)
        return report.operations(self.config, StepRecord(self.shape, rows, 0.0, 0.0))


class Stepper:
    """Runs steps of an engine, by point."""

    def __init__(self, engine: Engine):
        self.config, self._runner = engine.config, engine.model_runner
        self._shapes = step_shapes.enumerate_shapes(engine.config.engine)

    def decode(self, count: int, context: int) -> Step:
        """Returns the step in which `count` requests decode."""
        shape = step_shapes.choose(self._shapes, count, 0, False)
        return Step(Point(self.config.model, count, 0, context), shape, self.config)

    def prefill(self) -> Step:
        """Returns the step that computes a prompt."""
        tokens = self.config.engine.shapes.chunk_tokens
        point = Point(self.config.model, 0, _CHUNKS, _CHUNKS * tokens, tokens)
        shape = step_shapes.choose(self._shapes, 0, _CHUNKS, False)
        return Step(point, shape, self.config)

    def runs(self, step: Step) -> Callable[[], float]:
        """Returns a function that runs a step, which ran twice already, and returns its seconds."""
        prepared = steps.arrays(step.point, self.config, shape=step.shape)

        def run() -> float:
            return steps.run(self._runner, step.shape, prepared)

        run(), run()
        return run

    def seconds(self, step: Step) -> float:
        """Returns the median of several runs."""
        run = self.runs(step)
        return statistics.median(run() for _ in range(_REPEATS))

    def traced(self, step: Step) -> TracedStep:
        """Runs the step under the profiler."""
        executable = self._runner.compiled(step.shape)
        assert isinstance(executable, jax.stages.Compiled), "this process compiled it"
        return step_trace.trace(self.runs(step), executable.as_text() or "", _TRACED)


@dataclasses.dataclass(frozen=True)
class Turn:
    """All measurements, once.

    Attributes:
        plain, traced: the steps that are taken apart: seconds without the profiler, and parts.
        loads, prompts: the engine under each number of requests, and under prompts alone.
        rates: the device's bandwidth and product rate.
        growth: seconds of each step of the curve.
    """

    plain: list[float]
    traced: list[TracedStep]
    loads: list[drive.Run]
    prompts: drive.Run
    rates: tuple[float, float]
    growth: list[float]

    @classmethod
    def of(
        cls, engine: Engine, stepper: Stepper, shown: Sequence[Step], curve: Sequence[Step]
    ) -> "Turn":
        plain = [stepper.seconds(step) for step in shown]
        traced = [stepper.traced(step) for step in shown]
        loads = [_serve(engine, count, _PROMPT, _NEW) for count in _SHOWN]
        prompts = _serve(engine, 4, _LONG_PROMPT, 1)
        rates = lookup.rates_now(rate_shares.product_formats(engine.config.model))
        return cls(plain, traced, loads, prompts, rates, [stepper.seconds(s) for s in curve])


def main(arguments: list[str]) -> None:
    """Measures, then writes the page's blocks and its picture."""
    del arguments
    page = Path(_OUTPUT.value)
    compilation_cache.enable()
    engine = _engine()
    stepper, config = Stepper(engine), engine.config
    shown = [stepper.decode(count, _CONTEXT) for count in _SHOWN] + [stepper.prefill()]
    sizes = dict.fromkeys(
        [(count, _CONTEXT) for count in _REQUESTS]
        + [(count, context) for count in (1, _MANY) for context in _contexts(config)]
    )
    points = [stepper.decode(count, context) for count, context in sizes]
    for step in shown:
        stepper.runs(step)  # compiles what the calibration runs
    first_start.calibration(engine, anew=True)
    for count in _SHOWN:
        _serve(engine, count, _PROMPT, 2)  # compiles what mixes prompts with decoding
    turns = [Turn.of(engine, stepper, shown, points) for _ in range(_TURNS)]
    hardware = first_start.calibration(engine) or lookup.this_machine(config.model.dtype)
    seconds = _medians([turn.growth for turn in turns])
    curve = list(zip(points, seconds, strict=True))
    blocks = {
        "rates": _rates(engine, hardware, _shares(config, turns)),
        "parts": _parts(shown, turns, hardware, _shares(config, turns)),
        "growth": _growth(curve, hardware),
    }
    page.with_suffix(".png").write_bytes(_picture(curve, hardware, stepper))
    page.write_text(fill(_PAGE.read_text("utf-8"), blocks), "utf-8")
    print(page, file=sys.stderr)


def _medians(runs: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(point) for point in zip(*runs, strict=True)]


def _shares(config: Config, turns: Sequence[Turn]) -> rate_shares.Shares:
    """Returns the shares of the best rates of all turns that the turns' loads reached together."""
    bandwidth, rate = (max(rates) for rates in zip(*(turn.rates for turn in turns), strict=True))
    decoded, batched = (
        [record for turn in turns for record in turn.loads[at].records] for at in (0, -1)
    )
    seconds = statistics.median(turn.prompts.seconds for turn in turns)
    return rate_shares.shares(
        config, decoded, batched, _LONG_PROMPT, 4 * _LONG_PROMPT / seconds, (bandwidth, rate)
    )


def _engine() -> Engine:
    """Makes an engine as `scripts.generate` does, with room for the largest steps."""
    resolved = resolve.resolve(_MODEL.value)
    sizes = EngineConfig.of(
        max_seqs=max(_REQUESTS), max_context=min(max(_CONTEXTS), resolved.config.max_context),
        decode_rows=(2, 8, 16, 32, 64), weights=_WEIGHTS.value, seed=1,
    )  # fmt: skip
    config = Config(resolved.config, sizes).for_platform("cpu")
    sizes = config.engine.replace(cache_bytes=config.full_bytes(_MANY))
    return Engine.from_checkpoint(Config(config.model, sizes), resolved.open(None))


def _contexts(config: Config) -> list[int]:
    return [context for context in _CONTEXTS if context <= config.max_context]


def _serve(engine: Engine, count: int, length: int, num_new: int) -> drive.Run:
    """Runs a closed load of `count` requests at a time."""
    workload = Workload("closed", count, prompt=Fixed(length), output=Fixed(num_new))
    load = requests.generate(workload, engine.config.model.vocab_size, engine.config.max_context)
    return measure.measure(engine, load, 1, count)[0]


def _rates(engine: Engine, hardware: HardwareSpec, shares: rate_shares.Shares) -> list[str]:
    config = engine.config
    constants = [f"overhead {1e3 * hardware.overhead_s:.1f} ms"]
    constants += [f"{name} {getattr(hardware, name):.2f}" for name in calibrate.CONSTANTS[1:]]
    return [
        *prose(
            f"Measured {datetime.date.today()}, {local_machine.name()}: {config.model.name},",
            f"weights in {', '.join(rate_shares.product_formats(config.model))}, products by",
            f"{config.engine.kernels.linear}. Memory is read at",
            f"{shares.read_bandwidth / 1e9:.1f} GB/s, the best product (512 rows) computes",
            f"{shares.best_product_rate / 1e9:,.0f} GFLOP/s.",
            _peak(engine, shares),
        ),
        *bullets(
            "Decoding of one request reads its bytes at"
            f" {shares.decode_bandwidth_share:.0%} of that bandwidth.",
            f"Prefill of {_LONG_PROMPT} tokens computes at {shares.prefill_rate_share:.0%} of that"
            " product's rate.",
            "The planner is calibrated by this engine's own steps, in 5 seconds, while memory is"
            f" read at {hardware.read_bandwidth / 1e9:.1f} GB/s: {', '.join(constants)}.",
        ),
    ]


def _peak(engine: Engine, shares: rate_shares.Shares) -> str:
    """Says what the processor's multiply-adds reach, where a library can measure them."""
    format = rate_shares.product_formats(engine.config.model)[0]
    peak = machine_rates.product_peak(format, machine_rates.peaks())
    if peak is None:
        return ""
    return (
        f"Loops of multiply-adds on registers reach {peak / 1e9:,.0f} GFLOP/s: that product "
        f"{shares.best_product_rate / peak:.0%} of it."
    )


def _parts(
    shown: Sequence[Step], turns: Sequence[Turn], hardware: HardwareSpec, shares: rate_shares.Shares
) -> list[str]:
    """Formats the table of parts, a column a step."""
    names = [_requests(count) for count in _SHOWN] + [f"prompt of {shown[-1].point.context}"]
    predicted = [_predicted(step, hardware) for step in shown]
    plain = _medians([turn.plain for turn in turns])
    runs = zip(*(turn.traced for turn in turns), strict=True)
    traced = [sorted(steps, key=lambda step: step.seconds)[_TURNS // 2] for steps in runs]
    loads = zip(*(turn.loads for turn in turns), strict=True)
    in_engine = [_decoding(runs, count) for runs, count in zip(loads, _SHOWN, strict=True)]
    totals = [cost.total(step.operations) for step in shown]
    rows = {
        part: [_pair(s.parts[part], p.get(part)) for s, p in zip(traced, predicted, strict=True)]
        for part in step_trace.PARTS
    }
    rows |= {
        "**all**": [
            _pair(s.seconds, sum(p.values())) for s, p in zip(traced, predicted, strict=True)
        ],
        "without the profiler": [_ms(seconds) for seconds in plain],
        "in the engine": [*(_ms(seconds) for seconds, _ in in_engine), ""],
        "host: schedules, builds, commits": [*(_ms(host_s) for _, host_s in in_engine), ""],
        "read, MB": [f"{total.bytes / 1e6:,.0f}" for total in totals],
    }
    products = [cost.total(o for o in step.operations if o.kind == "matrix") for step in shown]
    product_s = [step.parts[step_trace.PRODUCTS] for step in traced]
    for label, costs, times in (
        ("share of", totals, plain), ("products alone, of", products, product_s),
    ):  # fmt: skip
        points = list(zip(costs, times, strict=True))
        rows[f"{label} the bandwidth"] = [
            f"{total.bytes / seconds / shares.read_bandwidth:.0%}" for total, seconds in points
        ]
        rows[f"{label} the best product"] = [
            f"{total.flops / seconds / shares.best_product_rate:.0%}" for total, seconds in points
        ]
    return table(("", *names), [(name, *cells) for name, cells in rows.items()])


def _requests(count: int) -> str:
    return f"{count} request{'s' * (count > 1)}"


def _predicted(step: Step, hardware: HardwareSpec) -> Mapping[str, float]:
    """Predicts seconds of each part that the planner knows."""
    operations, precision = step.operations, Precision.of(step.point.model)
    parts = {step_trace.REST: hardware.overhead_s}
    times = step_trace.operation_times(operations, hardware, precision)
    for operation, seconds in zip(operations, times, strict=True):
        part = step_trace.part_of_planned(operation)
        parts[part] = parts.get(part, 0.0) + seconds
    return parts


def _decoding(runs: Sequence[drive.Run], count: int) -> tuple[float, float]:
    """Returns medians of a load's steps in which all requests decode: seconds, and the host's."""
    records = [
        record
        for run in runs
        for record in run.records
        if not record.shape.prefill[0] and len(record.rows) == count
    ]
    seconds = statistics.median(record.seconds for record in records)
    return seconds, statistics.median(record.host_s for record in records)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def _pair(measured: float, predicted: float | None) -> str:
    return _ms(measured) + (f" / {_ms(predicted)}" if predicted is not None else "")


Curve = Sequence[tuple[Step, float]]


def _seconds(step: Step, hardware: HardwareSpec) -> float:
    return report.seconds(step.point.model, step.operations, hardware)


def _growth(curve: Curve, hardware: HardwareSpec) -> list[str]:
    errors = [_seconds(step, hardware) / seconds - 1 for step, seconds in curve]
    rows = [
        (
            f"{step.point.rows}", f"{step.point.context:,}", _ms(seconds),
            _ms(_seconds(step, hardware)), f"{error:+.0%}", f"{step.point.rows / seconds:,.0f}",
        )
        for (step, seconds), error in zip(curve, errors, strict=True)
    ]  # fmt: skip
    sizes = sorted(map(abs, errors))
    columns = "requests", "context", "measured, ms", "predicted, ms", "error", "tokens/s"
    median = statistics.median(sizes)
    summary = f"The prediction misses by {median:.0%} (median), at most {sizes[-1]:.0%}."
    return [*table(columns, rows), *prose(summary)]


def _picture(curve: Curve, hardware: HardwareSpec, stepper: Stepper) -> bytes:
    """Plots steps over requests and over context, with the planner's curves."""
    contexts = _contexts(stepper.config)

    def plot(axes: Axes, unit: str, steps: Sequence[Step], points: Curve, label: str) -> None:
        """`unit` names the attribute of a step's point that the axis shows."""
        color = COLORS[len(axes.lines) // 2]
        sizes = [getattr(step.point, unit) for step in steps]
        predicted = [1e3 * _seconds(step, hardware) for step in steps]
        axes.plot(sizes, predicted, color=color, label=f"{label}, planner")
        sizes = [getattr(step.point, unit) for step, _ in points]
        measured = [1e3 * seconds for _, seconds in points]
        axes.plot(sizes, measured, "o", color=color, label=f"{label}, measured")

    def draw(over_requests: Axes, over_context: Axes) -> None:
        steps = [stepper.decode(count, _CONTEXT) for count in range(1, max(_REQUESTS) + 1)]
        points = [(step, s) for step, s in curve if step.point.context == _CONTEXT]
        plot(over_requests, "rows", steps, points, f"{_CONTEXT} tokens of context")
        for count in (1, _MANY):
            steps = [stepper.decode(count, length) for length in range(128, contexts[-1] + 1, 64)]
            points = [(step, s) for step, s in curve if step.point.rows == count]
            plot(over_context, "context", steps, points, _requests(count))
        for axes, ticks, name in (
            (over_requests, _REQUESTS, "requests"), (over_context, contexts, "tokens of context"),
        ):  # fmt: skip
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
            axes.set(xlabel=name, ylabel="ms a step", ylim=(0, None))
            axes.legend(fontsize=8)

    return figures.png(f"{stepper.config.model.name}: a decode step", draw)


if __name__ == "__main__":
    app.run(main)
