"""Files that appear under their name only when complete."""

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def open_file(path: Path, is_kept: bool = False) -> Iterator[BinaryIO]:
    """Opens a new file to write, which appears under its name only when complete.

    Args:
        is_kept: later starts map or run it: no other user may write to it, or to its directory
            where that is new (`ownership`).

    Raises:
        OSError: it cannot be written; whatever had the name before is untouched.
    """
    mode = 0o755 if is_kept else 0o777
    path.parent.mkdir(mode, parents=True, exist_ok=True)
    # Not `tempfile`, whose files no other user may read.
    temporary = path.with_name(f".{path.name[:40]}.{uuid.uuid4().hex[:12]}")
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode & 0o666)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # or the name may outlive a power cut, and the bytes not
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def check_room(folder: Path, num_bytes: int) -> None:
    """Raises OSError if a folder's disk lacks room, as libraries that fill it say so in pages."""
    if shutil.disk_usage(folder).free < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
