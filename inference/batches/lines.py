"""Files of OpenAI's batches: a request a line, each with an id of its own."""

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec

from configs.errors import InputError, reason, shown
from inference.files import user_files

WANTED = '{"custom_id": text, "method": "POST", "url": "/v1/...", "body": {...}}'

_MAX_BYTES = 4 << 20  # of a line, as of a body over HTTP
_SHOWN = 200
_URL = re.compile(r"/v1/[!-~]+")


class Line(NamedTuple):
    """A request: the number of its line, its id, a path, and a body as the file has it."""

    number: int
    custom_id: str
    url: str
    body: bytes


class BadLine(NamedTuple):
    """A line that is no request, and why."""

    number: int
    custom_id: str | None
    why: str


class _RequestLine(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: Literal["POST"] = "POST"


class _Identified(msgspec.Struct):
    custom_id: str | None = None


class _Body(msgspec.Struct):
    stream: bool | None = None


_REQUEST_LINE = msgspec.json.Decoder(_RequestLine)
_IDENTIFIED = msgspec.json.Decoder(_Identified)
_BODY = msgspec.json.Decoder(_Body)


def read(name: str) -> list[Line | BadLine]:
    """Reads all but blank lines; raises InputError if the file is unreadable or has none."""
    lines = list(parsed(name))
    if not lines:
        raise InputError(f"{name}: no line holds a request; each is {WANTED}")
    return lines


def parsed(name: str) -> Iterator[Line | BadLine]:
    """Yields all but blank lines; raises InputError if the file is unreadable."""
    numbers: dict[str, int] = {}
    for number, data in enumerate(_read(name), 1):
        if not data.strip():
            continue
        line = _line(number, data)
        if isinstance(line, Line):
            first = numbers.setdefault(line.custom_id, number)
            if first != number:
                why = f"custom_id {shown(line.custom_id)} is that of line {first}, too"
                line = BadLine(number, line.custom_id, why)
        yield line


def _read(name: str) -> Iterator[bytes]:
    try:
        with user_files.open_file(name) as file:
            while data := file.readline(_MAX_BYTES + 2):
                yield data
                while not data.endswith(b"\n") and len(data) > _MAX_BYTES:
                    data = file.readline(_MAX_BYTES + 2)  # the rest of it
    except OSError as error:
        raise InputError(f"cannot read {name}: {reason(error)}") from None


def _line(number: int, data: bytes) -> Line | BadLine:
    if len(data) > _MAX_BYTES:
        return BadLine(number, None, f"it is longer than {_MAX_BYTES >> 20} MiB")
    try:
        parsed = _REQUEST_LINE.decode(data.strip().removeprefix(b"\xef\xbb\xbf"))
        body = bytes(parsed.body)
        streams = _BODY.decode(body).stream
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return BadLine(number, _custom_id(data), f"it is not {WANTED}: {error}"[:_SHOWN])
    why = ""
    if not parsed.custom_id:
        why = "its custom_id is empty"
    elif not _URL.fullmatch(parsed.url):
        why = f"its url is a path such as /v1/chat/completions, not {shown(parsed.url)}"
    elif streams:
        why = "an answer in a file is no stream: leave stream out"
    if why:
        return BadLine(number, parsed.custom_id or None, why)
    return Line(number, parsed.custom_id, parsed.url, body)


def _custom_id(data: bytes) -> str | None:
    try:
        return _IDENTIFIED.decode(data).custom_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
