"""XLA's own choices on GPUs, such as tilings of products, measured once and kept by kind of device.

`autotune/` has a file a kind of device and version of JAX, as XLA wrote it
(`--xla_gpu_dump_autotune_results_to`; `scripts.device` has the command). With it an engine starts
sooner, and a compilation without the device makes the device's program. Its entries name a
description of the device, with cuDNN's version; XLA passes over those of another.
"""

import functools
import logging
import re
from pathlib import Path

import jax

from layers.kernels.device import Device

FOLDER = Path(__file__).with_name("autotune")
_rejected: set[Path] = set()


def path(device: Device) -> Path:
    """The file of a kind of device and this version of JAX."""
    return FOLDER / f"{_slug(device)}-jax-{jax.__version__}.txt"


def compiler_options(device: Device) -> dict[str, str | bool]:
    """The option that loads what was measured on this kind of device; {} where nothing was."""
    file = path(device)
    if file in _rejected:
        return {}
    try:
        file.open("rb").close()
    except FileNotFoundError:
        for other in sorted(FOLDER.glob(f"{_slug(device)}-jax-*.txt")):
            _warn_of(other, f"not of jax {jax.__version__}")
        return {}
    except OSError as error:
        _warn_of(file, error.strerror)
        return {}
    return {"xla_gpu_load_autotune_results_from": str(file)}


def reject(device: Device, error: jax.errors.JaxRuntimeError) -> bool:
    """Whether XLA could not read the file of a device, which then is not loaded again."""
    reason = re.search(r"[^:\n]*autotune results[^\n]*", str(error))
    if reason is None:
        return False
    _rejected.add(path(device))
    _warn_of(path(device), reason[0].strip())
    return True


@functools.cache
def _warn_of(file: Path, reason: str) -> None:
    logging.warning("%s is not used, the compiler chooses anew: %s", file, reason)


def _slug(device: Device) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.kind.lower()).strip("-")
