"""`--hardware`: a chip of the catalog, or the machine at hand, measured once and remembered."""

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import math
import platform
from pathlib import Path
from typing import Any

from configs.hardware import catalog
from configs.hardware.spec import HardwareSpec
from inference import files

_DTYPES = ("float32", "bfloat16")
_VERSION = 1  # of what is measured, and how


def get(name: str) -> HardwareSpec:
    """The chip of that name; 'cpu' is this machine, with what `plan --verify` found it to reach.

    Raises:
        InputError: no such chip.
    """
    if name != catalog.THIS_MACHINE:
        return catalog.get(name)
    from inference.planner.calibration import calibrate  # loads numpy

    return calibrate.read() or this_machine()


def this_machine() -> HardwareSpec:
    """The machine at hand, as it was measured when first asked for: seconds then, none later.

    What is kept is a file per processor, number of cores and version of JAX. A file that does not
    hold positive numbers is measured again; a cache that cannot be written costs that each time.
    """
    from inference.planner.calibration import measure  # loads numpy, and jax when it measures

    path = cache_file(measure.num_cores())
    try:
        return _read(path)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass
    spec = measure.this_machine(*_DTYPES)
    try:
        with files.atomic_file(path) as file:
            file.write(json.dumps(dataclasses.asdict(spec), indent=1).encode())
    except OSError as error:
        logging.getLogger(__name__).warning("cannot keep %s: %s", path, error.strerror)
    return spec


def cache_file(num_cores: int) -> Path:
    """Where the rates of this machine are kept."""
    key = [processor(), num_cores, importlib.metadata.version("jax"), _VERSION]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return files.cache_directory() / "hardware" / f"cpu-{digest}.json"


def processor() -> str:
    """The processor's model, as far as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _read(path: Path) -> HardwareSpec:
    """Raises ValueError, TypeError or KeyError for anything but what `this_machine` writes."""
    found = json.loads(path.read_bytes())
    rates = {dtype: _positive(found["rates"][dtype]) for dtype in _DTYPES}
    memory, bandwidth = _positive(found["memory_bytes"]), _positive(found["read_bandwidth"])
    return HardwareSpec(catalog.THIS_MACHINE, memory, bandwidth, rates)


def _positive(number: Any) -> float:
    if not isinstance(number, int | float) or not 0 < number < math.inf:
        raise ValueError(f"{number!r} is no rate")
    return float(number)
