"""Tensors that a family stores in one piece, or in another order, as the matrices that we stack: of
each head (DeepSeek's way out of latent vectors) or of each expert (gpt-oss). And back, but for
MXFP4, which is only read.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from configs.errors import InputError, shown
from configs.kinds.experts import Experts
from configs.kinds.latent import Latent
from configs.model import ModelConfig
from inference.checkpoints import names
from inference.checkpoints.hf import mxfp4
from inference.checkpoints.tensor_source import TensorSource


@dataclasses.dataclass(frozen=True)
class Part:
    """A matrix, or a table, inside of a stored tensor.

    Attributes:
        tensor: its name, and `stored` the shape that it must have.
        shape: of the part.
        rows: of the tensor; of a stack, one matrix.
        columns: of the last axis, those that are taken, in their order; None: all of them.
        transposed: it is stored [in, out].
    """

    tensor: str
    stored: tuple[int, ...]
    shape: tuple[int, ...]
    rows: slice
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
        _check_shape(source, self.tensor, self.stored)
        return source.dtypes.get(self.tensor, source.dtype)

    def read(self, source: TensorSource, start: int, stop: int) -> np.ndarray:
        """Some of its rows."""
        found = source.read(self.tensor, self.rows.start, self.rows.stop)
        found = found if self.columns is None else found[..., self.columns]
        whole = found.reshape(self.shape[::-1]).T if self.transposed else found.reshape(self.shape)
        return whole[start:stop]

    def write(self, whole: np.ndarray, values: np.ndarray) -> None:
        """Its values into the tensor: the inverse of `read`."""
        target = whole[self.rows]
        columns = slice(None) if self.columns is None else self.columns
        values = values.T if self.transposed else values
        target[..., columns] = values.reshape(target[..., columns].shape)


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
            _check_shape(source, name, expected)
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


def split(
    source: TensorSource, config: ModelConfig, is_packed: bool, first: int = 0
) -> TensorSource:
    """The source with parts in place of the tensors that hold them.

    Args:
        source: the checkpoint's tensors.
        config: the model.
        is_packed: stacks that are not there as they are are stored as MXFP4.
        first: number of the model's first layer there.

    Raises:
        InputError: such a tensor is missing, or has another shape or type.
    """
    parts: dict[str, Part | Packed] = {}
    for tensor, stored, own in _wholes(config, first):
        can_be_packed = is_packed and len(stored) == 3 and tensor not in source.shapes
        if not can_be_packed:
            _check_shape(source, tensor, stored)
        parts |= {name: Packed(part) if can_be_packed else part for name, part in own().items()}
    if not parts:
        return source
    types = {name: part.check(source) for name, part in parts.items()}
    whole = {tensor for part in parts.values() for tensor in part.tensors}
    shapes = {name: shape for name, shape in source.shapes.items() if name not in whole}
    shapes |= {name: part.shape for name, part in parts.items()}

    def read(name: str, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        if name not in parts:
            return source.read(name, start, stop, columns)
        return parts[name].read(source, start, stop)[:, columns]

    def read_blocks(name: str) -> np.ndarray:
        part = parts.get(name)
        if isinstance(part, Packed):
            return part.blocks(source)
        assert source.read_blocks is not None
        return source.read_blocks(name)

    packed = {name: "mxfp4" for name, part in parts.items() if isinstance(part, Packed)}
    return dataclasses.replace(
        source,
        shapes=shapes,
        read=read,
        read_blocks=read_blocks,
        formats={**source.formats, **packed},
        dtypes={**source.dtypes, **types},
    )


def _check_shape(source: TensorSource, name: str, expected: tuple[int, ...]) -> None:
    if name not in source.shapes:
        raise InputError(f"{source.label}: tensor {shown(name)} is missing")
    if source.shapes[name] != expected:
        raise InputError(
            f"{source.label}: {shown(name)} is {list(source.shapes[name])}; "
            f"expected {list(expected)}"
        )


def parts_of(config: ModelConfig) -> dict[str, Part]:
    """All parts, by the names that stand for them."""
    return {name: part for _, _, own in _wholes(config) for name, part in own().items()}


# A tensor, its shape, and what makes its parts.
_Whole = tuple[str, tuple[int, ...], Callable[[], dict[str, Part]]]


def _wholes(config: ModelConfig, first: int = 0) -> Iterator[_Whole]:
    for index, layer in enumerate(config.layers, first):
        prefix = f"{names.FAMILIES[config.family].layers}.{index}"
        if isinstance(layer.mixer, Latent):
            yield _of_heads(f"{prefix}.self_attn.kv_b_proj", layer.mixer)
        if config.family == "gpt_oss" and isinstance(layer.ffn, Experts):
            yield from _of_experts(f"{prefix}.mlp.experts", layer.ffn, config.width)


def _of_heads(name: str, kind: Latent) -> _Whole:
    """A head's rows: its keys' elements, then its values'."""
    H, V, C = kind.nope_width, kind.value_width, kind.rank
    tensor, stored = f"{name}.weight", (kind.num_heads * (H + V), C)

    def parts() -> dict[str, Part]:
        found = {}
        for head in range(kind.num_heads):
            first = head * (H + V)
            keys, values = slice(first, first + H), slice(first + H, first + H + V)
            found[f"{name}.{head}.key"] = Part(tensor, stored, (C, H), keys, transposed=True)
            found[f"{name}.{head}.value"] = Part(tensor, stored, (V, C), values)
        return found

    return tensor, stored, parts


def _of_experts(name: str, kind: Experts, width: int) -> Iterator[_Whole]:
    """Matrices [in, out], in which gates and what they meet alternate."""
    E, D, F = kind.num_experts, width, kind.width
    gate_up, down, bias = f"{name}.gate_up_proj", f"{name}.down_proj", f"{name}.gate_up_proj_bias"

    def halves() -> dict[str, Part]:
        return {
            f"{gate_up}.{expert}.{half}": Part(
                gate_up, (E, D, 2 * F), (F, D), slice(expert, expert + 1),
                slice(first, None, 2), transposed=True,
            )
            for expert in range(E) for first, half in enumerate(("gate", "up"))
        }  # fmt: skip

    def downs() -> dict[str, Part]:
        return {
            f"{down}.{expert}": Part(
                down, (E, F, D), (D, F), slice(expert, expert + 1), transposed=True
            )
            for expert in range(E)
        }

    def ordered() -> dict[str, Part]:
        order = np.arange(2 * F).reshape(F, 2).T.ravel()
        return {f"{bias}.ordered": Part(bias, (E, 2 * F), (2 * E, F), slice(0, E), order)}

    yield gate_up, (E, D, 2 * F), halves
    yield down, (E, F, D), downs
    yield bias, (E, 2 * F), ordered
