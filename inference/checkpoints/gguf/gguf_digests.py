"""The digests in `.gguf` files of ours: of the weights, and of all before them.

Both are texts of the metadata, which other readers pass over. What is before the weights, metadata
and the factors of frequencies, is compared when the file is opened. The weights are compared when
they are first read, because later starts map what was made of them. That digest ends with the
file's size: tools of llama.cpp that quantize and split files copy all metadata, and no header that
is damaged can change the size.
"""

import logging
import mmap
from pathlib import Path

from configs.errors import InputError
from inference.checkpoints.gguf.gguf_scan import Header
from inference.families.shared.gguf_names import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from inference.files import digests

DATA = "ridgeline.data_digest"
_SIZE_DIGITS = 16  # hexadecimal
_FACTORS = LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS  # which lie before the weights
METADATA = {digests.FIELD: digests.EMPTY, DATA: digests.EMPTY}  # first in a file


def seal(path: Path, header: Header) -> None:
    """Writes the digests of a file that was written with `METADATA`, given its own header."""
    start = _start(header)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as whole, memoryview(whole) as view:
        of_data, of_head = digests.place(view, DATA), digests.place(view)
        assert of_data is not None and of_head is not None
        with view[:start] as head, view[start:] as data:
            head[of_data] = _of(data, len(view)).encode()
            head[of_head] = digests.of(head, of_head).encode()


def check_head(header: Header) -> None:
    """Raises an `InputError` if the bytes before the weights are not as written."""
    if not header.metadata.keys() & METADATA:
        return
    if _is_copied(header):
        logging.warning(
            "%s: another program copied the digests of another file into it; they are not compared",
            header.path,
        )  # fmt: skip
        return
    digests.check(header.data.read(0, _start(header)), str(header.path))


def check_data(header: Header) -> None:
    """Raises an `InputError` if the weights are not as written. Those of an object in a store, of
    which each host reads a part, are not read for that.
    """
    written = header.metadata.get(DATA)
    if written is None or _is_copied(header) or not header.data.is_local:
        return
    size = len(header.data)
    if _of(header.data.read(_start(header), size), size) != written:
        raise InputError(
            f"{header.path}: its weights are not what was written: the file is damaged or was "
            "changed"
        )


def _of(data: memoryview, size: int) -> str:
    """The digest of weights: 48 digits of theirs and 16 of the size of their file, in bytes."""
    return digests.of(data)[:-_SIZE_DIGITS] + _size_digits(size)


def _size_digits(size: int) -> str:
    return f"{size:0{_SIZE_DIGITS}x}"


def _is_copied(header: Header) -> bool:
    """Returns whether the digests are of a file of another size; one bit apart, it is damage."""
    written = header.metadata.get(DATA)
    if not isinstance(written, str):
        return False
    digits, expected = written[-_SIZE_DIGITS:], _size_digits(len(header.data))
    try:
        int(digits, 16)
    except ValueError:  # damaged
        return False
    pairs = zip(digits.encode(), expected.encode(), strict=False)
    return sum((digit ^ number).bit_count() for digit, number in pairs) > 1


def _start(header: Header) -> int:
    tensors = header.tensors.items()
    weights = (
        entry for name, entry in tensors if name not in _FACTORS and entry.data is header.data
    )
    return min((entry.position for entry in weights), default=len(header.data))
