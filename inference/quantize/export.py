"""A quantized model as a directory that every script serves."""

import dataclasses
from pathlib import Path

import numpy as np

from configs.kinds.params import leaves
from inference.checkpoints import convert, names
from inference.checkpoints.load import Progress
from inference.checkpoints.native import blocks
from inference.checkpoints.opened import Checkpoint, Contents
from inference.checkpoints.tensor_source import TensorSource
from inference.quantize.parts import Parts
from inference.quantize.walk import Walk


def write(
    checkpoint: Checkpoint, walk: Walk, parts: Parts, output: Path, progress: Progress | None
) -> None:
    """Writes what a walk has finished in our native format.

    Args:
        checkpoint: where the walk began.
        walk: a finished one.
        parts: what it has finished.
        output: a directory that does not exist yet.
        progress: called as parameters are written.

    Raises:
        InputError: as `convert.convert`.
    """
    declared = {"/".join(path): info for path, info in leaves(walk.config.parameters())}
    arrays: dict[str, np.ndarray] = {}
    for name in walk.names:
        arrays |= parts.read(name)
    packed = {path: declared[path] for path, own in arrays.items() if own.dtype == np.uint8}
    assert arrays.keys() == declared.keys()

    def read(name: str, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        rows = arrays[name][start:stop]
        rows = blocks.numbers(packed[name], rows) if name in packed else rows
        return rows[:, columns] if rows.ndim > 1 else rows

    def read_blocks(name: str) -> np.ndarray:
        return arrays[name].reshape(-1, arrays[name].shape[-1])

    source = TensorSource(
        str(parts.folder), {path: info.shape for path, info in declared.items()}, read,
        read_blocks=read_blocks, formats={path: info.format for path, info in packed.items()},
        dtypes={path: "float32" if path in packed else own.dtype.name
                for path, own in arrays.items()},
    )  # fmt: skip
    before = checkpoint.contents()
    made = dataclasses.replace(
        checkpoint,
        config=walk.config,
        contents=lambda: Contents(source, names.identity, before.read_files, before.raw_config),
    )
    convert.convert(made, output, "orbax", progress=progress)
