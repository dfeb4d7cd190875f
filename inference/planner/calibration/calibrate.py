"""What steps reach of a machine's rates: constants fitted to timed steps.

time = overhead + the sum of max(m, f) + gamma min(m, f) over a step's operations
m    = (bytes + the cache's (1 / cache_share - 1)) / (bandwidth x bandwidth_share)
f    = (FLOPs (1 + half_rows / rows) + attention's / attention_share) / (rate x rate_share)
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from configs.hardware.spec import HardwareSpec
from inference.planner import roofline
from inference.planner.cost import Operation, Precision

# Where a search starts; two more start at half and at twice these.
_START: dict[str, float] = {
    "overhead_s": 1e-4,
    "gamma": 0.5,
    "bandwidth_share": 0.7,
    "rate_share": 0.7,
    "half_rows": 4.0,
    "attention_share": 0.5,
    "cache_share": 0.5,
}
CONSTANTS = tuple(_START)
# A sum; attention so much better than products only where these compute (few rows of small blocks),
# and not where noise hides it. All others are at least 0 and open above.
_UPPER_BOUNDS = {"gamma": 1.0, "attention_share": 4.0, "cache_share": 4.0}
_SMALL = 0.1  # smaller errors count by their square, larger ones linearly: some are outliers


@dataclasses.dataclass(frozen=True)
class Sample:
    """A step that was timed: its operations, and its seconds at the hardware's bandwidth."""

    operations: tuple[Operation, ...]
    precision: Precision
    seconds: float


def predict(sample: Sample, hardware: HardwareSpec) -> float:
    """Seconds that the step should take."""
    return roofline.step_time(sample.operations, hardware, sample.precision).total_s


def fit(hardware: HardwareSpec, samples: Sequence[Sample]) -> HardwareSpec:
    """The hardware with the constants that predict the samples' times best.

    A search along one constant after another, by ever smaller factors, over a mean of pseudo-Huber
    losses of the logarithm of predicted over measured. No randomness: the same samples give the
    same constants.
    """
    starts = [{n: v * factor for n, v in _START.items()} for factor in (0.5, 1.0, 2.0)]
    fits = [_descend(hardware, samples, start) for start in starts]
    return _with(hardware, min(fits, key=lambda fitted: fitted[0])[1])


def _with(hardware: HardwareSpec, constants: Mapping[str, float]) -> HardwareSpec:
    replace: Callable[..., HardwareSpec] = dataclasses.replace
    return replace(hardware, **constants)


def _descend(
    hardware: HardwareSpec, samples: Sequence[Sample], start: dict[str, float]
) -> tuple[float, dict[str, float]]:
    def loss(constants: dict[str, float]) -> float:
        trial = _with(hardware, constants)
        logs = (math.log(predict(sample, trial) / sample.seconds) for sample in samples)
        losses = (math.sqrt(log_ratio**2 + _SMALL**2) - _SMALL for log_ratio in logs)
        return sum(losses) / len(samples)

    best, lowest, step = start, loss(start), 0.5
    while step > 0.005:
        improved = False
        for name in CONSTANTS:
            for factor in (1 + step, 1 / (1 + step)):
                value = min(best[name] * factor, _UPPER_BOUNDS.get(name, math.inf))
                trial = best | {name: value}
                if (trial_loss := loss(trial)) < lowest - 1e-5:
                    best, lowest, improved = trial, trial_loss, True
        step = step if improved else step / 2
    return lowest, best
