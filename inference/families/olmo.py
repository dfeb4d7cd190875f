"""OLMo (Groeneveld et al. 2024, arXiv 2402.00838), OLMo 2 and 3 (Ai2 2024 and 2025), OLMoE
(Muennighoff et al. 2024, arXiv 2409.02060) and FlexOlmo (Shi et al. 2025, arXiv 2507.07024).
"""

import dataclasses

from configs.kinds.attention import Attention
from configs.kinds.experts import Experts
from configs.kinds.feed_forward import Gated
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, Metadata, ModelFields
from inference.families.shared import (
    export_fields,
    fields,
    gguf_mixtures,
    gguf_names,
    gguf_rope,
    gguf_windows,
    hf_names,
    mixtures,
    rope_keys,
)
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import LAYER_EPSILON, YARN, GgufKeys

_POST_NORMED: ModelFields = {"pre_norms": False, "post_norms": True}


def _read_olmo(keys: Keys) -> ModelFields:
    """Reads the first OLMo, whose norms have neither weights nor an epsilon of the file's."""
    rope = rope_keys.read(keys)
    limit = keys.optional_number("clip_qkv")
    attention = fields.attention(keys, rope=rope, input_limit=limit)
    model = fields.model(keys.updated({"rms_norm_eps": None}), rope, attention, eps=1e-5)
    return {**model, "norm": "layer_bare"}


def _read_olmo2(keys: Keys) -> ModelFields:
    rope = rope_keys.read(keys)
    attention = fields.attention(keys, rope=rope, qk_norm="all")
    return {**fields.model(keys, rope, attention, eps=1e-5), **_POST_NORMED}


def _read_olmo3(keys: Keys) -> ModelFields:
    theta = keys.number("rope_theta", 500_000.0)
    far, close = (rope_keys.scaled(keys, stated, theta) for stated in rope_keys.by_kind(keys))
    full = fields.attention(keys, rope=far, qk_norm="all")
    window = keys.optional_integer("sliding_window", 4096)
    sliding = dataclasses.replace(full, rope=close, window=window)
    repeated = fields.types((True, True, True, False))
    mixers = fields.by_type(keys, full, sliding, repeated)
    return {**fields.model(keys, far, mixers, eps=1e-5), **_POST_NORMED}


def _read_olmoe(keys: Keys) -> ModelFields:
    rope = rope_keys.read(keys)
    limit = keys.optional_number("clip_qkv")
    attention = fields.attention(keys, rope=rope, qk_norm="all", input_limit=limit)
    width, router = keys.integer("intermediate_size", 2048), mixtures.softmax_router(keys, False)
    experts = mixtures.experts(keys, "num_experts", 64, 8, width, router)
    return fields.model(keys, rope, attention, experts, eps=1e-5)


def _read_flex_olmo(keys: Keys) -> ModelFields:
    """Reads FlexOlmo, which has OLMo 2's layers and OLMoE's mixture."""
    rope = rope_keys.read(keys, 500_000.0)
    attention = fields.attention(keys, rope=rope, qk_norm="all")
    width, router = keys.integer("intermediate_size", 11_008), mixtures.softmax_router(keys, False)
    experts = mixtures.experts(keys, "num_experts", 7, 5, width, router)
    return {**fields.model(keys, rope, attention, experts), **_POST_NORMED}


def _write_olmo(config: ModelConfig) -> dict[str, object]:
    attention, _ = export_fields.first(config)
    raw = export_fields.llama_fields(config)
    del raw["rms_norm_eps"], raw["mlp_bias"]
    return raw | {"clip_qkv": attention.input_limit}


def _write_olmo3(config: ModelConfig) -> dict[str, object]:
    """Returns the keys, with both objects of positions: transformers 5 reads the base of layers
    without a window from the older one.
    """
    raw = export_fields.llama_fields(config) | export_fields.layer_types(config)
    ropes = {mixer.window is None: mixer.rope or Rope() for mixer in config.mixers(Attention)}
    near = {"rope_type": "default", "rope_theta": raw["rope_theta"]}
    distant = export_fields.rope_scaling(ropes.get(True, Rope()).scaling)
    kinds = {"full_attention": near | (distant or {}), "sliding_attention": near}
    raw |= {"rope_scaling": distant, "rope_parameters": kinds}
    return raw if raw["sliding_window"] else raw | {"sliding_window": 4096}


def _write_olmoe(config: ModelConfig) -> dict[str, object]:
    experts, attention = mixtures.mixture(config), mixtures.attention(config)
    return mixtures.with_heads(config) | {
        "intermediate_size": experts.width,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": experts.router.is_normalized,
        "attention_bias": "out" in attention.biases,
        "clip_qkv": attention.input_limit,
    }


def _write_flex_olmo(config: ModelConfig) -> dict[str, object]:
    raw = _write_olmoe(config)
    del raw["clip_qkv"]
    return raw


_WINDOW = "attention.sliding_window"
_LIMIT = "attention.clamp_kqv"


def _gguf_olmo(keys: GgufKeys) -> ModelFields:
    limit = keys.number(_LIMIT) if keys.has(_LIMIT) else None
    return {"pattern": (keys.layer(keys.rope(), input_limit=limit),), "norm": "layer_bare"}


def _gguf_limit(config: ModelConfig) -> Metadata:
    limit = config.mixers(Attention)[0].input_limit
    return {} if limit is None else {_LIMIT: limit}


def _gguf_olmo2(keys: GgufKeys) -> ModelFields:
    """Reads OLMo 2 and, with windows, OLMo 3, which scales no positions in layers with them."""
    distant = keys.layer(keys.rope(has_yarn=True), qk_norm="all")
    olmo2: ModelFields = {"pattern": (distant,), **_POST_NORMED}
    if not keys.has(_WINDOW):
        return olmo2
    slides = keys.booleans(f"{_WINDOW}_pattern", keys.num_layers) or (True, True, True, False)
    near = Rope(keys.number("rope.freq_base", 10_000.0))
    local = keys.layer(near, qk_norm="all", window=keys.integer(_WINDOW))
    pattern = tuple(local if slide else distant for slide in slides)
    return {**olmo2, "family": "olmo3", "pattern": pattern}


def _gguf_windows(config: ModelConfig) -> Metadata:
    return gguf_windows.written(config) | gguf_rope.yarn_of(config)


def _gguf_olmoe(keys: GgufKeys) -> ModelFields:
    width = keys.integer("expert_feed_forward_length", keys.ffn_width)
    router = gguf_mixtures.read_router(keys, is_normalized=False)
    experts = gguf_mixtures.read_experts(keys, router, width)
    return {"pattern": (LayerSpec(keys.attention(keys.rope(), qk_norm="all"), experts),)}


FAMILIES = (
    Family(
        name="olmo",
        architecture="OlmoForCausalLM",
        read=_read_olmo,
        reads=("attention_bias",),
        write=_write_olmo,
        tensors=hf_names.LLAMA,
        gguf=Gguf(
            is_interleaved=True,
            readers={"olmo": GgufReader(_gguf_olmo, (_LIMIT,), epsilon=LAYER_EPSILON)},
            writer=GgufWriter("olmo", _gguf_limit),
        ),
    ),
    Family(
        name="olmo2",
        architecture="Olmo2ForCausalLM",
        read=_read_olmo2,
        reads=("attention_bias",),
        write=export_fields.llama_fields,
        tensors=hf_names.POST_NORMED,
        gguf=Gguf(
            readers={"olmo2": GgufReader(_gguf_olmo2, (*YARN, _WINDOW, f"{_WINDOW}_pattern"))},
            writer=GgufWriter("olmo2"),
        ),
    ),
    Family(
        name="olmo3",
        architecture="Olmo3ForCausalLM",
        read=_read_olmo3,
        reads=("attention_bias",),
        write=_write_olmo3,
        tensors=hf_names.POST_NORMED,
        gguf=Gguf(writer=GgufWriter("olmo2", _gguf_windows)),
    ),
    Family(
        name="olmoe",
        architecture="OlmoeForCausalLM",
        read=_read_olmoe,
        reads=("attention_bias",),
        write=_write_olmoe,
        feed_forwards=(Gated, Experts),
        tensors=hf_names.EXPERTS,
        gguf=Gguf(
            gguf_names.EXPERTS,
            readers={"olmoe": GgufReader(_gguf_olmoe, gguf_mixtures.ROUTED)},
            writer=GgufWriter("olmoe"),
        ),
    ),
    Family(
        name="flex_olmo",
        architecture="FlexOlmoForCausalLM",
        read=_read_flex_olmo,
        reads=("attention_bias", "num_local_experts"),
        write=_write_flex_olmo,
        feed_forwards=(Gated, Experts),
        tensors={
            **hf_names.EXPERTS,
            "mixer_post_norm": ("post_attention_layernorm.weight",),
            "ffn_post_norm": ("post_feedforward_layernorm.weight",),
        },
    ),
)
