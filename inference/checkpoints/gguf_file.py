"""A `.gguf` file: its metadata as a `ModelConfig`, its tensors as rows of bfloat16.

Quantized weights are dequantized to float32 and rounded to bfloat16, once: the rounded values are
the model, whatever precision later computes with them.
"""

import functools
import math
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np

from configs.errors import InputError
from configs.model import LayerSpec, ModelConfig, Rope
from inference.checkpoints import gguf_scan
from inference.checkpoints.gguf_scan import Header
from inference.checkpoints.tensor_source import TensorSource
from layers import rope as rope_math

_BLOCK_ELEMENTS = 1 << 17  # dequantized at a time: temporaries stay in the processor's cache
_ROPE_FACTORS = "rope_freqs.weight"
_MAX_WIDTH = 1 << 24
_MAX_LAYERS = 10_000
_GEMMA3_27B_LAYERS = 62  # the one size whose queries are scaled by D / N instead of H

# Keys that are understood below or say nothing about the mathematics. Any other is refused.
_KNOWN_KEYS = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon", "attention.sliding_window",
    "attention.sliding_window_pattern",
    "rope.freq_base", "rope.freq_base_swa", "rope.dimension_count", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned",
}  # fmt: skip


def open_gguf(path: Path) -> Header:
    """Scans the file's header (`gguf_scan.scan`)."""
    return gguf_scan.scan(path, {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()})


def read_config(header: Header) -> ModelConfig:
    """The model a file describes.

    Raises:
        InputError: another architecture, a missing key, or a key that changes the model and is not
            understood.
    """
    try:
        return _build(header)
    except ValueError as error:
        raise InputError(f"{header.path}: {error}") from None


def _build(header: Header) -> ModelConfig:
    family = header.metadata.get("general.architecture")
    if not isinstance(family, str) or family not in ("llama", "gemma3"):
        shown = " ".join(repr(family).split())[:80]
        raise InputError(f"architecture {shown} is not supported; valid: llama, gemma3")
    parts = header.metadata.get("split.count", 1)
    if not isinstance(parts, int) or parts != 1:  # an array compares with 1 element by element
        raise InputError("one part of a split GGUF; join the parts with gguf-split --merge")
    keys = _Keys(header, family)
    keys.refuse_unknown()
    width, num_heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_width = keys.integer("attention.key_length", max(width // num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, head_width) != head_width:
            raise InputError(f"{family}.{key} differs from the head width {head_width}")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise InputError("tensor 'token_embd.weight' is missing")
    name = header.metadata.get("general.name")
    widths: dict[str, Any] = {
        "name": name if isinstance(name, str) else header.path.stem,
        "family": family,
        "vocab_size": embedding.shape[0],
        "width": width,
        "ffn_width": keys.integer("feed_forward_length"),
        "num_layers": keys.integer("block_count", limit=_MAX_LAYERS),
        "num_heads": num_heads,
        "num_kv_heads": keys.integer("attention.head_count_kv", num_heads),
        "head_width": head_width,
        "max_context": keys.integer("context_length"),
        "norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tied": "output.weight" not in header.tensors,
    }
    if family == "gemma3":
        return _gemma3(keys, widths)
    return ModelConfig(**widths, pattern=(LayerSpec(rope=_llama_rope(keys, head_width)),))


class _Keys:
    """An architecture's metadata, read by type."""

    def __init__(self, header: Header, family: str):
        self.header = header
        self.family = family

    def refuse_unknown(self) -> None:
        prefix = f"{self.family}."
        for key in self.header.metadata:
            if key.startswith(prefix) and key.removeprefix(prefix) not in _KNOWN_KEYS:
                raise InputError(f"metadata {key!r} is not supported")

    def get(self, key: str, kinds: tuple[type, ...], default: Any) -> Any:
        value = self.header.metadata.get(f"{self.family}.{key}", default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()  # one value a layer, all equal
        if value is None:
            raise InputError(f"metadata {self.family}.{key!s} is missing")
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise InputError(f"metadata {self.family}.{key} must be one {kinds[0].__name__}")
        return value

    def integer(self, key: str, default: int | None = None, limit: int = _MAX_WIDTH) -> int:
        value = self.get(key, (int,), default)
        if not 1 <= value <= limit:
            raise InputError(f"metadata {self.family}.{key} must be 1 to {limit}, not {value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        # Stored in float32: the shortest decimal that rounds to it is the number that was meant.
        value = float(str(np.float32(self.get(key, (float, int), default))))
        if not 0 < value < math.inf:
            raise InputError(f"metadata {self.family}.{key} must be positive, not {value}")
        return value

    def text(self, key: str, default: str) -> str:
        return self.get(key, (str,), default)


def _linear_rope(keys: _Keys, theta: float) -> Rope:
    scaling = keys.text("rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise InputError(f"rope scaling {scaling!r} is not supported; valid: none, linear")
    factor = keys.number("rope.scaling.factor", 1.0) if scaling == "linear" else 1.0
    return Rope(theta) if factor == 1.0 else Rope(theta, "linear", factor)


def _llama_rope(keys: _Keys, head_width: int) -> Rope:
    rope = _linear_rope(keys, keys.number("rope.freq_base", 10_000.0))
    entry = keys.header.tensors.get(_ROPE_FACTORS)
    if entry is None:
        return rope
    # Llama 3.1 and later store the divisor of each frequency instead of the rule that made it.
    plain = rope_math.inverse_frequencies(rope, head_width)
    if entry.shape != plain.shape:
        raise InputError(f"{_ROPE_FACTORS!r} is {list(entry.shape)}; expected {list(plain.shape)}")
    _check_type(_ROPE_FACTORS, entry.ggml_type)
    divisors = _read(keys.header, _ROPE_FACTORS, 0, entry.shape[0], np.float32)
    if not (np.isfinite(divisors) & (divisors > 0)).all():
        raise InputError(f"{_ROPE_FACTORS!r} holds what divides no frequency")
    context = keys.integer("rope.scaling.original_context_length", Rope().original_context)
    candidate = Rope(rope.theta, "llama3", float(divisors.max()), original_context=context)
    expected = plain / rope_math.inverse_frequencies(candidate, head_width)
    if not np.allclose(divisors, expected, rtol=1e-3):
        raise InputError(f"{_ROPE_FACTORS!r} does not follow the llama3 rule")
    return candidate


def _gemma3(keys: _Keys, widths: dict[str, Any]) -> ModelConfig:
    period = keys.integer("attention.sliding_window_pattern", 6)
    local = LayerSpec(
        rope=Rope(keys.number("rope.freq_base_swa", 10_000.0)),
        window=keys.integer("attention.sliding_window"),
    )
    distant = LayerSpec(rope=_linear_rope(keys, keys.number("rope.freq_base", 1_000_000.0)))
    scaled_by = widths["width"] / widths["num_heads"]
    return ModelConfig(
        **widths,
        pattern=(local,) * (period - 1) + (distant,),
        norm_offset=1.0,
        qk_norm=True,
        post_norms=True,
        activation="gelu_tanh",
        attention_scale=scaled_by**-0.5 if widths["num_layers"] == _GEMMA3_27B_LAYERS else None,
        embedding_scale=widths["width"] ** 0.5,
    )


def tensors(header: Header, config: ModelConfig) -> TensorSource:
    """The file's tensors, in transformers' conventions.

    llama.cpp interleaves the rotary pairs of a llama's queries and keys, and stores Gemma's norm
    weights with the 1 already added; both are undone here.

    Raises:
        InputError: a tensor's type cannot be dequantized.
    """
    example = {entry.ggml_type: name for name, entry in header.tensors.items()}
    for ggml_type, name in example.items():
        try:
            _check_type(name, ggml_type)
        except InputError as error:
            raise InputError(f"{header.path}: {error}") from None
    shapes = {n: entry.shape for n, entry in header.tensors.items() if n != _ROPE_FACTORS}
    return TensorSource(str(header.path), shapes, functools.partial(_read_rows, header, config))


def _check_type(name: str, ggml_type: int) -> None:
    kind = gguf.GGMLQuantizationType(ggml_type)
    sample = np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
    try:
        gguf.dequantize(sample, kind)
    except NotImplementedError:
        raise InputError(f"tensor {name!r} has type {kind.name}, which is no weight") from None


def _read_rows(header: Header, config: ModelConfig, name: str, start: int, stop: int) -> np.ndarray:
    if config.family == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
        head = config.head_width  # whole heads are read, so that rows can move inside them
        first, last = start // head * head, -(-stop // head) * head
        rows = _read(header, name, first, min(last, header.tensors[name].shape[0]))
        if len(rows) % head:
            raise InputError(f"{header.path}: tensor {name!r} is not made of heads of {head} rows")
        heads = rows.reshape(-1, head // 2, 2, rows.shape[-1])
        return heads.swapaxes(1, 2).reshape(rows.shape)[start - first : stop - first]
    if config.norm_offset and name.endswith("norm.weight"):
        values = _read(header, name, start, stop, np.float32) - np.float32(config.norm_offset)
        return values.astype(ml_dtypes.bfloat16)
    return _read(header, name, start, stop)


def _read(
    header: Header, name: str, start: int, stop: int, dtype: Any = ml_dtypes.bfloat16
) -> np.ndarray:
    entry = header.tensors[name]
    kind = gguf.GGMLQuantizationType(entry.ggml_type)
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    row_elements = int(np.prod(entry.shape[1:]))
    rows = np.empty((stop - start, *entry.shape[1:]), dtype)
    flat = rows.reshape(-1)
    step = max(_BLOCK_ELEMENTS // block_elements, 1) * block_elements
    first = start * row_elements
    for offset in range(0, flat.size, step):
        size = min(step, flat.size - offset)
        position = entry.position + (first + offset) // block_elements * block_bytes
        blocks = np.frombuffer(
            header.data, np.uint8, size // block_elements * block_bytes, position
        )
        # One row of many blocks: the library works by 16 rows, 10 x slower when they are short.
        flat[offset : offset + size] = gguf.dequantize(blocks[None], kind)[0]
    return rows


def string_metadata(header: Header, key: str) -> str | None:
    """A string from the metadata, None when absent.

    Raises:
        InputError: the value is no string.
    """
    value = header.metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise InputError(f"{header.path}: metadata {key!r} is not a string")
    return value
