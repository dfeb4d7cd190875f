"""The directory of files and batches, which one server at a time uses."""

import os
from pathlib import Path

from configs.errors import InputError, reason
from inference.server.batches.stored_batches import StoredBatches
from inference.server.batches.stored_files import USUAL, StorageLimits, StoredFiles

try:
    import fcntl
except ImportError:  # not a POSIX system: two servers do not exclude each other
    fcntl = None  # type: ignore[assignment]


class Store:
    """What clients store, on disk."""

    def __init__(self, label: str, folder: Path, limits: StorageLimits = USUAL):
        """Opens a directory, new or of an earlier server. `label` is its name in errors.

        Raises:
            InputError: it cannot be written, is used by another server, or is damaged.
        """
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            if fcntl is not None:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.files = StoredFiles(folder, limits)
            self.batches = StoredBatches(folder)
            open_batches = self.batches.open()
            written = [id for batch in open_batches for id in (batch.output_id, batch.error_id)]
            self.files.delete_partial(written)
        except BlockingIOError:
            raise InputError(f"{label}: another server uses it; give each its own") from None
        except OSError as error:
            raise InputError(f"{label}: {reason(error)}; give a directory to write to") from None

    def sweep(self) -> None:
        """Deletes files that have expired."""
        self.files.sweep({batch.body.input_file_id for batch in self.batches.open()})

    def close(self) -> None:
        os.close(self._lock)
