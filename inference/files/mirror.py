"""A directory, or a `.gguf` file with its parts, in a store, as one on this machine's disk.

Small files are fetched whole; each other one is a pointer, by which `contents` reads ranges of the
object. So whatever looks at names, sizes and configurations of checkpoints works as on any disk. A
mirror is named by the versions of all its objects, and appears whole: what was changed in the store
becomes another mirror.
"""

import base64
import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from configs.errors import InputError, reason
from inference.files import atomic, contents, object_store, range_cache
from inference.files.object_store import StoredObject

# Descriptions and texts, of Orbax's directories too.
_WHOLE = (".json", ".jinja", ".sha256", ".model", ".zarray", ".zattrs", ".txt", "METADATA",
          ".ocdbt")  # fmt: skip
_MAX_WHOLE_BYTES = 100 << 20
_PART = re.compile(r"(.+-)\d{5}(-of-\d{5}\.gguf)")
_GGUF = ".gguf"
_WORKERS = 8


def path_of(name: str) -> Path:
    """The file or directory of a name, or the mirror of a URL; raises InputError as `of`."""
    return of(name) if object_store.is_url(name) else Path(name)


def whole(name: str) -> Path:
    """As `path_of`, with all that it stands for fetched."""
    path = path_of(name)
    complete(path)
    return path


def of(url: str) -> Path:
    """The mirror of a directory or `.gguf` file; made now unless this version is there.

    Raises:
        InputError: there is nothing, it cannot be read, a key is no path, or an object's bytes are
            not what the store's checksum says; nothing is kept then.
    """
    bucket, key = object_store.split(url)
    if key.endswith(_GGUF):
        part = _PART.fullmatch(key)
        beginning, ending = part.groups() if part else (key, key)
        objects = [
            item for item in object_store.beside(url)
            if item.key.startswith(beginning) and item.key.endswith(ending)
        ]  # fmt: skip
    else:
        objects = object_store.listed(url)
    if not objects:
        raise InputError(
            f"{url}: there is no such object or folder; valid: the folder of a checkpoint, or a "
            ".gguf file, in a bucket that is there"
        )
    versions = "\n".join(item.fingerprint for item in objects)
    name = hashlib.sha256(versions.encode()).hexdigest()[:16]
    top = range_cache.mirrors() / name
    if not top.is_dir():
        _make(top, objects)
    os.utime(top)  # used now
    return top / _path(bucket, key)


def complete(directory: Path) -> None:
    """Fetches the objects that files of a mirror stand for; of another directory there are none.
    Raises InputError as `of`.
    """
    for path in directory.rglob("*") if range_cache.holds(directory) else ():
        if (item := contents.stored_object(path)) is not None:
            fetch(item, path)


def fetch(item: StoredObject, path: Path) -> None:
    """Writes a whole object to a file, which appears under its name when it is complete.

    Raises:
        InputError: it cannot be read or written, or its bytes are not what the checksum says.
    """
    try:
        with atomic.open_file(path, is_kept=True) as file:
            copy(item, file)
    except OSError as error:
        raise InputError(f"cannot write {path}: {reason(error)}") from None


def copy(item: StoredObject, file: BinaryIO) -> None:
    """Writes a whole object to an open file; raises InputError as `fetch`, or OSError."""
    whole, digest = contents.Ranged(item), hashlib.md5(usedforsecurity=False)
    for start in range(0, item.size, whole.block_bytes):
        block = whole.take(start, min(start + whole.block_bytes, item.size))
        digest.update(block)
        file.write(block)
    _check({item: digest.digest()})


def _make(top: Path, objects: list[StoredObject]) -> None:
    small = [item for item in objects if _is_whole(item)]
    try:
        top.parent.mkdir(0o755, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=top.parent, prefix=".new-") as folder:
            with ThreadPoolExecutor(_WORKERS) as pool:
                read = pool.map(lambda item: contents.Ranged(item).take(0, item.size), small)
                texts = dict(zip(small, read, strict=True))
            _check({item: _md5(text) for item, text in texts.items()})
            for item in objects:
                path = Path(folder) / "new" / _path(item.bucket, item.key)
                path.parent.mkdir(0o755, parents=True, exist_ok=True)
                path.write_bytes(texts[item] if item in texts else contents.pointer(item))
            try:
                (Path(folder) / "new").rename(top)
            except OSError:
                if not top.is_dir():  # made by another process meanwhile
                    raise
    except OSError as error:
        raise InputError(f"cannot write {top.parent}: {reason(error)}") from None


def _is_whole(item: StoredObject) -> bool:
    return item.key.endswith(_WHOLE) and item.size <= _MAX_WHOLE_BYTES


def _path(bucket: str, key: str) -> Path:
    """Where an object is below the top of its mirror."""
    scheme, _, name = bucket.partition("://")
    return Path(scheme, name, key)


def _md5(data: memoryview) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()


def _check(digests: Mapping[StoredObject, bytes]) -> None:
    """Compares MD5s with those that stores give as ETags. Google's do for every object that was not
    composed. Amazon's do, except for objects in parts and those whose encryption has a key of its
    own; so they count where one of these objects has its MD5.

    Raises:
        InputError: one of them differs.
    """
    published = {item: md5 for item in digests if (md5 := _published(item.etag)) is not None}
    are_digests = any(digests[item] == md5 for item, md5 in published.items())
    for item, md5 in published.items():
        is_counted = are_digests or item.bucket.startswith("gs:")
        if is_counted and digests[item] != md5:
            raise InputError(
                f"{item.url}: its MD5 is {digests[item].hex()}, the store says {md5.hex()}: the "
                "object is damaged; write it again"
            )


def _published(etag: str) -> bytes | None:
    """The MD5 that an ETag is, in hexadecimal digits or base64."""
    if re.fullmatch(r"[0-9a-f]{32}", etag):
        return bytes.fromhex(etag)
    if re.fullmatch(r"[A-Za-z0-9+/]{22}==", etag):
        return base64.b64decode(etag)
    return None
