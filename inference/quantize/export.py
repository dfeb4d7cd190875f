"""A quantized model as a directory that every script serves."""

import ctypes
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from configs.kinds.params import leaves
from inference.checkpoints import convert, names, provenance
from inference.checkpoints.checkpoint import Checkpoint, Contents, NewCheckpoint
from inference.checkpoints.load import Progress
from inference.checkpoints.native import blocks
from inference.checkpoints.tensor_source import TensorSource
from inference.layerwise.parts import Parts
from inference.quantize.walk import Walk


def write(
    checkpoint: Checkpoint,
    walk: Walk,
    parts: Parts,
    record: Mapping[str, object],
    output: Path,
    progress: Progress | None,
) -> None:
    """Writes the parts of a finished walk through a checkpoint into a new directory, in our native
    format, with a `record` of plain JSON values as a stage of its `provenance`.

    Raises:
        InputError: as `convert.convert`.
    """
    _trim()
    declared = {"/".join(path): info for path, info in leaves(walk.config.parameters())}
    dtypes: dict[str, np.dtype] = {}
    part_of: dict[str, str] = {}
    for part in walk.names:
        arrays = parts.read(part)
        dtypes |= {path: array.dtype for path, array in arrays.items()}
        part_of |= dict.fromkeys(arrays, part)
    packed = {path: declared[path] for path, dtype in dtypes.items() if dtype == np.uint8}
    assert part_of.keys() == declared.keys()

    def mapped(name: str) -> np.ndarray:
        return parts.read(part_of[name])[name]  # pages that were read leave with the map

    def read(name: str, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        rows = mapped(name)[start:stop]
        rows = blocks.numbers(packed[name], rows) if name in packed else rows
        return rows[:, columns] if rows.ndim > 1 else rows

    def read_blocks(name: str) -> np.ndarray:
        array = mapped(name)
        return array.reshape(-1, array.shape[-1])

    source = TensorSource(
        str(parts.folder), {path: info.shape for path, info in declared.items()}, read,
        read_blocks=read_blocks, formats={path: info.format for path, info in packed.items()},
        dtypes={
            path: "float32" if path in packed else dtype.name for path, dtype in dtypes.items()
        },
    )  # fmt: skip
    before = checkpoint.contents()

    def read_files() -> dict[str, bytes]:
        return provenance.appended(before.read_files(), {"made_by": "quantize", **record})

    rounded = NewCheckpoint(
        config=walk.config,
        eos_ids=checkpoint.eos_ids,
        new_contents=Contents(source, names.identity, read_files, before.raw_config),
    )
    convert.convert(rounded, output, "orbax", progress=progress)


def _trim() -> None:
    """What calibration has freed goes back to the system: 0.5 GB of Gemma 3 270M, which glibc's
    malloc would hold while as much is needed anew.
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)
