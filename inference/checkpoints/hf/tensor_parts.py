"""Parts of a checkpoint's tensors (`families.shared.parts`), read and written."""

import dataclasses

import numpy as np

from configs.errors import InputError, shown
from inference.checkpoints.hf import mxfp4
from inference.checkpoints.tensor_source import TensorSource
from inference.families.shared.parts import Part


@dataclasses.dataclass(frozen=True)
class StoredPart:
    """A part of a tensor of numbers."""

    part: Part

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that hold it."""
        return (self.part.tensor,)

    def check(self, source: TensorSource) -> str:
        """The type of its numbers; raises an `InputError` if it is missing or of another shape."""
        check_shape(source, self.part.tensor, self.part.stored)
        return source.dtypes.get(self.part.tensor, source.dtype)

    def read(self, source: TensorSource, start: int, stop: int) -> np.ndarray:
        """Returns some of its rows."""
        part = self.part
        if isinstance(part.rows, slice):
            rows = source.read(part.tensor, part.rows.start, part.rows.stop)
        else:
            rows = source.read(part.tensor, 0, part.stored[0])[part.rows]
        values = rows if part.columns is None else rows[..., part.columns]
        if part.transposed:
            return values.reshape(part.shape[::-1]).T[start:stop]
        return values.reshape(part.shape)[start:stop]

    def write(self, whole: np.ndarray, values: np.ndarray) -> None:
        """Writes its values into the tensor: the inverse of `read`."""
        target = whole[self.part.rows]
        columns = slice(None) if self.part.columns is None else self.part.columns
        values = values.T if self.part.transposed else values
        target[..., columns] = values.reshape(target[..., columns].shape)
        whole[self.part.rows] = target  # of an array's rows it is a copy


@dataclasses.dataclass(frozen=True)
class PackedPart(StoredPart):
    """A part of a stack that is stored as MXFP4: the last axis of `part`, of which some are taken,
    comes first there, and the one before it is in blocks.
    """

    @property
    def tensors(self) -> tuple[str, ...]:
        return tuple(f"{self.part.tensor}{ending}" for ending in mxfp4.ENDINGS)

    def check(self, source: TensorSource) -> str:
        """As `StoredPart.check`, of blocks and scales, which have types, too."""
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
        """Returns some of its rows; no others are dequantized.

        Raises:
            InputError: a scale is beyond what bfloat16 holds.
        """
        return mxfp4.dequantize(*self._stored(source, start, stop))

    def blocks(self, source: TensorSource) -> np.ndarray:
        """All of it in blocks of ours: uint8 [rows, bytes]; raises as `read`."""
        return mxfp4.repacked(*self._stored(source, 0, self.part.shape[0]))

    def _stored(self, source: TensorSource, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(None) if self.part.columns is None else self.part.columns
        matrix = self.part.rows
        assert isinstance(matrix, slice)
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
    """Raises an `InputError` if a tensor is missing or has another shape."""
    if name not in source.shapes:
        raise InputError(f"{source.label}: tensor {shown(name)} is missing")
    if source.shapes[name] != expected:
        raise InputError(
            f"{source.label}: {shown(name)} is {list(source.shapes[name])}; "
            f"expected {list(expected)}"
        )
