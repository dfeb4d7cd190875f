"""Where the time of a step goes: operations of a trace of JAX's profiler, by the scopes that the
model names.

The times of the parts and of what lies between operations add up to the step's.
"""

import dataclasses
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import jax

from configs.hardware.spec import HardwareSpec
from inference.planner import roofline
from inference.planner.cost import Operation, Precision

PRODUCTS, ATTENTION, HEAD = "products with weights", "attention", "head"
SAMPLING, REST, BETWEEN = "sampling", "norms and the rest", "between operations"
PARTS = (PRODUCTS, ATTENTION, HEAD, SAMPLING, REST, BETWEEN)

_PRODUCTS = "ridgeline_linear", "ridgeline_gated", "ridgeline_grouped"
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%(\S+) = ", re.MULTILINE)
_SCOPE = re.compile(r'op_name="([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Event:
    """An operation as it ran: nanoseconds of some clock."""

    name: str
    start_ns: float
    duration_ns: float
    run: int


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A step that was traced: its seconds, and those of each part, which add up to them."""

    seconds: float
    parts: Mapping[str, float]


def part_of_planned(operation: Operation) -> str:
    """The part that one of the planner's operations belongs to."""
    if operation.kind == "matrix":
        return PRODUCTS
    return {"attention": ATTENTION}.get(operation.kind, HEAD if operation.name == HEAD else REST)


def operation_times(
    operations: Sequence[Operation], hardware: HardwareSpec, precision: Precision
) -> list[float]:
    """Returns seconds of each operation of a step on one chip; with the overhead their sum is
    `roofline.step_time`'s.
    """
    times = (roofline.operation_seconds(operation, hardware, precision) for operation in operations)
    return [max(seconds) + hardware.gamma * min(seconds) for seconds in times]


def parts_of(hlo: str) -> dict[str, str]:
    """The part of each instruction of a compiled step (its text, with metadata), by name."""
    parts = {}
    for line in hlo.splitlines():
        if instruction := _INSTRUCTION.match(line):
            scope, target = _SCOPE.search(line), _TARGET.search(line)
            parts[instruction[1]] = _part(scope[1] if scope else "", target[1] if target else "")
    return parts


def _part(scope: str, target: str) -> str:
    names = scope.split("/")
    is_product = names[-1] == "dot_general" or target.startswith(_PRODUCTS)
    for name, part in (("sample", SAMPLING), ("head", HEAD), ("attend", ATTENTION)):
        if name in names:
            return part
    return PRODUCTS if is_product and {"qkv", "out", "ffn"} & {*names} else REST


def divide(events: Iterable[Event], parts: Mapping[str, str]) -> dict[str, float]:
    """Seconds of each part. A moment in which several operations run belongs to the one that began
    last: of a branch and what it runs, to the latter.
    """
    edges = sorted(
        edge
        for index, event in enumerate(sorted(events, key=lambda event: event.start_ns))
        for edge in (
            (event.start_ns, index, event.name),
            (event.start_ns + event.duration_ns, index, event.name),
        )
    )
    seconds, running, before = dict.fromkeys(PARTS, 0.0), dict[int, str](), 0.0
    for now, index, name in edges:
        if running:
            part = parts.get(running[max(running)], REST)
            seconds[part] += 1e-9 * (now - before)
        if index in running:
            del running[index]
        else:
            running[index] = name
        before = now
    return seconds


def trace(step: Callable[[], float], hlo: str, repeats: int = 5) -> TracedStep:
    """The step of median time among several that run under the profiler.

    Args:
        step: runs a step and returns its seconds, from the call to its last output.
        hlo: text of its executable.
        repeats: odd.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            seconds = [step() for _ in range(repeats)]
        events = _read(next(Path(folder).rglob("*.xplane.pb")))
    runs = sorted({event.run: event.start_ns for event in events}.items(), key=lambda run: run[1])
    if len(runs) != repeats:
        raise RuntimeError(f"the profiler saw {len(runs)} of {repeats} steps")
    median = sorted(range(repeats), key=seconds.__getitem__)[repeats // 2]
    chosen = [event for event in events if event.run == runs[median][0]]
    parts = divide(chosen, parts_of(hlo))
    parts[BETWEEN] = seconds[median] - sum(parts.values())
    return TracedStep(seconds[median], parts)


def _read(path: Path) -> list[Event]:
    """Operations of steps in a trace of the CPU's."""
    events = []
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            for event in line.events:
                statistics = dict(event.stats)
                is_step = statistics.get("hlo_module") == "jit_step"
                if is_step and "hlo_op" in statistics and not event.name.startswith("end: "):
                    name, run = str(statistics["hlo_op"]), int(statistics["run_id"])
                    events.append(Event(name, event.start_ns, event.duration_ns, run))
    return events
