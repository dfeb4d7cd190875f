"""Opening checkpoint files: mapped read-only, with the reasons why not in one line."""

import json
import mmap
import os
import stat
from pathlib import Path
from typing import Any

from configs.errors import InputError
from inference.files import digests, json_lines

# Read whole into memory, where JSON takes up to ten times its size, by the number of its values.
MAX_JSON_BYTES = 8 << 20
_MAX_VALUES = 1 << 18
MAX_TOKENIZER_BYTES = 100 << 20


def map_file(path: Path) -> mmap.mmap:
    """The whole file as read-only memory.

    Raises:
        InputError: it is missing, unreadable, empty or not a regular file.
    """
    return map_identified(path)[0]


def map_identified(path: Path) -> tuple[mmap.mmap, str]:
    """`map_file`, and the `fingerprint` of the very file that is mapped: another one may take its
    name meanwhile.
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
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), fingerprint(path, status)
    finally:
        os.close(descriptor)


def check_digest(path: Path) -> None:
    """Compares a file with the digest that it holds (`digests.seal`).

    Raises:
        InputError: as `map_file`, or it is damaged.
    """
    with map_file(path) as data:
        digests.check(data, str(path))


def fingerprint(path: Path, status: os.stat_result) -> str:
    """Identifies a file's content by place, size and time of change, without reading it."""
    return f"{path.resolve()}:{status.st_size}:{status.st_mtime_ns}"


def read_text(path: Path, most: int = MAX_JSON_BYTES) -> str:
    """A UTF-8 text file of at most `most` bytes.

    Raises:
        InputError: as `map_file`, or the file is too large or not UTF-8.
    """
    with map_file(path) as data:
        if len(data) > most:
            raise InputError(f"{path}: {len(data)} bytes; at most {most} are accepted")
        try:
            return data[:].decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: not UTF-8 text ({error.reason})") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        InputError: as `read_text`, or the text is not one JSON object.
    """
    return parse_json(read_text(path), str(path))


def parse_json(text: str | bytes, label: str) -> dict[str, Any]:
    """The JSON object in `text`; no key may appear twice.

    Raises:
        InputError: the text is not that; `label` says where it came from.
    """
    commas = text.count(",") if isinstance(text, str) else text.count(b",")
    if commas > _MAX_VALUES:
        raise InputError(f"{label}: more than {_MAX_VALUES} values")
    try:
        value = json.loads(text, object_pairs_hook=json_lines.unique_keys)
    except RecursionError:
        raise InputError(f"{label}: JSON nested too deeply") from None
    except ValueError as error:
        raise InputError(f"{label}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"{label}: expected a JSON object, found {type(value).__name__}")
    return value
