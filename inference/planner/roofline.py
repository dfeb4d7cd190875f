"""From costs to seconds: what bounds a step on a chip, and on several."""

import dataclasses
import functools
import math
from collections.abc import Iterable

from configs.hardware.spec import HardwareSpec
from configs.mesh import ONE_CHIP, Mesh
from configs.precision import FORMATS
from inference.planner import weights
from inference.planner.cost import Operation, Precision, Work
from inference.planner.parallel.collectives import Collective


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Where the seconds of one step go.

    Attributes:
        memory_s: reading and writing, of all operations.
        compute_s: arithmetic, of all operations.
        collective_s: exchange between chips.
        overhead_s: neither.
        total_s: all of it, as far as it does not hide.
    """

    memory_s: float
    compute_s: float
    collective_s: float
    overhead_s: float
    total_s: float

    @property
    def bound(self) -> str:
        """What takes longest: 'memory', 'compute', 'collectives' or 'overhead'."""
        parts = {
            "memory": self.memory_s,
            "compute": self.compute_s,
            "collectives": self.collective_s,
            "overhead": self.overhead_s,
        }
        return max(parts, key=lambda name: parts[name])


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Collectives of a step with their cost.

    Attributes:
        collective: what they are.
        bytes: of one of them, on a chip.
        seconds: of all of them.
    """

    collective: Collective
    bytes: float
    seconds: float


def step_time(
    operations: Iterable[Operation],
    hardware: HardwareSpec,
    precision: Precision,
    mesh: Mesh = ONE_CHIP,
    collective_s: float = 0.0,
) -> StepTime:
    """overhead + the sum of max(m, f) + gamma min(m, f) over operations, and the collectives.

    Operations follow one another, so one that reads hides nothing of another that computes. Reading
    (m) and computing (f) of an operation overlap except for a share gamma of the shorter: a plain
    maximum (Williams et al. 2009) is gamma = 0, a sum gamma = 1. Two things keep a step from its
    rates: a product of few rows cannot fill the arithmetic (T rows take the time of T + half_rows),
    and attention computes at `attention_share` of the rate of the rest and reads the cache at
    `cache_share` of its bandwidth, then as activations, however few bits the cache has. Whatever is
    not calibrated (`calibration/calibrate.py`) costs nothing.

    Args:
        operations: of one step on one data-parallel group.
        precision: says in which type products run.
        mesh: chips that divide the operations.
        collective_s: seconds of exchange that hides behind nothing.
    """
    memory = compute = busy = 0.0
    for operation in operations:
        times = operation_seconds(per_chip(operation, mesh), hardware, precision)
        memory, compute = memory + times[0], compute + times[1]
        busy += max(times) + hardware.gamma * min(times)
    whole = hardware.overhead_s + busy + collective_s
    return StepTime(memory, compute, collective_s, hardware.overhead_s, whole)


def operation_seconds(
    operation: Operation, hardware: HardwareSpec, precision: Precision
) -> tuple[float, float]:
    """Returns seconds of moving an operation's bytes and of computing its FLOPs."""
    num_bytes, flops = _as_reached(operation, hardware)
    rate = hardware.rate(compute_type(operation, precision, hardware)) * hardware.rate_share
    return num_bytes / (hardware.read_bandwidth * hardware.bandwidth_share), flops / rate


def _as_reached(operation: Operation, hardware: HardwareSpec) -> tuple[float, float]:
    """Bytes and FLOPs of an operation, larger by what keeps it from the rates that steps reach."""
    num_bytes, flops = operation.bytes, operation.flops
    if operation.kind == "attention":
        share = hardware.cache_share
        gathered = operation.cache_bytes * (operation.expansion if share < 1 else 1)
        return num_bytes + gathered * (1 / share - 1), flops / hardware.attention_share
    if operation.rows:
        flops *= 1 + hardware.half_rows / operation.rows
    return num_bytes, flops


def compute_type(operation: Operation, precision: Precision, hardware: HardwareSpec) -> str:
    """Type in which an operation's products run, a key of `HardwareSpec.rates`, or that of the
    hardware's rate with such weights, where it was measured.
    """
    format = precision.weights if operation.kind == "matrix" else precision.rest
    if operation.format is not None:
        format = FORMATS[operation.format]
    return format.measured if format.measured in hardware.rates else format.compute


@functools.lru_cache(1 << 12)  # fits of a machine's constants ask for the same ones
def per_chip(operation: Operation, mesh: Mesh) -> Operation:
    """A chip's part of what one data-parallel group does.

    Chips along `model` divide heads and columns, those along `context` cached tokens and columns.
    Chips along `expert` divide the experts and, where tokens choose evenly, the work on them;
    around them each works for its own sequences, so there they divide requests and caches, not
    weights, and the fullest chip counts.
    """
    if mesh.group_chips * mesh.expert == 1:
        return operation
    heads, positions = mesh.model if operation.split else 1, 1
    if operation.by_context and operation.kind == "attention":
        positions = mesh.context
    elif operation.by_context:
        heads *= mesh.context
    is_divided = operation.by_expert
    share = 1 / mesh.expert if is_divided else fullest(operation.requests, mesh)

    def part(whole: float) -> float:
        return weights.divided(whole, heads, operation.copied, operation.cache_parts)

    return dataclasses.replace(
        operation,
        flops=part(operation.flops) / positions * share,
        weight_bytes=part(operation.weight_bytes) / (mesh.expert if is_divided else 1),
        cache_bytes=operation.cache_bytes / min(heads, operation.cache_parts) / positions * share,
        activation_bytes=part(operation.activation_bytes) * share,
    )


def fullest(requests: int, mesh: Mesh) -> float:
    """Share of a data-parallel group's requests that the fullest chip along `expert` works for."""
    return math.ceil(requests / mesh.expert) / requests


def exchange(collective: Collective, work: Work, hardware: HardwareSpec, mesh: Mesh) -> Exchange:
    """Collectives of a step with their cost, on a chip that has links.

    Each mesh axis lies along one axis of a torus, whose links alone it uses. In a ring of n an
    all-reduce moves 2 (n - 1) / n of the bytes in 2 (n - 1) turns (Patarasuk & Yuan 2009), all else
    half of that.
    """
    chips = mesh.along(collective.axis)
    turns = (2 if collective.kind == "all-reduce" else 1) * (chips - 1)
    num_bytes = collective.num_bytes(work.num_tokens, work.num_logits)
    num_bytes *= fullest(max(1, work.num_requests), mesh)
    bandwidth = hardware.link_bandwidth / hardware.link_axes
    seconds = turns * (num_bytes / chips / bandwidth + hardware.link_latency_s)
    return Exchange(collective, num_bytes, collective.count * seconds)
