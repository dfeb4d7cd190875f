"""A strict scan of a GGUF header, before anything believes it.

The format's own reader hangs on crafted lengths, so every length is compared with the bytes that
are left before it is used, and nothing is allocated in proportion to what the file claims.
"""

import dataclasses
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from configs.errors import InputError
from inference.checkpoints import mapped
from inference.files.contents import Contents

_MAX_COUNT = 65_536  # metadata entries, and tensors
_MAX_LISTED_STRINGS = 1 << 20  # in all string arrays together; Gemma has 2^18 tokens
_MAX_TEXT_BYTES = 16 << 20  # keys, names and string values together
_MAX_ALIGNMENT = 1 << 16
_MAX_DIMS = 4

_SCALARS = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"),
    4: struct.Struct("<I"), 5: struct.Struct("<i"), 6: struct.Struct("<f"), 7: struct.Struct("<?"),
    10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d"),
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_U32, _U64 = _SCALARS[4], _SCALARS[10]


@dataclasses.dataclass(frozen=True)
class StringArray:
    """A list of strings left in the file: only its place and length are known to be sound."""

    position: int
    count: int


Value = bool | int | float | str | np.ndarray | StringArray


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """One tensor: its shape (rows first), ggml type number, and place in its file."""

    shape: tuple[int, ...]
    ggml_type: int
    position: int
    num_bytes: int
    data: Contents | bytes

    def read(self, start: int, stop: int) -> np.ndarray:
        """Bytes [start, stop) of the tensor: u8[stop - start]. Raises InputError as `Contents`."""
        start, stop = self.position + start, self.position + stop
        if isinstance(self.data, bytes):
            return np.frombuffer(self.data, np.uint8)[start:stop]
        return np.frombuffer(self.data.read(start, stop), np.uint8)

    def cut(self, start: int, stop: int, row_bytes: int, columns: slice) -> np.ndarray:
        """Columns, in bytes, of rows [start, stop): u8[rows, C]; raises as `read`."""
        if isinstance(self.data, bytes):
            rows = self.read(start * row_bytes, stop * row_bytes)
            return rows.reshape(stop - start, row_bytes)[:, columns]
        first = self.position + start * row_bytes
        return self.data.cut(first, stop - start, row_bytes, columns)


@dataclasses.dataclass(frozen=True)
class Header:
    """A scanned file. `metadata` holds scalars, numpy arrays and `StringArray`s, which are in the
    `head`: the bytes of the file up to some place behind the description of its tensors.

    `fingerprints` are of the file as it was opened, then of those that hold the rest of one cut
    into parts.
    """

    path: Path
    data: Contents
    head: memoryview
    metadata: dict[str, Value]
    tensors: dict[str, TensorEntry]
    fingerprints: tuple[str, ...]

    def strings(self, key: str) -> list[str]:
        """The string array under `key`; raises an `InputError` if it is absent or not UTF-8."""
        array = self.metadata.get(key)
        if not isinstance(array, StringArray):
            raise InputError(f"{self.path}: metadata {key!r} is not a list of strings")
        items, position, unpack = [], array.position, _U64.unpack_from
        try:
            for _ in range(array.count):
                stop = position + 8 + unpack(self.head, position)[0]
                items.append(bytes(self.head[position + 8 : stop]).decode())
                position = stop
        except UnicodeDecodeError:
            raise InputError(f"{self.path}: metadata {key!r} is not UTF-8") from None
        return items


def scan(path: Path, quant_sizes: dict[int, tuple[int, int]]) -> Header:
    """Reads and checks everything up to the tensors' data.

    Args:
        quant_sizes: elements and bytes of a block, for every ggml type number.

    Raises:
        InputError: the file cannot be read or is not a sound GGUF file of version 2 or 3.
    """
    data = mapped.map_file(path)
    num_bytes = data.head_bytes
    while True:
        cursor = _Cursor(data, data.read(0, min(num_bytes, len(data))))
        try:
            metadata, num_tensors = _metadata(cursor)
            tensors = _tensors(cursor, num_tensors, metadata, quant_sizes)
        except _BeyondHead:
            num_bytes *= 4
        except _Malformed as cause:
            raise InputError(f"{path}: not a valid GGUF file: {cause}") from None
        else:
            return Header(path, data, cursor.head, metadata, tensors, (data.fingerprint,))


class _Malformed(Exception):
    pass


class _BeyondHead(Exception):
    """More of the file has to be read."""


class _Cursor:
    """A position in the header that cannot leave the file."""

    def __init__(self, data: Contents, head: memoryview):
        self.data, self.head = data, head
        self.position = 0
        self.listed_strings = 0
        self.text_bytes = 0

    def skip(self, num_bytes: int, what: str) -> int:
        start, remaining = self.position, len(self.data) - self.position
        if num_bytes > remaining:
            raise _Malformed(f"{what} needs {num_bytes} bytes, {remaining} are left (truncated?)")
        self.position += num_bytes
        if self.position > len(self.head):
            raise _BeyondHead
        return start

    def number(self, kind: struct.Struct, what: str) -> Any:
        return kind.unpack_from(self.head, self.skip(kind.size, what))[0]

    def text(self, what: str) -> str:
        length = self.number(_U64, f"the length of {what}")
        start = self.skip(length, what)
        self.text_bytes += length
        if self.text_bytes > _MAX_TEXT_BYTES:
            raise _Malformed(f"more than {_MAX_TEXT_BYTES} bytes of text")
        try:
            return bytes(self.head[start : start + length]).decode()
        except UnicodeDecodeError:
            raise _Malformed(f"{what} is not UTF-8") from None

    def value(self, kind: int, what: str) -> Value:
        if kind == _STRING:
            return self.text(what)
        if kind == _ARRAY:
            return self.array(what)
        if kind not in _SCALARS:
            raise _Malformed(f"{what} has unknown value type {kind}")
        return self.number(_SCALARS[kind], what)

    def array(self, what: str) -> np.ndarray | StringArray:
        kind = self.number(_U32, what)
        count = self.number(_U64, f"the length of {what}")
        if kind == _STRING:
            return self.string_array(count, what)
        if kind == _ARRAY:
            raise _Malformed(f"{what} is an array of arrays")
        if kind not in _SCALARS:
            raise _Malformed(f"{what} has unknown element type {kind}")
        start = self.skip(count * _SCALARS[kind].size, what)
        return np.frombuffer(self.head, np.dtype(_SCALARS[kind].format), count, start)

    def string_array(self, count: int, what: str) -> StringArray:
        self.listed_strings += count
        if self.listed_strings > _MAX_LISTED_STRINGS:
            raise _Malformed(f"{what} lists {count} strings; at most {_MAX_LISTED_STRINGS} in all")
        start = position = self.position
        head, unpack, last = self.head, _U64.unpack_from, len(self.head) - 8
        for _ in range(count):
            if position > last:
                if len(head) < len(self.data):
                    raise _BeyondHead
                raise _Malformed(f"{what} runs past the end of the file")
            position += 8 + unpack(head, position)[0]
        self.position = start
        self.skip(position - start, what)
        return StringArray(start, count)


def _metadata(cursor: _Cursor) -> tuple[dict[str, Value], int]:
    magic = bytes(cursor.head[cursor.skip(4, "the magic number") : 4])
    if magic != b"GGUF":
        raise _Malformed(f"it starts with {magic!r}, not b'GGUF'")
    version = cursor.number(_U32, "the version")
    if version not in (2, 3):
        swapped = " (big-endian)" if version in (2 << 24, 3 << 24) else ""
        raise _Malformed(
            f"version {version}{swapped} is not supported; valid: 2, 3 (little-endian)"
        )
    num_tensors = cursor.number(_U64, "the number of tensors")
    num_entries = cursor.number(_U64, "the number of metadata entries")
    for count, what in ((num_tensors, "tensors"), (num_entries, "metadata entries")):
        if count > _MAX_COUNT:
            raise _Malformed(f"{count} {what}; at most {_MAX_COUNT} are accepted")
    metadata: dict[str, Value] = {}
    for _ in range(num_entries):
        key = cursor.text("a metadata key")
        if key in metadata:
            raise _Malformed(f"duplicate metadata key {key[:80]!r}")
        kind = cursor.number(_U32, f"the type of {key[:80]!r}")
        metadata[key] = cursor.value(kind, f"metadata {key[:80]!r}")
    return metadata, num_tensors


def _tensors(
    cursor: _Cursor,
    num_tensors: int,
    metadata: dict[str, Value],
    quant_sizes: dict[int, tuple[int, int]],
) -> dict[str, TensorEntry]:
    alignment = metadata.get("general.alignment", 32)
    if not (
        isinstance(alignment, int)
        and 1 <= alignment <= _MAX_ALIGNMENT
        and alignment & (alignment - 1) == 0
    ):
        raise _Malformed(f"alignment {alignment!r} is not a power of two up to {_MAX_ALIGNMENT}")
    entries: dict[str, TensorEntry] = {}
    for _ in range(num_tensors):
        name = cursor.text("a tensor name")
        if name in entries:
            raise _Malformed(f"duplicate tensor {name[:80]!r}")
        entries[name] = _tensor(cursor, f"tensor {name[:80]!r}", quant_sizes)
    data_start = -(-cursor.position // alignment) * alignment
    end, previous = data_start, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: item[1].position):
        start = data_start + entry.position
        if entry.position % alignment:
            raise _Malformed(f"tensor {name[:80]!r} is not aligned to {alignment} bytes")
        if start < end:
            raise _Malformed(f"tensor {name[:80]!r} overlaps {previous}")
        end, previous = start + entry.num_bytes, f"tensor {name[:80]!r}"
        if end > len(cursor.data):
            raise _Malformed(
                f"{previous} ends {end - len(cursor.data)} bytes past the end of the file"
            )
        entries[name] = dataclasses.replace(entry, position=start)
    return entries


def _tensor(cursor: _Cursor, what: str, quant_sizes: dict[int, tuple[int, int]]) -> TensorEntry:
    num_dims = cursor.number(_U32, f"the rank of {what}")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise _Malformed(f"{what} has {num_dims} dimensions; valid: 1 to {_MAX_DIMS}")
    dims = [cursor.number(_U64, f"the shape of {what}") for _ in range(num_dims)]
    if min(dims) < 1 or math.prod(dims) >= 1 << 63:
        raise _Malformed(f"{what} has an impossible shape {dims}")
    ggml_type = cursor.number(_U32, f"the type of {what}")
    if ggml_type not in quant_sizes:
        raise _Malformed(f"{what} has unknown ggml type {ggml_type}")
    block_elements, block_bytes = quant_sizes[ggml_type]
    if dims[0] % block_elements:
        raise _Malformed(
            f"{what} has rows of {dims[0]}, not a multiple of its block of {block_elements}"
        )
    offset = cursor.number(_U64, f"the offset of {what}")
    num_bytes = math.prod(dims) // block_elements * block_bytes
    return TensorEntry(tuple(reversed(dims)), ggml_type, offset, num_bytes, cursor.data)
