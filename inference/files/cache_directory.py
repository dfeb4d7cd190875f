"""Where downloads, conversions, compiled steps, CPU kernels and calibrations are kept."""

import os
from pathlib import Path

from configs.errors import InputError, shown


def path() -> Path:
    """RIDGELINE_CACHE, or ~/.cache/ridgeline. Raises InputError if neither is known."""
    folder = os.environ.get("RIDGELINE_CACHE")
    if folder:
        return Path(folder)
    try:
        return Path.home() / ".cache" / "ridgeline"
    except RuntimeError:
        raise InputError(
            "this user has no home directory: RIDGELINE_CACHE=DIR names where caches are kept"
        ) from None


def trained(name: str) -> Path:
    """The default target of scripts.train under a name; raises InputError if that is no file's."""
    if Path(name).name != name:
        raise InputError(f"a model named {shown(name)} needs a place of its own: give --output")
    return path() / "trained" / name
