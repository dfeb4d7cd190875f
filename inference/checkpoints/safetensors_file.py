"""Safetensors, single or sharded. Pickles are refused: loading one runs its author's code."""

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np

from configs.errors import InputError, shown
from inference.checkpoints import mapped
from inference.checkpoints.tensor_source import TensorSource
from inference.files.contents import Contents

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Of Mistral's own files, which other layouts' may lie beside.
_OWN_INDEX, _OWN_SINGLE = "consolidated.safetensors.index.json", "consolidated.safetensors"
ALIGNMENT = 64  # bytes: what begins so in memory JAX adopts on a CPU

_FLOATS: dict[str, type] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F64": np.float64,
}
_INTEGERS: dict[str, type] = {"U16": np.uint16, "U8": np.uint8, "I8": np.int8, "I32": np.int32}
_CODES = {"U8": np.uint8, "I8": np.int8, "I32": np.int32, "I64": np.int64, "BOOL": np.bool_,
          "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu}  # fmt: skip
_MAX_TENSORS = 1 << 15
# A line a tensor: DeepSeek-V3's has 8.9 MB.
_MAX_INDEX_BYTES = 32 << 20
_HOLDS = {"float16": "float32"}
_DTYPE_NAMES = {np.dtype(t).name: name for name, t in (_FLOATS | _INTEGERS | _CODES).items()}
_DTYPES = {name: np.dtype(kind) for name, kind in (_FLOATS | _INTEGERS | _CODES).items()}
_NAMES = {dtype: _HOLDS.get(dtype.name, dtype.name) for dtype in _DTYPES.values()}
_CODE_NAMES = {np.dtype(code).name for code in _CODES.values()}


def is_in(directory: Path) -> bool:
    """Whether a directory holds weights that can be opened."""
    return _weights_file(directory) is not None


def _weights_file(directory: Path) -> Path | None:
    """Returns the file that holds weights, or lists those that do."""
    paths = (directory / name for name in (INDEX, SINGLE, _OWN_INDEX, _OWN_SINGLE))
    return next((path for path in paths if path.exists()), None)


def names_in(directory: Path) -> Iterable[str]:
    """Names of a directory's tensors; raises an `InputError` as `open_directory`."""
    path = _weights_file(directory)
    if path is not None and path.suffix == ".json":
        return read_index(directory)
    return open_file(path or directory / SINGLE, ("",)).shapes


def open_directory(directory: Path, codes_at: tuple[str, ...] = ()) -> TensorSource:
    """The tensors of a Hugging Face directory.

    Args:
        codes_at: endings of the names of tensors that may hold what stands for numbers.

    Raises:
        InputError: no safetensors, an unsound file, or an index that disagrees with its shards.
    """
    path = _weights_file(directory)
    if path is not None and path.suffix == ".json":
        return _open_sharded(path, codes_at)
    if path is not None:
        return open_file(path, codes_at)
    pickles = [
        p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl")
    ]
    if pickles:
        raise InputError(
            f"{directory}: {sorted(pickles)[0]} is a pickle, which can run code when loaded; "
            "only .safetensors is accepted (convert it where you trust it)"
        )
    raise InputError(f"{directory}: no weights; expected {SINGLE} or {INDEX}")


def open_file(path: Path, codes_at: tuple[str, ...] = ()) -> TensorSource:
    """The tensors of one file; see `open_directory`.

    Raises:
        InputError: the file is unsound, or holds a tensor that is not floating point.
    """
    data, tensors, _ = _header(path, codes_at=codes_at)
    shapes = {name: shape for name, (shape, _, _) in tensors.items()}
    dtypes = {name: _NAMES[dtype] for name, (_, dtype, _) in tensors.items()}
    widest = max({"bfloat16", *dtypes.values()} - _CODE_NAMES)
    reader = functools.partial(_read, data, tensors)
    return TensorSource(
        str(path), shapes, reader, widest, dtypes=dtypes, block_bytes=data.block_bytes,
        readers=data.readers,
    )  # fmt: skip


def map_arrays(path: Path) -> dict[str, np.ndarray]:
    """The tensors of one file as views of its mapped memory, integers too; what is not in memory
    yet begins to be read.

    Raises:
        InputError: the file is unsound.
    """
    data, tensors, _ = _header(path, _FLOATS | _INTEGERS)
    data.expect()
    return {name: _read(data, tensors, name, 0, shape[0]) for name, (shape, *_) in tensors.items()}


def read_metadata(path: Path) -> dict[str, str]:
    """The strings in a file's header; raises an `InputError` if the file is unsound."""
    return _header(path, _FLOATS | _INTEGERS)[2]


_Tensors = dict[str, tuple[tuple[int, ...], np.dtype, int]]  # shape, dtype, position


def _header(
    path: Path, types: Mapping[str, type] = _FLOATS, codes_at: tuple[str, ...] = ()
) -> tuple[Contents, _Tensors, dict[str, str]]:
    import safetensors  # a machine that runs random weights may lack it

    data = mapped.map_file(path)
    start = 8 + int.from_bytes(data[:8], "little")
    text = b""
    if start <= len(data):  # else it is no such file, as the library says
        text = data[: min(start, 9 + mapped.MAX_JSON_BYTES)]
        beginning = text[8:]
        num_tensors = beginning.count(b"data_offsets")  # before their names are read
        if len(beginning) > mapped.MAX_JSON_BYTES or num_tensors > _MAX_TENSORS:
            raise InputError(
                f"{path}: its header has more than {mapped.MAX_JSON_BYTES} bytes or names more "
                f"than {_MAX_TENSORS} tensors"
            )
    try:
        # The library proves the header sound: lengths, offsets, overlaps, holes.
        with data.beginning(min(start, len(data))) as file, safetensors.safe_open(file, "np"):
            pass
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path}: not a valid safetensors file ({error})") from None
    header = mapped.parse_json(text[8:], str(path))
    metadata = header.pop("__metadata__", {})
    tensors: _Tensors = {}
    with_codes = {**types, **_CODES}
    for name, entry in header.items():
        valid = with_codes if name.endswith(codes_at) else types
        if entry["dtype"] not in valid:
            raise InputError(
                f"{path}: tensor {shown(name)} has type {entry['dtype']}; valid: {', '.join(valid)}"
            )
        position = start + entry["data_offsets"][0]
        tensors[name] = (tuple(entry["shape"]), _DTYPES[entry["dtype"]], position)
    return data, tensors, metadata


def _read(
    data: Contents,
    tensors: _Tensors,
    name: str,
    start: int,
    stop: int,
    columns: slice = slice(None),
) -> np.ndarray:
    shape, dtype, position = tensors[name]
    row_bytes, count = math.prod(shape[1:]) * dtype.itemsize, stop - start
    first = position + start * row_bytes
    if len(shape) < 2 or columns == slice(None):
        values = np.frombuffer(data.read(first, first + count * row_bytes), dtype)
        return values.reshape(count, *shape[1:])
    begin, end, _ = columns.indices(shape[1])
    column = row_bytes // shape[1]
    rows = data.cut(first, count, row_bytes, slice(begin * column, end * column))
    return rows.view(dtype).reshape(count, end - begin, *shape[2:])


def read_index(directory: Path) -> dict[str, str]:
    """Which file of a sharded checkpoint holds each tensor.

    Raises:
        InputError: the index is unsound, or names a file outside of this directory.
    """
    index = _weights_file(directory) or directory / INDEX
    weight_map = mapped.read_json(index, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index}: 'weight_map' must be an object of tensor name -> file name")
    valid = {shard for shard in set(map(str, weight_map.values())) if _is_shard(shard)}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or shard not in valid:
            raise InputError(
                f"{index}: tensor {shown(name)} is in {shown(shard)}; "
                "valid: a .safetensors file of this directory"
            )
    return weight_map


def _is_shard(name: str) -> bool:
    return Path(name).name == name and name.endswith(".safetensors")


def _open_sharded(index: Path, codes_at: tuple[str, ...]) -> TensorSource:
    directory, weight_map = index.parent, read_index(index.parent)
    files = sorted(set(weight_map.values()))
    shards = {shard: open_file(directory / shard, codes_at) for shard in files}
    for shard, source in shards.items():
        for name in source.shapes:
            if weight_map.get(name) != shard:
                raise InputError(
                    f"{index}: tensor {shown(name)} is in {shard}, "
                    f"the index says {shown(weight_map.get(name))}"
                )
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for source in shards.values():
        shapes |= source.shapes
        dtypes |= source.dtypes
    if len(shapes) < len(weight_map):
        name = next(name for name in weight_map if name not in shapes)
        raise InputError(f"{index}: tensor {shown(name)} is not in {weight_map[name]}")

    def read(name: str, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        return shards[weight_map[name]].read(name, start, stop, columns)

    widest = max({source.dtype for source in shards.values()})
    return dataclasses.replace(
        next(iter(shards.values())), label=str(directory), shapes=shapes, read=read, dtype=widest,
        dtypes=dtypes,
    )  # fmt: skip


def write_header(
    file: BinaryIO, tensors: Mapping[str, tuple[tuple[int, ...], str]], metadata: dict[str, str]
) -> int:
    """Writes the header of a safetensors file whose tensors follow in this order, without gaps.

    Args:
        metadata: free-form strings; `digests.UNSEALED` first among those of a file that is sealed.

    Returns:
        Bytes that the tensors take.
    """
    header: dict[str, object] = {"__metadata__": metadata}
    total = 0
    for name, (shape, dtype) in tensors.items():
        stop = total + math.prod(shape) * np.dtype(dtype).itemsize
        header[name] = {
            "dtype": _DTYPE_NAMES[dtype],
            "shape": shape,
            "data_offsets": [total, stop],
        }
        total = stop
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)  # where data begins
    file.write(len(text).to_bytes(8, "little") + text)
    return total
