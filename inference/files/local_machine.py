"""Measurements of this machine, in files that are kept by its processor and cores."""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configs.errors import InputError, reason
from inference.files import atomic, cache_directory, digests


def cpu_info() -> list[str]:
    """Lines of "name: value" of each core; empty where the system is not Linux."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def processor() -> str:
    """The processor's model, as far as the system names it."""
    lines = (line for line in cpu_info() if line.startswith("model name"))
    names = (line.partition(":")[2].strip() for line in lines)
    return next(names, "") or platform.processor() or platform.machine()


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def name() -> str:
    """The cores and their model, as reports name the machine."""
    return f"{num_cores()} cores of {processor()}"


def path(kind: str, *key: object) -> Path:
    """The file of a kind of measurements; raises InputError if no cache directory is known."""
    digest = hashlib.sha256(json.dumps([processor(), num_cores(), *key]).encode()).hexdigest()[:16]
    return _folder() / f"{kind}-{digest}.json"


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Lets one process at a time measure; all of them where the folder cannot be created."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, InputError):
            _folder().mkdir(parents=True, exist_ok=True)
            descriptor = os.open(_folder(), os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # ends with its process
        yield


def write(content: object, kind: str, *key: object) -> None:
    """Keeps what JSON has; a folder that is unknown or cannot be written costs a warning."""
    try:
        with atomic.open_file(path(kind, *key)) as file:
            file.write(digests.sealed(json.dumps(content, indent=1)))
    except (OSError, InputError) as error:
        logging.getLogger(__name__).warning("cannot keep what was measured: %s", reason(error))


def read(kind: str, *key: object) -> Any:
    """What was kept; None where nothing was, or the file is damaged."""
    try:
        place = path(kind, *key)
        return json.loads(digests.opened(place.read_bytes(), str(place)))
    except (OSError, ValueError, RecursionError):
        return None


def _folder() -> Path:
    return cache_directory.path() / "hardware"
