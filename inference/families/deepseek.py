"""DeepSeek-V2 (DeepSeek-AI 2024, arXiv 2405.04434), V3 and R1 (2024, arXiv 2412.19437) and V3.2
(2025), without the layers that predict a second token. Kimi K2 (Moonshot AI 2025, arXiv 2507.20534)
is a V3, and so is the text of Kimi K2.5 (2026).
"""

import dataclasses

from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.kinds.latent import Indexer, Latent
from configs.model import ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields
from inference.families.shared import (
    gguf_latents,
    gguf_mixtures,
    gguf_names,
    hf_names,
    latents,
    mixtures,
    parts,
)
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import GgufKeys

_EVERY_LAYER = {"moe_layer_freq": (1, None), "ep_size": (1, None)}


def _read_deepseek_v2(keys: Keys) -> ModelFields:
    keys.require_neutral(norm_topk_prob=(False, None), moe_layer_freq=(1, None))
    keys.choice("scoring_func", {"softmax": "softmax"}, "softmax")
    methods = {method: method for method in ("greedy", "group_limited_greedy")}
    is_greedy = keys.choice("topk_method", methods, "greedy") == "greedy"
    groups, top_groups = (1, 1) if is_greedy else mixtures.groups(keys)
    scale = keys.number("routed_scaling_factor", 1.0)
    router = Router(is_normalized=False, scale=scale, num_groups=groups, top_groups=top_groups)
    experts = mixtures.sharing_experts(keys, 64, None, router, width=1407, num_shared=2)
    return latents.model(keys, experts, is_neighbours=True, first_dense=0)


def _read_deepseek_v3(keys: Keys) -> ModelFields:
    keys.require_neutral(**_EVERY_LAYER)
    router = mixtures.offset_router(keys, 2.5, 8, 4)
    experts = mixtures.sharing_experts(keys, 256, 8, router, width=2048)
    is_neighbours = keys.boolean("rope_interleave", True)
    return latents.model(keys, experts, is_neighbours, first_dense=3)


def _read_deepseek_v32(keys: Keys) -> ModelFields:
    """Reads DeepSeek-V3.2, which is V3 over the tokens that an indexer chooses."""
    keys.require_neutral(**_EVERY_LAYER)
    indexer = latents.indexer(keys, num_heads=64, is_neighbours=False)
    return latents.indexed_model(keys, indexer, num_groups=8, top_groups=4)


def _write_deepseek_v2(config: ModelConfig) -> dict[str, object]:
    grouped = mixtures.mixture(config).router.num_groups > 1
    method = "group_limited_greedy" if grouped else "greedy"
    return latents.written(config) | {"topk_method": method, "scoring_func": "softmax"}


def write_deepseek_v3(config: ModelConfig) -> dict[str, object]:
    """Returns the keys of DeepSeek-V3 and its relatives."""
    latent = config.mixers(Latent)[0]
    return latents.written(config) | {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_interleave": latent.rope.neighbours,
    }


def write_indexed(config: ModelConfig) -> dict[str, object]:
    """Returns the keys of DeepSeek-V3.2 and GLM-5."""
    indexer = config.mixers(Latent)[0].indexer or Indexer(1, 1, 1)
    return latents.written(config) | {
        "mlp_layer_types": mixtures.mlp_types(config),
        "index_n_heads": indexer.num_heads,
        "index_head_dim": indexer.head_width,
        "index_topk": indexer.top_k,
    }


def _gguf_deepseek(keys: GgufKeys) -> ModelFields:
    """Reads DeepSeek-V2 or, where scores are sigmoids, V3 and its relatives; without experts it is
    Youtu's model, and with a temperature Mistral Large 3.
    """
    router = gguf_mixtures.read_router(keys, is_normalized=False)
    latent = gguf_latents.rotated(keys)
    if latent.temperature is not None:
        family, router = "mistral4", dataclasses.replace(router, group_best=2)
    elif not keys.has("expert_count"):
        family = "youtu"
    else:
        family = "deepseek_v2" if router.scores == "softmax" else "deepseek_v3"
    return {"family": family, "pattern": gguf_mixtures.after_dense(keys, latent, router, 0)}


_READS = ("attention_bias",)
FAMILIES = (
    Family(
        name="deepseek_v2",
        architecture="DeepseekV2ForCausalLM",
        read=_read_deepseek_v2,
        reads=_READS,
        write=_write_deepseek_v2,
        mixers=(Latent,),
        feed_forwards=(Gated, Experts),
        tensors=hf_names.LATENT,
        splits=(parts.latent_heads,),
        gguf=Gguf(
            gguf_names.LATENT,
            readers={
                "deepseek2": GgufReader(
                    _gguf_deepseek,
                    (*gguf_mixtures.DENSE, *gguf_latents.ROTATED),
                    gguf_latents.FREE_WIDTHS,
                )
            },
            writer=GgufWriter("deepseek2"),
        ),
    ),
    Family(
        name="deepseek_v3",
        architecture="DeepseekV3ForCausalLM",
        read=_read_deepseek_v3,
        reads=_READS,
        write=write_deepseek_v3,
        mixers=(Latent,),
        feed_forwards=(Gated, Experts),
        tensors=hf_names.LATENT,
        splits=(parts.latent_heads,),
        predicting=hf_names.PREDICTING,
        wrapper="KimiK25ForConditionalGeneration",
        ignored=tuple(
            f"{prefix}{part}"
            for prefix in ("", "model.")
            for part in ("vision_tower", "mm_projector")
        ),
        gguf=Gguf(gguf_names.LATENT, writer=GgufWriter("deepseek2")),
    ),
    Family(
        name="deepseek_v32",
        architecture="DeepseekV32ForCausalLM",
        read=_read_deepseek_v32,
        reads=_READS,
        write=write_indexed,
        mixers=(Latent,),
        feed_forwards=(Gated, Experts),
        tensors=hf_names.INDEXED,
        splits=(parts.latent_heads,),
        predicting=hf_names.PREDICTING,
        listed=("mlp_layer_types",),
    ),
)
