"""Files of a user at `s3://` or `gs://`: read whole to a file without a name, written on this
machine's disk first.

What a run adds piece by piece, to resume after it is cut off, is on disk; the store gets the whole
file at the end.
"""

import tempfile
from pathlib import Path
from typing import BinaryIO

from configs.errors import InputError, reason
from inference.files import cache_directory, object_store


def opened(url: str) -> BinaryIO:
    """An object, fetched whole; raises InputError if it cannot be, or is damaged."""
    from inference.files import mirror  # brings numpy

    if (item := object_store.find(url)) is None:
        raise InputError(f"{url}: there is no such object")
    try:
        file = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
        mirror.copy(item, file)
        file.seek(0)
    except OSError as error:
        raise InputError(f"cannot read {url} to a temporary file: {reason(error)}") from None
    return file


def place(url: str) -> Path:
    """Where a file is before it is written to a URL; raises InputError if that is no URL."""
    bucket, key = object_store.split(url)
    return _folder() / bucket.replace("://", "/") / key


def target(url: str) -> Path:
    """As `place`, where whatever the store has there is now. Raises InputError if it cannot be
    reached, or written here.
    """
    from inference.files import mirror  # brings numpy

    path, item = place(url), object_store.find(url)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if item is None:
            path.unlink(missing_ok=True)
        else:
            mirror.fetch(item, path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {reason(error)}") from None
    return path


def publish(path: Path, content: bytes) -> None:
    """Writes a file of ours to the URL that it is for; raises InputError if that fails."""
    try:
        scheme, bucket, *key = path.relative_to(_folder()).parts
    except (ValueError, InputError):  # for no URL
        return
    object_store.write(f"{scheme}://{bucket}/{'/'.join(key)}", content)
    path.unlink()


def _folder() -> Path:
    return (cache_directory.path() / "outputs").resolve()
