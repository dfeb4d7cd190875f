"""A directory in our native format: an Orbax checkpoint of the parameters, our configuration, the
tokenizer, and a manifest that loading verifies.

Orbax writes it: one uncompressed Zarr array a parameter, so that `orbax.checkpoint` restores it
anywhere. Here it is read without Orbax: an array is one file of plain rows, hashed while it is
copied, so that what was verified is what is used, and nothing is held twice. Of an array that is
read in part, by one of several hosts, the layout and the size are verified, not the digest.
"""

import hashlib
import json
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from absl import logging

from configs.errors import InputError
from configs.model import ModelConfig
from inference.checkpoints import mapped, text_files
from inference.checkpoints.native import config_file, manifest
from inference.checkpoints.native.manifest import Manifest
from inference.checkpoints.tensor_source import TensorSource

FORMAT = "ridgeline-orbax-2"
PARAMS = "params"

_BLOCK_BYTES = 1 << 20
_MAX_LAYOUT_BYTES = 1 << 16
_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "<f4": np.dtype(np.float32)}


def is_ours(directory: Path) -> bool:
    """Whether a directory is of this format, sound or not.

    Raises:
        InputError: its `config.json` is not a JSON object.
    """
    if (directory / PARAMS).is_dir():
        return True
    path = directory / text_files.CONFIG
    return path.exists() and "format" in mapped.read_json(path)


def read_config(directory: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """The model of a directory, and the whole of its `config.json`, verified.

    Raises:
        InputError: the conversion is unfinished, a file is damaged, or a field makes no sense.
    """
    listed = manifest.read(directory)
    listed.verify([text_files.CONFIG])
    path = directory / text_files.CONFIG
    raw = mapped.read_json(path)
    if raw.get("format") != FORMAT:
        found = str(raw.get("format"))[:80]
        raise InputError(f"{path}: format {found!r}; valid: {FORMAT}; convert the model again")
    return config_file.from_json(raw.get("model"), str(path)), raw


def config_bytes(
    config: ModelConfig, eos_ids: tuple[int, ...], source_config: dict[str, Any] | None
) -> bytes:
    """The `config.json` of a directory.

    Args:
        config: the model.
        eos_ids: ids that end a sequence.
        source_config: what a Hugging Face source had under that name, kept for converting back.
    """
    value = {
        "format": FORMAT,
        "model": config_file.to_json(config),
        "eos_token_id": list(eos_ids),
        "huggingface": source_config,
    }
    return (json.dumps(value, indent=1) + "\n").encode()


def save(directory: Path, params: Any) -> None:
    """Writes parameters as an Orbax checkpoint.

    Orbax copies the whole tree to memory first; mapped arrays keep that the only copy.
    """
    import orbax.checkpoint as ocp  # 0.2 to 1 s, needed by nothing else

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)  # it warns that there are no shards of other hosts
    try:
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(directory.absolute() / PARAMS, args=ocp.args.PyTreeSave(params))
    finally:
        logging.set_verbosity(verbosity)


def open_tensors(directory: Path) -> TensorSource:
    """The parameters under our own paths.

    Every other file is verified now; an array when it is read.

    Raises:
        InputError: a file is damaged, or an array is not laid out as `save` does.
    """
    listed = manifest.read(directory)
    arrays = {}
    for name in listed.digests:
        parts = name.split("/")
        if len(parts) == 3 and parts[0] == PARAMS and parts[2] == ".zarray":
            arrays[parts[1].replace(".", "/")] = f"{PARAMS}/{parts[1]}"
    layouts = {path: _layout(listed, f"{name}/.zarray") for path, name in arrays.items()}
    data = {path: f"{arrays[path]}/{chunk}" for path, (_, _, chunk) in layouts.items()}
    known = {f"{name}/.zarray" for name in arrays.values()} | set(data.values())
    listed.verify(listed.digests.keys() - known)
    for path, (shape, dtype, _) in layouts.items():
        file = directory / data[path]
        expected = int(np.prod(shape)) * dtype.itemsize
        if not file.is_file() or file.stat().st_size != expected:
            raise InputError(f"{file}: not the {expected} bytes of {path}, {list(shape)}")
    shapes = {path: shape for path, (shape, _, _) in layouts.items()}
    dtypes = {path: dtype.name for path, (_, dtype, _) in layouts.items()}

    def read(name: str, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        shape, dtype, _ = layouts[name]
        flat = np.frombuffer(mapped.map_file(directory / data[name]), dtype)
        found = flat.reshape(shape)[start:stop]
        return found[:, columns] if found.ndim > 1 else found

    def stream(path: str) -> Iterator[np.ndarray]:
        return _rows(listed, data[path], *layouts[path][:2])

    def read_into(path: str, target: np.ndarray) -> bool:
        shape, dtype, _ = layouts[path]
        if target.dtype != dtype or target.shape != shape:
            return False
        for _ in _rows(listed, data[path], shape, dtype, target):
            pass
        return True

    widest = max(dtypes.values(), default="bfloat16")
    return TensorSource(str(directory), shapes, read, widest, stream, read_into, dtypes=dtypes)


def _layout(listed: Manifest, name: str) -> tuple[tuple[int, ...], np.dtype, str]:
    """Shape, type and data file of an array, verified."""
    path = listed.directory / name
    with mapped.map_file(path) as file:
        text = file[:_MAX_LAYOUT_BYTES]
    listed.compare(name, hashlib.sha256(text).hexdigest())
    raw = mapped.parse_json(text, str(path))
    shape, dtype = raw.get("shape"), _DTYPES.get(str(raw.get("dtype")))
    is_shape = isinstance(shape, list) and all(type(n) is int and 0 < n < 1 << 31 for n in shape)
    if not is_shape or not shape or dtype is None:
        raise InputError(f"{path}: not an array of {' or '.join(t.name for t in _DTYPES.values())}")
    plain = {"chunks": shape, "compressor": None, "filters": None, "order": "C"}
    for key, value in plain.items():
        if raw.get(key) != value:
            raise InputError(f"{path}: {key} is {str(raw.get(key))[:80]}; only {value} is read")
    return tuple(shape), dtype, ".".join("0" for _ in shape)


def _rows(
    listed: Manifest,
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype,
    target: np.ndarray | None = None,
) -> Iterator[np.ndarray]:
    """The rows of an array; of `target` they are views, when there is one to be filled."""
    row_bytes = int(np.prod(shape[1:])) * dtype.itemsize
    step = max(_BLOCK_BYTES // row_bytes, 1)
    if target is None:
        buffer = memoryview(bytearray(min(step, shape[0]) * row_bytes))
    else:
        buffer = target.reshape(-1).view(np.uint8).data
    digest = hashlib.sha256()
    with (listed.directory / name).open("rb", buffering=0) as file:
        for start in range(0, shape[0], step):
            offset = 0 if target is None else start * row_bytes
            block = buffer[offset : offset + min(step, shape[0] - start) * row_bytes]
            _read_exactly(file, block)
            digest.update(block)
            yield np.frombuffer(block, dtype).reshape(-1, *shape[1:])
    listed.compare(name, digest.hexdigest())


def _read_exactly(file: FileIO, block: memoryview) -> None:
    done = 0
    while done < len(block):
        count = file.readinto(block[done:])
        if not count:
            raise InputError(f"{file.name}: the file became shorter while it was read")
        done += count
