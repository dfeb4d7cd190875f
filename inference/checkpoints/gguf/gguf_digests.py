"""The digests in `.gguf` files of ours: of the weights, and of all before them.

Both are texts of the metadata, which other readers pass over. What is before the weights, metadata
and the divisors of frequencies, is compared when the file is opened. The weights are compared when
they are first read, because later starts map what was made of them.
"""

import mmap
from pathlib import Path

from configs.errors import InputError
from inference.checkpoints.gguf.gguf_scan import Header
from inference.checkpoints.gguf.tensor_names import ROPE_FACTORS
from inference.files import digests

DATA = "ridgeline.data_digest"
METADATA = {digests.FIELD: digests.EMPTY, DATA: digests.EMPTY}  # first in a file


def seal(path: Path, header: Header) -> None:
    """Writes the digests of a file that was written with `METADATA`, given its own header."""
    start = _start(header)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as whole, memoryview(whole) as view:
        of_data, own = digests.place(view, DATA), digests.place(view)
        assert of_data is not None and own is not None
        with view[:start] as head, view[start:] as data:
            head[of_data] = digests.of(data).encode()
            head[own] = digests.of(head, own).encode()


def check_head(header: Header) -> None:
    """Compares all that is before the weights.

    Raises:
        InputError: it is not what was written.
    """
    if not header.metadata.keys() & METADATA:
        return
    with memoryview(header.data) as view, view[: _start(header)] as head:
        digests.check(head, str(header.path))


def check_data(header: Header) -> None:
    """Compares the weights.

    Raises:
        InputError: it is not what was written.
    """
    written = header.metadata.get(DATA)
    if written is None:
        return
    with memoryview(header.data) as view, view[_start(header) :] as data:
        if digests.of(data) != written:
            raise InputError(
                f"{header.path}: its weights are not what was written: the file is damaged or was "
                "changed"
            )


def _start(header: Header) -> int:
    """Where the weights begin."""
    weights = (entry for name, entry in header.tensors.items() if name != ROPE_FACTORS)
    return min((entry.position for entry in weights), default=len(header.data))
