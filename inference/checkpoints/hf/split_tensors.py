"""Tensors that a family stores in one piece, or in another order, as the matrices that we stack: of
each head (DeepSeek's way out of latent vectors), of each expert (gpt-oss), or of what a recurrent
layer is fed.
"""

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np

from configs.errors import InputError, shown
from configs.kinds.params import leaves
from configs.model import ModelConfig
from inference.checkpoints.hf import mxfp4
from inference.checkpoints.tensor_source import TensorSource
from inference.families import families
from inference.families.shared.parts import Part, Parts


@dataclasses.dataclass(frozen=True)
class StoredPart:
    """A part of a tensor of numbers."""

    part: Part

    @property
    def tensors(self) -> tuple[str, ...]:
        return (self.part.tensor,)

    def check(self, source: TensorSource) -> str:
        """Returns the type of its numbers."""
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
        """Checks blocks and scales, which are other tensors; raises an `InputError`."""
        stack, width, rows = self.part.stored
        if width % mxfp4.BLOCK:
            raise InputError(
                f"{source.label}: {shown(self.part.tensor)}: mxfp4 stores rows in blocks of "
                f"{mxfp4.BLOCK}, which do not divide {width}"
            )
        shape = stack, rows, width // mxfp4.BLOCK
        for name, expected in zip(self.tensors, ((*shape, mxfp4.BLOCK // 2), shape), strict=True):
            source.check_shape(name, expected)
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


def split(
    source: TensorSource,
    config: ModelConfig,
    is_packed: bool,
    first: int = 0,
    layers: str | None = None,
) -> TensorSource:
    """The source with parts in place of the tensors that hold them.

    Args:
        is_packed: stacks that are not there as they are are stored as MXFP4.
        first: number of the model's first layer there.
        layers: what stands before that number; None: the family's.

    Raises:
        InputError: such a tensor is missing, or has another shape or type; or there is one of a
            part's own name.
    """
    layers = layers or families.of(config).layers
    source = _unstacked(_recut(source, config, first, layers), config, first, layers)
    parts: dict[str, StoredPart] = {}
    for name, part in parts_of(config, first, layers):
        can_be_packed = is_packed and len(part.stored) == 3 and part.tensor not in source.shapes
        if not can_be_packed:
            source.check_shape(part.tensor, part.stored)
        parts[name] = PackedPart(part) if can_be_packed else StoredPart(part)
    if not parts:
        return source
    if taken := sorted(parts.keys() & source.shapes.keys()):
        raise InputError(f"{source.label}: tensors the model has no place for: {shown(taken[0])}")
    types = {name: part.check(source) for name, part in parts.items()}
    whole = {tensor for part in parts.values() for tensor in part.tensors}
    shapes = {name: shape for name, shape in source.shapes.items() if name not in whole}
    shapes |= {name: stored.part.shape for name, stored in parts.items()}

    def read(name: str, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        if name not in parts:
            return source.read(name, start, stop, columns)
        return parts[name].read(source, start, stop)[..., columns]

    def read_blocks(name: str) -> np.ndarray:
        part = parts.get(name)
        if isinstance(part, PackedPart):
            return part.blocks(source)
        assert source.read_blocks is not None
        return source.read_blocks(name)

    packed = {name: "mxfp4" for name, part in parts.items() if isinstance(part, PackedPart)}
    return dataclasses.replace(
        source,
        shapes=shapes,
        read=read,
        read_blocks=read_blocks,
        formats={**source.formats, **packed},
        dtypes={**source.dtypes, **types},
    )


def parts_of(config: ModelConfig, first: int = 0, layers: str | None = None) -> Parts:
    """All parts, with the names that stand for them; arguments as `split` has them."""
    family = families.of(config)
    layers = layers or family.layers
    for index, layer in enumerate(config.layers, first):
        for split_layer in family.splits:
            prefix = f"{layers}.{index}"
            yield from split_layer(prefix, layer, config.width, family.tensors)


def _recut(source: TensorSource, config: ModelConfig, first: int, layers: str) -> TensorSource:
    """Returns the source with the rows of tensors cut as the model's are (`Family.recut`)."""
    family = families.of(config)
    if family.recut is None:
        return source
    joined: dict[str, tuple[list[str], int]] = {}  # tensors of a run, and a tensor's first row
    shapes = dict(source.shapes)
    for index, layer in enumerate(config.layers, first):
        for rows in family.recut(f"{layers}.{index}", layer, family.tensors):
            run, expected = list(rows), list(rows.values())
            stored = [source.shapes.get(name, (0,)) for name in run]
            counts = [shape[0] for shape in stored]
            is_alike = len({shape[1:] for shape in stored}) == 1
            if not is_alike or counts == expected or sum(counts) != sum(expected):
                continue
            starts = itertools.accumulate(expected, initial=0)
            joined |= {name: (run, start) for name, start in zip(run, starts, strict=False)}
            shapes |= {name: (count, *shapes[name][1:]) for name, count in rows.items()}

    def read(name: str, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        if name not in joined:
            return source.read(name, start, stop, columns)
        run, offset = joined[name]
        rows = [source.read(part, 0, source.shapes[part][0], columns) for part in run]
        return np.concatenate(rows)[offset + start : offset + stop]

    return dataclasses.replace(source, shapes=shapes, read=read) if joined else source


class _Cut(NamedTuple):
    """An expert's matrix in a stack, some rows of it; transposed: it is stored [in, out]."""

    stack: str
    expert: int
    rows: slice
    transposed: bool


def _unstacked(source: TensorSource, config: ModelConfig, first: int, layers: str) -> TensorSource:
    """Returns the source with a matrix for each expert in place of stacks (`Family.stacks`)."""
    family = families.of(config)
    cuts: dict[str, _Cut] = {}
    for index, layer in enumerate(config.layers, first):
        for stack, parts in family.stacks.items():
            name = f"{layers}.{index}.{stack}"
            if layer.ffn is None or layer.ffn.experts is None or name not in source.shapes:
                continue
            count, shape = layer.ffn.experts[0], source.shapes[name]
            declared = dict(leaves(layer.ffn.parameters(config)))
            path = next(path for path, names in family.tensors.items() if names == parts)
            E, F, D = declared[tuple(path.split("/")[1:])].shape
            if shape not in ((E, F, D), (E, D, F)):
                raise InputError(
                    f"{source.label}: {shown(name)} is {list(shape)}; expected a matrix for each "
                    f"of {count} experts, {[E, F, D]} or {[E, D, F]}"
                )
            rows = F // len(parts)
            for expert, (half, part) in itertools.product(range(count), enumerate(parts)):
                cut = _Cut(name, expert, slice(half * rows, (half + 1) * rows), shape != (E, F, D))
                cuts[f"{layers}.{index}.{part.format(expert)}"] = cut
    if not cuts:
        return source
    if taken := sorted(cuts.keys() & source.shapes.keys()):
        raise InputError(f"{source.label}: tensors the model has no place for: {shown(taken[0])}")
    whole = {cut.stack for cut in cuts.values()}
    shapes = {name: shape for name, shape in source.shapes.items() if name not in whole}
    shapes |= {
        part: (cut.rows.stop - cut.rows.start, source.shapes[cut.stack][1 if cut.transposed else 2])
        for part, cut in cuts.items()
    }
    types = {part: source.dtypes.get(cut.stack, source.dtype) for part, cut in cuts.items()}

    def read(name: str, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        if name not in cuts:
            return source.read(name, start, stop, columns)
        cut = cuts[name]
        matrix = source.read(cut.stack, cut.expert, cut.expert + 1)[0]
        return (matrix.T if cut.transposed else matrix)[cut.rows][start:stop, columns]

    return dataclasses.replace(source, shapes=shapes, read=read, dtypes={**source.dtypes, **types})
