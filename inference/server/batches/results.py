"""Results of a batch while it runs: answers and errors, each a line of one of two new files.

A line is appended whole. A crash may cut off the last one, and a power cut what was not yet on the
disk: `Results` drops a damaged end, and those requests are answered again.
"""

import dataclasses
import os
import time
from pathlib import Path

import msgspec

from inference.batches import records
from inference.batches.lines import Line
from inference.batches.records import Record
from inference.server.batches.bodies import FileBody
from inference.server.batches.stored_batches import StoredBatch
from inference.server.batches.stored_files import NewFile, StoredFiles


class _Identified(msgspec.Struct):
    custom_id: str


@dataclasses.dataclass(frozen=True)
class EarlierResults:
    """What is on disk.

    Attributes:
        answered, failed: ids of requests with an answer, and of those with an error.
        damaged: files with an incomplete end, and the bytes before it.
    """

    answered: set[str]
    failed: set[str]
    damaged: dict[Path, int]


def read(files: StoredFiles, batch: StoredBatch) -> EarlierResults:
    """Reads the results on disk, and changes nothing: a thread goes on where nothing awaits it."""
    damaged: dict[Path, int] = {}
    answered, failed = (_read(files, id, damaged) for id in (batch.output_id, batch.error_id))
    return EarlierResults(answered, failed, damaged)


def _read(files: StoredFiles, id: str, damaged: dict[Path, int]) -> set[str]:
    partial = files.partial_path(id)
    path = partial if partial.exists() else files.path(id)
    if not path.exists():
        return set()
    ids, num_bytes = _ids(path)
    if path == partial and num_bytes < path.stat().st_size:
        damaged[path] = num_bytes
    return ids


def _ids(path: Path) -> tuple[set[str], int]:
    """Ids of the whole lines, and the bytes of these."""
    ids, num_bytes = set(), 0
    decoder = msgspec.json.Decoder(_Identified)
    with path.open("rb") as file:
        for line in file:
            try:
                id = decoder.decode(line).custom_id
            except (msgspec.MsgspecError, UnicodeDecodeError):
                break
            if not line.endswith(b"\n"):
                break
            ids.add(id)
            num_bytes += len(line)
    return ids, num_bytes


class Results:
    """The results of a batch; a context that closes its files.

    Attributes:
        ids: of the requests that have a result.
    """

    def __init__(self, files: StoredFiles, batch: StoredBatch, earlier: EarlierResults):
        """Drops incomplete ends; raises OSError."""
        for path, num_bytes in earlier.damaged.items():
            os.truncate(path, num_bytes)
        self.ids = earlier.answered | earlier.failed
        self._files = files
        self._batch = batch
        self._new: dict[str, NewFile] = {}
        counts = batch.body.request_counts
        counts.completed, counts.failed = len(earlier.answered), len(earlier.failed)

    def __enter__(self) -> "Results":
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._new.values():
            file.close()

    def add(self, line: Line, record: Record) -> None:
        """Adds the result of a request; raises `StorageFull` or OSError, and then adds nothing."""
        is_good = records.is_good(record)
        file = self._file(self._batch.output_id if is_good else self._batch.error_id)
        file.write(msgspec.json.encode(record) + b"\n")
        self.ids.add(line.custom_id)
        counts = self._batch.body.request_counts
        counts.completed += is_good
        counts.failed += not is_good

    async def publish(self) -> None:
        """Makes files of both, as far as there are lines, and names them in the batch; may be
        repeated after a crash. Raises OSError.
        """
        body = self._batch.body
        body.output_file_id = await self._publish(self._batch.output_id, "output")
        body.error_file_id = await self._publish(self._batch.error_id, "error")

    async def _publish(self, id: str, kind: str) -> str | None:
        if self._files.has(id):
            return id
        if not self._files.partial_path(id).exists():
            return None
        file, now = self._file(id), int(time.time())
        if not file.num_bytes:
            file.discard()
            return None
        name = f"{self._batch.body.id}_{kind}.jsonl"
        expires_at = now + self._batch.lifetime_s
        await file.publish(FileBody(id, file.num_bytes, now, expires_at, name, "batch_output"))
        return id

    def _file(self, id: str) -> NewFile:
        if id not in self._new:
            self._new[id] = NewFile(self._files, self._batch.owner, id)
        return self._new[id]
