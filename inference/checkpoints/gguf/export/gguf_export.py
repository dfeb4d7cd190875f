"""A model as one `.gguf` file that llama.cpp runs.

Rotary pairs and norm weights become llama.cpp's again (`gguf_file` reads them back), matrices get
one type, or keep the blocks that they are stored in; whatever is no matrix is float32.

The package `gguf` is imported where it is used: no other engine needs it.
"""

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.params import ParamInfo
from configs.kinds.rope import Llama3, LongRope, Proportional
from configs.model import ModelConfig
from configs.precision import FORMATS
from inference.checkpoints import load, names, new_directory
from inference.checkpoints.checkpoint import Checkpoint, Contents, check_kept
from inference.checkpoints.gguf import (
    gguf_digests,
    gguf_file,
    gguf_fused,
    gguf_heads,
    gguf_metadata,
)
from inference.checkpoints.gguf.export import export_metadata, export_tokenizer
from inference.checkpoints.gguf.gguf_checkpoint import GgufFile
from inference.checkpoints.load import Progress, StoredParameter
from inference.families import families
from inference.families.shared import gguf_names
from inference.families.shared.gguf_states import Metadata
from layers import params
from layers import rope as rope_math

# Of all matrices, as `--dtype` names them; other blocks are written only as they are stored.
DTYPES = ("float32", "bfloat16", "q8_0", "q5_0", "q4_0", "q4_1")

# As in llama.cpp, whatever the type of the matrices is.
_ROUTERS = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")

_NEVER = 1e30  # the divisor of the frequency of a pair that does not rotate
_STEP = 1 << 20  # numbers that are rounded at a time


class _Tensor(NamedTuple):
    """One of a file: its shape (rows first), its format and its bytes, made when they are asked
    for: uint8 [rows, bytes of a row].
    """

    name: str
    shape: tuple[int, ...]
    format: str
    make: Callable[[], np.ndarray]

    @property
    def num_bytes(self) -> int:
        import gguf

        elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[_KINDS[self.format]]]
        return math.prod(self.shape) // elements * size


def write(
    checkpoint: Checkpoint, output: Path, dtype: str | None = None, progress: Progress | None = None
) -> None:
    """Writes a checkpoint as a `.gguf` file, and reads it back before it gets its name.

    Args:
        output: the file, which does not exist yet.
        dtype: one of `DTYPES`; None keeps what is stored.

    Raises:
        InputError: the family, something about the model, its tokenizer or a format has no place in
            such a file, blocks are to be rounded again, or the file cannot be written.
    """
    new_directory.check(output)
    checkpoint.check_no_classifier()
    model = export_metadata.renamed(dataclasses.replace(checkpoint.config, formats=()))
    metadata = export_metadata.of_model(model)
    contents = checkpoint.contents()
    if isinstance(checkpoint, GgufFile):
        contents = dataclasses.replace(contents, source=checkpoint.tensors("float32"))
    formats = _formats(checkpoint, contents, model, dtype)
    config = dataclasses.replace(model, dtype="float32", formats=tuple(formats.items()))
    declared = params.flatten(config.parameters())
    load.check(declared, contents.source, contents.name_map)
    metadata |= export_tokenizer.metadata(checkpoint)
    with new_directory.create_file(output) as path:
        factors = export_metadata.writer_of(checkpoint.config).factors(checkpoint.config)
        weights = list(_tensors(config, declared, contents, dtype, factors))
        metadata |= _numbers(config, weights)
        tensors = [*_rope_factors(config), *_fused(config, weights)]  # first: `gguf_digests`
        digests = _write(path, metadata, tensors, progress)
        gguf_digests.seal(path, gguf_file.scan_gguf(path))
        _compare(path, model, checkpoint, digests)


def _formats(
    checkpoint: Checkpoint, contents: Contents, model: ModelConfig, dtype: str | None
) -> dict[str, tuple[str, ...]]:
    """How parameters are read: in the blocks that are written as they are, or as numbers."""
    if dtype is None:
        by_path = checkpoint.formats()
    else:
        source, by_path = contents.source, {}
        for path in params.flatten(model.parameters()):
            stored = [source.formats.get(name) for name in contents.name_map(path).names]
            blocks = sorted({name for name in stored if name not in (None, dtype)})
            if blocks and FORMATS[dtype].is_quantized:
                raise InputError(
                    f"{source.label}: {path} is stored in {', '.join(map(str, blocks))}, which "
                    f"--dtype={dtype} would round again; leave --dtype out, or take 'float32'"
                )
            by_path[path] = (dtype,) if set(stored) == {dtype} else ("float32",)
    for path, kinds in by_path.items():
        for kind in kinds:
            if kind not in _KINDS:
                raise InputError(
                    f"{contents.source.label}: {path} is stored in {kind}, which .gguf files have "
                    f"not; --dtype=float32 or bfloat16 writes numbers"
                )
    return by_path


_KINDS = {format: kind for kind, format in gguf_file.BLOCKS.items()}
_KINDS |= {"float32": "F32", "bfloat16": "BF16"}


def _tensors(
    config: ModelConfig, declared: dict[str, ParamInfo], contents: Contents, dtype: str | None,
    factors: dict[str, float],
) -> Iterator[_Tensor]:  # fmt: skip
    name_map = names.gguf(config)
    for path, info in declared.items():
        stored = name_map(path)
        count = len(stored.names)
        rows = info.stacked if count > 1 else (info.in_rows[0],)
        if not rows and info.in_rows[0] % count == 0:  # vectors of experts
            rows = (info.in_rows[0] // count,) * count
        if len(rows) != len(stored.names):
            raise InputError(f"{path} {list(info.shape)} cannot be cut into {list(stored.names)}")
        is_blocks = FORMATS[info.format].is_quantized
        read = info if is_blocks else dataclasses.replace(info, format="float32")
        parameter = StoredParameter(contents.source, contents.name_map(path), read)
        start = 0
        for name, count in zip(stored.names, rows, strict=True):
            shape = (count, *info.in_rows[1:]) if len(rows) > 1 else info.shape
            is_kept = is_blocks or dtype is None
            format = info.format if is_kept else str(dtype)
            factor = next((f for end, f in factors.items() if f".{name}".endswith(end)), 1.0)
            if FORMATS[format].is_quantized and is_kept and factor != 1:
                raise InputError(
                    f"{contents.source.label}: {path} is stored in {format}, and a .gguf file has "
                    f"its factor {factor} in it; --dtype=float32 or bfloat16 writes numbers"
                )
            is_matrix = info.is_matrix and not name.endswith(_ROUTERS)
            format = format if is_matrix else "float32"
            try:
                FORMATS[format].check_rows(shape[-1], path)
            except InputError as error:
                raise InputError(f"{error}; 'float32' and 'bfloat16' go with any rows") from None
            part = slice(start, start := start + count)

            def make(
                name: str = name, part: slice = part, format: str = format,
                parameter: StoredParameter = parameter, factor: float = factor,
            ) -> np.ndarray:  # fmt: skip
                values = np.asarray(parameter)
                values = values.reshape(-1, values.shape[-1]) if values.ndim > 2 else values
                values = values[part] if factor == 1 else values[part] * np.float32(factor)
                return _bytes(config, name, format, values)

            yield _Tensor(name, shape, format, make)


def _fused(config: ModelConfig, tensors: list[_Tensor]) -> list[_Tensor]:
    """What llama.cpp has in one tensor, or in another shape, as it has it."""
    by_name = {tensor.name: tensor for tensor in tensors}
    stacks = gguf_fused.expert_stacks(config)
    for name, fused in (gguf_fused.fused_tensors(config) | stacks).items():
        if not fused.parts.keys() <= by_name.keys():
            continue  # llama.cpp has them apart in this family
        parts = [by_name.pop(part) for part in fused.parts]
        formats = sorted({part.format for part in parts})
        if len(formats) > 1:
            raise InputError(
                f"{name} would be of {' and '.join(formats)}; --dtype=float32 or bfloat16 writes "
                "numbers"
            )
        make = functools.partial(_joined, config, parts, fused.is_woven)
        by_name[name] = _Tensor(name, fused.shape, formats[0], make)
    return list(by_name.values())


def _joined(config: ModelConfig, parts: list[_Tensor], is_woven: bool) -> np.ndarray:
    rows = [part.make() for part in parts]
    if is_woven:
        return gguf_heads.woven(config, [part.name for part in parts], np.concatenate(rows))
    if len({part.shape[1:] for part in rows}) > 1 or len(rows[0]) == 1:
        return np.concatenate([part.reshape(1, -1) for part in rows], axis=1)
    return np.concatenate(rows)


def _bytes(config: ModelConfig, name: str, format: str, values: np.ndarray) -> np.ndarray:
    """Rows, or blocks of rows, as the file has them."""
    if gguf_file.is_interleaved(config, name):
        head, shape = config.mixers(Attention)[0].head_width, values.shape
        values = values.reshape(-1, 2, head // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
    values = gguf_heads.as_stored(config, name, values)
    if values.dtype == np.uint8:
        return np.ascontiguousarray(values)
    if gguf_fused.is_rates(name):
        values = gguf_fused.rates(values)
    if gguf_file.has_norm_offset(config, name):
        values = values + np.float32(config.norm_offset)
    import gguf

    kind = gguf.GGMLQuantizationType[_KINDS[format]]
    rows = values.reshape(-1, values.shape[-1])
    step = max(_STEP // rows.shape[1], 1)
    parts = [gguf.quantize(rows[i : i + step], kind) for i in range(0, len(rows), step)]
    return np.concatenate([part.view(np.uint8) for part in parts])


def _numbers(config: ModelConfig, tensors: list[_Tensor]) -> Metadata:
    """Takes the tensors that are metadata there, a number of each layer, out of the others."""
    keys = families.gguf(config).numbers
    by_key = {key: [t for t in tensors if t.name.endswith(f".{key}")] for key in keys}
    for tensor in itertools.chain.from_iterable(by_key.values()):
        tensors.remove(tensor)
    return {key: [float(t.make().view(np.float32)[0, 0]) for t in of] for key, of in by_key.items()}


def _rope_factors(config: ModelConfig) -> Iterator[_Tensor]:
    """Of frequencies: divisors that Llama 3.1's rule makes, and Phi-3's factors."""
    by_name: dict[str, Sequence[float]] = {}
    for mixer in config.mixers(Attention):
        rope, head = mixer.rope, mixer.head_width
        scaling = rope.scaling if rope else None
        if isinstance(scaling, LongRope):
            by_name[gguf_names.LONG_FACTORS] = scaling.long
            by_name[gguf_names.SHORT_FACTORS] = scaling.short
        if isinstance(scaling, Llama3 | Proportional):
            unscaled = rope_math.inverse_frequencies(dataclasses.replace(rope, scaling=None), head)
            scaled = rope_math.inverse_frequencies(rope, head)
            divisors = np.divide(
                unscaled, scaled, out=np.full(unscaled.shape, _NEVER), where=scaled > 0
            )
            by_name[gguf_names.ROPE_FACTORS] = [*divisors, *[1.0] * (head // 2 - len(divisors))]
    for name, factors in by_name.items():
        values = np.asarray(factors, np.float32)
        make = functools.partial(values.view(np.uint8).reshape, 1, -1)
        yield _Tensor(name, values.shape, "float32", make)


def _write(
    path: Path, metadata: Metadata, tensors: list[_Tensor], progress: Progress | None
) -> dict[str, str]:
    """The file, and the digest of each tensor's bytes."""
    import gguf

    writer = gguf.GGUFWriter(path, str(metadata["general.architecture"]))
    if any(FORMATS[tensor.format].is_quantized for tensor in tensors):
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in (gguf_digests.METADATA | metadata).items():
        if key != "general.architecture":
            writer.add_key_value(key, *_typed(value))
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType[_KINDS[tensor.format]]
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float32), tensor.num_bytes, raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    digests, done = {}, 0
    total = sum(tensor.num_bytes for tensor in tensors)
    for tensor in tensors:
        data = tensor.make()
        digests[tensor.name] = hashlib.sha256(data.data).hexdigest()
        writer.write_tensor_data(data)
        done += tensor.num_bytes
        if progress:
            progress(done, total, "writing weights")
    writer.close()
    return digests


def _typed(value: Any) -> tuple[Any, Any, Any]:
    """A value, its type, and that of its items."""
    import gguf

    types = gguf.GGUFValueType
    if isinstance(value, np.ndarray):
        items = {
            "float32": types.FLOAT32, "float64": types.FLOAT64, "bool": types.BOOL,
            **{name: types[name.upper()] for name in ("int8", "uint8", "int16", "uint16")},
            **{name: types[name.upper()] for name in ("int32", "uint32", "int64", "uint64")},
        }  # fmt: skip
        return value.tolist(), types.ARRAY, items[value.dtype.name]
    if isinstance(value, list):
        of_lists = {bool: types.BOOL, int: types.INT32, float: types.FLOAT32, str: types.STRING}
        return value, types.ARRAY, of_lists[type(value[0])]
    kinds = {bool: types.BOOL, str: types.STRING, float: types.FLOAT32}
    if type(value) in kinds:
        return value, kinds[type(value)], None
    return value, types.UINT32 if 0 <= value < 1 << 32 else types.INT64, None


def _compare(
    path: Path, model: ModelConfig, checkpoint: Checkpoint, digests: dict[str, str]
) -> None:
    """Reads the file as any script would."""
    header = gguf_file.open_gguf(path)
    config = gguf_metadata.read_config(header)
    check_kept(model, config, "a .gguf file", "name", "dtype", "formats")
    for name, entry in header.tensors.items():
        data = entry.read(0, entry.num_bytes)
        if hashlib.sha256(data.data).hexdigest() != digests[name]:
            raise InputError(f"{path}: {name} did not come back as it was written")
    export_tokenizer.compare(header, checkpoint)
