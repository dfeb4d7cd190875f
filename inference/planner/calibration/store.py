"""What is known of the machine at hand, kept by processor, cores and version of JAX: its rates, and
what the steps of a model were seen to reach.
"""

import dataclasses
import importlib.metadata
import math
from pathlib import Path
from typing import Any

from configs.hardware import catalog
from configs.hardware.spec import HardwareSpec
from configs.model import ModelConfig
from inference.files import local_machine
from inference.planner.calibration.calibrate import CONSTANTS

_VERSION = 6  # of what is measured, and how


def path(model: ModelConfig | None = None) -> Path:
    """The file of this machine, or of what a model's steps showed of it."""
    return local_machine.path(*_key(model))


def write(hardware: HardwareSpec, model: ModelConfig | None = None) -> None:
    """Keeps what was measured; a folder that cannot be written costs a warning."""
    local_machine.write(dataclasses.asdict(hardware), *_key(model))


def read(model: ModelConfig | None = None) -> HardwareSpec | None:
    """What was kept of this machine; None where nothing was, or the file is damaged."""
    content = local_machine.read(*_key(model))
    try:
        rates = {str(name): _number(rate) for name, rate in content["rates"].items()}
        sizes: dict[str, Any] = {
            name: _number(content[name]) for name in ("memory_bytes", "read_bandwidth")
        }
        constants: dict[str, Any] = {name: _number(content[name]) for name in CONSTANTS}
        implementations = content["implementations"] and str(content["implementations"])
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    shares = (constants[name] for name in CONSTANTS if name.endswith("_share"))
    if not all([rates, *rates.values(), *sizes.values(), *shares]):
        return None
    return HardwareSpec(
        catalog.THIS_MACHINE, rates=rates, implementations=implementations, **sizes, **constants
    )


def calibration(model: ModelConfig, implementations: str | None = None) -> HardwareSpec | None:
    """This machine as a model's steps showed it; None where none were timed, or only with others
    than these implementations, if they are named.
    """
    hardware = read(model)
    if hardware is None or not hardware.is_calibrated:
        return None
    return hardware if implementations in (None, hardware.implementations) else None


def _key(model: ModelConfig | None) -> tuple[str, str, int, str]:
    return "cpu", importlib.metadata.version("jax"), _VERSION, repr(model)


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} is no rate")
    return float(value)
