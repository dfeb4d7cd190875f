"""Tensors that a family stores in one piece, or in another order, as the matrices that we stack: of
each head (DeepSeek's way out of latent vectors), of each expert (gpt-oss), or of what a recurrent
layer is fed. And back, but for MXFP4, which is only read.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from configs.errors import InputError, shown
from configs.kinds.experts import Experts
from configs.kinds.latent import Latent
from configs.kinds.recurrent.delta_net import DeltaNet
from configs.kinds.recurrent.linear_attention import LinearAttention
from configs.kinds.recurrent.mamba import Mamba2
from configs.kinds.recurrent.selective import Mamba
from configs.kinds.recurrent.short_conv import ShortConv
from configs.model import ModelConfig
from inference.checkpoints import names
from inference.checkpoints.hf import delta_parts, recurrent_parts
from inference.checkpoints.hf.tensor_parts import Packed, Part, Whole, check_shape
from inference.checkpoints.tensor_source import TensorSource


def split(
    source: TensorSource, config: ModelConfig, is_packed: bool, first: int = 0
) -> TensorSource:
    """The source with parts in place of the tensors that hold them.

    Args:
        source: the checkpoint's tensors.
        config: the model.
        is_packed: stacks that are not there as they are are stored as MXFP4.
        first: number of the model's first layer there.

    Raises:
        InputError: such a tensor is missing, or has another shape or type; or there is one of a
            part's own name.
    """
    source = delta_parts.with_aligned_taps(source, config, first)
    parts: dict[str, Part | Packed] = {}
    for tensor, stored, own in _wholes(config, first):
        can_be_packed = is_packed and len(stored) == 3 and tensor not in source.shapes
        if not can_be_packed:
            check_shape(source, tensor, stored)
        parts |= {name: Packed(part) if can_be_packed else part for name, part in own().items()}
    if not parts:
        return source
    if taken := sorted(parts.keys() & source.shapes.keys()):
        raise InputError(f"{source.label}: tensors the model has no place for: {shown(taken[0])}")
    types = {name: part.check(source) for name, part in parts.items()}
    whole = {tensor for part in parts.values() for tensor in part.tensors}
    shapes = {name: shape for name, shape in source.shapes.items() if name not in whole}
    shapes |= {name: part.shape for name, part in parts.items()}

    def read(name: str, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        if name not in parts:
            return source.read(name, start, stop, columns)
        return parts[name].read(source, start, stop)[..., columns]

    def read_blocks(name: str) -> np.ndarray:
        part = parts.get(name)
        if isinstance(part, Packed):
            return part.blocks(source)
        assert source.read_blocks is not None
        return source.read_blocks(name)

    packed = {name: "mxfp4" for name, part in parts.items() if isinstance(part, Packed)}
    return dataclasses.replace(
        source,
        shapes=shapes,
        read=read,
        read_blocks=read_blocks,
        formats={**source.formats, **packed},
        dtypes={**source.dtypes, **types},
    )


def parts_of(config: ModelConfig) -> dict[str, Part]:
    """All parts, by the names that stand for them."""
    return {name: part for _, _, own in _wholes(config) for name, part in own().items()}


def _wholes(config: ModelConfig, first: int = 0) -> Iterator[Whole]:
    for index, layer in enumerate(config.layers, first):
        prefix = f"{names.FAMILIES[config.family].layers}.{index}"
        for mixer in layer.mixer.parts:
            if isinstance(mixer, Mamba):
                yield from recurrent_parts.of_mamba(config, prefix, mixer)
            if isinstance(mixer, Mamba2):
                yield from recurrent_parts.of_mamba2(config, prefix, mixer)
            if isinstance(mixer, DeltaNet):
                yield from delta_parts.of_delta_net(config, prefix, mixer)
            if isinstance(mixer, LinearAttention):
                yield from recurrent_parts.of_linear_attention(config, prefix, mixer)
            if isinstance(mixer, ShortConv):
                yield from recurrent_parts.of_short_conv(config, prefix, mixer)
        if isinstance(layer.mixer, Latent):
            yield _of_heads(f"{prefix}.self_attn.kv_b_proj", layer.mixer)
        if names.FAMILIES[config.family].stacks_experts and isinstance(layer.ffn, Experts):
            yield from _of_experts(f"{prefix}.mlp.experts", layer.ffn, config.width)


def _of_heads(name: str, kind: Latent) -> Whole:
    """A head's rows: its keys' elements, then its values'."""
    H, V, C = kind.nope_width, kind.value_width, kind.rank
    tensor, stored = f"{name}.weight", (kind.num_heads * (H + V), C)

    def parts() -> dict[str, Part]:
        found = {}
        for head in range(kind.num_heads):
            first = head * (H + V)
            keys, values = slice(first, first + H), slice(first + H, first + H + V)
            found[f"{name}.{head}.key"] = Part(tensor, stored, (C, H), keys, transposed=True)
            found[f"{name}.{head}.value"] = Part(tensor, stored, (V, C), values)
        return found

    return tensor, stored, parts


def _of_experts(name: str, kind: Experts, width: int) -> Iterator[Whole]:
    """Matrices [in, out], in which gates and what they meet alternate."""
    E, D, F = kind.num_experts, width, kind.width
    gate_up, down, bias = f"{name}.gate_up_proj", f"{name}.down_proj", f"{name}.gate_up_proj_bias"

    def halves() -> dict[str, Part]:
        return {
            f"{gate_up}.{expert}.{half}": Part(
                gate_up, (E, D, 2 * F), (F, D), slice(expert, expert + 1),
                slice(first, None, 2), transposed=True,
            )
            for expert in range(E) for first, half in enumerate(("gate", "up"))
        }  # fmt: skip

    def downs() -> dict[str, Part]:
        return {
            f"{down}.{expert}": Part(
                down, (E, F, D), (D, F), slice(expert, expert + 1), transposed=True
            )
            for expert in range(E)
        }

    def ordered() -> dict[str, Part]:
        order = np.arange(2 * F).reshape(F, 2).T.ravel()
        return {f"{bias}.ordered": Part(bias, (E, 2 * F), (2 * E, F), slice(0, E), order)}

    yield gate_up, (E, D, 2 * F), halves
    yield down, (E, F, D), downs
    yield bias, (E, 2 * F), ordered
