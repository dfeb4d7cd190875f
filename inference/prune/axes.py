"""What a layer can lose: units of a kind, which pruning keeps or removes whole, and the rows and
columns of its parameters that belong to each.

A unit is an FFN channel, a key/value head with its queries, an expert, a head or channel of a
state, an element of a latent vector. Two more axes are the model's: its width and its layers.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from configs.kinds.attention import Attention
from configs.kinds.experts import Experts
from configs.kinds.feed_forward import Gated, Plain
from configs.kinds.kind import Kind
from configs.kinds.latent import Latent
from configs.kinds.params import leaves
from configs.kinds.recurrent.mamba import Mamba2
from configs.kinds.recurrent.selective import Mamba
from configs.model import LayerSpec, ModelConfig

WIDTH, LAYERS = "width", "layers"  # the model's own axes
ALWAYS = -1  # the unit of what is never removed

AnyKind = TypeVar("AnyKind", bound=Kind)

# By parameter: its dimension that consists of units, counted from the last, and the unit of each
# element of that.
Places = Mapping[str, tuple[int, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Axis:
    """Units of a kind.

    Attributes:
        name: of the flag, and in artifacts.
        label: what it counts.
        kinds: that have such units.
        field: of the kind that counts them.
        places: of a kind's parameters, by their paths in it.
        scored: the matrix whose inputs say what a unit matters.
        of_results: whether its results say it instead, and then the norm that they pass.
        changes: further fields of a kind that follow from so many units.
        groups: groups that units lie in, each of which keeps equally many.
        least: units that must stay.
        is_stacked: each matrix of a stack has units of its own.
    """

    name: str
    label: str
    kinds: tuple[type[Kind], ...]
    field: str
    places: Callable[[Any], Places]
    scored: str
    of_results: str | None = None
    changes: Callable[[Any, int], Mapping[str, object]] = lambda kind, units: {}
    groups: Callable[[Any], int] = lambda kind: 1
    least: Callable[[Any], int] = lambda kind: 1
    is_stacked: bool = False

    def size(self, kind: Kind) -> int:
        """Returns how many units a kind has; 0: it has none."""
        return (getattr(kind, self.field) or 0) if isinstance(kind, self.kinds) else 0

    def reduced(self, kind: AnyKind, units: int) -> AnyKind:
        """Returns the kind with so many units."""
        return kind.changed({self.field: units, **self.changes(kind, units)})


@dataclasses.dataclass(frozen=True)
class Part:
    """A mixer or feed-forward of a layer, or one of those that it is made of.

    Attributes:
        prefix: of its parameters, in the layer.
        kind: what it is.
    """

    prefix: str
    kind: Kind


def parts(layer: LayerSpec) -> list[Part]:
    """Returns a layer's parts."""
    members: list[Part] = []
    for name, kind in (("mixer", layer.mixer), ("ffn", layer.ffn)):
        nested = kind.parts if kind else ()
        for part in nested:
            prefix = f"{name}/{part.name}" if len(nested) > 1 else name
            members.append(Part(prefix, part))
    return members


def of_layer(layer: LayerSpec) -> list[tuple[Axis, Part]]:
    """Returns the axes of a layer, with the parts that have them."""
    return [(axis, part) for part in parts(layer) for axis in AXES if axis.size(part.kind)]


def width_readers(config: ModelConfig, index: int) -> list[str]:
    """Returns the matrices of a layer whose inputs say what the model's channels matter: the first
    of each part that reads what a norm leaves of the residual stream.
    """
    readers: dict[str, str] = {}
    half = dataclasses.replace(config, dtype="bfloat16", formats=())
    for path, info in leaves(half.declared_layers[index]):
        is_reader = info.is_multiplied and info.logical_axes[-1] == "embed"
        if is_reader and info.shape[-1] == half.width and info.format == half.dtype:
            readers.setdefault(path[0], "/".join(path))
    return list(readers.values())


# --- kinds ----------------------------------------------------------------------------------------


def _feed_forward(kind: Gated | Plain) -> Places:
    channels = np.arange(kind.width)
    if isinstance(kind, Gated):
        up = np.tile(channels, 2)
        return {"gate_up": (-2, up), "gate_up_bias": (-1, up), "down": (-1, channels)}
    return {"up": (-2, channels), "up_bias": (-1, channels), "down": (-1, channels)}


def _experts(kind: Experts) -> Places:
    experts = np.arange(kind.num_experts)
    of_stack = {"experts/gate_up": -3, "experts/up": -3, "experts/down": -3,
                "experts/gate_up_bias": -3, "experts/down_bias": -2}  # fmt: skip
    of_router = {"router": -2, "router_bias": -1, "router_offsets": -1, "router_factors": -1}
    return {name: (dim, experts) for name, dim in (of_stack | of_router).items()}


def _expert_channels(kind: Experts) -> Places:
    channels = np.arange(kind.width)
    up = np.tile(channels, 2) if kind.is_gated else channels
    return {
        "experts/gate_up": (-2, up),
        "experts/up": (-2, up),
        "experts/gate_up_bias": (-1, channels),
        "experts/down": (-1, channels),
    }


def _shared_channels(kind: Experts) -> Places:
    channels = np.arange(kind.shared_width)
    up = np.tile(channels, 2) if kind.is_gated else channels
    name = "gate_up" if kind.is_gated else "up"
    return {f"shared/{name}": (-2, up), f"shared/{name}_bias": (-1, up),
            "shared/down": (-1, channels)}  # fmt: skip


def _heads(kind: Attention) -> Places:
    """A key/value head, and all queries that read it."""
    K, H, V = kind.num_kv_heads, kind.head_width, kind.value_width or kind.head_width
    heads = np.arange(K)
    query_heads = np.repeat(heads, kind.num_heads // K)
    queries = np.repeat(heads, kind.query_rows // K)
    keys = np.repeat(heads, H)
    rows = {
        "q": queries,
        "qk": np.concatenate([queries, keys]),
        "qkv": np.concatenate([queries, keys, np.repeat(heads, V)]),
    }
    elements = np.repeat(query_heads, V)
    places = {name: (-2, units) for name, units in rows.items()}
    places |= {f"{name}_bias": (-1, units) for name, units in rows.items()}
    places |= {
        "gate": (-2, elements if kind.gates_elements else query_heads),
        "sinks": (-1, query_heads),
        "out": (-1, elements),
    }
    if kind.qk_norm in ("all", "each"):
        places |= {"q_norm": (-1, np.repeat(query_heads, H)), "k_norm": (-1, keys)}
    return places


def _state_heads(kind: Mamba2) -> Places:
    heads, maps = np.arange(kind.num_heads), np.full(2 * kind.channels[1], ALWAYS)
    elements = np.repeat(heads, kind.head_width)
    convolved, gates = np.concatenate([elements, maps]), np.concatenate([elements, heads])
    return {
        "in": (-2, convolved), "in_bias": (-1, convolved),
        "conv": (-2, convolved), "conv_bias": (-1, convolved),
        "gates": (-2, gates), "gates_bias": (-1, gates),
        "decay": (-1, heads), "step_bias": (-1, heads), "skip": (-1, heads),
        "out": (-1, elements), "out_norm": (-1, elements),
    }  # fmt: skip


def _normed(kind: Mamba2, units: int) -> Mapping[str, object]:
    """Elements that are normed together are of equally many of a group's heads."""
    if not kind.norm_width:
        return {}
    return {"norm_width": kind.norm_width * units // kind.num_heads}


def _state_channels(kind: Mamba) -> Places:
    channels = np.arange(kind.channels)
    both = np.tile(channels, 2)
    return {
        "in": (-2, both), "in_bias": (-1, both), "conv": (-2, channels),
        "conv_bias": (-1, channels), "choice": (-1, channels), "step": (-2, channels),
        "step_bias": (-1, channels), "decay": (-2, channels), "skip": (-1, channels),
        "out": (-1, channels),
    }  # fmt: skip


def _latent_heads(kind: Latent) -> Places:
    heads = np.arange(kind.num_heads)
    queries = np.repeat(heads, kind.nope_width + kind.rope_width)
    return {
        "q": (-2, queries), "q_up": (-2, queries), "k_up": (-3, heads), "v_up": (-3, heads),
        "out": (-1, np.repeat(heads, kind.value_width)),
    }  # fmt: skip


def _latents(kind: Latent) -> Places:
    elements = np.arange(kind.rank)
    down = np.concatenate([elements, np.full(kind.rope_width, ALWAYS)])
    return {
        "kv_down": (-2, down), "kv_down_bias": (-1, down), "kv_norm": (-1, elements),
        "k_up": (-2, elements), "v_up": (-1, elements),
    }  # fmt: skip


def _query_latents(kind: Latent) -> Places:
    elements = np.arange(kind.query_rank or 0)
    return {
        "q_down": (-2, elements), "q_down_bias": (-1, elements), "q_norm": (-1, elements),
        "q_up": (-1, elements), "indexer/q": (-1, elements),
    }  # fmt: skip


AXES = (
    Axis("ffn_width", "channels of feed-forwards", (Gated, Plain), "width", _feed_forward, "down"),
    Axis(
        "kv_heads", "key/value heads, each with its queries", (Attention,), "num_kv_heads", _heads,
        "out", changes=lambda kind, n: {"num_heads": n * kind.num_heads // kind.num_kv_heads},
    ),
    Axis(
        "experts", "experts of a mixture", (Experts,), "num_experts", _experts, "experts/down",
        groups=lambda kind: kind.router.num_groups, least=lambda kind: kind.top_k,
    ),
    Axis(
        "expert_width", "channels of an expert", (Experts,), "width", _expert_channels,
        "experts/down", is_stacked=True,
    ),
    Axis(
        "shared_width", "channels of the expert for all tokens", (Experts,), "shared_width",
        _shared_channels, "shared/down",
    ),
    Axis(
        "state_heads", "heads of Mamba-2's states", (Mamba2,), "num_heads", _state_heads, "out",
        changes=_normed, groups=lambda kind: kind.num_groups,
        least=lambda kind: kind.num_groups,
    ),
    Axis(
        "state_channels", "channels of Mamba's states", (Mamba,), "channels", _state_channels, "out"
    ),
    Axis(
        "latent_heads", "heads of latent attention", (Latent,), "num_heads", _latent_heads, "out"
    ),
    Axis(
        "kv_rank", "elements of latent keys and values", (Latent,), "rank", _latents, "kv_down",
        of_results="kv_norm",
    ),
    Axis(
        "query_rank", "elements of latent queries", (Latent,), "query_rank", _query_latents, "q_up"
    ),
)  # fmt: skip
BY_NAME = {axis.name: axis for axis in AXES}
