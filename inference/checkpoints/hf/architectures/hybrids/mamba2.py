"""Architectures with Mamba-2 layers beside attention, and their `config.json`."""

import dataclasses
from typing import Any

from configs.errors import InputError, shown
from configs.kinds.attention import Attention
from configs.kinds.combined import Parallel
from configs.kinds.experts import Experts
from configs.kinds.feed_forward import Gated
from configs.kinds.kind import MOST_MATRICES
from configs.kinds.recurrent.mamba import Mamba2
from configs.kinds.rope import Rope
from configs.model import MOST_LAYERS, LayerSpec, ModelConfig
from inference.checkpoints.hf.architectures import export_fields, fields, rope_keys
from inference.checkpoints.hf.architectures.config_keys import Keys
from inference.checkpoints.hf.architectures.scans import recurrent

# Keys that are refused elsewhere, and read here.
BAMBA = ("attention_bias", "mlp_bias")
FALCON = ("attention_bias", "mlp_bias")
GRANITE = ("attention_bias", "num_local_experts")

_BAMBA = {
    "vocab_size": 128_000, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 262_144,
}  # fmt: skip
_FALCON = _BAMBA | {"max_position_embeddings": 8192}
_GRANITE = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
}  # fmt: skip


def bamba(keys: Keys, name: str) -> ModelConfig:
    """Bamba (IBM, Princeton & UIUC 2024): attention in the layers that are listed."""
    keys = with_defaults(keys, _BAMBA)
    keys.require_neutral({"partial_rotary_factor": (0.5, None)})  # else beside the positions' base
    rope = rope_keys.partial(keys, 10_000.0, 0.5)
    mixers = fields.attention(keys, rope=rope), mamba2(keys, expanded(keys))
    layers = keys.integer("num_hidden_layers", limit=MOST_LAYERS)
    attends = fields.numbered(keys, "attn_layer_indices", layers)
    return ModelConfig(
        **fields.llama_fields(keys, name, "bamba", eps=1e-5),
        max_context=rope_keys.max_context(keys, rope),
        pattern=fields.pattern(
            [mixers[layer not in attends] for layer in range(layers)], fields.gated(keys)
        ),
    )


def granite(keys: Keys, name: str) -> ModelConfig:
    """Granite 4 (IBM 2025): what is embedded, what layers add and the logits are scaled; a mixture
    beside a feed-forward that all tokens visit, or that one alone.
    """
    keys = with_defaults(keys, _GRANITE)
    layers = keys.integer("num_hidden_layers", limit=MOST_LAYERS)
    turns = keys.raw.get("position_embedding_type") == "rope"
    keys.require_neutral({
        "position_embedding_type": ("rope", "nope", None),
        "normalization_function": ("rmsnorm", None),
    })  # fmt: skip
    rope = rope_keys.read(keys) if turns else None
    scale = keys.number("attention_multiplier", 1.0)
    attention, state = fields.attention(keys, rope=rope, scale=scale), mamba2(keys, expanded(keys))
    kinds = keys.listed("layer_types", layers) or keys.listed("layers_block_type", layers)
    kinds = kinds or ["linear_attention"] * layers
    mixers = [_by_name(kind, attention, state) for kind in kinds]
    return ModelConfig(
        **fields.llama_fields(keys, name, "granitemoehybrid"),
        max_context=rope_keys.max_context(keys, rope or Rope()),
        pattern=fields.pattern(mixers, _granite_ffn(keys)),
        embedding_scale=keys.number("embedding_multiplier", 1.0),
        residual_scale=keys.number("residual_multiplier", 1.0),
        logit_scale=1 / keys.number("logits_scaling", 1.0),
    )


def falcon_h1(keys: Keys, name: str) -> ModelConfig:
    """Falcon-H1 (Zuo et al. 2025, arXiv 2507.22448): attention and a state side by side in every
    layer, and a factor on everything that is projected.
    """
    keys = with_defaults(keys, _FALCON)
    keys.require_neutral({"mamba_use_mlp": (True, None), "attn_layer_indices": (None,)})
    rope = rope_keys.read(keys)
    scales = {
        part: (keys.number(f"{key}_in_multiplier", 1.0), keys.number(f"{key}_out_multiplier", 1.0))
        for part, key in (("attention", "attention"), ("state", "ssm"))
    }
    inner = keys.optional_integer("mamba_d_ssm", 1024)
    has_norm = keys.boolean("mamba_rms_norm", False)
    state = mamba2(keys, inner or expanded(keys), part_scales=_scales(keys, "ssm_multipliers", 5))
    biases = ("out",) if keys.boolean("projectors_bias", False) else ()
    state = dataclasses.replace(
        state,
        biases=(*(bias for bias in state.biases if bias != "out"), *biases),
        norm_width=state.norm_width if has_norm else 0,
        norms_first=has_norm and keys.boolean("mamba_norm_before_gate", True),
    )
    attention = fields.attention(keys, rope=rope, key_scale=keys.number("key_multiplier", 1.0))
    mixer = Parallel(attention, state, *zip(scales["attention"], scales["state"], strict=True))
    gate, down = _scales(keys, "mlp_multipliers", 2) or (1.0, 1.0)
    ffn = dataclasses.replace(fields.gated(keys), gate_scale=gate, down_scale=down)
    return ModelConfig(
        **fields.llama_fields(keys, name, "falcon_h1", eps=1e-5),
        max_context=rope_keys.max_context(keys, rope),
        pattern=(LayerSpec(mixer, ffn),),
        embedding_scale=keys.number("embedding_multiplier", 1.0),
        logit_scale=keys.number("lm_head_multiplier", 1.0),
    )


def _scales(keys: Keys, key: str, count: int) -> tuple[float, ...]:
    """So many factors; (): all are 1."""
    if keys.raw.get(key) is None:
        return ()
    found = keys.numbers(key, count)
    if len(found) != count:
        raise InputError(f"{key} lists {count} numbers, not {len(found)}")
    return () if set(found) == {1.0} else found


def _granite_ffn(keys: Keys) -> Gated | Experts:
    activation = keys.choice("hidden_act", {"silu": "silu"}, "silu")
    shared = keys.integer("shared_intermediate_size", 1024)
    experts = keys.whole("num_local_experts", 8, limit=MOST_MATRICES)
    if not experts:
        return Gated(shared, activation)
    chosen = keys.integer("num_experts_per_tok", 2)
    return Experts(
        experts, chosen, keys.integer("intermediate_size"), shared_width=shared,
        activation=activation,
    )  # fmt: skip


def _by_name(kind: Any, attention: Attention, state: Mamba2) -> Attention | Mamba2:
    """The mixer that transformers 4 or 5 calls so."""
    names: dict[str, Attention | Mamba2] = {
        "attention": attention, "full_attention": attention,
        "mamba": state, "linear_attention": state,
    }  # fmt: skip
    if not isinstance(kind, str) or kind not in names:
        raise InputError(f"layer type {shown(kind)} is not supported; valid: {', '.join(names)}")
    return names[kind]


def with_defaults(keys: Keys, defaults: dict[str, Any]) -> Keys:
    """The keys, and those that files leave out as their class has them."""
    return Keys(defaults | keys.raw, keys.label)


def expanded(keys: Keys) -> int:
    """Elements of all heads, as a multiple of the model's width."""
    return int(keys.number("mamba_expand", 2) * keys.integer("hidden_size"))


def mamba2(keys: Keys, inner: int, **own: Any) -> Mamba2:
    """The state-space layer as Bamba and those behind it write it.

    Args:
        keys: of the whole model.
        inner: elements of all heads.
        own: fields that a family adds.
    """
    heads, groups = keys.integer("mamba_n_heads", 128), keys.integer("mamba_n_groups", 1)
    is_auto = keys.raw.get("mamba_d_head") in ("auto", None)
    head_width = max(inner // heads, 1) if is_auto else keys.integer("mamba_d_head")
    if heads * head_width != inner:
        raise InputError(
            f"mamba_n_heads x mamba_d_head is {heads * head_width}, and the layer's width {inner}: "
            "they have to be equal"
        )
    told: dict[str, Any] = {
        "biases": recurrent.biases(keys, "mamba_proj_bias", "mamba_conv_bias"),
        "norm_width": inner // groups,
        "step_limits": recurrent.step_limits(keys),
    }
    state, conv = keys.integer("mamba_d_state", 256), keys.integer("mamba_d_conv", 4)
    return Mamba2(heads, head_width, state, groups, conv, **told | own)


def export_bamba(config: ModelConfig) -> dict[str, Any]:
    """See `bamba`. Both spellings of positions: the older one has no place for another share."""
    raw = _hybrid(config) | {"attn_layer_indices": _attends(config)}
    rope = _attention(config).rope or Rope(share=0.5)
    own = export_fields.rope_scaling(rope.scaling) or {"rope_type": "default"}
    own |= {"rope_theta": rope.theta, "partial_rotary_factor": rope.share}
    return raw | {"rope_scaling": None, "rope_parameters": own}


def export_falcon_h1(config: ModelConfig) -> dict[str, Any]:
    """See `falcon_h1`."""
    layer = config.layers[0]
    mixer, ffn, (state,) = layer.mixer, layer.ffn, config.mixers(Mamba2)
    assert isinstance(mixer, Parallel) and isinstance(ffn, Gated), "config_export has seen to it"
    (attention_in, state_in), (attention_out, state_out) = mixer.in_scales, mixer.out_scales
    raw = {key: value for key, value in _hybrid(config).items() if key != "mamba_expand"}
    return raw | {
        "mamba_d_ssm": state.inner_width,
        "mamba_rms_norm": state.norm_width != 0,
        "mamba_norm_before_gate": state.norms_first,
        "projectors_bias": "out" in state.biases,
        "embedding_multiplier": config.embedding_scale,
        "lm_head_multiplier": config.logit_scale,
        "key_multiplier": mixer.attention.key_scale,
        "attention_in_multiplier": attention_in,
        "attention_out_multiplier": attention_out,
        "ssm_in_multiplier": state_in,
        "ssm_out_multiplier": state_out,
        "ssm_multipliers": list(state.part_scales or (1.0,) * 5),
        "mlp_multipliers": [ffn.gate_scale, ffn.down_scale],
    }


def export_granite(config: ModelConfig) -> dict[str, Any]:
    """See `granite`."""
    own, ffn = _attention(config), config.layers[0].ffn
    kinds = ["attention" if n in _attends(config) else "mamba" for n in range(config.num_layers)]
    raw = {key: value for key, value in _hybrid(config).items() if key != "mlp_bias"} | {
        "position_embedding_type": "rope" if own.rope else "nope",
        "layer_types": kinds,
        "attention_multiplier": own.head_width**-0.5 if own.scale is None else own.scale,
        "embedding_multiplier": config.embedding_scale,
        "residual_multiplier": config.residual_scale,
        "logits_scaling": round(1 / config.logit_scale, 9),
    }
    if isinstance(ffn, Experts):
        return raw | {
            "num_local_experts": ffn.num_experts,
            "num_experts_per_tok": ffn.top_k,
            "intermediate_size": ffn.width,
            "shared_intermediate_size": ffn.shared_width,
        }
    return raw | {"num_local_experts": 0, "shared_intermediate_size": raw["intermediate_size"]}


def _attends(config: ModelConfig) -> list[int]:
    """Numbers of the layers with attention."""
    return [n for n, layer in enumerate(config.layers) if isinstance(layer.mixer, Attention)]


def _attention(config: ModelConfig) -> Attention:
    """Of the first such layer; a model without one has none to write."""
    return next(iter(config.mixers(Attention)), Attention(1, 1, config.width, rope=None))


def _hybrid(config: ModelConfig) -> dict[str, Any]:
    """What all of these families write alike, of layers of the first of each kind."""
    own, ffn = _attention(config), config.layers[0].ffn
    raw = export_fields.sizes(config, own.rope or Rope()) | export_fields.heads(own)
    if isinstance(ffn, Gated):
        raw |= {"intermediate_size": ffn.width, "mlp_bias": ffn.has_bias}
    return raw | {"attention_bias": "out" in own.biases} | export_mamba2(config)


def export_mamba2(config: ModelConfig) -> dict[str, Any]:
    """See `mamba2`."""
    mixers: list[Mamba2] = config.mixers(Mamba2)
    mixer = next(iter(mixers), Mamba2(1, 2 * config.width, 1))
    return {
        "mamba_expand": recurrent.expansion(mixer, config.width),
        "mamba_n_heads": mixer.num_heads,
        "mamba_d_head": mixer.head_width,
        "mamba_n_groups": mixer.num_groups,
        "mamba_d_state": mixer.state_width,
        "mamba_d_conv": mixer.conv_width,
        "mamba_conv_bias": "conv" in mixer.biases,
        "mamba_proj_bias": "in" in mixer.biases,
        "time_step_limit": recurrent.limits_as_json(mixer),
    }
