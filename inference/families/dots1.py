"""dots.llm1 (Huo et al. 2025, arXiv 2506.05767): Qwen3's attention, DeepSeek-V3's mixture."""

import dataclasses

from configs.kinds.experts import Experts
from configs.kinds.feed_forward import Gated
from configs.model import MOST_LAYERS, ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields
from inference.families.shared import (
    export_fields,
    fields,
    gguf_mixtures,
    gguf_names,
    hf_names,
    mixtures,
    rope_keys,
)
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import GgufKeys


def _read_dots1(keys: Keys) -> ModelFields:
    keys.choice("scoring_func", {"noaux_tc": "sigmoid", "sigmoid": "sigmoid"}, "sigmoid")
    keys = keys.updated({"scoring_func": None})
    rope = rope_keys.read(keys)
    full = fields.attention(keys, rope=rope, qk_norm="head")
    window = keys.optional_integer("sliding_window", 4096)
    first = keys.whole("max_window_layers", 62, limit=MOST_LAYERS)
    kinds = fields.types(window is not None and n >= first for n in range(fields.num_layers(keys)))
    mixers = fields.by_type(keys, full, dataclasses.replace(full, window=window), kinds)
    width = keys.integer("moe_intermediate_size", 1408)
    router = mixtures.offset_router(keys, 1.0, 1, 1, is_normalized=False)
    experts = mixtures.experts(
        keys, "n_routed_experts", None, None, width, router,
        shared_width=width * keys.integer("n_shared_experts"),
    )  # fmt: skip
    return fields.model(keys, rope, mixers, mixtures.after_dense(keys, experts, first_dense=0))


def _write_dots1(config: ModelConfig) -> dict[str, object]:
    kinds = export_fields.layer_types(config)
    return mixtures.with_heads(config) | mixtures.routed(config) | kinds | {
        "attention_bias": "qkv" in mixtures.attention(config).biases,
        "scoring_func": "noaux_tc",
    }  # fmt: skip


def _gguf_dots1(keys: GgufKeys) -> ModelFields:
    router = gguf_mixtures.read_router(keys, is_normalized=False, scores="sigmoid")
    attention = keys.attention(keys.rope(), qk_norm="head")
    return {"pattern": gguf_mixtures.after_dense(keys, attention, router, 0)}


FAMILIES = (
    Family(
        name="dots1",
        architecture="Dots1ForCausalLM",
        read=_read_dots1,
        reads=("attention_bias", "num_local_experts"),
        write=_write_dots1,
        feed_forwards=(Gated, Experts),
        tensors=hf_names.SHARED_EXPERTS,
        gguf=Gguf(
            gguf_names.EXPERTS,
            readers={"dots1": GgufReader(_gguf_dots1, gguf_mixtures.DENSE)},
            writer=GgufWriter("dots1"),
        ),
    ),
)
