"""Weights as transformers stores them: safetensors under its names, in shards above a size."""

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from configs.errors import InputError
from configs.kinds.params import ParamInfo
from configs.model import ModelConfig
from inference.checkpoints import names
from inference.checkpoints.hf import safetensors_file
from inference.checkpoints.load import Progress
from inference.checkpoints.names import Stored
from inference.checkpoints.native import converted

_METADATA = {"format": "pt"}  # transformers refuses a file without it


def write(
    folder: Path,
    config: ModelConfig,
    declared: dict[str, ParamInfo],
    rows: Any,
    max_shard_bytes: int,
    progress: Progress | None,
) -> None:
    """Writes a model's tensors, a block of rows at a time.

    Args:
        folder: where to.
        config: the model.
        declared: our parameters, by path, in the type that is stored.
        rows: `rows(path)` gives the blocks of rows of a parameter.
        max_shard_bytes: a file is larger only when one tensor is.
        progress: called after each tensor.

    Raises:
        InputError: a parameter has no name there.
    """
    name_map = names.huggingface(config)
    stored = {path: name_map(path) for path in declared}
    parts = {path: _parts(path, i, stored[path]) for path, i in declared.items()}
    tensors = {
        name: (shape, declared[path].format)
        for path, named in parts.items()
        for name, shape in named.items()
    }
    sizes = {n: math.prod(s) * jax.numpy.dtype(d).itemsize for n, (s, d) in tensors.items()}
    shards = _shards(sizes, max_shard_bytes)
    blocks = (
        block
        for path, info in declared.items()
        for block in _cut(_turned(rows(path), stored[path]), parts[path], info)
    )
    done, total = 0, sum(sizes.values())
    files = [_file_name(index, len(shards)) for index in range(len(shards))]
    for file_name, shard in zip(files, shards, strict=True):
        with (folder / file_name).open("wb") as file:
            converted.write_header(file, {name: tensors[name] for name in shard}, _METADATA)
            left = sum(sizes[name] for name in shard)
            while left:
                block = next(blocks)
                file.write(block.view(np.uint8).data)
                left -= block.nbytes
                done += block.nbytes
                if progress:
                    progress(done, total, "writing weights")
    for _ in blocks:  # a source that is verified says so at its end
        raise InputError(f"{config.name}: more rows than were declared")
    if len(shards) > 1:
        weight_map = {n: f for f, shard in zip(files, shards, strict=True) for n in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / safetensors_file.INDEX).write_text(json.dumps(index, indent=1) + "\n")


def _parts(path: str, info: ParamInfo, stored: Stored) -> dict[str, tuple[int, ...]]:
    """The tensors that a parameter is stacked of, with their shapes."""
    tensors = stored.names
    if len(tensors) == 1:
        return {tensors[0]: info.in_rows[:: -1 if stored.transposed else 1]}
    if len(info.stacked) != len(tensors):
        raise InputError(f"{path} {list(info.shape)} cannot be cut into {', '.join(tensors)}")
    return {name: (n, *info.in_rows[1:]) for name, n in zip(tensors, info.stacked, strict=True)}


def _turned(blocks: Iterable[np.ndarray], stored: Stored) -> Iterable[np.ndarray]:
    """A matrix that is stored [in, out] is written whole."""
    if not stored.transposed:
        return blocks
    return [np.concatenate([np.array(block) for block in blocks]).T]


def _cut(
    blocks: Iterable[np.ndarray], parts: dict[str, tuple[int, ...]], info: ParamInfo
) -> Iterator[np.ndarray]:
    """Blocks of rows, none of which reaches over the end of a part."""
    ends, start = np.cumsum([shape[0] for shape in parts.values()]).tolist(), 0
    for block in blocks:
        stop = start + len(block)
        cuts = [0, *(end - start for end in ends if start < end < stop), len(block)]
        for first, last in zip(cuts, cuts[1:], strict=False):
            yield np.ascontiguousarray(block[first:last], jax.numpy.dtype(info.format))
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


def _file_name(index: int, count: int) -> str:
    if count == 1:
        return safetensors_file.SINGLE
    return f"model-{index + 1:05}-of-{count:05}.safetensors"
