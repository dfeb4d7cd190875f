"""Tensors of `.gguf` files as those that our parameters are made of.

llama.cpp stores the gates of all experts in one tensor and what they meet in another; ours lie side
by side, expert by expert. It keeps what a Mamba-2 layer projects in one tensor, and gives vectors
of each head, or of each group of them, a second axis. Matrices of a stack, rows, and so their
blocks, follow one another: each part is an entry of its own here, in the same bytes.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from configs.errors import InputError, shown
from configs.kinds.attention import Attention
from configs.kinds.experts import Experts
from configs.kinds.latent import Latent
from configs.kinds.recurrent.delta_net import DeltaNet
from configs.kinds.recurrent.mamba import Mamba2
from configs.model import ModelConfig
from inference.checkpoints import names
from inference.checkpoints.gguf.gguf_scan import Header, TensorEntry
from inference.checkpoints.tensor_source import TensorSource
from inference.families import families
from inference.families.shared.gguf_keys import GgufKeys
from inference.families.shared.gguf_names import BETAS_DECAYS

_STACK = re.compile(r"blk\.(\d+)\.ffn_(gate|up|gate_up)_exps\.(weight|bias)")
_FLOAT32 = 0  # the number of a type
_SHARED_GATE = ".ffn_gate_inp_shexp.weight"
_RATES = ".ssm_a"
# What is used in float32 however the others are rounded: decays are exponents of exponents.
_EXACT = (_RATES, ".ssm_d", ".ssm_dt.bias")


class FusedTensor(NamedTuple):
    """A tensor of a file.

    Attributes:
        parts: shapes by names, in order.
        is_woven: rows of the parts take turns (`gguf_heads.rows`), and the entry of each part has
            the bytes of all.
    """

    shape: tuple[int, ...]
    parts: Mapping[str, tuple[int, ...]]
    is_woven: bool = False


def fused_tensors(config: ModelConfig) -> dict[str, FusedTensor]:
    """Tensors that a file has in another shape than their parts have here, by name."""
    return {
        name: fused for number in range(config.num_layers) for name, fused in _of(config, number)
    }


def _of(config: ModelConfig, number: int) -> Iterator[tuple[str, FusedTensor]]:
    prefix, D = f"blk.{number}", config.width
    for kind in config.layers[number].mixer.parts:
        if isinstance(kind, Attention) and kind.qk_norm == "each":
            for part, heads in (("q", kind.num_heads), ("k", kind.num_kv_heads)):
                tensor, H = f"{prefix}.attn_{part}_norm.weight", kind.head_width
                yield tensor, FusedTensor((heads, H), {tensor: (heads * H,)})
        if isinstance(kind, DeltaNet):
            yield from _of_delta_rule(kind, prefix, D)
        if not isinstance(kind, Mamba2):
            continue
        inner, maps, _ = kind.channels
        rows = {"z": inner, "x": inner, "B": maps, "C": maps, "dt": kind.num_heads}
        for name, row_shape in ((f"{prefix}.ssm_in.weight", (D,)), (f"{prefix}.ssm_in.bias", ())):
            parts = {f"{name}.{part}": (count, *row_shape) for part, count in rows.items()}
            if row_shape or "in" in kind.biases:
                yield name, FusedTensor((sum(rows.values()), *row_shape), parts)
        for name in ("ssm_a", "ssm_d"):
            tensor = f"{prefix}.{name}"
            yield tensor, FusedTensor((kind.num_heads, 1), {tensor: (kind.num_heads,)})
        if kind.norm_width != 0:
            tensor, groups = f"{prefix}.ssm_norm.weight", kind.num_groups
            yield tensor, FusedTensor((groups, inner // groups), {tensor: (inner,)})


def _of_delta_rule(kind: DeltaNet, prefix: str, D: int) -> Iterator[tuple[str, FusedTensor]]:
    values, keys, _ = kind.channels
    if kind.decay_rank is not None:  # Kimi's
        for part, count in {"q": keys, "k": keys, "v": values}.items():
            tensor, taps = f"{prefix}.ssm_conv1d_{part}.weight", (count, kind.conv_width)
            yield tensor, FusedTensor((1, count, 1, kind.conv_width), {tensor: taps})
        rates = f"{prefix}.ssm_a"
        yield rates, FusedTensor((1, 1, kind.num_heads, 1), {rates: (kind.num_heads,)})
        return
    for name, row in (("attn_qkv.weight", D), ("ssm_conv1d.weight", kind.conv_width)):
        tensor, rows = f"{prefix}.{name}", {"q": keys, "k": keys, "v": values}
        parts = {f"{tensor}.{part}": (count, row) for part, count in rows.items()}
        yield tensor, FusedTensor((2 * keys + values, row), parts)
    tensor, heads = f"{prefix}.{BETAS_DECAYS}", kind.num_heads
    parts = {f"{tensor}.{part}": (heads, D) for part in "ba"}
    yield tensor, FusedTensor((2 * heads, D), parts, is_woven=True)


def expert_stacks(config: ModelConfig) -> dict[str, FusedTensor]:
    """Tensors of all experts' gates, or of what they meet, by name, an expert a part."""
    stacks = {}
    for number, layer in enumerate(config.layers):
        if not isinstance(layer.ffn, Experts):
            continue
        count, width = layer.ffn.num_experts, layer.ffn.width
        depth = layer.ffn.latent_width or config.width
        for half in ("gate", "up") if layer.ffn.is_gated else ("up",):
            name = f"blk.{number}.ffn_{half}_exps"
            parts = {f"{name}.{n}.weight": (width, depth) for n in range(count)}
            stacks[f"{name}.weight"] = FusedTensor((count, width, depth), parts)
            if layer.ffn.has_bias:
                biases = {f"{name}.{n}.bias": (1, width) for n in range(count)}
                stacks[f"{name}.bias"] = FusedTensor((count, width), biases)
    return stacks


def split(header: Header, config: ModelConfig) -> Header:
    """The header with an entry for each expert and each part of what is fused, without blocks
    behind the model's last layer, which predict a second token, and without keys and values of
    layers that read earlier ones'.

    Raises:
        InputError: a stack has another number of matrices than the model has experts.
    """
    return dataclasses.replace(header, tensors=dict(_entries(header, config)))


def _entries(header: Header, config: ModelConfig) -> Iterator[tuple[str, TensorEntry]]:
    keys = GgufKeys(str(header.metadata["general.architecture"]), header.metadata)
    behind = range(config.num_layers, keys.num_layers)
    experts = {n: layer.ffn for n, layer in enumerate(config.layers)}
    fused = fused_tensors(config)
    unread = names.unread(config, families.gguf(config).tensors, "blk")
    unread += tuple(f"blk.{number}." for number in behind)
    for name, entry in header.tensors.items():
        stack = _STACK.fullmatch(name)
        ffn = experts.get(int(stack[1])) if stack else None
        if name.startswith(unread):
            continue
        if stack and isinstance(ffn, Experts):
            yield from _experts(str(header.path), name, entry, ffn.num_experts)
        elif name in fused:
            yield from _parts(str(header.path), name, entry, fused[name])
        elif name.endswith(_SHARED_GATE) and len(entry.shape) == 1:
            yield name, dataclasses.replace(entry, shape=(1, *entry.shape))
        else:
            yield name, entry
    for name in families.gguf(config).numbers:
        yield from _numbers(header, config.num_layers, name)


def _numbers(header: Header, count: int, key: str) -> Iterator[tuple[str, TensorEntry]]:
    """The number that the metadata lists for each layer, or states once for all."""
    values = header.metadata.get(key)
    if isinstance(values, float):
        values = np.full(count, values)
    if not isinstance(values, np.ndarray) or values.dtype.kind != "f" or len(values) != count:
        raise InputError(f"{header.path}: metadata {key} must list {count} numbers")
    data = values.astype(np.float32).tobytes()
    for number in range(count):
        yield f"blk.{number}.{key}", TensorEntry((1,), _FLOAT32, 4 * number, 4, data)


def _experts(
    label: str, name: str, entry: TensorEntry, count: int
) -> Iterator[tuple[str, TensorEntry]]:
    """The matrices of a stack: of each expert its gate, what that meets, or both, in this order."""
    stack = _STACK.fullmatch(name)
    assert stack is not None
    halves = stack[2].split("_")
    shape = entry.shape[1:] if len(entry.shape) > 2 else (1, *entry.shape[1:])
    if entry.shape[0] != count or shape[0] % len(halves):
        raise InputError(
            f"{label}: tensor {shown(name)} is {list(entry.shape)}; expected {count} experts"
        )
    shape = shape[0] // len(halves), *shape[1:]
    parts = {
        f"blk.{stack[1]}.ffn_{half}_exps.{number}.{stack[3]}": shape
        for number in range(count)
        for half in halves
    }
    yield from _parts(label, name, entry, FusedTensor(entry.shape, parts))


def _parts(
    label: str, name: str, entry: TensorEntry, fused: FusedTensor
) -> Iterator[tuple[str, TensorEntry]]:
    """The parts of a tensor.

    Raises:
        InputError: it has another shape; axes of one element may be left out.
    """
    if [size for size in entry.shape if size > 1] != [size for size in fused.shape if size > 1]:
        raise InputError(
            f"{label}: {shown(name)} is {list(entry.shape)}; expected {list(fused.shape)}"
        )
    if fused.is_woven:
        yield from ((part, dataclasses.replace(entry, shape=s)) for part, s in fused.parts.items())
        return
    position = entry.position
    for part, shape in fused.parts.items():
        size = entry.num_bytes * math.prod(shape) // math.prod(fused.shape)
        yield part, dataclasses.replace(entry, shape=shape, position=position, num_bytes=size)
        position += size


def joint_name(name: str) -> str:
    """The tensor of older files that holds both ways between keys, values and latents of a head."""
    return re.sub(r"\.attn_[kv]_b\.weight$", ".attn_kv_b.weight", name)


def with_latents(source: TensorSource, config: ModelConfig) -> TensorSource:
    """The source with those of newer files in place of the tensors that hold both.

    Raises:
        InputError: such a tensor has another shape.
    """
    apart: dict[str, tuple[int, ...]] = {}
    for index, layer in enumerate(config.layers):
        joint, kind = f"blk.{index}.attn_kv_b.weight", layer.mixer
        if not isinstance(kind, Latent) or joint not in source.shapes:
            continue
        shape = kind.num_heads * (kind.nope_width + kind.value_width), kind.rank
        source.check_shape(joint, shape)
        apart[f"blk.{index}.attn_k_b.weight"] = kind.num_heads, kind.rank, kind.nope_width
        apart[f"blk.{index}.attn_v_b.weight"] = kind.num_heads, kind.value_width, kind.rank
    if not apart:
        return source
    joined = {joint_name(name) for name in apart}
    shapes = {name: shape for name, shape in source.shapes.items() if name not in joined} | apart

    def read(name: str, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        if name not in apart:
            return source.read(name, start, stop, columns)
        is_keys, joint = name.endswith("k_b.weight"), joint_name(name)
        num_heads, out, inner = apart[name]
        head_rows = source.shapes[joint][0] // num_heads
        rows = source.read(joint, start * head_rows, stop * head_rows).reshape(
            stop - start, head_rows, -1
        )
        return rows[:, :inner].swapaxes(1, 2) if is_keys else rows[:, head_rows - out :]

    return dataclasses.replace(source, shapes=shapes, read=read)


def is_exact(name: str) -> bool:
    """Whether a tensor's numbers stay as they are stored when others are rounded."""
    return name.endswith(_EXACT)


def is_rates(name: str) -> bool:
    """Whether a tensor holds what states decay by, of which our parameters are the logarithms."""
    return name.endswith(_RATES)


def logarithms(label: str, name: str, rates: np.ndarray) -> np.ndarray:
    """x of rates -exp(x); raises an `InputError` if a rate is positive or no number."""
    if not (rates <= 0).all():
        raise InputError(f"{label}: {shown(name)} holds a rate that lets a state grow")
    with np.errstate(divide="ignore"):
        return np.log(-rates.astype(np.float64)).astype(np.float32)


def rates(logarithms: np.ndarray) -> np.ndarray:
    """The inverse of `logarithms`."""
    return (-np.exp(logarithms.astype(np.float64))).astype(np.float32)
