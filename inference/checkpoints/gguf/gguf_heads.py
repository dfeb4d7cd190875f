"""The order of heads of layers with the delta rule in `.gguf` files.

Ours, transformers' too, has the value heads of a key head side by side. llama.cpp has those of
Qwen3.5 in turns, so that the first value head of each key head comes first. Of Qwen3-Next only
betas and decays are ordered otherwise: each key head's betas, then its decays.
"""

import re
from collections.abc import Sequence

import numpy as np

from configs.kinds.recurrent.delta_net import DeltaNet
from configs.model import ModelConfig
from inference.families import families
from inference.families.shared.gguf_names import BETAS_DECAYS

_NAME = re.compile(r"blk\.(\d+)\.(.+)")
# Tensors, or parts of them, with rows of each value head: as many as its values, or one.
_VALUES = ("attn_qkv.weight.v", "attn_gate.weight", "ssm_conv1d.weight.v")
_NUMBERS = ("ssm_beta.weight", "ssm_alpha.weight", "ssm_a", "ssm_dt.bias")
_PARTS = tuple(f"{BETAS_DECAYS}.{part}" for part in "ba")
_OUT = "ssm_out.weight"
_ENDINGS = tuple(f".{name}" for name in (*_VALUES, *_NUMBERS, *_PARTS, _OUT))


def rows(config: ModelConfig, name: str) -> np.ndarray | None:
    """Rows of a file's tensor that ours consists of, in order; None: all, as they are stored."""
    kind, tensor = _layer_of(config, name)
    if kind is None:
        return None
    if tensor in _PARTS:
        groups_KPr = np.arange(2 * kind.num_heads).reshape(kind.num_key_heads, 2, -1)
        return groups_KPr[:, _PARTS.index(tensor)].ravel()
    if tensor in _VALUES:
        return _in_groups(config, kind, kind.value_width)
    return _in_groups(config, kind, 1) if tensor in _NUMBERS else None


def columns(config: ModelConfig, name: str) -> np.ndarray | None:
    """As `rows`, of a tensor's columns."""
    kind, tensor = _layer_of(config, name)
    if kind is None or tensor != _OUT:
        return None
    return _in_groups(config, kind, kind.value_width)


def cuts_blocks(config: ModelConfig, name: str, block_elements: int) -> bool:
    """Whether columns move that blocks of so many elements have together with others."""
    kind, _ = _layer_of(config, name)
    if kind is None or columns(config, name) is None:
        return False
    return kind.value_width % block_elements > 0


def as_stored(config: ModelConfig, name: str, values: np.ndarray) -> np.ndarray:
    """Returns numbers of a tensor of ours, or the bytes of their blocks, in the file's order: the
    inverse of `rows` and `columns`. Parts of a woven tensor stay as they are.
    """
    order, across = rows(config, name), columns(config, name)
    if order is not None and not name.endswith(_PARTS):
        values = _placed(values, order)
    kind, _ = _layer_of(config, name)
    if kind is None or across is None:
        return values
    heads_NDX = values.reshape(len(values), kind.num_heads, -1).swapaxes(0, 1)
    places_N = across[:: kind.value_width] // kind.value_width
    return _placed(heads_NDX, places_N).swapaxes(0, 1).reshape(values.shape)


def woven(config: ModelConfig, parts: Sequence[str], values: np.ndarray) -> np.ndarray:
    """Returns the rows of a woven tensor, given those of its parts one after another."""
    orders = [order for part in parts if (order := rows(config, part)) is not None]
    return _placed(values, np.concatenate(orders))


def _placed(values: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Returns the values at these places, which are all."""
    moved = np.empty_like(values)
    moved[places] = values
    return moved


def _layer_of(config: ModelConfig, name: str) -> tuple[DeltaNet | None, str]:
    """The layer with the delta rule that a tensor is of, and the tensor's name there; None: it is
    of another kind, or its rows and columns are stored in our order.
    """
    match = _NAME.fullmatch(name) if name.endswith(_ENDINGS) else None
    if match is None or int(match[1]) >= config.num_layers:
        return None, ""
    kind = config.layers[int(match[1])].mixer
    return (kind, match[2]) if isinstance(kind, DeltaNet) else (None, "")


def _in_groups(config: ModelConfig, kind: DeltaNet, width: int) -> np.ndarray | None:
    """Places in the file of all value heads' elements, `width` of each head, in our order."""
    if not families.gguf(config).has_heads_in_turns or kind.num_heads == kind.num_key_heads:
        return None
    places = np.arange(kind.num_heads * width).reshape(-1, kind.num_key_heads, width)
    return places.swapaxes(0, 1).ravel()
