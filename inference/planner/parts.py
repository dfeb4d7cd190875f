"""A plan's formula with its parts visible: what each operation of a step moves and computes."""

import dataclasses

from inference.planner import cost, roofline, weights
from inference.planner.cost import Work
from inference.planner.deployment import Deployment
from inference.planner.roofline import Exchange, StepTime


@dataclasses.dataclass(frozen=True)
class Part:
    """One kind of operation of a step, in all its layers, on one chip.

    Attributes:
        operation: 'part.operation'.
        layers: that run it.
        flops, bytes: of one chip.
        intensity: FLOPs a byte.
        ridge: the intensity above which it waits for arithmetic, in the type it runs in.
        seconds: the longer of moving and computing.
        bound: which of them: 'memory' or 'compute'.
    """

    operation: str
    layers: int
    flops: float
    bytes: float
    intensity: float
    ridge: float
    seconds: float
    bound: str


@dataclasses.dataclass(frozen=True)
class Step:
    """One step: its operations, what chips exchange, and the time of all of it."""

    operations: tuple[Part, ...]
    exchanges: tuple[Exchange, ...]
    time: StepTime


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a row of a plan is made of.

    Attributes:
        batch, context: of the decode step; prefill is of one prompt of `context` tokens.
        parameters, active_parameters: all, and those that one token is multiplied with.
        weight_bytes, cache_bytes_per_token, cache_bytes_per_sequence: stored once.
        ridge: FLOPs a byte of the chip, in the type that the layers' products run in.
        decode, prefill: the steps.
    """

    batch: int
    context: int
    parameters: int
    active_parameters: int
    weight_bytes: float
    cache_bytes_per_token: float
    cache_bytes_per_sequence: float
    ridge: float
    decode: Step
    prefill: Step


def explain(deployment: Deployment, batch: int, context: int) -> Explanation:
    """The parts of one point, always in the exact accounting."""
    config, formats = deployment.config, deployment.formats
    exact = dataclasses.replace(deployment, accounting="exact")
    steps = (
        Step(_parts(exact, work), exact.exchanges(work), time)
        for work, time in (
            (exact.decode_work(batch, context), exact.decode_time(batch, context)),
            (exact.prefill_work(1, context), exact.prefill_time(1, context)),
        )
    )
    return Explanation(
        batch, context, weights.num_parameters(config), weights.num_active_parameters(config),
        deployment.weight_bytes, cost.cache_bytes_per_token(config, formats, deployment.lanes),
        deployment.cache_bytes(context), deployment.hardware.ridge(formats.weights.compute),
        *steps,
    )  # fmt: skip


def _parts(deployment: Deployment, work: Work) -> tuple[Part, ...]:
    parts = []
    for operation in cost.step_operations(deployment.config, work, deployment.formats):
        done = roofline.per_chip(operation, deployment.mesh)
        alone = deployment.step_time((operation,))
        compute = roofline.compute_type(operation, deployment.formats, deployment.hardware)
        bound = "compute" if alone.compute_s > alone.memory_s else "memory"
        parts.append(
            Part(
                done.name, done.layers, done.flops, done.bytes, done.intensity,
                deployment.hardware.ridge(compute), max(alone.memory_s, alone.compute_s), bound,
            )
        )  # fmt: skip
    return tuple(parts)
