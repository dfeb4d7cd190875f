"""What was read of objects in stores, on this machine's disk, with a bound.

Each piece is a file of its own, which appears whole by a rename, so that processes share them
without locks. It ends with a digest, which is compared when it is mapped. Where room is needed, the
least recently used go first, but none that this process has used: a checkpoint that is larger than
the bound is kept in part, instead of pushing itself out.
"""

import contextlib
import dataclasses
import functools
import hashlib
import logging
import math
import mmap
import os
import shutil
import threading
import time
from pathlib import Path

from configs.errors import InputError, reason, shown
from inference.files import atomic, cache_directory, digests, ownership
from inference.files.object_store import StoredObject

_BOUND, _DEFAULT_GB = "RIDGELINE_STORE_GB", 100.0
_DIGEST_BYTES = 64
_RESCAN_BYTES = 1 << 30  # what this process writes before it looks at what others wrote
_MIRROR_S = 24 * 3600.0  # how long the small files of a checkpoint stay after their last use


def folder() -> Path:
    """Where everything of stores is kept."""
    return cache_directory.path() / "stores"


def mirrors() -> Path:
    """Where directories are that stand for checkpoints (`mirror`)."""
    return folder() / "mirrors"


def holds(path: Path) -> bool:
    """Whether a path is of a file there."""
    try:
        return path.is_relative_to(folder())
    except InputError:  # nothing is kept, because no cache directory is known
        return False


@dataclasses.dataclass
class _Room:
    """Bytes on disk, as far as this process knows."""

    since: float = dataclasses.field(default_factory=time.time)
    used: int = 0
    unscanned: int | None = None  # None: nothing was scanned yet
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


_room = _Room()


@functools.cache
def bound() -> int:
    """Bytes that are kept at most: RIDGELINE_STORE_GB, 0 for none. Raises InputError if it is no
    such number.
    """
    value = os.environ.get(_BOUND) or str(_DEFAULT_GB)
    try:
        gigabytes = float(value)
    except ValueError:
        gigabytes = -1.0
    if not 0 <= gigabytes < math.inf:
        raise InputError(f"{_BOUND}={shown(value)} is not how many GB of stores to keep, from 0")
    return int(gigabytes * 1e9)


def get(item: StoredObject, piece: str) -> memoryview | None:
    """A piece that was kept; None: it was not, or it is damaged, and then it is removed."""
    path = _place(item, piece)
    try:
        ownership.check(path)
        with path.open("rb") as file:
            whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        os.utime(path)  # used now
    except (OSError, ValueError, InputError):  # ValueError: it is empty
        return None
    data = whole[:-_DIGEST_BYTES]
    if digests.of(data).encode() == whole[-_DIGEST_BYTES:]:
        return data
    logging.warning("%s is damaged; it is read again", path)
    path.unlink(missing_ok=True)
    return None


def keep(item: StoredObject, piece: str, data: memoryview) -> None:
    """Keeps a piece where there is room for it; a disk that cannot costs a warning."""
    size = len(data) + _DIGEST_BYTES
    try:
        if not _make_room(size):
            return
        with atomic.open_file(_place(item, piece), is_kept=True) as file:
            file.write(data)
            file.write(digests.of(data).encode())
    except (OSError, InputError) as error:
        logging.warning("cannot keep what was read of %s: %s", item.url, reason(error))


def forget(item: StoredObject) -> None:
    """Removes all pieces of an object."""
    for path in _place(item, "").glob("*"):
        path.unlink(missing_ok=True)


def _place(item: StoredObject, piece: str) -> Path:
    name = hashlib.sha256(item.fingerprint.encode()).hexdigest()[:32]
    return folder() / "pieces" / name / piece


def _make_room(size: int) -> bool:
    """Whether a file of this size fits under the bound, after others are removed."""
    with _room.lock:
        if size > bound():
            return False
        is_stale = _room.unscanned is None or _room.unscanned > _RESCAN_BYTES
        if is_stale or _room.used + size > bound():
            _scan(size)
        if _room.used + size > bound():
            return False
        _room.used += size
        _room.unscanned = (_room.unscanned or 0) + size
        return True


def _scan(size: int) -> None:
    """Counts what is there, and removes what was not used for longest until `size` fits."""
    entries = [_used(path) for path in (folder() / "pieces").glob("*/*")]
    entries += [_used(path) for path in mirrors().glob("[!.]*")]
    _room.used, _room.unscanned = sum(num_bytes for _, num_bytes, _ in entries), 0
    for used_at, num_bytes, path in sorted(entries):
        if _room.used + size <= bound():
            return
        kept_s = _MIRROR_S if path.parent == mirrors() else 0.0
        if used_at < _room.since - kept_s:
            _remove(path)
            _room.used -= num_bytes


def _used(path: Path) -> tuple[float, int, Path]:
    """When a file or a mirror was used last, and its bytes; none where it is gone meanwhile."""
    used_at, num_bytes = 0.0, 0
    with contextlib.suppress(OSError):
        used_at = path.stat().st_mtime
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        num_bytes = sum(file.stat().st_size for file in files)
    return used_at, num_bytes, path


def _remove(path: Path) -> None:
    """Removes a file, or a mirror, whose name goes first: half of one is none."""
    with contextlib.suppress(OSError):
        if path.is_file():
            path.unlink()
            return
        gone = path.with_name(f".gone-{path.name}-{os.getpid()}")
        path.rename(gone)
        shutil.rmtree(gone)
