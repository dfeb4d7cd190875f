"""The tensors of a `.gguf` file as rows of numbers, or as the blocks that they are; `gguf_metadata`
reads the rest.

Quantized weights are dequantized to float32 and, unless asked otherwise, rounded to bfloat16, once:
the rounded values are the model, whatever precision later computes with them.

The package `gguf` is imported where it is used: no other engine needs it.
"""

import functools
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from configs.errors import InputError, shown
from configs.kinds import params
from configs.kinds.attention import Attention
from configs.kinds.params import ParamInfo
from configs.kinds.rope import Llama3, LongRope, Proportional
from configs.model import ModelConfig
from inference.checkpoints.gguf import (
    gguf_digests,
    gguf_fused,
    gguf_heads,
    gguf_parts,
    gguf_scan,
)
from inference.checkpoints.gguf.gguf_scan import Header
from inference.checkpoints.names import NameMap
from inference.checkpoints.tensor_source import TensorSource
from inference.families import families
from inference.families.shared.gguf_names import (
    LONG_FACTORS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    STATE_NORM,
)

# Types that are kept as they are, and the format that holds their numbers.
_DENSE = {"F32": "float32", "F16": "float32", "BF16": "bfloat16"}
BLOCKS = {"Q8_0": "q8_0", "Q5_0": "q5_0", "Q4_0": "q4_0", "Q4_1": "q4_1", "Q4_K": "q4_k",
          "Q5_K": "q5_k", "Q6_K": "q6_k", "Q3_K": "q3_k", "Q2_K": "q2_k",
          "IQ4_NL": "iq4_nl", "IQ4_XS": "iq4_xs", "MXFP4": "mxfp4"}  # fmt: skip
_BLOCK_ELEMENTS = 1 << 17  # dequantized at a time: temporaries stay in the processor's cache


def open_gguf(path: Path) -> Header:
    """Scans the file's header (`gguf_scan.scan`), and those of its further parts.

    Raises:
        InputError: a header is not sound, or, of a file that we wrote, not what was written.
    """
    header = scan_gguf(path)
    gguf_digests.check_head(header)
    return header


def scan_gguf(path: Path) -> Header:
    """As `open_gguf`, of a file that may hold no digests yet."""
    import gguf

    sizes = {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    scan = functools.partial(gguf_scan.scan, quant_sizes=sizes)
    return gguf_parts.join(scan(path), scan)


def tensors(header: Header, config: ModelConfig, dtype: str = "bfloat16") -> TensorSource:
    """The file's tensors, in transformers' conventions, rounded to `dtype`.

    llama.cpp interleaves the rotary pairs of some families' queries and keys, stores Gemma's norm
    weights with the 1 already added, of decays of states the rates, not their logarithms, and
    Qwen3.5's value heads in another order (`gguf_heads`); all of it is undone here.

    Raises:
        InputError: a tensor's type cannot be dequantized; reading it, the data of a file that we
            wrote are damaged.
    """
    example = {entry.ggml_type: name for name, entry in header.tensors.items()}
    for ggml_type, name in example.items():
        try:
            _check_type(name, ggml_type)
        except InputError as error:
            raise InputError(f"{header.path}: {error}") from None
    configured = _in_configuration(config)
    shapes = {n: entry.shape for n, entry in header.tensors.items() if n not in configured}
    check = functools.cache(functools.partial(gguf_digests.check_data, header))

    def read(name: str, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        check()
        return _read_rows(header, config, np.dtype(dtype), name, start, stop, columns)

    def read_blocks(name: str) -> np.ndarray:
        check()
        return _read_blocks(header, config, name)

    kinds = {name: _kind(header, name) for name in shapes if not _cuts_blocks(header, config, name)}
    formats = {name: BLOCKS[kind] for name, kind in kinds.items() if kind in BLOCKS}
    label = str(header.path)
    source = TensorSource(
        label, shapes, read, dtype, read_blocks=read_blocks, formats=formats,
        block_bytes=header.data.block_bytes, readers=header.data.readers,
    )  # fmt: skip
    return gguf_fused.with_latents(source, config)


def formats(header: Header, config: ModelConfig, name_map: NameMap) -> dict[str, tuple[str, ...]]:
    """How parameters can be kept with the file's own numbers, by path: a format, or one of each
    part of a stack. Numbers of float16 are kept in float32, and in bfloat16 those of blocks that
    would have to be cut.

    Raises:
        InputError: a tensor has a type that no kernel multiplies as it is, or the matrices of a
            stack have several.
    """
    by_path = {}
    for path, info in params.leaves(config.parameters()):
        stored = [_stored_as(header, config, name, info) for name in name_map("/".join(path)).names]
        is_stack = len(info.shape) > 2
        if is_stack and len(set(stored)) > 1:
            raise InputError(
                f"{header.path}: {'/'.join(path)} is a stack of {', '.join(sorted(set(stored)))}, "
                "which no kernel multiplies at once; engine.weights=bfloat16 runs it, dequantized"
            )
        by_path["/".join(path)] = tuple(stored[:1] if is_stack else stored)
    return by_path


def _stored_as(header: Header, config: ModelConfig, name: str, info: ParamInfo) -> str:
    """The format of a tensor that a parameter is made of."""
    joint = gguf_fused.joint_name(name)
    stored = name if name in header.tensors else joint
    kind = _kind(header, stored)
    if kind in _DENSE:
        return _DENSE[kind]
    if _cuts_blocks(header, config, stored):
        return "bfloat16"
    if stored != name:
        cause = "is of several parameters, of which no kernel multiplies a part"
    elif info.is_matrix and kind not in BLOCKS:
        valid = ", ".join([*_DENSE, *BLOCKS])
        cause = f"has type {kind}, which no kernel multiplies as it is; those are {valid}"
    else:
        return BLOCKS[kind] if info.is_matrix else "float32"
    raise InputError(
        f"{header.path}: tensor {shown(stored)} {cause}. engine.weights=bfloat16 runs any type, "
        "dequantized"
    )


def _kind(header: Header, name: str) -> str:
    import gguf

    return gguf.GGMLQuantizationType(header.tensors[name].ggml_type).name


def _block_size(header: Header, name: str) -> tuple[int, int]:
    """Elements and bytes of a block of a tensor."""
    import gguf

    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(header.tensors[name].ggml_type)]


def _cuts_blocks(header: Header, config: ModelConfig, name: str) -> bool:
    """Whether no order of a tensor's blocks is the order of our columns."""
    return gguf_heads.cuts_blocks(config, name, _block_size(header, name)[0])


def _in_configuration(config: ModelConfig) -> set[str]:
    """The tensors that the configuration was made of, and nothing else has a place for."""
    factors: set[str] = set()
    for mixer in config.mixers(Attention):
        scaling = None if mixer.rope is None else mixer.rope.scaling
        factors |= {ROPE_FACTORS} if isinstance(scaling, Llama3 | Proportional) else set()
        factors |= {LONG_FACTORS, SHORT_FACTORS} if isinstance(scaling, LongRope) else set()
    return factors


def _check_type(name: str, ggml_type: int) -> None:
    import gguf

    kind = gguf.GGMLQuantizationType(ggml_type)
    sample = np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
    try:
        gguf.dequantize(sample, kind)
    except NotImplementedError:
        raise InputError(f"tensor {shown(name)} has type {kind.name}, which is no weight") from None


def read_numbers(header: Header, name: str) -> np.ndarray:
    """A whole small tensor, float32.

    Raises:
        InputError: its type is not a weight's, or a value is not finite and positive.
    """
    entry = header.tensors[name]
    _check_type(name, entry.ggml_type)
    values = _read(header, name, 0, entry.shape[0], np.float32)
    if not (np.isfinite(values) & (values > 0)).all():
        raise InputError(f"{name!r} holds what divides no frequency")
    return values


def _read_rows(
    header: Header,
    config: ModelConfig,
    dtype: np.dtype,
    name: str,
    start: int,
    stop: int,
    columns: slice = slice(None),
) -> np.ndarray:
    if columns != slice(None):
        return _read_columns(header, config, dtype, name, start, stop, columns)
    if is_interleaved(config, name):
        # Whole heads are read, so that rows can move inside them.
        head = config.mixers(Attention)[0].head_width
        first, last = start // head * head, -(-stop // head) * head
        rows = _read(header, name, first, min(last, header.tensors[name].shape[0]), dtype)
        return _in_halves(header, config, name, rows)[start - first : stop - first]
    if gguf_fused.is_rates(name):
        rates = _in_order(header, config, name, start, stop, np.float32)
        return gguf_fused.logarithms(str(header.path), name, rates)
    if gguf_fused.is_exact(name):
        return _in_order(header, config, name, start, stop, np.float32)
    if has_norm_offset(config, name):
        values = _read(header, name, start, stop, np.float32) - np.float32(config.norm_offset)
        return values.astype(dtype)
    return _in_order(header, config, name, start, stop, dtype)


def _in_order(
    header: Header, config: ModelConfig, name: str, start: int, stop: int, dtype: DTypeLike
) -> np.ndarray:
    """Rows of a tensor whose heads may have another order in the file, which is read in runs."""
    order, columns = gguf_heads.rows(config, name), gguf_heads.columns(config, name)
    if order is None:
        rows = _read(header, name, start, stop, dtype)
    else:
        order = order[start:stop]
        runs = np.split(order, np.flatnonzero(np.diff(order) != 1) + 1)
        rows = np.concatenate([_read(header, name, r[0], r[-1] + 1, dtype) for r in runs])
    return rows if columns is None else rows[:, columns]


def has_norm_offset(config: ModelConfig, name: str) -> bool:
    """Whether a tensor holds a norm's weights with the model's offset added."""
    is_norm = name.endswith("norm.weight") and not name.endswith(STATE_NORM)
    return is_norm and config.norm_offset != 0


def is_interleaved(config: ModelConfig, name: str) -> bool:
    """Whether the rotary pairs of a tensor's rows are neighbours in the file."""
    endings = tuple(f".attn_{p}.{e}" for p in "qk" for e in ("weight", "bias"))
    return name.endswith(endings) and families.gguf(config).is_interleaved


def _in_halves(header: Header, config: ModelConfig, name: str, rows: np.ndarray) -> np.ndarray:
    """Rows of whole heads, whose rotary pairs are neighbours, with the pairs' halves apart."""
    head = config.mixers(Attention)[0].head_width
    if len(rows) % head:
        raise InputError(f"{header.path}: tensor {shown(name)} is not made of heads of {head} rows")
    heads = rows.reshape(-1, head // 2, 2, *rows.shape[1:])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def _read_blocks(header: Header, config: ModelConfig, name: str) -> np.ndarray:
    """A whole tensor in the blocks of its format: uint8 [rows, bytes]."""
    entry, (size, num_bytes) = header.tensors[name], _block_size(header, name)
    flat = entry.read(0, entry.num_bytes)
    rows = flat.reshape(-1, entry.shape[-1] // size * num_bytes)
    if is_interleaved(config, name):
        return _in_halves(header, config, name, rows)
    order, columns = gguf_heads.rows(config, name), gguf_heads.columns(config, name)
    if columns is not None:
        blocks = rows.reshape(len(rows), -1, num_bytes)
        return blocks[:, columns[::size] // size].reshape(rows.shape)
    return rows if order is None else rows[order]


def _read(header: Header, name: str, start: int, stop: int, dtype: DTypeLike) -> np.ndarray:
    import gguf

    entry = header.tensors[name]
    kind = gguf.GGMLQuantizationType(entry.ggml_type)
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    row_elements = int(np.prod(entry.shape[1:]))
    rows = np.empty((stop - start, *entry.shape[1:]), dtype)
    flat = rows.reshape(-1)
    step = max(_BLOCK_ELEMENTS // block_elements, 1) * block_elements
    first, last = (row * row_elements // block_elements * block_bytes for row in (start, stop))
    stored = entry.read(first, last)
    for offset in range(0, flat.size, step):
        size = min(step, flat.size - offset)
        position = offset // block_elements * block_bytes
        blocks = stored[position : position + size // block_elements * block_bytes]
        # One row of many blocks: the library works by 16 rows, 10 x slower when they are short.
        flat[offset : offset + size] = gguf.dequantize(blocks[None], kind)[0]
    return rows


def _read_columns(
    header: Header,
    config: ModelConfig,
    dtype: np.dtype,
    name: str,
    start: int,
    stop: int,
    columns: slice,
) -> np.ndarray:
    """As `_read_rows`; whole blocks of each row are read."""
    import gguf

    entry = header.tensors[name]
    orders = gguf_heads.rows(config, name), gguf_heads.columns(config, name)
    is_moved = any(order is not None for order in orders)
    if is_moved or is_interleaved(config, name) or gguf_fused.is_rates(name):
        return _read_rows(header, config, dtype, name, start, stop)[:, columns]
    kind = gguf.GGMLQuantizationType(entry.ggml_type)
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    first, last = columns.start // size, -(-columns.stop // size)
    row_bytes = entry.num_bytes // entry.shape[0]
    rows = entry.cut(start, stop, row_bytes, slice(first * num_bytes, last * num_bytes))
    numbers = np.empty((stop - start, columns.stop - columns.start), dtype)
    step = max(1, _BLOCK_ELEMENTS // ((last - first) * size))
    for row in range(0, stop - start, step):
        some = np.ascontiguousarray(rows[row : row + step])
        values = gguf.dequantize(some.reshape(1, -1), kind).reshape(len(some), -1)
        shift = first * size
        numbers[row : row + step] = values[:, columns.start - shift : columns.stop - shift]
    return numbers


def string_metadata(header: Header, key: str) -> str | None:
    """A string of the metadata, None if absent; raises an `InputError` if it is no string."""
    value = header.metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise InputError(f"{header.path}: metadata {key!r} is not a string")
    return value
