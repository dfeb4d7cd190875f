"""What is known of the machine at hand, kept by processor, cores and version of JAX: its rates, or
what steps were seen to reach, of all models or of one.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import platform
from pathlib import Path
from typing import Any

from configs.hardware import catalog
from configs.hardware.spec import HardwareSpec
from configs.model import ModelConfig
from inference.files import atomic, cache_directory, digests
from inference.planner.calibration.calibrate import CONSTANTS

_VERSION = 3  # of what is measured, and how


def processor() -> str:
    """The processor's model, as far as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def path(model: ModelConfig | None = None) -> Path:
    """The file of this machine, or of what a model's steps showed of it."""
    key = [processor(), num_cores(), importlib.metadata.version("jax"), _VERSION, repr(model)]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return cache_directory.path() / "hardware" / f"cpu-{digest}.json"


def write(hardware: HardwareSpec, model: ModelConfig | None = None) -> None:
    """Keeps what was measured; a folder that cannot be written costs a warning."""
    try:
        with atomic.open_file(path(model)) as file:
            file.write(digests.sealed(json.dumps(dataclasses.asdict(hardware), indent=1)))
    except OSError as error:
        logging.getLogger(__name__).warning("cannot keep %s: %s", path(model), error.strerror)


def read(model: ModelConfig | None = None) -> HardwareSpec | None:
    """What was kept of this machine; None where nothing was, or the file is damaged."""
    try:
        place = path(model)
        found = json.loads(digests.opened(place.read_bytes(), str(place)))
        rates = {str(name): _number(rate) for name, rate in found["rates"].items()}
        sizes: dict[str, Any] = {
            name: _number(found[name]) for name in ("memory_bytes", "read_bandwidth")
        }
        constants: dict[str, Any] = {name: _number(found[name]) for name in CONSTANTS}
        implementations = found["implementations"] and str(found["implementations"])
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
        OverflowError,
    ):
        return None
    shares = (constants[name] for name in CONSTANTS if name.endswith("_share"))
    if not all([rates, *rates.values(), *sizes.values(), *shares]):
        return None
    return HardwareSpec(
        catalog.THIS_MACHINE, rates=rates, implementations=implementations, **sizes, **constants
    )


def calibration(
    model: ModelConfig | None = None, implementations: str | None = None
) -> HardwareSpec | None:
    """This machine as it was calibrated, or else as a model's steps showed it; None where neither
    was, or only with others than these implementations, if they are named.
    """
    kept = (read(), None if model is None else read(model))
    usable = (found for found in kept if found is not None and found.is_calibrated)
    return next(
        (found for found in usable if implementations in (None, found.implementations)), None
    )


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} is no rate")
    return float(value)
