"""Parts of a checkpoint's tensors that stand for matrices of their own."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from configs.errors import InputError, shown
from inference.checkpoints.hf import mxfp4
from inference.checkpoints.tensor_source import TensorSource


@dataclasses.dataclass(frozen=True)
class Part:
    """A matrix, or a table, inside of a stored tensor.

    Attributes:
        tensor: its name, and `stored` the shape that it must have.
        shape: of the part.
        rows: of the tensor, a slice or in their order an array of numbers; of a stack, one matrix.
        columns: of the last axis, those that are taken, in their order; None: all of them.
        transposed: it is stored [in, out].
    """

    tensor: str
    stored: tuple[int, ...]
    shape: tuple[int, ...]
    rows: Any
    columns: Any = None
    transposed: bool = False

    @property
    def tensors(self) -> tuple[str, ...]:
        """Those it is in."""
        return (self.tensor,)

    def check(self, source: TensorSource) -> str:
        """The type of its numbers.

        Raises:
            InputError: the tensor is missing, or has another shape.
        """
        check_shape(source, self.tensor, self.stored)
        return source.dtypes.get(self.tensor, source.dtype)

    def read(self, source: TensorSource, start: int, stop: int) -> np.ndarray:
        """Some of its rows."""
        if isinstance(self.rows, slice):
            found = source.read(self.tensor, self.rows.start, self.rows.stop)
        else:
            found = source.read(self.tensor, 0, self.stored[0])[self.rows]
        found = found if self.columns is None else found[..., self.columns]
        whole = found.reshape(self.shape[::-1]).T if self.transposed else found.reshape(self.shape)
        return whole[start:stop]

    def write(self, whole: np.ndarray, values: np.ndarray) -> None:
        """Its values into the tensor: the inverse of `read`."""
        target = whole[self.rows]
        columns = slice(None) if self.columns is None else self.columns
        values = values.T if self.transposed else values
        target[..., columns] = values.reshape(target[..., columns].shape)
        whole[self.rows] = target  # of an array's rows it is a copy


@dataclasses.dataclass(frozen=True)
class Packed:
    """A part of a stack that is stored as MXFP4: the last axis of `part`, of which some are taken,
    comes first there, and the one before it is in blocks.
    """

    part: Part

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        return self.part.shape

    @property
    def tensors(self) -> tuple[str, ...]:
        """The blocks' and the scales'."""
        return tuple(f"{self.part.tensor}{ending}" for ending in mxfp4.ENDINGS)

    def check(self, source: TensorSource) -> str:
        """The type of its numbers.

        Raises:
            InputError: a tensor is missing, or has another shape or type.
        """
        stack, width, rows = self.part.stored
        if width % mxfp4.BLOCK:
            raise InputError(
                f"{source.label}: {shown(self.part.tensor)}: mxfp4 stores rows in blocks of "
                f"{mxfp4.BLOCK}, which do not divide {width}"
            )
        shape = stack, rows, width // mxfp4.BLOCK
        for name, expected in zip(self.tensors, ((*shape, mxfp4.BLOCK // 2), shape), strict=True):
            check_shape(source, name, expected)
            if source.dtypes[name] != "uint8":
                raise InputError(
                    f"{source.label}: {shown(name)} is {source.dtypes[name]}; expected uint8"
                )
        return "bfloat16"

    def read(self, source: TensorSource, start: int, stop: int) -> np.ndarray:
        """Some of its rows; no others are dequantized.

        Raises:
            InputError: a scale is beyond what bfloat16 holds.
        """
        return mxfp4.dequantize(*self._stored(source, start, stop))

    def blocks(self, source: TensorSource) -> np.ndarray:
        """All of it in blocks of ours: uint8 [rows, bytes].

        Raises:
            InputError: as `read`.
        """
        return mxfp4.repacked(*self._stored(source, 0, self.shape[0]))

    def _stored(self, source: TensorSource, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(None) if self.part.columns is None else self.part.columns
        matrix = self.part.rows
        blocks, scales = (
            source.read(name, matrix.start, matrix.stop)[0, rows][start:stop]
            for name in self.tensors
        )
        if (scales > mxfp4.MOST).any():
            raise InputError(
                f"{source.label}: {shown(self.tensors[1])} holds a scale of {scales.max()}; "
                f"numbers of scales above {mxfp4.MOST} have no place in bfloat16"
            )
        return blocks, scales


def check_shape(source: TensorSource, name: str, expected: tuple[int, ...]) -> None:
    """Refuses a tensor that is missing or has another shape.

    Raises:
        InputError: with its name and what was expected.
    """
    if name not in source.shapes:
        raise InputError(f"{source.label}: tensor {shown(name)} is missing")
    if source.shapes[name] != expected:
        raise InputError(
            f"{source.label}: {shown(name)} is {list(source.shapes[name])}; "
            f"expected {list(expected)}"
        )


# A tensor, its shape, and what makes its parts.
Whole = tuple[str, tuple[int, ...], Callable[[], dict[str, Part]]]
