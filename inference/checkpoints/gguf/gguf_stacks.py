"""Stacks of matrices in `.gguf` files as the tensors that our parameters are made of.

llama.cpp stores the gates of all experts in one tensor and what they meet in another; ours lie side
by side, expert by expert. A stack's matrices, and so their blocks, follow one another: each is an
entry of its own here, in the same bytes.
"""

import dataclasses
import re
from collections.abc import Iterator

import numpy as np

from configs.errors import InputError, shown
from configs.kinds.experts import Experts
from configs.kinds.latent import Latent
from configs.model import ModelConfig
from inference.checkpoints import names
from inference.checkpoints.gguf import gguf_state_parts
from inference.checkpoints.gguf.gguf_scan import Header, TensorEntry
from inference.checkpoints.tensor_source import TensorSource
from inference.families import families
from inference.families.shared.gguf_keys import GgufKeys

_STACK = re.compile(r"blk\.(\d+)\.(ffn_(?:gate|up)_exps)\.(weight|bias)")
_SHARED_GATE = ".ffn_gate_inp_shexp.weight"


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
    behind = keys.num_layers - config.num_layers
    experts = {n: layer.ffn for n, layer in enumerate(config.layers)}
    fused = gguf_state_parts.fused_tensors(config)
    unread = names.unread(config, families.gguf(config).tensors, "blk")
    for name, entry in header.tensors.items():
        stack = _STACK.fullmatch(name)
        ffn = experts.get(int(stack[1])) if stack else None
        if stack and isinstance(ffn, Experts):
            if entry.shape[0] != ffn.num_experts:
                raise InputError(
                    f"{header.path}: tensor {shown(name)} is {list(entry.shape)}; expected "
                    f"{ffn.num_experts} experts"
                )
            for number in range(ffn.num_experts):
                yield f"blk.{stack[1]}.{stack[2]}.{number}.{stack[3]}", _matrix(entry, number)
        elif name in fused:
            yield from gguf_state_parts.split(str(header.path), name, entry, fused[name])
        elif name.endswith(_SHARED_GATE) and len(entry.shape) == 1:
            yield name, dataclasses.replace(entry, shape=(1, *entry.shape))
        elif not name.startswith(unread) and not names.is_behind(config, name, "blk", behind):
            yield name, entry


def _matrix(entry: TensorEntry, number: int) -> TensorEntry:
    """One of a stack; of a table a row."""
    num_bytes = entry.num_bytes // entry.shape[0]
    shape = entry.shape[1:] if len(entry.shape) > 2 else (1, *entry.shape[1:])
    position = entry.position + number * num_bytes
    return dataclasses.replace(entry, shape=shape, position=position, num_bytes=num_bytes)


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
        if source.shapes[joint] != shape:
            raise InputError(
                f"{source.label}: {shown(joint)} is {list(source.shapes[joint])}; "
                f"expected {list(shape)}"
            )
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
