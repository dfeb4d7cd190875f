"""The digests in `.gguf` files of ours: of the tensors' data, and, where that is, of all before it.

Both are texts of the metadata, which other readers pass over. What is before the data is compared
when the file is opened, and the data when it is first read: later starts map what was made of it.
"""

import mmap
from pathlib import Path

from configs.errors import InputError
from inference.checkpoints.gguf.gguf_scan import Header
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
    """Compares all that is before the data.

    Raises:
        InputError: it is not what was written.
    """
    if not header.metadata.keys() & METADATA:
        return
    with memoryview(header.data) as view, view[: _start(header)] as head:
        digests.check(head, str(header.path))


def check_data(header: Header) -> None:
    """Compares the tensors' data.

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
    return min((entry.position for entry in header.tensors.values()), default=len(header.data))
