"""Reads an upload, a form (`multipart/form-data`), and writes its file to disk as it comes."""

import asyncio
import re
import time
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from inference.batches import lines
from inference.server.batches.bodies import LIFETIME_S, MIN_LIFETIME_S, FileBody
from inference.server.batches.stored_files import (
    NewFile,
    StorageFull,
    StorageLimits,
    StoredFile,
    StoredFiles,
    new_id,
    storage_full,
)
from inference.server.protocol.errors import ApiError, invalid, missing

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_MAX_PARTS = 16
_MAX_FIELD_BYTES = 1024
_MAX_NAME_CHARS = 255
_FORM_BYTES = 64 << 10  # of a form beside its file
_READ = 8  # times the largest file: so much is read of a larger one before it is rejected, because
# clients read an answer only after they have sent everything
_START = re.compile(rb"(?:\xef\xbb\xbf)?\s*(\{?)")
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS = ("purpose", _ANCHOR, _SECONDS)


async def receive(
    request: Request, files: StoredFiles, owner: str, silence_s: float, max_s: float
) -> StoredFile:
    """Stores the file of a form.

    Args:
        silence_s, max_s: without a byte of the body, and for all of it.

    Raises:
        ApiError: 400, a field is wrong; 408, 413, 415; 507, there is no room.
        ClientDisconnect: the client left.
    """
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data":
        raise ApiError(415, "the header Content-Type is multipart/form-data here")
    if not options.get(b"boundary"):
        raise ApiError(400, "the header Content-Type has no boundary of the form's parts")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > _READ * files.limits.file_bytes + _FORM_BYTES:
        raise _too_large(files.limits)
    form = _Form(files, owner)
    try:
        files.check_number(owner)
        parser = MultipartParser(options[b"boundary"], form.callbacks)
        async with asyncio.timeout(max_s):
            await _read(request, parser, form, silence_s)
        return await form.publish()
    except FormParserError as error:
        raise ApiError(400, f"the body is not a valid form: {error}") from None
    except TimeoutError:
        raise ApiError(408, "the body did not come in time") from None
    except (StorageFull, OSError) as error:
        raise storage_full(error) from None
    finally:
        form.discard()


async def _read(request: Request, parser: MultipartParser, form: "_Form", silence_s: float) -> None:
    limits = form.limits
    stream, num_bytes = aiter(request.stream()), 0
    while True:
        async with asyncio.timeout(silence_s):
            chunk = await anext(stream, None)
        if chunk is None:
            break
        num_bytes += len(chunk)
        if num_bytes > _READ * limits.file_bytes + _FORM_BYTES:
            raise _too_large(limits)
        if form.num_bytes <= limits.file_bytes and form.num_lines <= limits.file_lines:
            parser.write(chunk)
    if form.num_bytes > limits.file_bytes:
        raise _too_large(limits)
    if form.num_lines > limits.file_lines:
        raise invalid("file", f"has more than {limits.file_lines} lines: cut it into parts")
    parser.finalize()


def _too_large(limits: StorageLimits) -> ApiError:
    why = f"file: is larger than {limits.file_bytes} bytes; cut it into parts"
    return ApiError(413, why, "file", "file_too_large")


class _Form:
    """The parts of a form.

    Attributes:
        num_bytes: of the file so far.
    """

    def __init__(self, files: StoredFiles, owner: str):
        self.limits = files.limits
        self.num_bytes = 0
        self.callbacks: MultipartCallbacks = {
            "on_part_begin": self._begin_part,
            "on_header_field": self._add_to_header_name,
            "on_header_value": self._add_to_header_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._begin_data,
            "on_part_data": self._add_data,
            "on_end": self._end,
        }
        self._files = files
        self._owner = owner
        self._fields: dict[str, bytes] = {}
        self._file: NewFile | None = None
        self._file_name = ""
        self._start = b""  # of the file
        self._num_newlines, self._ends_in_newline = 0, True
        self._num_parts = 0
        self._name = ""  # of the part
        self._header_name, self._header_value, self._disposition = b"", b"", b""
        self._is_whole = False

    @property
    def num_lines(self) -> int:
        """Lines of the file so far."""
        return self._num_newlines + (not self._ends_in_newline)

    async def publish(self) -> StoredFile:
        """Makes the file one that exists; raises an `ApiError` that names a wrong field."""
        if not self._is_whole:
            raise ApiError(400, "the body is not a valid form: it is cut off")
        purpose = self._field("purpose")
        if purpose is None:
            raise missing("purpose")
        if purpose != "batch":
            raise invalid("purpose", f"is batch here, not {purpose[:40]!r}")
        lifetime_s = self._lifetime_s()
        file, self._file = self._file, None
        if file is None:
            raise missing("file")
        try:
            match = _START.match(self._start)
            if match is None or not match[1]:
                raise invalid("file", f"is no JSONL of requests: each line is {lines.WANTED}")
            now = int(time.time())
            name = self._file_name or f"{file.id}.jsonl"
            body = FileBody(file.id, self.num_bytes, now, now + lifetime_s, name, "batch")
            return await file.publish(body)
        except BaseException:
            file.discard()
            raise

    def discard(self) -> None:
        """Deletes a file that is not published."""
        if self._file is not None:
            self._file.discard()

    def _field(self, name: str) -> str | None:
        value = self._fields.get(name)
        return None if value is None else value.decode(errors="replace").strip()

    def _lifetime_s(self) -> int:
        if self._field(_ANCHOR) not in (None, "created_at"):
            raise invalid(_ANCHOR, "is created_at")
        seconds = self._field(_SECONDS)
        if seconds is None:
            return LIFETIME_S
        is_valid = seconds.isdecimal() and len(seconds) < 10
        if not is_valid or not MIN_LIFETIME_S <= int(seconds) <= LIFETIME_S:
            raise invalid(_SECONDS, f"is a whole number from {MIN_LIFETIME_S} to {LIFETIME_S}")
        return int(seconds)

    def _begin_part(self) -> None:
        self._disposition = b""
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise ApiError(400, f"the form has more than {_MAX_PARTS} fields")

    def _add_to_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _add_to_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name = self._header_value = b""

    def _begin_data(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        if self._name in self._fields or (self._name == "file" and self._file is not None):
            raise invalid(self._name, "is in the form twice")
        if self._name == "file":
            self._file_name = _base_name(options.get(b"filename", b""))
            self._file = NewFile(self._files, self._owner, new_id("file-"))
        elif self._name in _FIELDS:
            self._fields[self._name] = b""

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        part = data[start:end]
        if self._name == "file" and self._file is not None:
            self.num_bytes += len(part)
            self._num_newlines += part.count(b"\n")
            self._ends_in_newline = part.endswith(b"\n")
            if self.num_bytes <= self.limits.file_bytes:
                self._file.write(part)
            self._start += part[: _MAX_FIELD_BYTES - len(self._start)]
        elif self._name in self._fields:
            self._fields[self._name] += part
            if len(self._fields[self._name]) > _MAX_FIELD_BYTES:
                raise invalid(self._name, f"has more than {_MAX_FIELD_BYTES} bytes")

    def _end(self) -> None:
        self._is_whole = True


def _base_name(name: bytes) -> str:
    """The last part of a path, as some clients send all of it."""
    text = re.split(r"[/\\]", name.decode(errors="replace"))[-1]
    return "".join(c for c in text if c.isprintable())[:_MAX_NAME_CHARS]
