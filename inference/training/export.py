"""A trained model as a directory that every script serves."""

from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from configs.model import ModelConfig
from inference.checkpoints import convert, names
from inference.checkpoints.checkpoint import Contents, NewCheckpoint
from inference.checkpoints.load import Progress
from inference.checkpoints.tensor_source import TensorSource
from layers import params
from layers.params import Params


def write(
    masters: Params,
    config: ModelConfig,
    eos_ids: tuple[int, ...],
    files: Mapping[str, bytes],
    output: Path,
    progress: Progress | None = None,
) -> None:
    """Writes float32 parameters on whatever devices, in `config.dtype`, and the tokenizer's `files`
    into a new directory, in our native format; raises InputError as `convert.convert`.
    """
    source = tensors(masters, config.name)
    contents = Contents(source, names.identity, lambda: dict(files))
    checkpoint = NewCheckpoint(config=config, eos_ids=eos_ids, new_contents=contents)
    convert.convert(checkpoint, output, "orbax", config.dtype, progress=progress)


def tensors(masters: Params, label: str) -> TensorSource:
    """Float32 parameters on whatever devices as a checkpoint's tensors, under our own paths; errors
    call them `label`.
    """
    leaves: dict[str, np.ndarray] = params.flatten(jax.device_get(masters))

    def read(name: str, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        rows = leaves[name][start:stop]
        return rows[:, columns] if rows.ndim > 1 else rows

    return TensorSource(label, {path: leaf.shape for path, leaf in leaves.items()}, read, "float32")
