"""Files and directories of a user at `s3://` or `gs://`: read whole, written on this machine's disk
first.

What a run adds piece by piece, to resume after it is cut off, is on disk; the store gets the whole
file or directory at the end.
"""

import shutil
import tempfile
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from configs.errors import InputError, reason
from inference.files import cache_directory, object_store

_WORKERS = 8  # files that are uploaded at a time


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


def name(path: Path) -> str:
    """The URL that a file or directory of ours is for; the path of one that is for none."""
    return _url(path) or str(path)


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
    if (url := _url(path)) is not None:
        object_store.write(url, content)
        path.unlink()


def new(url: str) -> Path:
    """Where a directory or a file is made for a URL, which gets it by `published`. Raises
    InputError if something is there already, the store cannot be reached, or nothing can be written
    here.
    """
    if object_store.find(url) is not None or object_store.listed(url):
        raise InputError(f"{url}: exists already")
    return writable_place(url)


def writable_place(url: str) -> Path:
    """As `place`, in a folder that is there. Raises InputError if it cannot be."""
    path = place(url)
    try:
        path.parent.mkdir(0o755, parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {path}: {reason(error)}") from None
    return path


def published(path: Path, last: str = "") -> str:
    """Writes a file or a directory of ours to the URL that it is for, then removes it here; what
    has the name `last` comes behind all else. Returns the URL, or the path of what is for none.
    Raises InputError if that fails: then it is still here.
    """
    if (url := _url(path)) is None:
        return str(path)
    try:
        _upload(path, url, last)
    except InputError as error:
        raise InputError(f"{error}; what it would get is whole in {path}") from None
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    return url


def fetch_directory(path: Path) -> None:
    """Fetches what a store has of a directory of ours for a URL and is not here. Raises InputError
    if it cannot be read or written, is damaged, or a key is no path.
    """
    from inference.files import mirror  # brings numpy

    if (url := _url(path)) is None:
        return
    for item in object_store.listed(url):
        file = place(item.url)
        if file.exists():
            continue
        try:
            file.parent.mkdir(0o755, parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot write {file}: {reason(error)}") from None
        mirror.fetch(item, file)


def keep_alike(path: Path, last: str) -> None:
    """Gives a store the files of a directory of ours for a URL, then removes there what is here no
    longer. Of both a folder's file `last` says whether the folder is whole: it comes behind all
    others, and goes before them. A folder that is whole there is not written again; any other is,
    with every file, since what is there of it may be another machine's. Raises InputError if the
    store cannot be reached.
    """
    if (url := _url(path)) is None:
        return
    there = object_store.listed(url)
    ends = [item for item in there if item.key.endswith(f"/{last}")]
    here = _upload(path, url, last, tuple(item.url.removesuffix(last) for item in ends))
    gone = [item for item in there if item.url not in here]
    object_store.remove(sorted(gone, key=lambda item: item not in ends))


def discard(path: Path) -> None:
    """Removes a directory here, and what a store has of one of ours for a URL. Raises InputError
    if the store cannot be reached.
    """
    shutil.rmtree(path)
    if (url := _url(path)) is not None:
        object_store.remove(object_store.listed(url))


def _upload(path: Path, url: str, last: str, whole: tuple[str, ...] = ()) -> Collection[str]:
    """Writes a file, or the files of a directory except those below the URLs `whole`, to a URL.
    Returns the URLs of all.
    """
    files = {url: path}
    if path.is_dir():
        files = {
            f"{url}/{file.relative_to(path).as_posix()}": file
            for file in path.rglob("*") if file.is_file()
        }  # fmt: skip
    for is_last in (False, True):
        batch = {
            name: file for name, file in files.items()
            if not name.startswith(whole) and (file.name == last) == is_last
        }  # fmt: skip
        with ThreadPoolExecutor(_WORKERS) as pool:
            list(pool.map(object_store.upload, batch.keys(), batch.values()))
    return files.keys()


def _url(path: Path) -> str | None:
    """What a file or directory of ours is for; None if that is no URL."""
    try:
        scheme, bucket, *key = path.absolute().relative_to(_folder()).parts
    except (ValueError, InputError):
        return None
    return f"{scheme}://{bucket}/{'/'.join(key)}"


def _folder() -> Path:
    return (cache_directory.path() / "outputs").resolve()
