"""Writes the keys of `config.json` that many families share."""

from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated, Plain
from configs.kinds.rope import Dynamic, Linear, Llama3, LongRope, Proportional, Rope, Scaling, Yarn
from configs.model import LayerSpec, ModelConfig
from inference.families.shared import fields

_SCALINGS = {Linear: "linear", Dynamic: "dynamic", Llama3: "llama3", Yarn: "yarn"}
# Fields with the names of their keys.
_STATED: dict[type[Scaling], tuple[str, ...]] = {
    Llama3: ("low_freq_factor", "high_freq_factor"),
    Yarn: ("beta_fast", "beta_slow", "truncate"),
}


def attention(layer: LayerSpec) -> Attention:
    """Returns the attention of a layer, in families that have no other mixer."""
    assert isinstance(layer.mixer, Attention), "config_export checks the kinds"
    return layer.mixer


def first(config: ModelConfig) -> tuple[Attention, Gated | Plain]:
    """Returns the parts of the first layer, for keys that all layers share."""
    ffn = config.layers[0].ffn
    assert isinstance(ffn, Gated | Plain), "config_export checks the kinds"
    return attention(config.layers[0]), ffn


def llama_fields(config: ModelConfig) -> dict[str, object]:
    """Returns the keys that all of Llama's relatives share."""
    attention, ffn = first(config)
    rope = next((mixer.rope for mixer in config.mixers(Attention) if mixer.rope), Rope())
    return {
        **sizes(config, rope),
        **heads(attention),
        "intermediate_size": ffn.width,
        "attention_bias": "out" in attention.biases,
        "mlp_bias": ffn.has_bias,
    }


def plain_activation(activation: str) -> str:
    """Returns transformers' name of a plain feed-forward's activation."""
    return {"gelu_tanh": "gelu_new"}.get(activation, activation)


def layer_normed(config: ModelConfig, key: str = "layer_norm_eps") -> dict[str, object]:
    """Returns `llama_fields` of a model with layer norms, whose epsilon has this key."""
    raw = llama_fields(config)
    del raw["rms_norm_eps"], raw["mlp_bias"]
    return raw | {key: config.norm_eps}


def sizes(config: ModelConfig, rope: Rope) -> dict[str, object]:
    """Returns the keys of the whole model and of its positions."""
    longest, scaling = config.max_context, rope.scaling
    if isinstance(scaling, Dynamic):  # stretched from the length that the file states
        longest = scaling.original_context
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": longest,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "rope_theta": rope.theta,
        "rope_scaling": rope_scaling(scaling),
    }


def heads(attention: Attention) -> dict[str, object]:
    """Returns the keys of attention's heads."""
    return {
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_width,
    }


def layer_types(config: ModelConfig) -> dict[str, object]:
    """Returns the keys of the layers' windows."""
    windows = [attention(layer).window for layer in config.layers]
    return {
        "layer_types": fields.types(window is not None for window in windows),
        "sliding_window": max(filter(None, windows), default=None),
    }


def ropes_by_kind(config: ModelConfig, **defaults: Rope) -> dict[str, object]:
    """Returns the objects that describe the positions of layers without a window and of those with
    one, by their first ones; `defaults` (`full_attention`, `sliding_attention`) where none is.
    """
    ropes = dict(defaults)
    for mixer in reversed(config.mixers(Attention)):
        if mixer.rope is not None:
            ropes["full_attention" if mixer.window is None else "sliding_attention"] = mixer.rope
    return {
        kind: {"rope_theta": rope.theta, "partial_rotary_factor": rope.share}
        | (rope_scaling(rope.scaling) or {"rope_type": "default"})
        for kind, rope in ropes.items()
    }


def rope_scaling(scaling: Scaling | None) -> dict[str, object] | None:
    """Returns the object that says how positions are scaled; None: they are not."""
    if scaling is None:
        return None
    if isinstance(scaling, LongRope):
        return {
            "rope_type": "longrope",
            "short_factor": list(scaling.short),
            "long_factor": list(scaling.long),
            "original_max_position_embeddings": scaling.original_context,
            "attention_factor": scaling.attention_factor,
        }
    if isinstance(scaling, Proportional):
        factor = {"factor": scaling.factor} if scaling.factor != 1 else {}
        return {"rope_type": "proportional", "partial_rotary_factor": scaling.share} | factor
    raw: dict[str, object] = {"rope_type": _SCALINGS[type(scaling)], "factor": scaling.factor}
    raw |= {key: getattr(scaling, key) for key in _STATED.get(type(scaling), ())}
    if isinstance(scaling, Yarn) and scaling.attention_factor is not None:
        raw |= {"attention_factor": scaling.attention_factor}
    if isinstance(scaling, Llama3 | Yarn):
        raw |= {"original_max_position_embeddings": scaling.original_context}
    return raw
