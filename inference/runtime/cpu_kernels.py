"""The native library of CPU kernels, for engines on a CPU: the wheel's own, or found, or built at
first use, in the cache directory; only where RIDGELINE_KERNELS says, if set ('none': nowhere).
"""

import functools
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from configs.errors import InputError
from inference.files import cache_directory, local_machine, ownership
from layers.kernels.cpu import build, library

_LOCK = threading.Lock()
_PAIRWISE = "avx512bf16", "neonbf16"  # instruction sets that multiply pairs of bfloat16
_ROUNDS = 5  # of timed products, which take less than 0.1 ms each


def load() -> None:
    """Loads or builds the library once a process; without it XLA computes, and a line says why."""
    with _LOCK:
        _load()


@functools.cache
def _load() -> None:
    setting = os.environ.get("RIDGELINE_KERNELS")
    if setting == "none":
        return
    folder = Path(setting) if setting else cache_directory.path() / "kernels"
    try:
        bundled = None if setting else build.bundled()  # as trusted as the code beside it
        trials = library.load(bundled or _cached(folder))
    except (build.BuildError, InputError, OSError) as error:
        logging.warning("CPU kernels are not used, XLA's run instead: %s", error)
        return
    instruction_set = _fastest(trials.usable)
    library.use(instruction_set)
    for name in trials.faulty:
        logging.warning(
            "CPU kernels use %s: this processor claims %s, whose instructions are illegal here",
            instruction_set, name,
        )  # fmt: skip


def _fastest(usable: Sequence[str]) -> str:
    """The first of the usable instruction sets, fastest first, except where it multiplies pairs of
    bfloat16 more slowly than the next one float32. The first start on a machine times both; others
    keep to its choice, and so to its bits.
    """
    if usable[0] not in _PAIRWISE:
        return usable[0]
    rivals, key = usable[:2], ("products", build.library_name())
    with local_machine.alone():  # so that starts at the same moment agree
        match local_machine.read(*key):
            case {"instruction_set": str(name)} if name in rivals:
                return name
        rounds = [[library.product_seconds(name) for name in rivals] for _ in range(_ROUNDS)]
        seconds = dict(zip(rivals, map(min, *rounds), strict=True))
        fastest = min(rivals, key=seconds.__getitem__)
        local_machine.write({"instruction_set": fastest, "seconds": seconds}, *key)
    return fastest


def _cached(folder: Path) -> Path:
    """The library in a folder, built where it is missing. Raises BuildError if there is none, or
    InputError if another user may write to it.
    """
    path = build.find(folder)
    if path is None:
        build.check(folder)
        logging.warning("building the CPU kernels, once (some seconds)")
        path = build.build(folder)
    ownership.check(path)
    return path
