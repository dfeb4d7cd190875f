"""K-EXAONE (LG AI Research 2026, arXiv 2601.01739): Qwen3's attention, which sees all without
positions or a window with them, and DeepSeek-V3's mixture; without the layer that predicts a second
token.
"""

import dataclasses

from configs.errors import InputError, shown
from configs.kinds.attention import Attention
from configs.kinds.experts import Experts
from configs.kinds.feed_forward import Gated
from configs.kinds.kind import FeedForward
from configs.model import MOST_LAYERS, LayerSpec, ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields
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


def _read_exaone_moe(keys: Keys) -> ModelFields:
    rope, window = rope_keys.read(keys), keys.optional_integer("sliding_window", 4096)
    attention = fields.attention(keys, rope=rope, qk_norm="head")
    mixers = fields.by_type(keys, *_kinds(attention, window), _repeated(keys, window))
    width = keys.integer("moe_intermediate_size", 1024)
    router = mixtures.offset_router(keys, 2.5, 1, 1)
    experts = mixtures.experts(
        keys, "num_experts", 64, 8, width, router,
        shared_width=width * keys.whole("num_shared_experts", 1),
    )  # fmt: skip
    return fields.model(keys, rope, mixers, _ffns(keys, experts), eps=1e-5)


def _kinds(attention: Attention, window: int | None) -> tuple[Attention, Attention]:
    """Returns the attention that sees all tokens, without positions where others have a window, and
    the other one.
    """
    full = attention if window is None else dataclasses.replace(attention, rope=None)
    return full, dataclasses.replace(attention, window=window)


def _repeated(keys: Keys, window: int | None) -> list[str]:
    """Returns the kinds by `sliding_window_pattern`: letters, L with a window and G without, or how
    often a layer has none.
    """
    pattern, layers = keys.raw.get("sliding_window_pattern"), fields.num_layers(keys)
    if window is None:
        return ["full_attention"]
    if isinstance(pattern, str):
        if not pattern or not set(pattern) <= set("LG"):
            raise InputError(
                f"sliding_window_pattern has letters L and G, or is a number, not {shown(pattern)}"
            )
        last = layers - 1  # which sees all
        return fields.types(pattern[n % len(pattern)] == "L" and n < last for n in range(layers))
    period = keys.integer("sliding_window_pattern", 4, limit=MOST_LAYERS)
    return fields.types((n + 1) % period != 0 for n in range(period))


def _ffns(keys: Keys, experts: Experts) -> list[FeedForward]:
    """Returns each layer's feed-forward by one of three keys, the first of which wins."""
    if listed := mixtures.by_mlp_types(keys, experts):
        return listed
    is_mixture = keys.listed("is_moe_layer", fields.num_layers(keys))
    if is_mixture is None:
        return mixtures.after_dense(keys, experts, first_dense=1)
    if any(type(value) is not bool for value in is_mixture):
        raise InputError("is_moe_layer lists true or false for each layer")
    return mixtures.by_layer(keys, experts, lambda layer: bool(is_mixture[layer]))


def _write_exaone_moe(config: ModelConfig) -> dict[str, object]:
    experts, raw = mixtures.mixture(config), mixtures.routed(config)
    del raw["n_routed_experts"], raw["n_shared_experts"], raw["first_k_dense_replace"]
    rope = next((mixer.rope for mixer in config.mixers(Attention) if mixer.rope), None)
    positions = export_fields.sizes(config, rope) if rope else {}
    return mixtures.with_heads(config) | positions | raw | export_fields.layer_types(config) | {
        "num_experts": experts.num_experts,
        "num_shared_experts": experts.shared_width // experts.width,
        "mlp_layer_types": mixtures.mlp_types(config),
    }  # fmt: skip


def _gguf_exaone_moe(keys: GgufKeys) -> ModelFields:
    """Reads K-EXAONE, except its last block, which predicts a second token."""
    extra = keys.whole("nextn_predict_layers", limit=keys.num_layers - 1)
    attention = keys.attention(keys.rope(), qk_norm="head")
    full, sliding = _kinds(attention, keys.integer(gguf_windows.WINDOW))
    router = gguf_mixtures.read_router(keys, is_normalized=True, scores="sigmoid")
    count = keys.num_layers - extra
    mixers = [sliding if near else full for near in gguf_windows.slides(keys, count)]
    ffns = gguf_mixtures.feed_forwards(keys, router, count)
    return {"num_layers": count, "pattern": tuple(map(LayerSpec, mixers, ffns))}


FAMILIES = (
    Family(
        name="exaone_moe",
        architecture="ExaoneMoeForCausalLM",
        spellings=("ExaoneMoEForCausalLM",),
        read=_read_exaone_moe,
        write=_write_exaone_moe,
        feed_forwards=(Gated, Experts),
        tensors={
            **hf_names.SHARED_EXPERTS,
            "ffn/router_offsets": ("mlp.e_score_correction_bias",),
        },
        predictor="mtp.",
        listed=("layer_types", "mlp_layer_types"),
        gguf=Gguf(
            gguf_names.EXPERTS,
            readers={
                "exaone-moe": GgufReader(
                    _gguf_exaone_moe,
                    (*gguf_mixtures.DENSE, *gguf_windows.KEYS, "nextn_predict_layers"),
                )
            },
            writer=GgufWriter("exaone-moe", gguf_windows.written),
        ),
    ),
)
