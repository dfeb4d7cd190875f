"""Where a step's time goes on this machine's CPU, and how it grows, beside the planner's word.

    python -m scripts.reports.performance [--model=smollm2-135m] [--weights=file]

writes docs/performance.md, or --output, and a picture beside it. One engine does everything, within
5 minutes on two cores. The planner's constants come from the engine's own steps, as after a first
start (`inference/benchmark/first_start.py`).
"""

import dataclasses
import datetime
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import app, flags

from configs.engine import Config, EngineConfig
from configs.hardware.spec import HardwareSpec
from configs.workload import Fixed, Workload
from inference.benchmark import drive, first_start, measure, requests, step_trace, steps
from inference.benchmark.step_trace import TracedStep
from inference.checkpoints import resolve
from inference.engine import Engine
from inference.files import local_machine
from inference.planner import cost, report, roofline
from inference.planner.calibration import calibrate, lookup
from inference.planner.calibration import measure as machine_rates
from inference.planner.calibration.verify import Point
from inference.planner.cost import Operation, Precision
from inference.runtime import compilation_cache
from inference.scheduling import step_shapes
from inference.scheduling.step_schedule import StepRecord
from inference.scheduling.step_shapes import StepShape
from scripts.reports.plots import figures

_MODEL = flags.DEFINE_string("model", "smollm2-135m", "a model, as scripts.generate takes it")
_WEIGHTS = flags.DEFINE_string("weights", None, "bfloat16, float32 or file, as scripts.generate's")
_OUTPUT = flags.DEFINE_string("output", "docs/performance.md", "the page")

_REQUESTS, _CONTEXTS = (1, 2, 4, 8, 16, 32, 64), (128, 256, 512, 1024, 2048, 4096, 8192)
_SHOWN = (1, 8, 32)  # requests whose steps are taken apart
_CONTEXT, _PROMPT, _NEW = 128, 112, 32  # of these: the engine's loads lie around that context
_CHUNKS, _LONG_PROMPT = 8, 500
_TURNS, _REPEATS, _TRACED = 3, 3, 5
_MANY = 8  # requests whose step is timed over contexts, beside that of one
_COLOURS = ("#332288", "#CC6677")  # of Paul Tol's muted scheme


@dataclasses.dataclass(frozen=True)
class Step:
    """A step that is timed: a point, and the shape of the executable that the engine runs it in."""

    point: Point
    shape: StepShape
    config: Config

    @property
    def operations(self) -> tuple[Operation, ...]:
        """What the planner counts of it."""
        queries = 1 if self.point.rows else self.point.chunk_tokens
        rows = tuple((queries, context) for context in self.point.contexts)
        return report.operations(self.config, StepRecord(self.shape, rows, 0.0, 0.0))


class Stepper:
    """Steps of an engine, by point."""

    def __init__(self, engine: Engine):
        self.config, self._runner = engine.config, engine.model_runner
        self._shapes = step_shapes.enumerate_shapes(engine.config.engine)

    def decode(self, count: int, context: int) -> Step:
        """The step in which so many requests decode."""
        shape = step_shapes.choose(self._shapes, count, 0, False)
        return Step(Point(self.config.model, count, 0, context), shape, self.config)

    def prefill(self) -> Step:
        """The step that computes a prompt."""
        tokens = self.config.engine.shapes.chunk_tokens
        point = Point(self.config.model, 0, _CHUNKS, _CHUNKS * tokens, tokens)
        shape = step_shapes.choose(self._shapes, 0, _CHUNKS, False)
        return Step(point, shape, self.config)

    def runs(self, step: Step) -> Callable[[], float]:
        """What runs a step and returns its seconds; it ran twice already."""
        prepared = steps.arrays(step.point, self.config, shape=step.shape)

        def run() -> float:
            return steps.run(self._runner, step.shape, prepared)

        run(), run()
        return run

    def seconds(self, step: Step) -> float:
        """The median of several runs."""
        run = self.runs(step)
        return statistics.median(run() for _ in range(_REPEATS))

    def traced(self, step: Step) -> TracedStep:
        """The step under the profiler."""
        hlo = self._runner.compiled(step.shape).as_text()
        return step_trace.trace(self.runs(step), hlo, _TRACED)


@dataclasses.dataclass(frozen=True)
class Turn:
    """Everything, measured once: steps that are taken apart (seconds without the profiler, and
    under it), a load of each number of requests and one of prompts, the device's rates, and seconds
    of the steps that grow.
    """

    plain: list[float]
    traced: list[TracedStep]
    loads: list[drive.Run]
    prompts: drive.Run
    rates: tuple[float, float]
    grown: list[float]

    @classmethod
    def of(
        cls, engine: Engine, stepper: Stepper, shown: Sequence[Step], grown: Sequence[Step]
    ) -> "Turn":
        """A turn of an engine's steps."""
        plain = [stepper.seconds(step) for step in shown]
        traced = [stepper.traced(step) for step in shown]
        loads = [_serve(engine, count, _PROMPT, _NEW) for count in _SHOWN]
        prompts = _serve(engine, 4, _LONG_PROMPT, 1)
        rates = lookup.rates_now(report.product_formats(engine.config.model))
        return cls(plain, traced, loads, prompts, rates, [stepper.seconds(s) for s in grown])


def main(arguments: list[str]) -> None:
    """Measures, then writes the page and its picture."""
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
    grown = [stepper.decode(*each) for each in sizes]
    for step in shown:
        stepper.runs(step)  # compiles what the calibration runs
    first_start.calibration(engine, anew=True)
    for count in _SHOWN:
        _serve(engine, count, _PROMPT, 2)  # compiles what mixes prompts with decoding
    turns = [Turn.of(engine, stepper, shown, grown) for _ in range(_TURNS)]
    hardware = first_start.calibration(engine) or lookup.this_machine(config.model.dtype)
    times = [statistics.median(each) for each in zip(*(turn.grown for turn in turns), strict=True)]
    curve = list(zip(grown, times, strict=True))
    picture = page.with_suffix(".png")
    picture.write_bytes(_picture(curve, hardware, stepper))
    shares = _shares(config, turns)
    lines = _head(engine, hardware, shares) + _parts(shown, turns, hardware, shares)
    lines += _scaling(curve, hardware, picture.name)
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(page, file=sys.stderr)


def _shares(config: Config, turns: Sequence[Turn]) -> report.Shares:
    """Of the best rates of all turns, what the turns' loads reached together."""
    bandwidth, rate = (max(rates) for rates in zip(*(turn.rates for turn in turns), strict=True))
    decoded, batched = (
        [record for turn in turns for record in turn.loads[at].records] for at in (0, -1)
    )
    seconds = statistics.median(turn.prompts.seconds for turn in turns)
    return report.shares(
        config, decoded, batched, _LONG_PROMPT, 4 * _LONG_PROMPT / seconds, (bandwidth, rate)
    )


def _engine() -> Engine:
    """An engine as `scripts.generate` makes it, with room for the largest steps."""
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
    """A closed load of so many requests at a time."""
    load = Workload("closed", count, prompt=Fixed(length), output=Fixed(num_new))
    asked = requests.generate(load, engine.config.model.vocab_size, engine.config.max_context)
    return measure.measure(engine, asked, 1, count)[0]


def _head(engine: Engine, hardware: HardwareSpec, shares: report.Shares) -> list[str]:
    config = engine.config
    given = "".join(
        f" --{flag.name}={flag.value}" for flag in (_MODEL, _WEIGHTS) if flag.value != flag.default
    )
    formats = ", ".join(report.product_formats(config.model))
    return [
        "# Performance",
        "",
        f"{datetime.date.today()}, {local_machine.name()}: "
        f"{config.model.name}, weights in {formats}, products by {config.engine.kernels.linear}.",
        "Written by",
        "",
        f"    python -m scripts.reports.performance{given}",
        "",
        "Measured in the same run: memory is read at "
        f"{shares.read_bandwidth / 1e9:.1f} GB/s, the best product (512 rows) computes "
        f"{shares.best_product_rate / 1e9:,.0f} GFLOP/s.{_peak(engine, shares)}",
        "",
        f"* Decoding of one request reads its bytes at {shares.decode_bandwidth_share:.0%} of that "
        "bandwidth.",
        f"* Prefill of {_LONG_PROMPT} tokens computes at {shares.prefill_rate_share:.0%} of that "
        "product's rate.",
        "",
        "The planner is calibrated by this engine's own steps, in 5 seconds, while memory is read "
        f"at {hardware.read_bandwidth / 1e9:.1f} GB/s: {_constants(hardware)}.",
    ]


def _peak(engine: Engine, shares: report.Shares) -> str:
    """What the processor's multiply-adds reach, where there is a library to measure them."""
    format = report.product_formats(engine.config.model)[0]
    peak = machine_rates.product_peak(format, machine_rates.peaks())
    if peak is None:
        return ""
    return (
        f" Loops of multiply-adds on registers reach {peak / 1e9:,.0f} GFLOP/s: that product "
        f"{shares.best_product_rate / peak:.0%} of it."
    )


def _constants(hardware: HardwareSpec) -> str:
    found = [f"overhead {1e3 * hardware.overhead_s:.1f} ms"]
    for name in calibrate.CONSTANTS[1:]:
        found.append(f"{name} {getattr(hardware, name):.2f}")
    return ", ".join(found)


def _parts(
    shown: Sequence[Step], turns: Sequence[Turn], hardware: HardwareSpec, shares: report.Shares
) -> list[str]:
    """The table of parts: a column a step."""
    names = [f"{count} request{'s' * (count > 1)}" for count in _SHOWN]
    names.append(f"prompt of {shown[-1].point.context}")
    planned = [_planned(step, hardware) for step in shown]
    found = [
        (statistics.median(plain), sorted(traced, key=lambda step: step.seconds)[_TURNS // 2])
        for plain, traced in zip(
            zip(*(turn.plain for turn in turns), strict=True),
            zip(*(turn.traced for turn in turns), strict=True),
            strict=True,
        )
    ]
    loads = zip(*(turn.loads for turn in turns), strict=True)
    rows = {
        part: [
            _pair(traced.parts[part], expected.get(part))
            for (_, traced), expected in zip(found, planned, strict=True)
        ]
        for part in step_trace.PARTS
    }
    rows["**all**"] = [
        _pair(traced.seconds, sum(expected.values()))
        for (_, traced), expected in zip(found, planned, strict=True)
    ]
    rows["without the profiler"] = [_ms(plain) for plain, _ in found]
    engine = [_decoding(runs, count) for runs, count in zip(loads, _SHOWN, strict=True)]
    rows["in the engine"] = [_ms(seconds) for seconds, _ in engine] + [""]
    rows["host: schedules, builds, commits"] = [_ms(host) for _, host in engine] + [""]
    totals = [cost.total(step.operations) for step in shown]
    rows["read, MB"] = [f"{total.bytes / 1e6:,.0f}" for total in totals]
    products = [_products(step) for step in shown]
    for whose, costs, seconds in (
        ("share of", totals, [plain for plain, _ in found]),
        ("products alone, of", products, [step.parts[step_trace.PRODUCTS] for _, step in found]),
    ):
        each = list(zip(costs, seconds, strict=True))
        rows[f"{whose} the bandwidth"] = [
            f"{done.bytes / time / shares.read_bandwidth:.0%}" for done, time in each
        ]
        rows[f"{whose} the best product"] = [
            f"{done.flops / time / shares.best_product_rate:.0%}" for done, time in each
        ]
    return [
        "",
        "## Where a step's time goes",
        "",
        f"Milliseconds, measured / predicted; {_CONTEXT} tokens of context where requests decode.",
        "",
        f"| | {' | '.join(names)} |",
        "|---" * (len(names) + 1) + "|",
        *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()),
        "",
        f"Medians of {_TURNS} turns. The parts are of one step of median time under JAX's "
        "profiler, whose operations carry the scopes that the model names; a moment belongs to the "
        "operation that began last, what is left lies between operations, so that they add up. The "
        "planner counts neither "
        "sampling nor norms: what they take is its overhead, shown with the rest. In the engine: "
        f"the median decode step of a closed load ({_PROMPT} tokens in, {_NEW} out), whose host "
        "works while the device runs the step before. One request decodes in a step of "
        f"{shown[0].shape.num_rows} rows.",
    ]


def _planned(step: Step, hardware: HardwareSpec) -> dict[str, float]:
    """Predicted seconds of each part that the planner knows."""
    operations, precision = step.operations, Precision.of(step.point.model)
    found = {step_trace.REST: hardware.overhead_s}
    times = roofline.operation_times(operations, hardware, precision)
    for operation, seconds in zip(operations, times, strict=True):
        part = step_trace.part_of_planned(operation)
        found[part] = found.get(part, 0.0) + seconds
    return found


def _products(step: Step) -> cost.Cost:
    chosen = (each for each in step.operations if each.kind == "matrix")
    return cost.total(chosen)


def _decoding(runs: Sequence[drive.Run], count: int) -> tuple[float, float]:
    """Medians of a load's steps in which all requests decode: seconds, and the host's."""
    chosen = [
        record
        for run in runs
        for record in run.records
        if not record.shape.prefill[0] and len(record.rows) == count
    ]
    seconds = statistics.median(record.seconds for record in chosen)
    return seconds, statistics.median(record.host_s for record in chosen)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def _pair(measured: float, predicted: float | None) -> str:
    return _ms(measured) + (f" / {_ms(predicted)}" if predicted is not None else "")


Curve = Sequence[tuple[Step, float]]


def _seconds(step: Step, hardware: HardwareSpec) -> float:
    return report.seconds(step.point.model, step.operations, hardware)


def _scaling(curve: Curve, hardware: HardwareSpec, picture: str) -> list[str]:
    errors = [_seconds(step, hardware) / seconds - 1 for step, seconds in curve]
    rows = [
        f"| {step.point.rows} | {step.point.context:,} | {_ms(seconds)} | "
        f"{_ms(_seconds(step, hardware))} | {error:+.0%} | {step.point.rows / seconds:,.0f} |"
        for (step, seconds), error in zip(curve, errors, strict=True)
    ]
    sizes = sorted(map(abs, errors))
    return [
        "",
        "## How it grows",
        "",
        f"![A step's time over requests and over context, measured and predicted]({picture})",
        "",
        "| requests | context | measured, ms | predicted, ms | error | tokens/s |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        f"Medians of {_TURNS} turns. The prediction misses by {statistics.median(sizes):.0%} "
        f"(median), at most {sizes[-1]:.0%}; of these sizes the calibration saw at most the "
        "context of 1,024.",
    ]


def _picture(curve: Curve, hardware: HardwareSpec, stepper: Stepper) -> bytes:
    """Left over requests, right over context, with the planner's curves."""

    def panel(axes, size, over, measured, colour, label):  # noqa: ANN001, ANN202
        predicted = [1e3 * _seconds(step, hardware) for step in over]
        axes.plot([size(s.point) for s in over], predicted, color=colour, label=f"{label}, planner")
        points = [size(step.point) for step, _ in measured], [1e3 * t for _, t in measured]
        axes.plot(*points, "o", color=colour, label=f"{label}, measured")

    def draw(left, right):  # noqa: ANN001, ANN202
        over = [stepper.decode(count, _CONTEXT) for count in range(1, max(_REQUESTS) + 1)]
        measured = [each for each in curve if each[0].point.context == _CONTEXT]
        label = f"{_CONTEXT} tokens of context"
        panel(left, lambda point: point.rows, over, measured, _COLOURS[0], label)
        contexts = _contexts(stepper.config)
        for count, colour in zip((1, _MANY), _COLOURS, strict=True):
            over = [stepper.decode(count, length) for length in range(128, contexts[-1] + 1, 64)]
            measured = [each for each in curve if each[0].point.rows == count]
            label = f"{count} request{'s' * (count > 1)}"
            panel(right, lambda point: point.context, over, measured, colour, label)
        for axes, ticks, name in (
            (left, _REQUESTS, "requests"),
            (right, contexts, "tokens of context"),
        ):
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
            axes.set(xlabel=name, ylabel="ms a step", ylim=(0, None))
            axes.legend(fontsize=8)

    return figures.png(f"{stepper.config.model.name}: a decode step", draw)


if __name__ == "__main__":
    app.run(main)
