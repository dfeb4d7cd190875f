"""Objects in stores of the cloud, named `s3://bucket/key` or `gs://bucket/key`.

The package `obstore` speaks to them; it repeats a request whose connection breaks, from the byte
that it reached, with growing pauses. Credentials are only those that the provider's own chain has:
the environment, a service account's file, the machine's metadata.
"""

import functools
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from configs.errors import InputError

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

_SCHEMES = ("s3://", "gs://")
_VALID = "s3://BUCKET/PATH or gs://BUCKET/PATH"
_BUCKET = re.compile(r"(?:s3|gs)://[a-z0-9][a-z0-9._-]{1,221}[a-z0-9]")
_MAX_OBJECTS = 100_000
_MAX_WRITTEN = 4 << 30
_IN_FLIGHT = 32  # requests at a time
_RETRIES, _PATIENCE = 10, timedelta(minutes=2)  # of a request that fails for a while
_SHOWN = 200
_DENIED = re.compile(r"status code: 40[13]|AccessDenied|InvalidAccessKeyId")
# Which credentials a provider's chain looks for, in messages.
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a web identity or the machine's role, and "
    "AWS_REGION; AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login` or the "
    "machine's service account; GOOGLE_SKIP_SIGNATURE=true for a public bucket",
}


class StoredObject(NamedTuple):
    """An object as it was listed: `etag` names its very content."""

    bucket: str
    key: str
    size: int
    etag: str

    @property
    def url(self) -> str:
        return f"{self.bucket}/{self.key}"

    @property
    def fingerprint(self) -> str:
        """Names the very content."""
        return f"{self.url}:{self.size}:{self.etag}"


def is_url(name: str) -> bool:
    """Whether a name is that of an object, or of the folder above some."""
    return name.startswith(_SCHEMES)


def split(url: str) -> tuple[str, str]:
    """The bucket (`s3://bucket`) and the key of a URL, which must be of the valid form."""
    scheme, _, path = url.partition("://")
    bucket, _, key = path.partition("/")
    key, parts = key.rstrip("/"), key.rstrip("/").split("/")
    bucket = f"{scheme}://{bucket}"
    if not _BUCKET.fullmatch(bucket) or "" in parts or {".", ".."} & {*parts}:
        raise InputError(f"{url[:_SHOWN]!r} names no object; valid: {_VALID}")
    if len(key.encode()) > 1024 or not key.isprintable():  # what both providers accept
        raise InputError(f"{url[:_SHOWN]!r}: a key has at most 1024 printable bytes")
    return bucket, key


def listed(url: str) -> list[StoredObject]:
    """Objects below a URL, by key.

    Raises:
        InputError: there is no such bucket, it may not be read or cannot be reached, or there are
            too many.
    """
    bucket, key = split(url)
    objects: list[StoredObject] = []
    with _one_line(url):
        for chunk in _obstore(url).list(_store(bucket), f"{key}/", chunk_size=1000):
            objects += [_object(bucket, meta) for meta in chunk if not meta["path"].endswith("/")]
            if len(objects) > _MAX_OBJECTS:
                raise InputError(f"{url}: more than {_MAX_OBJECTS} objects; name one checkpoint")
    return sorted(objects)


def beside(url: str) -> list[StoredObject]:
    """The object of a URL and those of the same folder, by key; raises InputError as `listed`."""
    bucket, key = split(url)
    with _one_line(url):
        folder = _obstore(url).list_with_delimiter(_store(bucket), key.rpartition("/")[0])
        return sorted(_object(bucket, meta) for meta in folder["objects"])


def find(url: str) -> StoredObject | None:
    """The object of a URL; None where there is none. Raises InputError as `listed`."""
    key = split(url)[1]
    return next((item for item in beside(url) if item.key == key), None)


def _object(bucket: str, meta: "ObjectMeta") -> StoredObject:
    etag = (meta["e_tag"] or "").strip('"')
    return StoredObject(bucket, meta["path"], meta["size"], etag)


def read(item: StoredObject, start: int, stop: int) -> memoryview:
    """Bytes [start, stop) of an object, in one request.

    Raises:
        InputError: it is not there any more, was changed meanwhile, or cannot be read.
    """
    if start == stop:  # which no store has a range for
        return memoryview(b"")
    with _one_line(item.url):
        options: Any = {"range": (start, stop), "if_match": f'"{item.etag}"'}
        data = memoryview(
            _obstore(item.url).get(_store(item.bucket), item.key, options=options).bytes()
        )
    if len(data) != stop - start:
        raise InputError(f"{item.url}: {len(data)} bytes came for {stop - start}; run it again")
    return data


def write(url: str, content: bytes) -> None:
    """Writes an object, which appears whole or not at all. Raises InputError as `listed`."""
    if len(content) > _MAX_WRITTEN:
        raise InputError(f"{url}: {len(content)} bytes; at most {_MAX_WRITTEN} are written at once")
    bucket, key = split(url)
    with _one_line(url):
        _obstore(url).put(_store(bucket), key, content, use_multipart=False)


def upload(url: str, path: Path) -> None:
    """Writes a file's bytes as an object, which appears whole or not at all; a large one goes in
    parts. Raises InputError as `listed`.
    """
    bucket, key = split(url)
    with _one_line(url):
        _obstore(url).put(_store(bucket), key, path)


def remove(items: Iterable[StoredObject]) -> None:
    """Removes objects, one after the other. Raises InputError as `listed`."""
    for item in items:
        with _one_line(item.url):
            _obstore(item.url).delete(_store(item.bucket), item.key)


@functools.cache
def requests() -> ThreadPoolExecutor:
    """The threads that wait for requests: so many are in flight."""
    return ThreadPoolExecutor(_IN_FLIGHT, "object-store")


@functools.cache
def _store(bucket: str) -> "ObjectStore":
    from obstore.store import from_url

    store: ObjectStore = from_url(
        bucket, retry_config={"max_retries": _RETRIES, "retry_timeout": _PATIENCE}
    )
    return store


def _obstore(url: str) -> Any:
    try:
        import obstore.exceptions
    except ModuleNotFoundError:
        raise InputError(f"{url}: stores are read by obstore: pip install '.[cloud]'") from None
    return obstore


@contextmanager
def _one_line(url: str) -> Iterator[None]:
    """Says in one line why a request failed: InputError. No credential is part of it."""
    exceptions = _obstore(url).exceptions
    bucket = split(url)[0]
    credentials = _CREDENTIALS[bucket[:2]]
    try:
        yield
        return
    except InputError:
        raise
    except exceptions.PreconditionError:
        why = "it was changed while it was read; run it again"
    except FileNotFoundError:
        why = f"there is no such object; valid: {_VALID}, and a bucket that is there"
    except exceptions.BaseError as error:
        message = str(error)
        if "NoSuchBucket" in message or "404 Not Found" in message or "no bucket" in message:
            why = f"there is no bucket {bucket}; valid: one that is there, {_VALID}"
        elif _DENIED.search(message):
            why = f"not allowed; valid credentials: {credentials}"
        elif "redirect" in message.lower() or "AuthorizationHeaderMalformed" in message:
            why = f"the bucket {bucket} is in another region; valid: its own in AWS_REGION"
        elif any(place in message for place in ("169.254.", "metadata.google", "oauth2", "sts.")):
            why = f"there are no credentials; valid: {credentials}"
        else:
            why = f"the store cannot be reached, or failed: {_cause(message)}"
    except (OSError, ValueError) as error:
        why = _cause(str(error))
    raise InputError(f"cannot use {url}: {why}") from None


def _cause(message: str) -> str:
    """The first line of an error of obstore's, whose further ones repeat it for programmers."""
    return message.strip().partition("\n")[0][:_SHOWN]
