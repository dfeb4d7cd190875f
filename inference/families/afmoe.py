"""Trinity (Arcee AI 2025, arXiv 2602.17004): attention with gates of each element, windows with
RoPE and all tokens without, norms on both sides, DeepSeek-V3's mixture.
"""

import dataclasses

from configs.kinds.attention import Attention
from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.model import MOST_LAYERS, LayerSpec, ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields, Table
from inference.families.shared import (
    export_fields,
    fields,
    gguf_mixtures,
    gguf_names,
    gguf_windows,
    hf_names,
    mixtures,
    rope_keys,
)
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import GgufKeys
from inference.families.shared.gguf_states import Metadata


def _read_afmoe(keys: Keys) -> ModelFields:
    keys.require_neutral(
        route_norm=(True, None), score_func=("sigmoid", None),
        **{
            key: (1, None)
            for key in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups")
        },
    )  # fmt: skip
    rope, window = rope_keys.read(keys), keys.integer("sliding_window", 1024)
    sliding = _attention(fields.attention(keys, 128, rope=rope, window=window))
    period = keys.integer("global_attn_every_n_layers", 4, limit=MOST_LAYERS)
    repeated = fields.types((n + 1) % period != 0 for n in range(period))
    mixers = fields.by_type(keys, _seeing_all(sliding), sliding, repeated)
    width = keys.integer("moe_intermediate_size", 1408)
    router = Router("sigmoid", scale=keys.number("route_scale", 1.0), has_offsets=True)
    experts = mixtures.experts(
        keys, "num_experts", 64, 6, width, router,
        shared_width=width * keys.whole("num_shared_experts", 2),
    )  # fmt: skip
    dense = keys.whole("num_dense_layers", 1, limit=MOST_LAYERS)
    ffns = mixtures.by_layer(keys, experts, lambda layer: layer >= dense)
    model = fields.model(keys, rope, mixers, ffns, eps=1e-5)
    is_scaled = keys.boolean("mup_enabled", False)
    return {
        **model,
        "post_norms": True,
        "embedding_scale": model["width"] ** 0.5 if is_scaled else 1,
    }


def _attention(heads: Attention) -> Attention:
    return dataclasses.replace(heads, qk_norm="head", head_gate="sigmoid", gates_elements=True)


def _seeing_all(sliding: Attention) -> Attention:
    return dataclasses.replace(sliding, rope=None, window=None)


def _write_afmoe(config: ModelConfig) -> dict[str, object]:
    experts, dense = mixtures.mixture(config), mixtures.dense_layers(config)
    rope = next((mixer.rope for mixer in config.mixers(Attention) if mixer.rope), None)
    positions = export_fields.sizes(config, rope) if rope else {}
    return mixtures.with_heads(config) | positions | export_fields.layer_types(config) | {
        "attention_bias": "out" in mixtures.attention(config).biases,
        "intermediate_size": dense[min(dense)].width if dense else experts.width,
        "moe_intermediate_size": experts.width,
        "num_dense_layers": len(dense),
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "num_shared_experts": experts.shared_width // experts.width,
        "route_norm": True,
        "route_scale": experts.router.scale,
        "score_func": "sigmoid",
        "mup_enabled": config.embedding_scale != 1,
    }  # fmt: skip


_WINDOW = "attention.sliding_window"


def _gguf_afmoe(keys: GgufKeys) -> ModelFields:
    """Reads Trinity, of which llama.cpp knows that every fourth layer has no window, and the scale
    of embeddings.
    """
    router = gguf_mixtures.read_router(keys, is_normalized=True, scores="sigmoid")
    router = dataclasses.replace(router, group_best=1)
    sliding = _attention(keys.attention(keys.rope(), window=keys.integer(_WINDOW)))
    ffns = gguf_mixtures.feed_forwards(keys, router, keys.num_layers)
    layers = tuple(
        LayerSpec(sliding if number % 4 else _seeing_all(sliding), ffn)
        for number, ffn in enumerate(ffns, 1)
    )
    scale = keys.integer("embedding_length") ** 0.5
    return {"pattern": layers, "post_norms": True, "embedding_scale": scale}


def _gguf_window(config: ModelConfig) -> Metadata:
    return {_WINDOW: gguf_windows.window(config)}


_TENSORS: Table = {
    **hf_names.SHARED_EXPERTS,
    "mixer/gate": ("self_attn.gate_proj.weight",),
    "mixer_post_norm": ("post_attention_layernorm.weight",),
    "ffn_norm": ("pre_mlp_layernorm.weight",),
    "ffn_post_norm": ("post_mlp_layernorm.weight",),
    "ffn/router": ("mlp.router.gate.weight",),
    "ffn/router_offsets": ("mlp.expert_bias",),
}
FAMILIES = (
    Family(
        name="afmoe",
        architecture="AfmoeForCausalLM",
        read=_read_afmoe,
        reads=("attention_bias",),
        write=_write_afmoe,
        feed_forwards=(Gated, Experts),
        tensors=_TENSORS,
        gguf=Gguf(
            {**gguf_names.EXPERTS, "mixer/gate": ("attn_gate.weight",)},
            readers={"afmoe": GgufReader(_gguf_afmoe, (*gguf_mixtures.DENSE, _WINDOW))},
            writer=GgufWriter("afmoe", _gguf_window),
        ),
    ),
)
