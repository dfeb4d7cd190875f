"""Tensors of recurrent layers in `.gguf` files as those that our parameters are made of.

llama.cpp keeps what a Mamba-2 layer projects in one tensor, and gives vectors of each head, or of
each group of them, a second axis. Rows, and so their blocks, follow one another: each part is an
entry of its own here, in the same bytes.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from configs.errors import InputError, shown
from configs.kinds.experts import Experts
from configs.kinds.recurrent.mamba import Mamba2
from configs.model import ModelConfig
from inference.checkpoints.gguf.gguf_scan import TensorEntry

_RATES = ".ssm_a"
# What is used in float32 however the others are rounded: decays are exponents of exponents.
_EXACT = (_RATES, ".ssm_d", ".ssm_dt.bias")


class FusedTensor(NamedTuple):
    """A tensor of a file: its shape, and the names of its parts with their rows, in order."""

    shape: tuple[int, ...]
    parts: Mapping[str, tuple[int, ...]]


def fused_tensors(config: ModelConfig) -> dict[str, FusedTensor]:
    """Tensors that a file has in another shape than their parts have here, by name."""
    return {
        name: fused for number in range(config.num_layers) for name, fused in _of(config, number)
    }


def _of(config: ModelConfig, number: int) -> Iterator[tuple[str, FusedTensor]]:
    prefix, D = f"blk.{number}", config.width
    for kind in config.layers[number].mixer.parts:
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
    return stacks


def split(
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
    if len(fused.parts) == 1:  # the same numbers in another shape
        ((part, shape),) = fused.parts.items()
        yield part, dataclasses.replace(entry, shape=shape)
        return
    row_bytes, position = entry.num_bytes // fused.shape[0], entry.position
    for part, shape in fused.parts.items():
        size = shape[0] * row_bytes
        yield part, dataclasses.replace(entry, shape=shape, position=position, num_bytes=size)
        position += size


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
