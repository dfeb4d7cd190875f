"""The native library of CPU kernels, for engines on a CPU: the wheel's own, or found, or built at
first use, in the cache directory; only where RIDGELINE_KERNELS says, if set ('none': nowhere).
"""

import functools
import logging
import os
import threading
from pathlib import Path

from configs.errors import InputError
from inference.files import cache_directory, ownership
from layers.kernels.cpu import build, library

_LOCK = threading.Lock()


def load() -> None:
    """Loads the library, building it where it was never built; without it, XLA's own products and
    attention run, and one line says why. A process tries once.
    """
    with _LOCK:
        _load()


@functools.cache
def _load() -> None:
    named = os.environ.get("RIDGELINE_KERNELS")
    if named == "none":
        return
    folder = Path(named) if named else cache_directory.path() / "kernels"
    try:
        bundled = None if named else build.bundled()  # as trusted as the code beside it
        library.load(bundled or _cached(folder))
    except (build.BuildError, InputError, OSError) as error:
        logging.warning("CPU kernels are not used, XLA's run instead: %s", error)


def _cached(folder: Path) -> Path:
    """The library in a folder, built where it is missing.

    Raises:
        BuildError: there is none.
        InputError: another user may write to it.
    """
    path = build.find(folder)
    if path is None:
        build.check(folder)
        logging.warning("building the CPU kernels, once (some seconds)")
        path = build.build(folder)
    ownership.check(path)
    return path
