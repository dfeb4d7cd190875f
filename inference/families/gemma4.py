"""Gemma 4 (Google DeepMind 2026), the part that reads and writes text."""

import dataclasses

from configs.errors import InputError, shown
from configs.kinds.attention import Attention, sharing
from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.kinds.kind import FeedForward
from configs.kinds.layer_inputs import LayerInputs
from configs.kinds.rope import Proportional, Rope
from configs.model import LayerSpec, ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields, Table
from inference.families.shared import (
    export_fields,
    fields,
    gguf_names,
    gguf_rope,
    gguf_windows,
    hf_names,
    rope_keys,
)
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import GgufKeys
from inference.families.shared.gguf_states import Metadata

# Key of the rows of a table, of which only those of tokens are read.
_NUM_ROWS = "vocab_size_per_layer_input"
_INPUTS = "hidden_size_per_layer_input"
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


def _read_gemma4(keys: Keys) -> ModelFields:
    """Reads the text part; of `use_bidirectional_attention`, only 'all' changes text."""
    keys.require_neutral(use_bidirectional_attention=(None, False, "vision"))
    sizes = fields.llama_fields(keys, tied=True)
    num_layers = sizes["num_layers"]
    num_shared = keys.whole("num_kv_shared_layers", 0, limit=num_layers)
    mixers = sharing(_mixers(keys, num_layers), num_shared)
    inputs = _inputs_width(keys, sizes["vocab_size"])
    return {
        **sizes,
        "max_context": keys.integer("max_position_embeddings", 131_072),
        "pattern": fields.pattern(mixers, _ffns(keys, num_layers, num_layers - num_shared)),
        "post_norms": True,
        "logit_cap": keys.optional_number("final_logit_softcapping"),
        "embedding_scale": sizes["width"] ** 0.5,
        "layer_inputs": LayerInputs(inputs, _activation(keys)) if inputs else None,
        "has_layer_scales": True,
    }


def _read_unified(keys: Keys) -> ModelFields:
    """Reads the text part of Gemma 4 12B, whose layers have no inputs of their own."""
    keys = keys.with_defaults(
        {"sliding_window": 1024, "max_position_embeddings": 262_144, _INPUTS: 0}
    )
    keys.require_neutral(enable_moe_block=(False, None), **{_INPUTS: (0, None)})
    return _read_gemma4(keys)


def _mixers(keys: Keys, num_layers: int) -> list[Attention]:
    """Returns each layer's attention, before layers share keys and values."""
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
    return [_resized(stated, layer, mixer) for layer, mixer in enumerate(mixers)]


def _wider(keys: Keys, full: Attention) -> Attention:
    kv_heads = full.num_kv_heads
    if not full.has_values:
        kv_heads = keys.integer("num_global_key_value_heads", kv_heads)
    return dataclasses.replace(
        full, head_width=keys.integer("global_head_dim", 512), num_kv_heads=kv_heads
    )


def _resized(stated: Keys, layer: int, mixer: Attention) -> Attention:
    keys = stated.nested(str(layer)) or Keys({}, stated.label)
    valid = "head_dim", "num_key_value_heads"
    if unknown := sorted(keys.raw.keys() - set(valid)):
        raise InputError(f"{keys.label}{shown(unknown[0])} is not supported; valid: {valid}")
    return dataclasses.replace(
        mixer,
        head_width=keys.integer("head_dim", mixer.head_width),
        num_kv_heads=keys.integer("num_key_value_heads", mixer.num_kv_heads),
    )


def _rope(keys: Keys, kind: str) -> Rope:
    by_kind = keys.nested("rope_parameters")
    stated = by_kind and by_kind.nested(kind)
    stated = stated or Keys(_ROPE[kind], f"rope_parameters: {kind}: ")
    return rope_keys.scaled(keys, stated, 10_000.0)


def _ffns(keys: Keys, num_layers: int, first_shared: int) -> list[FeedForward]:
    width, activation = keys.integer("intermediate_size", 9216), _activation(keys)
    is_wide = keys.boolean("use_double_wide_mlp", False)
    widths = [width * (1 + (is_wide and n >= first_shared)) for n in range(num_layers)]
    if keys.boolean("enable_moe_block", False):
        return [_experts(keys, width, activation) for width in widths]
    return [Gated(width, activation) for width in widths]


def _experts(keys: Keys, dense: int, activation: str) -> Experts:
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
    """Returns the elements of a token for each layer; 0: there are none."""
    width = 0 if keys.raw.get(_INPUTS, 256) is None else keys.whole(_INPUTS, 256)
    rows = keys.integer(_NUM_ROWS, 262_144)
    if width and rows < vocab_size:
        raise InputError(
            f"{_NUM_ROWS}={rows} is not supported: tokens from there to vocab_size={vocab_size} "
            "have no inputs of layers, and transformers fails on them"
        )
    return width


def _write_gemma4(config: ModelConfig) -> dict[str, object]:
    windows = [config.stored_by(layer).window for layer in range(config.num_layers)]
    far, near = _makers(config)
    first, last = config.layers[0].ffn, config.layers[-1].ffn
    sizes = export_fields.sizes(config, Rope())
    del sizes["hidden_act"], sizes["rope_theta"], sizes["rope_scaling"]
    return sizes | export_fields.heads(near) | _ffn(first, last) | {
        "global_head_dim": far.head_width,
        "num_global_key_value_heads": None if far.has_values else far.num_kv_heads,
        "attention_k_eq_v": not far.has_values,
        "attention_bias": "out" in near.biases,
        "sliding_window": near.window or 512,
        "layer_types": fields.types(window is not None for window in windows),
        "rope_parameters": {_GLOBAL: _stated(far.rope), _LOCAL: _stated(near.rope)},
        "num_kv_shared_layers": _num_shared(config),
        _INPUTS: config.layer_inputs.width if config.layer_inputs else 0,
        _NUM_ROWS: config.vocab_size,
        "final_logit_softcapping": config.logit_cap,
        "use_bidirectional_attention": None,
    }  # fmt: skip


def _makers(config: ModelConfig) -> tuple[Attention, Attention]:
    """Returns attention with a cache of its own: without a window, and with one."""
    mixers = [mixer for mixer in config.mixers(Attention) if mixer.owner is None]
    far = next((mixer for mixer in mixers if mixer.window is None), mixers[0])
    return far, next((mixer for mixer in mixers if mixer.window is not None), far)


def _num_shared(config: ModelConfig) -> int:
    return sum(spec.owner is not None for spec in config.cache_specs)


def _write_unified(config: ModelConfig) -> dict[str, object]:
    raw = _write_gemma4(config)
    for key in (_INPUTS, _NUM_ROWS, "enable_moe_block"):  # which transformers' class has not
        del raw[key]
    return raw


def _ffn(first: FeedForward | None, last: FeedForward | None) -> dict[str, object]:
    widths = _width(first), _width(last)
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


def _width(ffn: FeedForward | None) -> int:
    """Returns the width of what every token visits."""
    return ffn.shared_width if isinstance(ffn, Experts) else getattr(ffn, "width", 0)


def _stated(rope: Rope | None) -> dict[str, object]:
    rope = rope or Rope()
    scaling = export_fields.rope_scaling(rope.scaling) or {"rope_type": "default"}
    return scaling | {"rope_theta": rope.theta}


_NEVER = 1e20  # least divisor of the frequency of a pair that does not rotate
_GGUF_KEYS = (
    *(*gguf_windows.KEYS, "attention.shared_kv_layers", "final_logit_softcapping"),
    *("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"),
    *(gguf_rope.NEAR_THETA, "embedding_length_per_layer_input"),
    *("expert_count", "expert_used_count", "expert_feed_forward_length"),
)


def _gguf_gemma4(keys: GgufKeys) -> ModelFields:
    num_shared = keys.whole("attention.shared_kv_layers", limit=keys.num_layers)
    mixers = sharing(_gguf_mixers(keys), num_shared)
    inputs = keys.whole("embedding_length_per_layer_input")
    cap = "final_logit_softcapping"
    return {
        "pattern": tuple(map(LayerSpec, mixers, _gguf_ffns(keys))),
        "post_norms": True,
        "logit_cap": keys.number(cap) if keys.has(cap) else None,
        "embedding_scale": keys.integer("embedding_length") ** 0.5,
        "layer_inputs": LayerInputs(inputs) if inputs else None,
        "has_layer_scales": True,
    }


def _gguf_mixers(keys: GgufKeys) -> list[Attention]:
    heads = keys.integer("attention.head_count")
    kv_heads = keys.integers("attention.head_count_kv", keys.num_layers)
    slides = gguf_windows.slides(keys, keys.num_layers)
    near = gguf_rope.near(keys)
    near_width = keys.integer("attention.key_length_swa", keys.head_width)
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if keys.integer(key, near_width) != near_width:
            raise InputError(f"{keys.architecture}.{key} differs from the head width {near_width}")
    far, mixers = _gguf_distant(keys), []
    window = keys.integer(gguf_windows.WINDOW)
    for layer, (slide, kv) in enumerate(zip(slides, kv_heads, strict=True)):
        width, rope = (near_width, near) if slide else (keys.head_width, far)
        mixers.append(
            Attention(
                heads, kv, width, rope, window if slide else None, qk_norm="head",
                has_value_norm=True, scale=1.0,
                has_values=slide or keys.has_tensor(f"blk.{layer}.attn_v.weight"),
            )
        )  # fmt: skip
    return mixers


def _gguf_distant(keys: GgufKeys) -> Rope:
    """Reads the RoPE of layers without a window: frequency divisors give the rotating pairs."""
    theta = keys.number("rope.freq_base", 1_000_000.0)
    shape = keys.shapes.get(gguf_names.ROPE_FACTORS)
    if shape is None:
        raise InputError(f"tensor {gguf_names.ROPE_FACTORS!r} is missing")
    pairs = keys.head_width // 2
    if shape != (pairs,):
        raise InputError(f"{gguf_names.ROPE_FACTORS!r} is {list(shape)}; expected [{pairs}]")
    divisors = keys.read_numbers(gguf_names.ROPE_FACTORS)
    rotating = int((divisors == 1).sum())
    is_prefix = (divisors[:rotating] == 1).all() and not (divisors[rotating:] < _NEVER).any()
    if not rotating or not is_prefix:
        raise InputError(
            f"{gguf_names.ROPE_FACTORS!r} is not supported: pairs that rotate come first, with "
            "divisors of 1"
        )
    return Rope(theta, Proportional(rotating / pairs))


def _gguf_ffns(keys: GgufKeys) -> list[FeedForward]:
    widths = keys.integers("feed_forward_length", keys.num_layers)
    if not keys.whole("expert_count"):
        return [Gated(width, "gelu_tanh") for width in widths]
    experts = Experts(
        keys.integer("expert_count"),
        keys.integer("expert_used_count"),
        keys.integer("expert_feed_forward_length"),
        Router(has_norm=True, has_factors=True),
        shared_width=widths[0],
        activation="gelu_tanh",
        has_norms=True,
    )
    return [dataclasses.replace(experts, shared_width=width) for width in widths]


def _gguf_metadata(config: ModelConfig) -> Metadata:
    far, near = _makers(config)
    mixers = [export_fields.attention(layer) for layer in config.layers]
    metadata: Metadata = {
        **gguf_windows.written(config),
        **gguf_rope.near_of(config),
        "feed_forward_length": [_width(layer.ffn) for layer in config.layers],
        "attention.head_count_kv": [mixer.num_kv_heads for mixer in mixers],
        "attention.shared_kv_layers": _num_shared(config),
        "embedding_length_per_layer_input": config.layer_inputs.width if config.layer_inputs else 0,
    }
    for ending, mixer in (("", far), ("_swa", near)):
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            metadata[f"{key}{ending}"] = mixer.head_width
    if config.logit_cap is not None:
        metadata["final_logit_softcapping"] = config.logit_cap
    return metadata


_TENSORS: Table = {
    **hf_names.POST_NORMED,
    "inputs/table": ("model.embed_tokens_per_layer.weight",),
    "inputs/projection": ("model.per_layer_model_projection.weight",),
    "inputs/projection_norm": ("model.per_layer_projection_norm.weight",),
    "inputs/gate": ("per_layer_input_gate.weight",),
    "inputs/out": ("per_layer_projection.weight",),
    "inputs/norm": ("post_per_layer_input_norm.weight",),
    "scale": ("layer_scalar",),
    "mixer/qk": ("self_attn.q_proj.weight", "self_attn.k_proj.weight"),
    "mixer/q": ("self_attn.q_proj.weight",),
    "ffn/router": ("router.proj.weight",),
    "ffn/router_norm": ("router.scale",),
    "ffn/router_factors": ("router.per_expert_scale",),
    "ffn/experts/gate_up": ("experts.gate_up_proj",),
    "ffn/experts/down": ("experts.down_proj",),
    "ffn/experts_norm": ("pre_feedforward_layernorm_2.weight",),
    "ffn/experts_post_norm": ("post_feedforward_layernorm_2.weight",),
    "ffn/shared/gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "ffn/shared/down": ("mlp.down_proj.weight",),
    "ffn/shared_norm": ("pre_feedforward_layernorm.weight",),
    "ffn/shared_post_norm": ("post_feedforward_layernorm_1.weight",),
}
_GGUF: Table = {
    **gguf_names.EXPERTS,
    "inputs/table": ("per_layer_token_embd.weight",),
    "inputs/projection": ("per_layer_model_proj.weight",),
    "inputs/projection_norm": ("per_layer_proj_norm.weight",),
    "inputs/gate": ("inp_gate.weight",),
    "inputs/out": ("proj.weight",),
    "inputs/norm": ("post_norm.weight",),
    "scale": ("layer_output_scale.weight",),
    "mixer/qk": ("attn_q.weight", "attn_k.weight"),
    "mixer/q": ("attn_q.weight",),
    "ffn/router_norm": ("ffn_gate_inp.scale",),
    "ffn/router_factors": ("ffn_down_exps.scale",),
    "ffn/experts_norm": ("pre_ffw_norm_2.weight",),
    "ffn/experts_post_norm": ("post_ffw_norm_2.weight",),
    "ffn/shared/gate_up": ("ffn_gate.weight", "ffn_up.weight"),
    "ffn/shared/down": ("ffn_down.weight",),
    "ffn/shared_norm": ("ffn_norm.weight",),
    "ffn/shared_post_norm": ("post_ffw_norm_1.weight",),
}
FAMILIES = (
    Family(
        name="gemma4",
        architecture="Gemma4ForCausalLM",
        model_type="gemma4_text",
        read=_read_gemma4,
        reads=("attention_bias", "final_logit_softcapping", "use_bidirectional_attention"),
        write=_write_gemma4,
        feed_forwards=(Gated, Experts),
        tensors=_TENSORS,
        wrapper="Gemma4ForConditionalGeneration",
        ignored=tuple(
            f"model.{part}"
            for part in ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
        ),
        rows_key=_NUM_ROWS,
        gguf=Gguf(
            _GGUF,
            readers={"gemma4": GgufReader(_gguf_gemma4, _GGUF_KEYS)},
            writer=GgufWriter("gemma4", _gguf_metadata),
        ),
    ),
    Family(
        name="gemma4_unified",
        architecture="Gemma4UnifiedForCausalLM",
        model_type="gemma4_unified_text",
        read=_read_unified,
        reads=("attention_bias", "final_logit_softcapping", "use_bidirectional_attention"),
        write=_write_unified,
        tensors=_TENSORS,
        wrapper="Gemma4UnifiedForConditionalGeneration",
        ignored=("model.embed_vision", "model.embed_audio", "model.vision_embedder"),
        gguf=Gguf(_GGUF, writer=GgufWriter("gemma4", _gguf_metadata, read_as="gemma4")),
    ),
)
