"""What steps reach of a machine's rates: constants fitted to steps that ran, kept for later plans.

time = overhead + max(m, f) + gamma min(m, f)
m    = (bytes + cached bytes / attention_share) / (bandwidth x bandwidth_share)
f    = (FLOPs (1 + half_rows / rows) + attention's / attention_share) / (rate x rate_share)
"""

import dataclasses
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.hardware import catalog
from configs.hardware.spec import HardwareSpec
from inference import files
from inference.planner import roofline
from inference.planner.calibration import machine, measure
from inference.planner.cost import Operation, Precision

# Where the search begins; it also begins at half and at twice of all.
_START: dict[str, Any] = {
    "overhead_s": 1e-4,
    "gamma": 0.5,
    "bandwidth_share": 0.7,
    "rate_share": 0.7,
    "half_rows": 4.0,
    "attention_share": 0.5,
}
CONSTANTS = tuple(_START)
_MOST = {"gamma": 1.0}  # a sum; all others are at least 0 and open above
_SMALL = 0.1  # errors below count little more than by their square: not every point is as sure


@dataclasses.dataclass(frozen=True)
class Sample:
    """A step that ran: what it had to do, and its seconds at the hardware's own bandwidth."""

    operations: tuple[Operation, ...]
    precision: Precision
    seconds: float


def predict(sample: Sample, hardware: HardwareSpec) -> float:
    """Seconds that the step should take."""
    return roofline.step_time(sample.operations, hardware, sample.precision).total_s


def error(sample: Sample, hardware: HardwareSpec) -> float:
    """Of the prediction, as a share of the measured time."""
    return abs(predict(sample, hardware) / sample.seconds - 1)


def fit(hardware: HardwareSpec, samples: Sequence[Sample]) -> HardwareSpec:
    """The hardware with the constants under which the samples' times are least surprising.

    A search along one constant after another, by ever smaller factors, over a mean of pseudo-Huber
    losses of the logarithm of predicted over measured. No randomness: the same samples give the
    same constants.
    """
    starts = [{n: v * factor for n, v in _START.items()} for factor in (0.5, 1.0, 2.0)]
    found = [_descend(hardware, samples, start) for start in starts]
    return dataclasses.replace(hardware, **min(found, key=lambda each: each[0])[1])


def _descend(
    hardware: HardwareSpec, samples: Sequence[Sample], start: dict[str, Any]
) -> tuple[float, dict[str, Any]]:
    def loss(constants: dict[str, Any]) -> float:
        trial = dataclasses.replace(hardware, **constants)
        logs = (math.log(predict(sample, trial) / sample.seconds) for sample in samples)
        return sum(math.sqrt(each**2 + _SMALL**2) - _SMALL for each in logs) / len(samples)

    best, lowest, step = start, loss(start), 0.5
    while step > 0.005:
        improved = False
        for name in CONSTANTS:
            for factor in (1 + step, 1 / (1 + step)):
                value = min(best[name] * factor, _MOST.get(name, math.inf))
                trial = best | {name: value}
                if (found := loss(trial)) < lowest - 1e-5:
                    best, lowest, improved = trial, found, True
        step = step if improved else step / 2
    return lowest, best


# --- kept -----------------------------------------------------------------------------------------


def cache_file() -> Path:
    """Where this machine's calibration is kept, by processor, cores and version of JAX."""
    name = machine.cache_file(measure.num_cores()).name
    return files.cache_directory() / "calibration" / name


def write(hardware: HardwareSpec) -> None:
    """Keeps a calibration; a folder that cannot be written costs a warning."""
    try:
        with files.atomic_file(cache_file()) as file:
            file.write(json.dumps(dataclasses.asdict(hardware), indent=1).encode())
    except OSError as failure:
        logging.getLogger(__name__).warning("cannot keep %s: %s", cache_file(), failure.strerror)


def read() -> HardwareSpec | None:
    """This machine as it was calibrated; None where it never was, or the file is damaged."""
    try:
        found = json.loads(cache_file().read_bytes())
        rates = {str(name): _number(rate) for name, rate in found["rates"].items()}
        sizes: dict[str, Any] = {
            name: _number(found[name]) for name in ("memory_bytes", "read_bandwidth")
        }
        constants: dict[str, Any] = {name: _number(found[name]) for name in CONSTANTS}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    shares = (name for name in CONSTANTS if name.endswith("_share"))
    if not all([*rates.values(), *sizes.values(), *map(constants.__getitem__, shares)]):
        return None
    return HardwareSpec(catalog.THIS_MACHINE, rates=rates, **sizes, **constants)


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} is no rate")
    return float(value)


def this_machine(*dtypes: str) -> HardwareSpec:
    """The machine at hand as calibrated, or else with its rates in these types alone; where JAX
    computes on an accelerator, that one.

    A calibrated machine is as slow as it reads now: other tenants slow all of it down.
    """
    import jax

    if jax.default_backend() != "cpu":
        from inference.planner.calibration import on_device

        return on_device.this_device(*dtypes)
    found = read()
    if found is None or not set(dtypes) <= set(found.rates):
        return measure.this_machine(*dtypes)
    return at_bandwidth(found, measure.read_bandwidth())


def this_machine_or_none(*dtypes: str) -> HardwareSpec | None:
    """`this_machine`; None where the device has too little memory left to be measured."""
    import jax

    try:
        return this_machine(*dtypes)
    except jax.errors.JaxRuntimeError as failure:
        logging.getLogger(__name__).warning("the device cannot be measured: %s", failure)
        return None


def at_bandwidth(hardware: HardwareSpec, read_bandwidth: float) -> HardwareSpec:
    """The same machine where everything goes as much slower as it reads. Where it reads faster,
    nothing is faster: such moments pass, and steps do not show them (`docs/log.md`).
    """
    speed = min(1.0, read_bandwidth / hardware.read_bandwidth)
    rates = {name: rate * speed for name, rate in hardware.rates.items()}
    overhead_s = hardware.overhead_s / speed
    return dataclasses.replace(
        hardware, read_bandwidth=hardware.read_bandwidth * speed, rates=rates, overhead_s=overhead_s
    )
