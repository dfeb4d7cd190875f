"""Which mesh axis divides which logical axis, and what a chip holds of a parameter."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from configs import mesh as divided
from configs.errors import InputError
from configs.kinds.params import ParamInfo, in_rows, leaves
from configs.model import ModelConfig
from configs.precision import FORMATS


class Slices(Protocol):
    """What reads slices of a parameter's rows, or of all rows' columns."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __getitem__(self, index: slice | tuple[slice, slice], /) -> np.ndarray: ...


Values = np.ndarray | jax.Array | Slices

RULES: Mapping[str, tuple[str, ...]] = {
    "vocab": ("model", "context"),
    "heads": ("model",),
    "kv_heads": ("model",),
    "ffn": ("model", "context"),
    "shared": ("model", "context"),
    "experts": ("expert",),
    "embed": (),
    "taps": (),
    "states": (),
}


def mesh_axes(path: str, info: ParamInfo) -> tuple[str, ...]:
    """The mesh axes that divide a parameter, in the order of its own; none: each chip holds all.
    Raises InputError for an axis that no rule names, or two that the same chips would divide.
    """
    names = [name for name in info.logical_axes if name is not None]
    if unknown := [name for name in names if name not in RULES]:
        raise InputError(
            f"{path}: no rule divides the axis {unknown[0]!r}; known: {', '.join(RULES)}"
        )
    mesh_axes = [axis for name in names for axis in RULES[name]]
    if len(mesh_axes) > len(set(mesh_axes)):
        raise InputError(f"{path}: chips would divide two of its axes, {', '.join(names)}")
    return tuple(mesh_axes)


def spec(path: str, info: ParamInfo) -> PartitionSpec:
    """How the chips' parts of a parameter lie in one array (`sharding/mesh.py`): of its own shape,
    except that zeros fill up parts that are not equal, and each chip has its copy where key/value
    heads are fewer than chips. Rows of what is stacked lie in the order of the chips (`pieces`).
    """
    mesh_axes(path, info)  # refuses contradictions
    return _spec([RULES[name or "embed"] for name in info.logical_axes])


def _spec(axes: Sequence[tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*((names[0] if len(names) == 1 else names or None) for names in axes))


def layout(path: str, info: ParamInfo, mesh: Mesh) -> NamedSharding:
    """How a whole parameter lies on a mesh whose program XLA divides (training): each axis that a
    rule names is cut where that gives equal parts; otherwise each chip holds all of it.
    """
    return NamedSharding(mesh, _even(spec(path, info), info.shape, mesh))


def layouts(path: str, info: ParamInfo, leaf: Any, mesh: Mesh) -> Any:
    """`layout` of each array of a leaf that stands for a parameter (`Quantized`)."""
    if isinstance(leaf, jax.Array):
        return layout(path, info, mesh)
    specs = leaf.specs(spec(path, info))
    return jax.tree.map(
        lambda array, spec: NamedSharding(mesh, _even(spec, array.shape, mesh)), leaf, specs
    )


def _even(spec: PartitionSpec, shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """The cuts of a spec that give equal parts."""
    cuts = []
    for part, size in itertools.zip_longest(spec, shape):
        axes = (part,) if isinstance(part, str) else part or ()
        is_even = size % math.prod(mesh.shape[axis] for axis in axes) == 0
        cuts.append(tuple(axis for axis in axes if mesh.shape[axis] > 1) if is_even else ())
    return _spec(cuts)


def part(
    config: ModelConfig,
    path: str,
    info: ParamInfo,
    values: Values,
    mesh: divided.Mesh,
    group: int,
    chip: int,
) -> np.ndarray:
    """What a chip holds of a parameter, as `ModelConfig.per_chip` declares it: its experts, and of
    each matrix its rows of each stacked one, or its columns; zeros stand for what is missing.

    Args:
        config, info: the whole model, and the parameter's declaration in it.
        values: all of it, an array or what reads slices of rows (a stack's, of all its matrices),
            or of all rows' columns; rows may be bytes of blocks.
        group, chip: the chip's place among those along `data` and `expert`, and along `model` and
            `context`.
    """
    axes = mesh_axes(path, info)
    share = _Share(mesh.model, chip // mesh.context)
    if "context" in axes:
        share = _Share(mesh.group_chips, chip, mesh.context > 1)
    if len(info.shape) > 2 and isinstance(values, np.ndarray | jax.Array):
        values = np.asarray(values).reshape(*in_rows(values.shape))
    if "expert" in axes:
        num_experts, matrix_info = info.shape[0], _of_expert(info)
        count, expert_rows = num_experts // mesh.expert, info.rows // num_experts
        first = group % mesh.expert * count
        matrices = [_RowSlice(values, (first + n) * expert_rows, expert_rows) for n in range(count)]
        parts = [_of_matrix(config, path, matrix_info, matrix, share) for matrix in matrices]
        return np.stack(parts).reshape(count, *parts[0].shape[-len(matrix_info.shape) :])
    if len(info.shape) > 2:
        matrix_info = dataclasses.replace(
            info, shape=info.in_rows, logical_axes=(info.logical_axes[0], None), stacked=()
        )
        rows = _of_matrix(config, path, matrix_info, values, share)
        return rows.reshape(-1, *info.shape[1:-1], rows.shape[-1])
    return _of_matrix(config, path, info, values, share)


class Piece(NamedTuple):
    """Entries of an axis, and zeros that follow them."""

    start: int
    stop: int
    zeros: int


def pieces(
    config: ModelConfig, path: str, info: ParamInfo, mesh: divided.Mesh
) -> tuple[int, tuple[Piece, ...]]:
    """An axis of a parameter, and the pieces of it that the chips hold, in the order of their
    array: the chips' parts in turn, each with its share of whatever is stacked. No pieces: the axis
    lies as it is declared.
    """
    is_stack = info.logical_axes[0] == "experts"
    matrix = _of_expert(info) if is_stack else info
    divided_axes = [(d, name) for d, name in enumerate(matrix.logical_axes) if name and RULES[name]]
    if not divided_axes:
        return 0, ()
    dim, name = divided_axes[0]
    has_contexts = "context" in mesh_axes(path, info)
    chips = mesh.group_chips if has_contexts else mesh.model
    parts: list[Piece] = []
    for chip in range(chips):
        share = _Share(chips, chip, has_contexts and mesh.context > 1)
        if dim == len(matrix.shape) - 1 and dim:
            parts.append(_range(config, path, name, matrix.shape[dim], share))
        else:
            parts += _row_pieces(config, path, matrix, name, share)
    stop, is_alike = 0, True
    for part in parts:
        is_alike &= part.start == stop and not part.zeros
        stop = part.stop
    return dim + is_stack, () if is_alike else tuple(parts)


def is_padded(config: ModelConfig, path: str, info: ParamInfo, mesh: divided.Mesh) -> bool:
    """Whether the array over a mesh is larger than the parameter: it has zeros, or copies."""
    if mesh.group_chips == 1:  # a kind may say no shares
        return False
    axis, parts = pieces(config, path, info, mesh)
    size = sum(part.stop - part.start + part.zeros for part in parts)
    return size > info.shape[axis]


def _of_expert(info: ParamInfo) -> ParamInfo:
    """The declaration of each matrix of a mixture's stack."""
    num_experts, *shape = info.shape
    return dataclasses.replace(
        info, shape=tuple(shape), logical_axes=info.logical_axes[1:],
        stacked=info.stacked[: len(info.stacked) // num_experts],
    )  # fmt: skip


class _Share(NamedTuple):
    """One of the parts of a parameter."""

    chips: int
    chip: int
    is_joint: bool = False  # along `model` and `context`

    def __str__(self) -> str:
        return f"mesh.model{' x mesh.context' * self.is_joint}={self.chips}"


class _RowSlice:
    """Some rows of what reads slices of rows, or of all rows' columns."""

    def __init__(self, values: Values, first: int, count: int):
        self._values, self._first, self._count = values, first, count

    @property
    def shape(self) -> tuple[int, ...]:
        return self._count, *self._values.shape[1:]

    def __array__(
        self, dtype: np.typing.DTypeLike | None = None, copy: bool | None = None
    ) -> np.ndarray:
        return np.asarray(self[:])

    def __getitem__(self, index: slice | tuple[slice, slice]) -> np.ndarray:
        rows, *columns = index if isinstance(index, tuple) else (index,)
        start, stop, _ = rows.indices(self._count)
        local_rows = slice(self._first + start, self._first + stop)
        return np.asarray(self._values[(local_rows, columns[0]) if columns else local_rows])


def _of_matrix(
    config: ModelConfig, path: str, info: ParamInfo, values: Values, share: _Share
) -> np.ndarray:
    """`part` of a matrix or a vector, not along `expert`."""
    if not mesh_axes(path, info):
        return np.asarray(values)
    if info.format == "int32":
        return _own_features(config, path, info, np.asarray(values), share)
    names = enumerate(info.logical_axes)
    dim, axis = next((d, name) for d, name in names if name and RULES[name])
    if dim == len(info.shape) - 1 and dim:
        head = _head_bytes(info)  # which all columns need
        size = values.shape[-1] - head
        start, stop, missing = _range(config, path, axis, size, share)
        _check_whole(path, info, start, stop, size, share)
        if start == stop:  # of a share without heads, zeros as many as those of a neighbour's
            return np.zeros((values.shape[0], head + missing), np.asarray(values[:1, :1]).dtype)
        columns = np.asarray(values[:, head + start : head + stop])
        if head:
            columns = np.concatenate([np.asarray(values[:, :head]), columns], axis=1)
        return np.pad(columns, [(0, 0), (0, missing)]) if missing else columns
    parts: list[np.ndarray] = []
    for start, stop, missing in _row_pieces(config, path, info, axis, share):
        if start == stop:
            like = np.asarray(values[:1])
            parts.append(np.zeros((missing, *like.shape[1:]), like.dtype))
        else:
            share_rows = np.asarray(values[start:stop])
            parts += [share_rows, np.zeros((missing, *share_rows.shape[1:]), share_rows.dtype)]
    return np.concatenate(parts)


def _row_pieces(
    config: ModelConfig, path: str, info: ParamInfo, axis: str, share: _Share
) -> list[Piece]:
    """A share of the rows of each of what is stacked, counted from the first row of all; raises
    InputError if it begins or ends between rows that share scales.
    """
    parts: list[Piece] = []
    first = count_before = 0
    for index, count in enumerate(info.stacked or (info.shape[0],)):
        is_kv = info.kv_heads and (index or not info.stacked)
        start, stop, missing = _range(config, path, "kv_heads" if is_kv else axis, count, share)
        ends = stop - start if missing else 0  # before zeros
        _check_shared(path, info, (start, count_before, ends), share)
        parts.append(Piece(first + start, first + stop, missing))
        count_before += stop - start + missing
        first += count
    return parts


def _head_bytes(info: ParamInfo) -> int:
    """Bytes of a scale of a whole row."""
    format = FORMATS[info.format]
    if format.row_bits:
        return format.row_bits // 8
    is_whole = format.is_quantized and format.block_in(info.shape[-1]) == info.shape[-1]
    return format.scale_bits // 8 if is_whole and format.group is None else 0


def _check_whole(
    path: str, info: ParamInfo, start: int, stop: int, size: int, share: _Share
) -> None:
    """Refuses a chip's columns, bytes of blocks, that begin or end within a block. A row is `size`
    bytes without its head; a file's blocks may be smaller than they are in memory.
    """
    format, row = FORMATS[info.format], info.shape[-1]
    if not format.is_quantized or format.group is None:
        return
    block = format.block_in(row)
    num_bytes = format.row_bytes(block) if row % block else size // (row // block)
    if start % num_bytes or (stop % num_bytes and stop != size):
        raise InputError(
            f"{path}: {share} divides its rows of {row} within blocks of "
            f"{block}, which {info.format} keeps together: fewer chips, or smaller groups"
        )


def _check_shared(path: str, info: ParamInfo, firsts: tuple[int, ...], share: _Share) -> None:
    """Refuses parts of a chip's rows that begin or end between rows that share scales."""
    together = FORMATS[info.format].rows
    if any(first % together for first in firsts):
        raise InputError(
            f"{path}: {share} divides its rows within {together} that share scales in "
            f"{info.format}: fewer chips"
        )


def _own_features(
    config: ModelConfig, path: str, info: ParamInfo, values: np.ndarray, share: _Share
) -> np.ndarray:
    """Of features by number, those that a chip has, as it counts them; -1 for the others."""
    matrix, axis = path.rpartition("/")[0], info.logical_axes[0]
    assert axis is not None
    whole = _widths(config)[f"{matrix}/int8"]
    start, stop, _ = _range(config, matrix, axis, whole, share)
    return np.where((values >= start) & (values < stop), values - start, -1).astype(np.int32)


def _range(config: ModelConfig, path: str, axis: str, size: int, share: _Share) -> Piece:
    """A chip's part of an axis of so many rows, or columns, or bytes of their blocks."""
    shares = _shares(config, path, axis, share.chips)
    chip_share, whole = shares[share.chip], max(share.stop for share in shares)
    start, stop, largest = (
        count * size // whole
        for count in (chip_share.start, chip_share.stop, max(map(len, shares)))
    )
    return Piece(start, stop, largest - (stop - start))


@functools.lru_cache(maxsize=16)
def _widths(config: ModelConfig) -> Mapping[str, int]:
    """Elements of a row of each parameter."""
    return {"/".join(path): info.shape[-1] for path, info in leaves(config.parameters())}


@functools.lru_cache(maxsize=4096)
def _shares(config: ModelConfig, path: str, axis: str, chips: int) -> tuple[range, ...]:
    return config.shares(tuple(path.split("/")), axis, chips)
