"""Weights as transformers stores them: safetensors under its names, in shards above a size."""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from configs.errors import InputError
from configs.kinds.params import ParamInfo
from configs.model import ModelConfig
from configs.precision import FORMATS
from inference.checkpoints import names, safetensors_file
from inference.checkpoints.hf import split_tensors
from inference.checkpoints.hf.quantized import export
from inference.checkpoints.load import Progress
from inference.checkpoints.names import Stored
from inference.families.shared.parts import Part

Rows = Callable[[str], Iterable[np.ndarray]]  # the blocks of rows of a parameter

_METADATA = {"format": "pt"}  # transformers refuses a file without it


@dataclasses.dataclass(frozen=True)
class _Parameter:
    """What is written of one: where it is stored, as which type, and its blocks of rows."""

    path: str
    info: ParamInfo
    stored: Stored
    format: str
    blocks: Callable[[], Iterable[np.ndarray]]

    def values(self) -> np.ndarray:
        return np.concatenate([np.array(block) for block in self.blocks()])


class _Piece(NamedTuple):
    """Tensors that are written together: shape and type of each, and their rows in order."""

    tensors: dict[str, tuple[tuple[int, ...], str]]
    blocks: Callable[[], Iterator[np.ndarray]]


def write(
    folder: Path,
    config: ModelConfig,
    declared: dict[str, ParamInfo],
    rows: Rows,
    max_shard_bytes: int,
    progress: Progress | None,
) -> None:
    """Writes a model's tensors, a block of rows at a time.

    Args:
        declared: our parameters, by path, in the type that is stored.
        max_shard_bytes: a file is larger only when one tensor is.

    Raises:
        InputError: a parameter has no name there.
    """
    name_map = names.huggingface(config)
    written = []
    for path, info in declared.items():
        blocks_of = functools.partial(rows, path)
        format = _format(info, config.dtype, blocks_of)
        written.append(_Parameter(path, info, name_map(path), format, blocks_of))
    pieces = list(_pieces(config, written))
    tensors = {name: tensor for piece in pieces for name, tensor in piece.tensors.items()}
    sizes = {n: math.prod(s) * jax.numpy.dtype(d).itemsize for n, (s, d) in tensors.items()}
    shards = _shards(sizes, max_shard_bytes)
    blocks = (block for piece in pieces for block in piece.blocks())
    done, total = 0, sum(sizes.values())
    numbers = range(1, len(shards) + 1)
    files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in numbers]
    if len(shards) == 1:
        files = [safetensors_file.SINGLE]
    for file_name, shard in zip(files, shards, strict=True):
        with (folder / file_name).open("wb") as file:
            safetensors_file.write_header(file, {name: tensors[name] for name in shard}, _METADATA)
            remaining = sum(sizes[name] for name in shard)
            while remaining:
                block = next(blocks)
                file.write(block.view(np.uint8).data)
                remaining -= block.nbytes
                done += block.nbytes
                if progress:
                    progress(done, total, "writing weights")
    for _ in blocks:  # a source that is verified says so at its end
        raise InputError(f"{config.name}: more rows than were declared")
    if len(shards) > 1:
        weight_map = {n: f for f, shard in zip(files, shards, strict=True) for n in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / safetensors_file.INDEX).write_text(json.dumps(index, indent=1) + "\n")


def _format(info: ParamInfo, dtype: str, blocks: Callable[[], Iterable[np.ndarray]]) -> str:
    """The model's type, a wider one where that would lose numbers, or the format of blocks."""
    if info.format == dtype or FORMATS[info.format].is_quantized:
        return info.format
    narrow = (block.astype(jax.numpy.dtype(dtype)) == block for block in blocks())
    return dtype if all(same.all() for same in narrow) else info.format


def _pieces(config: ModelConfig, written: list[_Parameter]) -> Iterator[_Piece]:
    """Parameters in their order, those that share a tensor in one piece."""
    parts = dict(split_tensors.parts_of(config))
    for group in _sharing(written, parts):
        if FORMATS[group[0].format].is_quantized:
            first = parts.get(group[0].stored.names[0])
            yield from _quantized(group[0], group[0].path if first is None else first.tensor)
        elif group[0].stored.names[0] in parts:
            yield _joined(group, parts)
        else:
            yield _stacked(group[0])


def _sharing(written: list[_Parameter], parts: dict[str, Part]) -> list[list[_Parameter]]:
    """The parameters, together those whose parts lie in one tensor, or in one with others'."""
    groups: dict[str, list[_Parameter]] = {}
    for parameter in written:
        tensors = [parts[name].tensor for name in parameter.stored.names if name in parts]
        tensors = tensors or [parameter.path]
        joined = {id(groups[tensor]): groups[tensor] for tensor in tensors if tensor in groups}
        union = [*itertools.chain(*joined.values()), parameter]
        tensors += [tensor for tensor, group in groups.items() if id(group) in joined]
        groups |= dict.fromkeys(tensors, union)
    return list({id(group): group for group in groups.values()}.values())


def _joined(group: list[_Parameter], parts: dict[str, Part]) -> _Piece:
    """Tensors in which parts of several parameters lie; they are in memory as a whole."""
    tensors = {
        parts[name].tensor: (parts[name].stored, parameter.format)
        for parameter in group
        for name in parameter.stored.names
    }

    def blocks() -> Iterator[np.ndarray]:
        wholes = {  # the bytes of a number are those of a vector of one
            tensor: np.empty(shape or (1,), jax.numpy.dtype(format))
            for tensor, (shape, format) in tensors.items()
        }
        for parameter in group:
            values, start = parameter.values(), 0
            for name in parameter.stored.names:
                stop = start + parts[name].shape[0]
                split_tensors.StoredPart(parts[name]).write(
                    wholes[parts[name].tensor], values[start:stop]
                )
                start = stop
        yield from wholes.values()

    return _Piece(tensors, blocks)


def _stacked(parameter: _Parameter) -> _Piece:
    """A parameter that one tensor holds, or that several are stacked to."""
    shapes = _shapes(parameter)
    tensors = {name: (shape, parameter.format) for name, shape in shapes.items()}
    return _Piece(tensors, lambda: _cut(parameter, shapes))


def _quantized(parameter: _Parameter, tensor: str) -> Iterator[_Piece]:
    """The matrices of a stack, each quantized in tensors of its own."""
    info, start = parameter.info, 0
    for name, shape in _shapes(parameter).items():
        module = name.removesuffix(".weight")
        if parameter.stored.transposed or module == name or len(shape) != 2:
            raise InputError(
                f"{parameter.path} in {info.format} has no place there: {tensor} is no matrix of a "
                "module; --dtype=bfloat16 writes numbers"
            )
        rows = slice(start, start := start + shape[0])
        layout = export.shapes(info.format, *shape)
        yield _Piece(
            {f"{module}.{ending}": stored for ending, stored in layout.items()},
            functools.partial(_packed, parameter, rows, shape[1], tuple(layout)),
        )


def _packed(
    parameter: _Parameter, rows: slice, width: int, endings: tuple[str, ...]
) -> Iterator[np.ndarray]:
    blocks = parameter.values()
    blocks_FX = blocks.reshape(-1, blocks.shape[-1])[rows]
    arrays = export.tensors(parameter.format, blocks_FX, width)
    yield from (np.ascontiguousarray(arrays[ending]) for ending in endings)


def _shapes(parameter: _Parameter) -> dict[str, tuple[int, ...]]:
    info, stored = parameter.info, parameter.stored
    if len(stored.names) == 1:
        shape = info.shape if info.num_experts is not None else info.in_rows
        return {stored.names[0]: shape[::-1] if stored.transposed else shape}
    rows, count = info.in_rows[0], len(stored.names)
    stacked = info.stacked or (rows // count,) * count  # heads are alike
    if len(stacked) == count and sum(stacked) == rows:
        parts = zip(stored.names, stacked, strict=True)
        return {name: (n, *info.in_rows[1:]) for name, n in parts}
    raise InputError(
        f"{parameter.path} {list(info.shape)} cannot be cut into {', '.join(stored.names)}"
    )


def modules(config: ModelConfig, declared: dict[str, ParamInfo]) -> dict[str, str]:
    """The format of each module that has a matrix tokens are multiplied with, by its name."""
    name_map = names.huggingface(config)
    return {
        name.removesuffix(".weight"): info.format
        for path, info in declared.items()
        if info.is_multiplied
        for name in name_map(path).names
    }


def _cut(parameter: _Parameter, shapes: dict[str, tuple[int, ...]]) -> Iterator[np.ndarray]:
    """Blocks of rows, none of which reaches over the end of a tensor; a matrix that is stored
    [in, out] is written whole.
    """
    is_turned = parameter.stored.transposed
    ends, start = np.cumsum([shape[0] for shape in shapes.values()]).tolist(), 0
    for block in [parameter.values().T] if is_turned else parameter.blocks():
        stop = start + len(block)
        cuts = [0, *(end - start for end in ends if start < end < stop), len(block)]
        for first, last in zip(cuts, cuts[1:], strict=False):
            yield np.ascontiguousarray(block[first:last], jax.numpy.dtype(parameter.format))
        start = stop


def _shards(sizes: dict[str, int], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards
