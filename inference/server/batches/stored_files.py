"""Clients' files on disk: uploads, and results of batches.

A file is `files/ID.json`, which describes it, and `files/ID`, its content. It exists if both do:
the description is written first and deleted first. Files that grow are in `partial/`.
"""

import asyncio
import dataclasses
import os
import secrets
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import TypeVar

import msgspec

from configs.errors import InputError
from inference.files import atomic
from inference.server.batches.bodies import FileBody
from inference.server.protocol.errors import ApiError

State = TypeVar("State", bound=msgspec.Struct)

_DESCRIPTION = ".json"


@dataclasses.dataclass(frozen=True)
class StorageLimits:
    """Limits of what clients store.

    Attributes:
        file_bytes, file_lines: of an upload.
        total_bytes: of all files, also of those that are written.
        files: number of all files.
        open_batches: number of batches that have not ended.
        ended_batches: batches of a key that stay listed after their end.
    """

    file_bytes: int = 100 << 20
    file_lines: int = 50_000
    total_bytes: int = 4 << 30
    files: int = 10_000
    open_batches: int = 100
    ended_batches: int = 1_000


USUAL = StorageLimits()


class StorageFull(Exception):
    """There is no room for more bytes; says why."""


def storage_full(error: StorageFull | OSError) -> ApiError:
    """A 507: there is no room, or no disk."""
    why = str(error) if isinstance(error, StorageFull) else f"the disk fails: {error.strerror}"
    return ApiError(507, why, code="storage_full", may_retry=False)


class StoredFile(msgspec.Struct):
    """A file, and the name of the key that owns it."""

    owner: str
    body: FileBody


def new_id(prefix: str) -> str:
    """An id that no other has; later ids are greater."""
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(6)}"


class StoredFiles:
    """All files; in one event loop.

    Attributes:
        num_keys: number of clients' keys; with several, none may fill the storage.
    """

    def __init__(self, folder: Path, limits: StorageLimits):
        """Reads the files of a folder; raises InputError if a description is damaged."""
        self.limits = limits
        self.num_keys = 0
        self._folder = folder / "files"
        self._partial = folder / "partial"
        self._files: dict[str, StoredFile] = {}
        self._num_bytes: Counter[str] = Counter()  # of each owner
        for place in (self._folder, self._partial):
            place.mkdir(mode=0o700, exist_ok=True)
        self._read()

    def _read(self) -> None:
        for path in self._folder.glob(f"*{_DESCRIPTION}"):
            if path.with_suffix("").exists():
                self.add(read_state(path, StoredFile))
            else:
                path.unlink()
        for path in self._folder.iterdir():
            if path.suffix != _DESCRIPTION and path.name not in self._files:
                path.unlink()  # a crash came between two steps of its deletion, or of a description

    def delete_partial(self, except_ids: Collection[str]) -> None:
        """Deletes what no batch continues: uploads that a crash ended."""
        for path in self._partial.iterdir():
            if path.name not in except_ids:
                path.unlink()

    def get(self, owner: str, id: str, param: str | None = None) -> StoredFile:
        """Returns a file; raises an `ApiError` (404) if the owner has none of this id."""
        file = self._files.get(id)
        if file is None or file.owner != owner or file.body.expires_at <= time.time():
            why = "there is no file of this id"
            raise ApiError(404, f"{param}: {why}" if param else why, param, "file_not_found")
        return file

    def has(self, id: str) -> bool:
        return id in self._files

    def of(self, owner: str) -> list[FileBody]:
        """The files of an owner, the oldest first."""
        now = time.time()
        files = [file.body for file in self._files.values() if file.owner == owner]
        return sorted((body for body in files if body.expires_at > now), key=lambda body: body.id)

    def path(self, id: str) -> Path:
        return self._folder / id

    def partial_path(self, id: str) -> Path:
        return self._partial / id

    def delete(self, id: str) -> None:
        file = self._files.pop(id)
        self._num_bytes[file.owner] -= file.body.bytes
        (self._folder / (id + _DESCRIPTION)).unlink(missing_ok=True)
        self.path(id).unlink(missing_ok=True)

    def sweep(self, used_ids: Collection[str]) -> None:
        """Deletes files that have expired, except those in use."""
        now = time.time()
        for id, file in list(self._files.items()):
            if file.body.expires_at <= now and id not in used_ids:
                self.delete(id)

    def check_number(self, owner: str) -> None:
        """Raises `StorageFull` unless the owner may have a further file."""
        num_left = self.limits.files - len(self._files) - 1
        if num_left < 0:
            raise StorageFull(f"this server stores {self.limits.files} files: delete some")
        num_owned = sum(file.owner == owner for file in self._files.values())
        if self.num_keys > 1 and num_owned > num_left:
            raise StorageFull(f"this key has {num_owned} files, which is its share: delete some")

    def check_room(self, owner: str, num_bytes: int) -> None:
        """Raises `StorageFull` unless the owner may store so many bytes more."""
        num_left = self.limits.total_bytes - self._num_bytes.total() - num_bytes
        if num_left < 0:
            raise StorageFull(f"this server stores {self.limits.total_bytes} bytes: delete files")
        # A key has its share if it has as much as is free, as of the places of a queue.
        if self.num_keys > 1 and self._num_bytes[owner] > num_left:
            raise StorageFull("the files of this key fill its share of the storage: delete some")

    def count(self, owner: str, num_bytes: int) -> None:
        """Counts bytes of a file that is written; below 0: it is no longer."""
        self._num_bytes[owner] += num_bytes

    def add(self, file: StoredFile) -> None:
        """Adds a file that is on disk."""
        self._files[file.body.id] = file
        self._num_bytes[file.owner] += file.body.bytes

    def write_description(self, file: StoredFile) -> None:
        write_state(self._folder / (file.body.id + _DESCRIPTION), msgspec.json.encode(file))


class NewFile:
    """A file that is written by appending, and appears only when it is published."""

    def __init__(self, files: StoredFiles, owner: str, id: str):
        """Continues what `partial/` has of it; raises OSError."""
        self.id = id
        self._files = files
        self._owner = owner
        self._path = files.partial_path(id)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._descriptor = os.open(self._path, flags, 0o600)
        self.num_bytes = os.fstat(self._descriptor).st_size
        files.count(owner, self.num_bytes)

    def write(self, data: bytes) -> None:
        """Appends all of the data or nothing; raises `StorageFull`."""
        self._files.check_room(self._owner, len(data))
        num_written = 0
        try:
            while num_written < len(data):
                num_written += os.write(self._descriptor, memoryview(data)[num_written:])
        except OSError as error:
            os.ftruncate(self._descriptor, self.num_bytes)
            raise StorageFull(f"the disk of this server takes no more: {error.strerror}") from None
        self.num_bytes += len(data)
        self._files.count(self._owner, len(data))

    async def publish(self, body: FileBody) -> StoredFile:
        """Makes it a file with a description; raises OSError."""
        file = StoredFile(self._owner, body)
        await asyncio.to_thread(self._publish, file)
        self.close()
        self._files.add(file)
        return file

    def _publish(self, file: StoredFile) -> None:
        os.fsync(self._descriptor)
        self._files.write_description(file)
        os.replace(self._path, self._files.path(self.id))

    def close(self) -> None:
        """Leaves it as it is; may be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._files.count(self._owner, -self.num_bytes)

    def discard(self) -> None:
        self.close()
        self._path.unlink(missing_ok=True)


def read_state(path: Path, kind: type[State]) -> State:
    """Reads what `write_state` wrote; raises InputError if it is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, OSError) as error:
        raise InputError(f"{path}: is damaged ({error}); delete it") from None


def write_state(path: Path, data: bytes) -> None:
    """Replaces a file that only this user may read, or leaves it as it was; raises OSError."""
    with atomic.open_file(path) as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(data)
