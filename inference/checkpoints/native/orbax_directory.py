"""A directory in our native format: an Orbax checkpoint of the parameters, our configuration, the
tokenizer, and a manifest that loading verifies.

Orbax writes it: one uncompressed Zarr array a parameter, so that `orbax.checkpoint` restores it
anywhere. Here it is read without Orbax: an array is one file of plain rows, hashed while it is
copied, so that what was verified is what is used, and nothing is held twice. One that is read in
slices is hashed before the first of them. Of an array that is read in part, by one of several
hosts, the layout and the size are verified, not the digest.

A parameter of few bits is an array of its blocks (`layers/quantized.py`), uint8 [F, bytes of a row]
or [E, F, bytes]; the model's `formats` say which format they are of. A matrix in `llm_int8` is its
three parts, and can be read as the numbers that they stand for, too.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from absl import logging

from configs.errors import InputError
from configs.kinds.params import ParamInfo, leaves
from configs.model import ModelConfig
from configs.recipes.few_bits import LLM_INT8
from inference.checkpoints import manifest, mapped, names, text_files
from inference.checkpoints.checkpoint import StoredDirectory
from inference.checkpoints.manifest import Manifest
from inference.checkpoints.native import blocks, config_file
from inference.checkpoints.tensor_source import TensorSource
from inference.files import contents
from layers.params import Params

FORMAT = "ridgeline-orbax-2"
PARAMS = "params"

_METADATA = "_CHECKPOINT_METADATA"
_COMMITTED = "commit_success.txt"
_BLOCK_BYTES = 1 << 20
_MAX_LAYOUT_BYTES = 1 << 16
_DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16), "<f4": np.dtype(np.float32),
    "|u1": np.dtype(np.uint8), "<i4": np.dtype(np.int32),
}  # fmt: skip


class _Array(NamedTuple):
    """An array on disk: its own shape and type, and its data's file, below the directory."""

    shape: tuple[int, ...]
    dtype: np.dtype
    file: str


def open_directory(path: Path, config: ModelConfig, raw: dict[str, object]) -> StoredDirectory:
    """Opens a directory, given what `read_config` returns.

    Raises:
        InputError: a file is missing, damaged or unsound.
    """
    source, huggingface = open_tensors(path, config), raw.get("huggingface")
    source_config = huggingface if isinstance(huggingface, dict) else None
    return StoredDirectory.of(path, config, source, names.identity, source_config)


def is_ours(directory: Path) -> bool:
    """Whether a directory is of this format, sound or not; may raise an `InputError`."""
    if (directory / PARAMS).is_dir():
        return True
    path = directory / text_files.CONFIG
    return path.exists() and "format" in mapped.read_json(path)


def read_config(directory: Path) -> tuple[ModelConfig, dict[str, object]]:
    """The model of a directory, and the whole of its `config.json`, verified.

    Raises:
        InputError: the conversion is unfinished, a file is damaged, or a field makes no sense.
    """
    manifest.read(directory).verify([text_files.CONFIG])
    path = directory / text_files.CONFIG
    raw = mapped.read_json(path)
    if raw.get("format") != FORMAT:
        name = str(raw.get("format"))[:80]
        raise InputError(f"{path}: format {name!r}; valid: {FORMAT}; convert the model again")
    return config_file.from_json(raw.get("model"), str(path)), raw


def config_bytes(
    config: ModelConfig, eos_ids: tuple[int, ...], source_config: dict[str, object] | None
) -> bytes:
    """The `config.json` of a directory.

    Args:
        source_config: what a Hugging Face source had under that name, kept for converting back.
    """
    value = {
        "format": FORMAT,
        "model": config_file.to_json(config),
        "eos_token_id": list(eos_ids),
        "huggingface": source_config,
    }
    return (json.dumps(value, indent=1) + "\n").encode()


def save(directory: Path, params: Params) -> None:
    """Writes parameters as an Orbax checkpoint, whose bytes depend on nothing else.

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
    _remove_time_and_place(directory / PARAMS)


def _remove_time_and_place(checkpoint: Path) -> None:
    """Of its writing: two conversions of the same weights have the same digests. Orbax reads times
    that are missing as unknown, and of the file that says where only whether it exists.
    """
    path = checkpoint / _METADATA
    metadata = mapped.read_json(path)
    for time in ("init_timestamp_nsecs", "commit_timestamp_nsecs"):
        metadata.pop(time, None)
    path.write_text(json.dumps(metadata))
    (checkpoint / _COMMITTED).write_text("Checkpoint commit was successful\n")


def open_tensors(directory: Path, config: ModelConfig) -> TensorSource:
    """The parameters of a model under our own paths.

    Every other file is verified now; an array when it is read.

    Raises:
        InputError: a file is damaged, an array is not laid out as `save` does, or its blocks are
            not those of the format that the model says.
    """
    listed = manifest.read(directory)
    arrays: dict[str, _Array] = {}
    for name in listed.digests:
        parts = name.split("/")
        if len(parts) == 3 and parts[0] == PARAMS and parts[2] == ".zarray":
            arrays[parts[1].replace(".", "/")] = _layout(listed, f"{PARAMS}/{parts[1]}")
    layouts = {f"{Path(array.file).parent}/.zarray" for array in arrays.values()}
    listed.verify(listed.digests.keys() - layouts - {array.file for array in arrays.values()})
    for path, (shape, dtype, name) in arrays.items():
        expected = int(np.prod(shape)) * dtype.itemsize
        file = directory / name
        if not file.is_file() or contents.size(file) != expected:
            mapped.check_stand_in(file)
            raise InputError(f"{file}: not the {expected} bytes of {path}, {list(shape)}")
    declared = {"/".join(path): info for path, info in leaves(config.parameters())}
    packed: dict[str, ParamInfo] = {}
    for path in arrays.keys() & declared.keys():
        array = arrays[path]
        if blocks.are_in(declared[path], array.shape, array.dtype.name, f"{directory}: {path}"):
            packed[path] = declared[path]
    features = _features(listed, arrays, config, declared)

    def mapped_rows(path: str, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        shape, dtype, file = arrays[path]
        data, row_bytes = mapped.map_file(directory / file), _row_bytes(arrays[path])
        if len(shape) != 2 or columns == slice(None):
            rows = np.frombuffer(data.read(start * row_bytes, stop * row_bytes), dtype)
            return rows.reshape(stop - start, *shape[1:])
        first, last, _ = columns.indices(shape[1])
        cut = slice(first * dtype.itemsize, last * dtype.itemsize)
        return data.cut(start * row_bytes, stop - start, row_bytes, cut).view(dtype)

    def joined(path: str, int8: np.ndarray, outliers: np.ndarray) -> np.ndarray:
        parts = {"int8": int8, "outliers": outliers, "features": features[path]}
        return blocks.joined(parts, shapes[path][1])

    def read(name: str, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        if name in features:
            parts = (mapped_rows(f"{name}/{part}", start, stop) for part in ("int8", "outliers"))
            return joined(name, *parts)[:, columns]
        if name in packed:
            rows = blocks.numbers(packed[name], mapped_rows(name, start, stop))
            return rows[:, columns] if rows.ndim > 1 else rows
        if len(arrays[name].shape) == 2:
            return mapped_rows(name, start, stop, columns)
        rows = mapped_rows(name, start, stop)
        return rows[:, columns] if rows.ndim > 1 else rows

    def stream(path: str) -> Iterator[np.ndarray]:
        if path in features:
            outliers, start = _whole(listed, arrays[f"{path}/outliers"]), 0
            for rows in _rows(listed, arrays[f"{path}/int8"]):
                yield joined(path, rows, outliers[start : start + len(rows)])
                start += len(rows)
            return
        for rows in _rows(listed, arrays[path]):
            yield blocks.numbers(packed[path], rows) if path in packed else rows

    def read_into(path: str, target: np.ndarray) -> bool:
        if path in packed or path in features or target.dtype != arrays[path].dtype:
            return False
        return _fill(listed, arrays[path], target)

    def read_blocks(path: str) -> np.ndarray:
        whole = _whole(listed, arrays[path])
        return whole.reshape(-1, whole.shape[-1])

    def verify(path: str) -> None:
        parts = [f"{path}/{part}" for part in blocks.PARTS] if path in features else [path]
        listed.verify([arrays[part].file for part in parts])

    shapes = {path: packed[path].shape if path in packed else array.shape
              for path, array in arrays.items()}  # fmt: skip
    shapes |= {path: shapes[f"{path}/int8"] for path in features}
    dtypes = {path: array.dtype.name for path, array in arrays.items() if path not in packed}
    widest = max({"bfloat16", *dtypes.values()} & {"bfloat16", "float32"})
    formats = {path: info.format for path, info in packed.items()}
    return TensorSource(
        str(directory), shapes, read, widest, stream, read_into, read_blocks,
        formats | dict.fromkeys(features, LLM_INT8),
        dtypes | dict.fromkeys([*packed, *features], "float32"),
        {path: tuple(f"{path}/{part}" for part in blocks.PARTS) for path in features},
        verify, readers=_readers(directory, arrays),
    )  # fmt: skip


def _readers(directory: Path, arrays: dict[str, _Array]) -> int:
    """How many arrays are best read at a time."""
    for array in arrays.values():
        with mapped.map_file(directory / array.file) as file:
            return file.readers
    return 1


def _features(
    listed: Manifest,
    arrays: dict[str, _Array],
    config: ModelConfig,
    declared: dict[str, ParamInfo],
) -> dict[str, np.ndarray]:
    """Which columns are the outliers of each matrix whose three parts are there, by its path."""
    columns = {}
    for path in (path for path, formats in config.formats if LLM_INT8 in formats):
        parts = [f"{path}/{part}" for part in blocks.PARTS]
        if all(part in arrays and arrays[part].shape == blocks.layout(declared[part])[0]
               for part in parts):  # fmt: skip
            int8, _, name = parts
            columns[path], width = _whole(listed, arrays[name]), declared[int8].shape[1]
            if not ((columns[path] >= 0) & (columns[path] < width)).all():
                raise InputError(f"{listed.directory}: {name} are not columns of {width}")
    return columns


def _layout(listed: Manifest, folder: str) -> _Array:
    """The array in a folder, its description verified."""
    name = f"{folder}/.zarray"
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
    return _Array(tuple(shape), dtype, f"{folder}/" + ".".join("0" for _ in shape))


def _fill(listed: Manifest, array: _Array, target: np.ndarray) -> bool:
    """Reads a whole array into one of its type; says whether it has its shape."""
    if target.shape != array.shape:
        return False
    for _ in _rows(listed, array, target):
        pass
    return True


def _whole(listed: Manifest, array: _Array) -> np.ndarray:
    values = np.empty(array.shape, array.dtype)
    _fill(listed, array, values)
    return values


def _rows(
    listed: Manifest, array: _Array, target: np.ndarray | None = None
) -> Iterator[np.ndarray]:
    """The rows of an array; of `target` they are views, when there is one to be filled."""
    shape, dtype, name = array
    row_bytes = _row_bytes(array)
    digest = hashlib.sha256()
    with mapped.map_file(listed.directory / name) as file:
        step = max((_BLOCK_BYTES if file.is_local else file.block_bytes) // row_bytes, 1)
        if target is None:
            buffer = memoryview(bytearray(min(step, shape[0]) * row_bytes))
        else:
            buffer = target.reshape(-1).view(np.uint8).data
        for start in range(0, shape[0], step):
            offset = 0 if target is None else start * row_bytes
            block = buffer[offset : offset + min(step, shape[0] - start) * row_bytes]
            file.fill(start * row_bytes, block)
            digest.update(block)
            yield np.frombuffer(block, dtype).reshape(-1, *shape[1:])
        try:
            listed.compare(name, digest.hexdigest())
        except InputError:
            file.forget()
            raise


def _row_bytes(array: _Array) -> int:
    return math.prod(array.shape[1:]) * array.dtype.itemsize
