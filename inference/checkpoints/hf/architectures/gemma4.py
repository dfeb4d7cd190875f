"""Gemma 4 (Google DeepMind 2026), the part that reads and writes text."""

import dataclasses
from typing import Any

from configs.errors import InputError, shown
from configs.kinds.attention import Attention, sharing
from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.kinds.kind import FeedForward
from configs.kinds.layer_inputs import LayerInputs
from configs.kinds.rope import Rope
from configs.model import ModelConfig
from inference.checkpoints.hf.architectures import export_fields, fields, rope_keys
from inference.checkpoints.hf.architectures.config_keys import Keys

# Keys that are refused elsewhere, and read here.
READS = ("attention_bias", "final_logit_softcapping", "use_bidirectional_attention")
# A table may have more rows than there are tokens, which are not read.
NUM_ROWS = "vocab_size_per_layer_input"
_ACTIVATION = {"gelu_pytorch_tanh": "gelu_tanh"}
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_ROPE = {
    _GLOBAL: {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
    _LOCAL: {"rope_type": "default", "rope_theta": 10_000.0},
}


def build(keys: Keys, name: str) -> ModelConfig:
    """Its model. Images are not read, so that of `use_bidirectional_attention` only 'all' says
    something of text.
    """
    keys.require_neutral({"use_bidirectional_attention": (None, False, "vision")})
    own = fields.llama_fields(keys, name, "gemma4", tied=True)
    width, num_layers = own["width"], own["num_layers"]
    num_shared = keys.whole("num_kv_shared_layers", 0, limit=num_layers)
    mixers = sharing(_mixers(keys, num_layers), num_shared)
    inputs = _inputs_width(keys, own["vocab_size"])
    return ModelConfig(
        **own,
        max_context=keys.integer("max_position_embeddings", 131_072),
        pattern=fields.pattern(mixers, _ffns(keys, num_layers, num_layers - num_shared)),
        post_norms=True,
        logit_cap=keys.optional_number("final_logit_softcapping"),
        embedding_scale=width**0.5,
        layer_inputs=LayerInputs(inputs, _activation(keys)) if inputs else None,
        has_layer_scales=True,
    )


def _mixers(keys: Keys, num_layers: int) -> list[Attention]:
    """Before any of them shares."""
    base = fields.attention(keys, 256, qk_norm="head", has_value_norm=True, scale=1.0)
    full = dataclasses.replace(
        base, rope=_rope(keys, _GLOBAL), has_values=not keys.boolean("attention_k_eq_v", False)
    )
    window = keys.integer("sliding_window", 512)
    local = dataclasses.replace(base, rope=_rope(keys, _LOCAL), window=window)
    slides = ((layer + 1) % 6 != 0 for layer in range(num_layers))
    mixers = fields.by_type(keys, full, local, fields.types(slides))
    mixers[-1] = full  # whatever is listed
    stated = keys.nested("per_layer_config")
    if stated is None:  # as transformers wrote it at first
        return [_wider(keys, mixer) if mixer == full else mixer for mixer in mixers]
    return [_own(stated, layer, mixer) for layer, mixer in enumerate(mixers)]


def _wider(keys: Keys, full: Attention) -> Attention:
    """A layer without a window."""
    kv_heads = full.num_kv_heads
    if not full.has_values:
        kv_heads = keys.integer("num_global_key_value_heads", kv_heads)
    return dataclasses.replace(
        full, head_width=keys.integer("global_head_dim", 512), num_kv_heads=kv_heads
    )


def _own(stated: Keys, layer: int, mixer: Attention) -> Attention:
    """A layer with what is stated of it alone."""
    own = stated.nested(str(layer)) or Keys({}, stated.label)
    known = "head_dim", "num_key_value_heads"
    if unknown := sorted(own.raw.keys() - set(known)):
        raise InputError(f"{own.label}{shown(unknown[0])} is not supported; valid: {known}")
    return dataclasses.replace(
        mixer,
        head_width=own.integer("head_dim", mixer.head_width),
        num_kv_heads=own.integer("num_key_value_heads", mixer.num_kv_heads),
    )


def _rope(keys: Keys, kind: str) -> Rope:
    stated = keys.nested("rope_parameters")
    own = stated and stated.nested(kind)
    own = own or Keys(_ROPE[kind], f"rope_parameters: {kind}: ")
    return rope_keys.scaled(keys, own, 10_000.0)


def _ffns(keys: Keys, num_layers: int, first_shared: int) -> list[FeedForward]:
    width, activation = keys.integer("intermediate_size", 9216), _activation(keys)
    is_wide = keys.boolean("use_double_wide_mlp", False)
    has_experts = keys.boolean("enable_moe_block", False)
    found: list[FeedForward] = []
    for layer in range(num_layers):
        own = width * (2 if is_wide and layer >= first_shared else 1)
        if has_experts:
            found.append(_experts(keys, own, activation))
        else:
            found.append(Gated(own, activation))
    return found


def _experts(keys: Keys, dense: int, activation: str) -> Experts:
    """The mixture beside a dense feed-forward."""
    num_experts, top_k = keys.integer("num_experts"), keys.integer("top_k_experts")
    if top_k > num_experts:
        raise InputError(f"top_k_experts={top_k} is more than num_experts={num_experts}")
    width = keys.integer("moe_intermediate_size")
    return Experts(
        num_experts, top_k, width, Router(has_norm=True, has_factors=True), shared_width=dense,
        activation=activation, has_norms=True,
    )  # fmt: skip


def _activation(keys: Keys) -> str:
    return keys.choice("hidden_activation", _ACTIVATION, "gelu_pytorch_tanh")


def _inputs_width(keys: Keys, vocab_size: int) -> int:
    """Elements of a token for each layer; 0: there are none."""
    name = "hidden_size_per_layer_input"
    width = 0 if keys.raw.get(name, 256) is None else keys.whole(name, 256)
    rows = keys.integer(NUM_ROWS, 262_144)
    if width and rows < vocab_size:
        raise InputError(
            f"{NUM_ROWS}={rows} is not supported: tokens from there to vocab_size={vocab_size} "
            "have no inputs of layers, and transformers fails on them"
        )
    return width


def export(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `build`, by the keys of published files."""
    windows = [config.stored_by(layer).window for layer in range(config.num_layers)]
    mixers = [export_fields.attention(layer) for layer in config.layers]
    makers = [mixer for mixer in mixers if mixer.owner is None]
    far = next((mixer for mixer in makers if mixer.window is None), makers[0])
    near = next((mixer for mixer in makers if mixer.window is not None), far)
    first, last = config.layers[0].ffn, config.layers[-1].ffn
    sizes = export_fields.sizes(config, Rope())
    for key in ("hidden_act", "rope_theta", "rope_scaling"):
        del sizes[key]
    return sizes | export_fields.heads(near) | _ffn(first, last) | {
        "global_head_dim": far.head_width,
        "num_global_key_value_heads": None if far.has_values else far.num_kv_heads,
        "attention_k_eq_v": not far.has_values,
        "attention_bias": "out" in near.biases,
        "sliding_window": near.window or 512,
        "layer_types": fields.types(window is not None for window in windows),
        "rope_parameters": {_GLOBAL: _stated(far.rope), _LOCAL: _stated(near.rope)},
        "num_kv_shared_layers": len(mixers) - len(makers),
        "hidden_size_per_layer_input": config.layer_inputs.width if config.layer_inputs else 0,
        NUM_ROWS: config.vocab_size,
        "final_logit_softcapping": config.logit_cap,
        "use_bidirectional_attention": None,
    }  # fmt: skip


def _ffn(first: FeedForward | None, last: FeedForward | None) -> dict[str, Any]:
    widths = [
        ffn.shared_width if isinstance(ffn, Experts) else getattr(ffn, "width", 0)
        for ffn in (first, last)
    ]
    raw = {
        "intermediate_size": widths[0],
        "hidden_activation": "gelu_pytorch_tanh",
        "use_double_wide_mlp": widths[1] == 2 * widths[0],
        "enable_moe_block": isinstance(first, Experts),
    }
    if isinstance(first, Experts):
        raw |= {
            "num_experts": first.num_experts,
            "top_k_experts": first.top_k,
            "moe_intermediate_size": first.width,
        }
    return raw


def _stated(rope: Rope | None) -> dict[str, Any]:
    rope = rope or Rope()
    scaling = export_fields.rope_scaling(rope.scaling) or {"rope_type": "default"}
    return scaling | {"rope_theta": rope.theta}
