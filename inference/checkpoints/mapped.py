"""Opening checkpoint files, with the reasons why not in one line."""

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from configs.errors import InputError
from inference.files import contents, digests, json_lines
from inference.files.contents import Contents

# Read whole into memory, where JSON takes up to ten times its size, by the number of its values.
MAX_JSON_BYTES = 8 << 20
_MAX_VALUES = 1 << 18
MAX_TOKENIZER_BYTES = 100 << 20
_BEGINNING_BYTES = 1024  # more than a pointer has
_POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/.*?^size (\d+)$", re.DOTALL | re.M
)
_WEB_PAGE = re.compile(rb"(?:\xef\xbb\xbf)?\s*<(?:!doctype html|html|\?xml)\b", re.IGNORECASE)


def map_file(path: Path) -> Contents:
    """The file's bytes: mapped read-only, or ranges of the object in a store that it stands for.

    Raises:
        InputError: it is missing, unreadable, empty or not a regular file, or stands for another
            (`check_stand_in`).
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO must not block the open
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{path}: {why}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path}: not a regular file")
        if status.st_size == 0:
            raise InputError(f"{path}: the file is empty")
        check_stand_in(path, os.pread(descriptor, _BEGINNING_BYTES, 0))
        return contents.opened(path, descriptor)
    finally:
        os.close(descriptor)


def check_digest(path: Path) -> None:
    """Compares a file with the digest that it holds (`digests.seal`); raises an `InputError`."""
    with map_file(path) as data:
        digests.check(data.read(0, len(data)), str(path))


def check_stand_in(path: Path, beginning: bytes | None = None) -> None:
    """Refuses what was stored under the name of a file and is not that file.

    Args:
        beginning: its first bytes; None: they are read, if they can be.

    Raises:
        InputError: it is a pointer of Git LFS, or a page that a server sent.
    """
    if beginning is None:
        if not path.is_file():
            return
        with path.open("rb") as file:
            beginning = file.read(_BEGINNING_BYTES)
    if pointer := _POINTER.match(beginning):
        raise InputError(
            f"{path}: a Git LFS pointer, not the file of {int(pointer[1])} bytes; run `git lfs "
            "pull` in its repository, or download the file itself"
        )
    if _WEB_PAGE.match(beginning):
        raise InputError(
            f"{path}: a web page, not the file; download it again, and look at this page for why a "
            "server sent it (an error, a login)"
        )


def read_text(path: Path, max_bytes: int = MAX_JSON_BYTES) -> str:
    """A UTF-8 text file of at most `max_bytes` bytes.

    Raises:
        InputError: as `map_file`, or the file is too large or not UTF-8.
    """
    with map_file(path) as data:
        if len(data) > max_bytes:
            raise InputError(f"{path}: {len(data)} bytes; at most {max_bytes} are accepted")
        try:
            return data[:].decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: not UTF-8 text ({error.reason})") from None


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, object]:
    """The JSON object in a file; raises as `read_text`, or if the text is no object."""
    return parse_json(read_text(path, max_bytes), str(path))


def parse_json(text: str | bytes, label: str, most_values: int = _MAX_VALUES) -> dict[str, Any]:
    """The JSON object of at most so many values in `text`; no key may appear twice.

    Raises:
        InputError: the text is not that; `label` says where it came from.
    """
    commas = text.count(",") if isinstance(text, str) else text.count(b",")
    if commas > most_values:
        raise InputError(f"{label}: more than {most_values} values")
    try:
        value = json.loads(text, object_pairs_hook=json_lines.unique_keys)
    except RecursionError:
        raise InputError(f"{label}: JSON nested too deeply") from None
    except ValueError as error:
        raise InputError(f"{label}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"{label}: expected a JSON object, found {type(value).__name__}")
    return value
