"""States of batches on disk: `batches/ID.json`, replaced whole at each change."""

import asyncio
from pathlib import Path

import msgspec

from inference.server.batches.bodies import BatchBody, Status
from inference.server.batches.stored_files import read_state, write_state
from inference.server.protocol.errors import ApiError


class StoredBatch(msgspec.Struct):
    """A batch, and what its client does not see.

    Attributes:
        owner: name of the key.
        output_id, error_id: of its files, before they exist.
        lifetime_s: of these files.
        outcome: the state in which it will end, once that is certain.
    """

    owner: str
    body: BatchBody
    output_id: str
    error_id: str
    lifetime_s: int
    outcome: Status | None = None


class StoredBatches:
    """All batches; in one event loop."""

    def __init__(self, folder: Path):
        """Reads the batches of a folder; raises InputError if one is damaged."""
        self._folder = folder / "batches"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._batches: dict[str, StoredBatch] = {}
        self._writing = asyncio.Lock()
        for path in sorted(self._folder.iterdir()):
            if path.name.startswith("."):
                path.unlink()  # a crash came while it was written
            else:
                batch = read_state(path, StoredBatch)
                self._batches[batch.body.id] = batch

    def get(self, owner: str, id: str) -> StoredBatch:
        """Returns a batch; raises an `ApiError` (404) if the owner has none of this id."""
        batch = self._batches.get(id)
        if batch is None or batch.owner != owner:
            raise ApiError(404, "there is no batch of this id", code="batch_not_found")
        return batch

    def of(self, owner: str) -> list[BatchBody]:
        """The batches of an owner, the oldest first."""
        return [batch.body for batch in self._batches.values() if batch.owner == owner]

    def open(self) -> list[StoredBatch]:
        """Batches that have not ended, the oldest first."""
        return [batch for batch in self._batches.values() if not batch.body.has_ended]

    def reader(self, file_id: str) -> str | None:
        """Id of a batch that still reads a file."""
        readers = (b.body.id for b in self.open() if b.body.input_file_id == file_id)
        return next(readers, None)

    async def add(self, batch: StoredBatch) -> None:
        """Adds a new batch; raises OSError, and then it does not exist."""
        self._batches[batch.body.id] = batch
        try:
            await self.save(batch)
        except BaseException:
            del self._batches[batch.body.id]
            raise

    async def save(self, batch: StoredBatch) -> None:
        """Writes a changed batch; raises OSError."""
        path = self._folder / f"{batch.body.id}.json"
        async with self._writing:  # so that the newest state is written last
            await asyncio.to_thread(write_state, path, msgspec.json.encode(batch))

    def forget_ended(self, owner: str, limit: int) -> None:
        """Deletes the oldest ended batches of an owner beyond a number of them."""
        ended = [body.id for body in self.of(owner) if body.has_ended]
        for id in ended[: max(0, len(ended) - limit)]:
            del self._batches[id]
            (self._folder / f"{id}.json").unlink(missing_ok=True)
