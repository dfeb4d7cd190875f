"""The bytes of a file that is read in parts: mapped from a disk, or of an object in a store.

What reads checkpoints knows only `Contents`, and reads no more of one than it needs.
"""

import contextlib
import json
import mmap
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from configs.errors import InputError
from inference.files import object_store, range_cache
from inference.files.object_store import StoredObject

_POINTER = b"ridgeline object\n"
_MAX_POINTER_BYTES = 4096
_REQUEST_BYTES = 8 << 20  # of one request: large enough that its latency is a small part
# A gap between two ranges that takes no longer to read than another request takes: 32 at a time,
# each 50 ms, at 100 MB/s. No matrix of a published model that two hosts divide by columns has more.
MAX_GAP_BYTES = 64 << 10


class Contents(ABC):
    """Bytes by position.

    Attributes:
        fingerprint: names the very content, by place, size and time or version.
        block_bytes: how many bytes are best read at a time, in order.
        readers: how many readers at a time keep the disk or the network busy.
        head_bytes: how much of its beginning is best read at first, where its length is unknown.
        is_local: reading all of it moves nothing over a network.
    """

    fingerprint: str
    block_bytes = 16 << 20
    readers = 2  # one reads while the other waits for the disk, or both check digests
    is_local = True

    @property
    def head_bytes(self) -> int:
        return len(self)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop), which stay valid; raises InputError if they cannot be read."""

    @abstractmethod
    def cut(self, start: int, rows: int, row_bytes: int, columns: slice) -> np.ndarray:
        """Columns, in bytes, of rows that lie behind one another from `start` on: u8[rows, C].

        Raises InputError if they cannot be read.
        """

    @abstractmethod
    def fill(self, start: int, target: memoryview) -> None:
        """Copies the bytes from `start` on; raises InputError if there are no longer so many."""

    @abstractmethod
    def beginning(self, stop: int) -> "contextlib.AbstractContextManager[Path]":
        """A file of the same length, whose first bytes up to `stop` are the same."""

    def __getitem__(self, index: slice) -> bytes:
        start, stop, _ = index.indices(len(self))
        return bytes(self.read(start, max(start, stop)))

    @abstractmethod
    def expect(self) -> None:
        """Begins to read all that is not in memory yet, where that moves nothing over a network."""

    @abstractmethod
    def forget(self) -> None:
        """Keeps nothing of what was read: it was damaged."""

    @abstractmethod
    def close(self) -> None:
        """Frees what is no longer used."""

    def __enter__(self) -> "Contents":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Mapped(Contents):
    """A file on disk, mapped read-only."""

    def __init__(self, path: Path, descriptor: int):
        """Takes an open descriptor of a file that is not empty, and does not close it."""
        self._path = path
        self.fingerprint = _of_file(path, os.fstat(descriptor))
        self.data = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self.data)

    def read(self, start: int, stop: int) -> memoryview:
        return memoryview(self.data)[start:stop]

    def cut(self, start: int, rows: int, row_bytes: int, columns: slice) -> np.ndarray:
        flat = np.frombuffer(self.data, np.uint8, rows * row_bytes, start)
        return flat.reshape(rows, row_bytes)[:, columns]

    def fill(self, start: int, target: memoryview) -> None:
        done = 0
        with self._path.open("rb", buffering=0) as file:
            file.seek(start)
            while done < len(target):
                count = file.readinto(target[done:])
                if not count:
                    raise InputError(f"{self._path}: the file became shorter while it was read")
                done += count

    @contextlib.contextmanager
    def beginning(self, stop: int) -> Iterator[Path]:
        yield self._path

    def expect(self) -> None:
        self.data.madvise(mmap.MADV_WILLNEED)

    def forget(self) -> None:
        pass

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # a view of it is still used
            self.data.close()


class Ranged(Contents):
    """An object in a store. Large reads are divided into requests that run side by side, and what
    was read is kept (`range_cache`).
    """

    block_bytes = 128 << 20
    readers = 8
    is_local = False
    head_bytes = 4 << 20

    def __init__(self, item: StoredObject):
        self._item = item
        self.fingerprint = item.fingerprint

    def __len__(self) -> int:
        return self._item.size

    def read(self, start: int, stop: int) -> memoryview:
        piece = f"{start}-{stop}"
        if (cached := range_cache.get(self._item, piece)) is not None:
            return cached
        data = self.take(start, stop)
        range_cache.keep(self._item, piece, data)
        return data

    def take(self, start: int, stop: int) -> memoryview:
        """As `read`, but nothing is kept."""
        target = np.empty(stop - start, np.uint8).data
        _fetch(self._item, [(start, stop, target)])
        return target.toreadonly()

    def cut(self, start: int, rows: int, row_bytes: int, columns: slice) -> np.ndarray:
        first, last, _ = columns.indices(row_bytes)
        width = last - first
        if row_bytes - width <= MAX_GAP_BYTES:
            whole = self.read(start, start + rows * row_bytes)
            return np.frombuffer(whole, np.uint8).reshape(rows, row_bytes)[:, columns]
        piece = f"{start}-{rows}x{row_bytes}-{first}-{last}"
        cached = range_cache.get(self._item, piece)
        if cached is not None:
            return np.frombuffer(cached, np.uint8).reshape(rows, width)
        values = np.empty((rows, width), np.uint8)
        places = (start + row * row_bytes + first for row in range(rows))
        _fetch(self._item, [(p, p + width, values[i].data) for i, p in enumerate(places)])
        range_cache.keep(self._item, piece, values.reshape(-1).data)
        return values

    def fill(self, start: int, target: memoryview) -> None:
        target[:] = self.read(start, start + len(target))

    @contextlib.contextmanager
    def beginning(self, stop: int) -> Iterator[Path]:
        with tempfile.NamedTemporaryFile() as file:  # sparse: what is not written takes no room
            file.write(self.read(0, stop))
            file.truncate(len(self))
            file.flush()
            yield Path(file.name)

    def expect(self) -> None:
        pass

    def forget(self) -> None:
        range_cache.forget(self._item)

    def close(self) -> None:
        pass


def _fetch(item: StoredObject, parts: list[tuple[int, int, memoryview]]) -> None:
    """Reads ranges (start, stop, target), so many requests at a time."""
    pending: list[Future[None]] = []

    def copy(start: int, target: memoryview) -> None:
        target[:] = object_store.read(item, start, start + len(target))

    for start, stop, target in parts:
        for first in range(start, stop, _REQUEST_BYTES):
            some = target[first - start : first - start + _REQUEST_BYTES]
            pending.append(object_store.requests().submit(copy, first, some))
    try:
        for future in pending:
            future.result()
    finally:
        for future in pending:
            future.cancel()


def opened(path: Path, descriptor: int) -> Contents:
    """The contents of a file that is not empty: its own, or those of the object that it stands for
    among ours (`mirror`). Does not close the descriptor.
    """
    beginning = os.pread(descriptor, _MAX_POINTER_BYTES, 0)
    if beginning.startswith(_POINTER) and range_cache.holds(path):
        return Ranged(StoredObject(*json.loads(beginning.removeprefix(_POINTER))))
    return Mapped(path, descriptor)


def pointer(item: StoredObject) -> bytes:
    """What a file holds that stands for an object."""
    return _POINTER + json.dumps(item).encode()


def stored_object(path: Path) -> StoredObject | None:
    """The object that a file stands for; None: it stands for itself."""
    if not range_cache.holds(path) or not path.is_file():
        return None
    beginning = path.read_bytes() if path.stat().st_size <= _MAX_POINTER_BYTES else b""
    if not beginning.startswith(_POINTER):
        return None
    return StoredObject(*json.loads(beginning.removeprefix(_POINTER)))


def size(path: Path) -> int:
    """Bytes of a file, or of the object that it stands for."""
    item = stored_object(path)
    return path.stat().st_size if item is None else item.size


def fingerprint(path: Path) -> str:
    """Identifies content without reading it: by place, size and time of change, or of an object by
    its version.
    """
    item = stored_object(path)
    return _of_file(path, path.stat()) if item is None else item.fingerprint


def _of_file(path: Path, status: os.stat_result) -> str:
    return f"{path.resolve()}:{status.st_size}:{status.st_mtime_ns}"
