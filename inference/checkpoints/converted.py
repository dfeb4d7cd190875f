"""The cache of converted weights: one safetensors file under our own parameter paths.

A `.gguf` file is dequantized once; later starts map the result. A cached file that is unsound, or
was made from something else, is written anew.
"""

import hashlib
import json
import logging
import math
from pathlib import Path

import jax
import numpy as np

from configs.errors import InputError
from configs.kinds.params import Declared
from inference.checkpoints import load, mapped, names, safetensors_file
from inference.checkpoints.load import Progress
from inference.checkpoints.names import NameMap
from inference.checkpoints.tensor_source import TensorSource
from inference.files import atomic, cache_directory, digests, ownership
from layers import params

_FORMAT = "2"


def place(path: Path, *fingerprints: str) -> Path:
    """Returns the cache's directory for what files with these fingerprints become."""
    digest = hashlib.sha256("\n".join(fingerprints).encode()).hexdigest()[:16]
    return cache_directory.path() / "converted" / f"{path.stem}-{digest}"


def open_or_convert(
    path: Path,
    infos: Declared,
    source: TensorSource,
    name_map: NameMap,
    progress: Progress | None = None,
) -> TensorSource:
    """The converted form of a checkpoint, made now unless a sound one is cached.

    Args:
        path: where the converted file belongs.
        infos: tree of `ParamInfo`; its dtypes are those stored.

    Raises:
        InputError: as `load.check`.
        OSError: the cache cannot be written.
    """
    declared = params.flatten(infos)
    described = [(name, list(info.shape), info.format) for name, info in declared.items()]
    digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()
    metadata = {"format": _FORMAT, "declaration": digest}
    if path.exists():
        try:
            _check_kept(path)
            cached = safetensors_file.open_file(path)
            load.check(declared, cached, names.identity)
            if safetensors_file.read_metadata(path).items() >= metadata.items():
                return cached
        except InputError as error:
            logging.warning("%s; weights are converted again", error)
    load.check(declared, source, name_map)
    with atomic.open_file(path, is_kept=True) as file:
        tensors = {name: (info.shape, info.format) for name, info in declared.items()}
        total = safetensors_file.write_header(file, tensors, digests.UNSEALED | metadata)
        done = 0
        for name, info in declared.items():
            dtype = jax.numpy.dtype(info.format)
            for block in load.rows_of(source, name_map(name)):
                file.write(np.ascontiguousarray(block, dtype).view(np.uint8).data)
            done += math.prod(info.shape) * dtype.itemsize
            if progress:
                progress(done, total, "converting weights")
        digests.seal(file)
    return safetensors_file.open_file(path)


def map_kept(path: Path) -> dict[str, np.ndarray]:
    """Maps the arrays of a sealed file in the cache; raises as `_check_kept`."""
    _check_kept(path)
    return safetensors_file.map_arrays(path)


def _check_kept(path: Path) -> None:
    """Compares a file of the cache with its digest.

    Raises:
        InputError: it is damaged, another user may write it, or another process has removed it.
    """
    try:
        ownership.check(path)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    mapped.check_digest(path)
