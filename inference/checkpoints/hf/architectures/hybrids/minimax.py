"""MiniMax-Text-01 (MiniMax 2025, arXiv 2501.08313): lightning attention, softmax attention in some
layers, and a residual stream that goes on from the norms before them.
"""

from typing import Any

from configs.errors import InputError, shown
from configs.kinds.attention import Attention
from configs.kinds.experts import Experts, Router
from configs.kinds.recurrent.linear_attention import LinearAttention
from configs.kinds.rope import Rope
from configs.model import MOST_LAYERS, LayerSpec, ModelConfig
from inference.checkpoints.hf.architectures import export_fields, fields, mixtures, rope_keys
from inference.checkpoints.hf.architectures.config_keys import Keys

READS = ("num_local_experts",)  # keys that are refused elsewhere

_FULL, _LINEAR = "full_attention", "linear_attention"
_FACTORS = {_FULL: "full_attn", _LINEAR: "linear_attn"}  # as their keys begin
_DEFAULTS = {
    "vocab_size": 32_000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 131_072,
}  # fmt: skip


def build(keys: Keys, name: str) -> ModelConfig:
    """The model that a `config.json` describes."""
    given = {key: value for key, value in keys.raw.items() if value is not None}
    keys = Keys(_DEFAULTS | given, keys.label)
    keys.require_neutral({"postnorm": (True, None), "shared_intermediate_size": (0, None)})
    width = keys.integer("head_dim", fields.attention(keys).head_width)
    share = keys.integer("rotary_dim", width) / width
    rope = rope_keys.partial(keys, 1_000_000.0, keys.number("partial_rotary_factor", share))
    full = fields.attention(keys, rope=rope, window=keys.optional_integer("sliding_window"))
    ffn, kinds = mixtures.minimax_ffn(keys), _layer_types(keys)
    to_ffn = _factors(keys, "mlp")
    layers = []
    for number, kind in enumerate(kinds):
        mixer = full if kind == _FULL else _lightning(full, number, len(kinds))
        layers.append(LayerSpec(mixer, ffn, factors=(_factors(keys, _FACTORS[kind]), to_ffn)))
    return ModelConfig(
        **fields.llama_fields(keys, name, "minimax", eps=1e-5),
        max_context=rope_keys.max_context(keys, rope),
        pattern=fields.repeated(layers),
    )


def _lightning(full: Attention, layer: int, num_layers: int) -> LinearAttention:
    """Of as many heads as queries have; the deeper a layer is, the less it forgets."""
    decay = 1 - layer / (num_layers - 1 + 1e-5) + 1e-5
    width = full.head_width
    return LinearAttention(full.num_heads, width, width, decay=decay, has_gated_norm=True)


def _factors(keys: Keys, part: str) -> tuple[float, float]:
    return keys.number(f"{part}_alpha_factor", 1.0), keys.number(f"{part}_beta_factor", 1.0)


def _layer_types(keys: Keys) -> list[str]:
    """Listed, or in turn, softmax attention first."""
    count = keys.integer("num_hidden_layers", limit=MOST_LAYERS)
    listed = keys.listed("layer_types", count)
    for kind in listed or ():
        if not isinstance(kind, str) or kind not in _FACTORS:
            valid = ", ".join(_FACTORS)
            raise InputError(f"layer type {shown(kind)} is not supported; valid: {valid}")
    return listed or [_LINEAR if layer % 2 else _FULL for layer in range(count)]


def export(config: ModelConfig) -> dict[str, Any]:
    """The fields of a `config.json`."""
    ffn, kinds = config.layers[0].ffn, [_kind(layer) for layer in config.layers]
    experts = ffn if isinstance(ffn, Experts) else Experts(1, 1, 1, Router())
    own = _attention(config)
    rope = own.rope or Rope()
    factors = dict(zip(kinds, (layer.factors for layer in config.layers), strict=True))
    raw = {
        **export_fields.sizes(config, rope),
        **export_fields.heads(own),
        "rotary_dim": rope.rotating(own.head_width),
        "sliding_window": own.window,
        "layer_types": kinds,
        "intermediate_size": experts.width,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "postnorm": True,
    }
    for kind, found in factors.items():
        for part, pair in zip((_FACTORS[kind], "mlp"), found, strict=True):
            raw |= {f"{part}_alpha_factor": pair[0], f"{part}_beta_factor": pair[1]}
    return raw


def _kind(layer: LayerSpec) -> str:
    return _FULL if isinstance(layer.mixer, Attention) else _LINEAR


def _attention(config: ModelConfig) -> Attention:
    """Softmax attention, or heads as those of a model that has linear attention alone."""
    for attention in config.mixers(Attention):
        return attention
    own = config.mixers(LinearAttention)[0]
    return Attention(own.num_heads, own.num_heads, own.value_width, rope=None)
