"""What every checkpoint format offers: names, shapes, and rows or columns."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import numpy as np

from configs.errors import InputError, shown

_BYTES = 4  # of a number, at most


class Read(Protocol):
    """`TensorSource.read`."""

    def __call__(
        self, name: str, start: int, stop: int, columns: slice = slice(None)
    ) -> np.ndarray:
        """Rows [start, stop), or these columns of them; no others are read."""


@dataclasses.dataclass(frozen=True)
class TensorSource:
    """Tensors on disk, read a block of rows at a time.

    Attributes:
        label: where they are, for messages.
        shapes: shape of each tensor, the outermost dimension (rows) first.
        read: `read(name, start, stop, columns)` gives rows [start, stop), and of a matrix these
            columns, in the precision the checkpoint stands for; the array may be a view of mapped
            memory.
        dtype: the smallest of bfloat16, float32 and float64 that holds every value.
        stream: whole tensors in blocks of rows, where reading in order can do more than `read`.
        read_into: fills an array with a whole tensor, or says that its type is another.
        read_blocks: a whole tensor in the blocks of its format: uint8 [rows, bytes], a stack's rows
            as those of one matrix.
        formats: of the tensors that are stored in blocks (`configs.precision.FORMATS`); `read` and
            the others give the numbers that these stand for.
        dtypes: as `dtype`, of each tensor where they may differ; 'uint8', 'int32', ... of one that
            holds what stands for numbers.
        parts: of a tensor that others stand for, which are there too: their names. One is asked
            for, or the others are.
        verify: compares a whole tensor with its digest, where `read` compares nothing; raises
            InputError where it is damaged.
        block_bytes: what is read at a time of a whole tensor.
        readers: how many readers at a time keep the disk, or the network, busy.
    """

    label: str
    shapes: Mapping[str, tuple[int, ...]]
    read: Read
    dtype: str = "bfloat16"
    stream: Callable[[str], Iterator[np.ndarray]] | None = None
    read_into: Callable[[str, np.ndarray], bool] | None = None
    read_blocks: Callable[[str], np.ndarray] | None = None
    formats: Mapping[str, str] = dataclasses.field(default_factory=dict)
    dtypes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    parts: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    verify: Callable[[str], None] | None = None
    block_bytes: int = 16 << 20
    readers: int = 2

    def verified(self) -> "TensorSource":
        """The source for readers of whole tensors by slices: it verifies each tensor first."""
        if self.verify is None:
            return self
        verify = functools.cache(self.verify)

        def read(name: str, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
            verify(name)
            return self.read(name, start, stop, columns)

        return dataclasses.replace(self, read=read)

    def check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        """Raises an `InputError` if a tensor is missing or has another shape."""
        if name not in self.shapes:
            raise InputError(f"{self.label}: tensor {shown(name)} is missing")
        if self.shapes[name] != expected:
            actual = list(self.shapes[name])
            raise InputError(f"{self.label}: {shown(name)} is {actual}; expected {list(expected)}")

    def widest(self, names: Iterable[str]) -> str:
        """The smallest type that holds every value of some tensors."""
        return max({self.dtypes.get(name, self.dtype) for name in names}, default="bfloat16")

    def blocks(self, name: str) -> Iterator[np.ndarray]:
        """A tensor's rows in order, in blocks of bounded size."""
        if self.stream is not None:
            yield from self.stream(name)
            return
        shape = self.shapes[name]
        step = max(self.block_bytes // (_BYTES * math.prod(shape[1:])), 1)
        for start in range(0, shape[0], step):
            yield self.read(name, start, min(start + step, shape[0]))
