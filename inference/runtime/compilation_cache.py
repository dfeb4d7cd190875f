"""Executables kept between starts. They are code: only the owner may read or write them.

JAX compiles what it cannot read, warns, and leaves the damaged entry: it would warn at every start.
Here an entry that cannot be read is removed when JAX says so, and JAX writes it again.
"""

import contextlib
import logging
import os
import re
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from configs.errors import InputError, reason
from inference.files import cache_directory, ownership

_UNREADABLE = re.compile("Error reading persistent compilation cache entry for '(.+?)'")
_UNWRITABLE = "Error writing persistent compilation cache entry"
ENTRIES = "*-cache"
_ZSTD = b"\x28\xb5\x2f\xfd"  # where a package for it is installed

_directory: Path | None = None
_LOCK = threading.Lock()
_num_disabling, _was_enabled = 0, True  # contexts that threads are in; before the first of them


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Loads nothing from the cache, in any thread: a loaded executable cannot be serialized."""
    try:
        _count_disabling(1)
        yield
    finally:
        _count_disabling(-1)


def _count_disabling(change: int) -> None:
    global _num_disabling, _was_enabled
    with _LOCK:
        if not _num_disabling:
            _was_enabled = getattr(jax.config, "jax_enable_compilation_cache")  # noqa: B009, unknown to mypy
        _num_disabling += change
        jax.config.update("jax_enable_compilation_cache", _was_enabled and not _num_disabling)
        reset_cache()  # JAX asks once only


def directory() -> Path | None:
    """Where executables are kept; None: nowhere (`enable`)."""
    return _directory


def enable() -> None:
    """Turns on JAX's persistent compilation cache, in a directory that only its owner can open."""
    global _directory
    folder = cache_directory.path() / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.chmod(folder, 0o700)
        ownership.check(folder)
    except (OSError, InputError) as error:
        logging.warning("executables are not kept: %s", reason(error))
        return
    _directory = folder
    warnings.showwarning = _mending(folder, warnings.showwarning)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _mending(folder: Path, show: Callable[..., None]) -> Callable[..., None]:
    """`warnings.showwarning`, which JAX reaches before it compiles what it could not read."""

    def mend(message: Warning | str, *where: object, **more: object) -> None:
        text = str(message)
        if unreadable := _UNREADABLE.match(text):
            num_removed = _remove_damaged(folder, unreadable[1])
            logging.warning("%s: %d damaged, compiled and kept again", folder, num_removed)
        elif text.startswith(_UNWRITABLE):
            logging.warning("an executable is not kept: %s", text.rpartition("': ")[2])
        else:
            show(message, *where, **more)

    return mend


def is_whole(path: Path) -> bool:
    """Whether an entry decompresses: zlib has a checksum. Zstd has none, so it passes."""
    data = path.read_bytes()
    try:
        return data.startswith(_ZSTD) or bool(zlib.decompress(data))
    except zlib.error:
        return False


def _remove_damaged(folder: Path, program: str) -> int:
    """Removes the damaged entries, or, where none is found, all of a program; how many."""
    entries, removed = list(folder.glob(ENTRIES)), []
    for path in entries:
        with contextlib.suppress(OSError):  # one that cannot be read may be whole
            if not is_whole(path):
                removed.append(path)
    removed = removed or [path for path in entries if path.name.startswith(f"{program}-")]
    for path in removed:
        with contextlib.suppress(OSError):  # another process may do the same
            path.unlink()
    return len(removed)
