"""What an engine's steps take of a chip's memory, before they are compiled; loads no JAX."""

import dataclasses
import math

from configs.engine import Config
from configs.hardware import catalog
from configs.hardware.targets import Target
from configs.kinds import params
from configs.precision import FORMATS
from inference.planner import weights
from inference.planner.calibration import measure
from inference.planner.cost import Precision
from inference.scheduling.step_shapes import StepShape

_FLOAT32 = 4  # bytes
_LOGITS = 4  # arrays of them, at most at the same time


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Bytes on each device.

    Attributes:
        weight_bytes, cache_bytes: what is there all the time; pages with their sinks, states.
        temporary_bytes: what a step needs beside it, the largest of the steps.
        memory_bytes: of the device.
    """

    weight_bytes: int
    cache_bytes: int
    temporary_bytes: int
    memory_bytes: int

    @property
    def total_bytes(self) -> int:
        """Of all that is planned."""
        return self.weight_bytes + self.cache_bytes + self.temporary_bytes

    @property
    def fits(self) -> bool:
        """Whether the device holds it."""
        return self.total_bytes <= self.memory_bytes


def predict(config: Config, target: Target, shapes: tuple[StepShape, ...]) -> Prediction:
    """What the planner says of an engine with steps of these shapes on each device of a target.

    Args:
        config: for the target's platform (`Config.for_platform`).
        target: says how much memory there is.
        shapes: of the steps.
    """
    precision = Precision.of(config.model)
    held = weights.weight_bytes(config.chip_model, precision.weights, precision.rest)
    needed = max((temporary_bytes(config, shape) for shape in shapes), default=0)
    return Prediction(round(held), config.pool_bytes, needed, memory_bytes(target))


def memory_bytes(target: Target) -> int:
    """Bytes of memory of each device of a target."""
    if target.is_here:
        return int(measure.this_memory())
    return int(catalog.get(target.chip).memory_bytes / target.devices_a_chip)


def temporary_bytes(config: Config, shape: StepShape) -> int:
    """Bytes that a step of a shape needs beside its arguments: the widest product of all its
    tokens, as its float32 sums and as what is stored of them, or four float32 arrays of logits (as
    they are, filtered, ranked, with noise), whichever is more.
    """
    model = config.chip_model
    widths = [
        info.shape[-2] for _, info in params.leaves(model.parameters()["layers"]) if info.is_matrix
    ]
    stored = FORMATS[model.dtype].bytes_for(1, 1)
    sums = shape.num_tokens * max(widths) * (_FLOAT32 + stored)
    logits = shape.num_logits * model.vocab_size * _FLOAT32 * _LOGITS
    return math.ceil(max(sums, logits))
