"""Digests inside the files that they are of, quick enough to be compared at every start.

A file of ours that is kept holds, near its beginning and in whatever way its format has texts, the
name `ridgeline.digest` and 64 hexadecimal digits: of the file in which these digits are zeros, cut
into pieces of 4 MiB, the SHA-256 of the pieces' CRC-32s. A flipped bit is found for certain. It is
no seal against those who may write the file: `ownership` is.
"""

import hashlib
import mmap
import os
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

from configs.errors import InputError

FIELD = "ridgeline.digest"
EMPTY = "0" * 64  # what is written in its place first
UNSEALED = {FIELD: EMPTY}

_PIECE = 4 << 20
SEARCHED = 4096  # bytes in which the field is
_DIGITS = rb"([0-9a-f]{64})(?![0-9a-f])"
_GAP = rb"[^0-9a-f]{1,16}"  # between name and digits, in any format


def of(data: "memoryview | mmap.mmap", place: slice | None = None) -> str:
    """Returns the digest of bytes; the field at `place` among them counts as empty."""
    with memoryview(data) as view:
        pieces = [view[start : start + _PIECE] for start in range(0, len(view), _PIECE)]
        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                sums = list(pool.map(zlib.crc32, pieces[1:]))
            first = bytearray(pieces[0]) if pieces else bytearray()
            if place is not None:
                first[place] = EMPTY.encode()
            sums.insert(0, zlib.crc32(first))
        finally:
            for piece in pieces:
                piece.release()
    return hashlib.sha256(b"".join(crc.to_bytes(4, "little") for crc in sums)).hexdigest()


def place(data: "memoryview | mmap.mmap", field: str = FIELD) -> slice | None:
    """Where a field's digits are; None: there is no such field, or a damaged one."""
    match = re.search(re.escape(field.encode()) + _GAP + _DIGITS, bytes(data[:SEARCHED]))
    return None if match is None else slice(*match.span(1))


def is_sealed(beginning: bytes) -> bool:
    """Whether the first `SEARCHED` bytes of a file show a digest; earlier versions' have none."""
    return FIELD.encode() in beginning or re.search(_DIGITS, beginning) is not None


def seal(file: BinaryIO) -> None:
    """Writes the digest of a file that was written with `EMPTY` in its place."""
    file.flush()
    with mmap.mmap(file.fileno(), 0) as data:
        _fill(data)


def sealed(text: str) -> bytes:
    """A text below a line that holds its digest: what `opened` reads."""
    data = bytearray(f"{FIELD} {EMPTY}\n{text}".encode())
    _fill(memoryview(data))
    return bytes(data)


def _fill(data: "memoryview | mmap.mmap") -> None:
    digits = place(data)
    assert digits is not None
    data[digits] = of(data, digits).encode()


def opened(data: bytes, label: str) -> str:
    """The text that `sealed` was given. Raises InputError if it is not what was written."""
    check(memoryview(data), label)
    return data.partition(b"\n")[2].decode()


def check(data: "memoryview | mmap.mmap", label: str) -> None:
    """Compares a file's bytes with its digest; raises InputError if they differ, or it has none."""
    digits = place(data)
    if digits is None or of(data, digits).encode() != bytes(data[digits]):
        raise InputError(f"{label}: not what was written: the file is damaged or was changed")
