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
        found = (None if named else build.bundled()) or build.find(folder)
        if found is None:
            build.check(folder)
            logging.warning("building the CPU kernels, once (some seconds)")
            found = build.build(folder)
        ownership.check(found)
        library.load(found)
    except (build.BuildError, InputError, OSError) as error:
        logging.warning("CPU kernels are not used, XLA's run instead: %s", error)
