"""GLM-4.5 and 4.6 (Zeng et al. 2025, arXiv 2508.06471), GLM-4.7-Flash and GLM-5 (Z.ai 2026),
without the layers that predict a second token.
"""

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Sequence

from configs.errors import InputError
from configs.kinds.experts import Experts
from configs.kinds.feed_forward import Gated
from configs.kinds.latent import Indexer, Latent
from configs.kinds.rope import Rope
from configs.model import MOST_LAYERS, LayerSpec, ModelConfig
from inference.families import deepseek
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields
from inference.families.shared import (
    fields,
    gguf_latents,
    gguf_mixtures,
    gguf_names,
    gguf_rope,
    hf_names,
    latents,
    mixtures,
    parts,
    rope_keys,
)
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import YARN, GgufKeys
from inference.families.shared.gguf_states import Metadata

_WIDTHS = {"qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5}  # of latent attention


def _read_glm4_moe(keys: Keys) -> ModelFields:
    rope = rope_keys.partial(keys, 10_000.0, keys.number("partial_rotary_factor", 0.5))
    attention = fields.attention(
        keys, rope=rope, qk_norm="head" if keys.boolean("use_qk_norm", False) else None,
        biases=("qkv",) if keys.boolean("attention_bias", False) else (),
    )  # fmt: skip
    router = mixtures.offset_router(keys, 1.0, 1, 1)
    experts = mixtures.sharing_experts(keys, 128, 8, router, width=1408)
    ffns = mixtures.after_dense(keys, experts, first_dense=1)
    return fields.model(keys, rope, attention, ffns, eps=1e-5)


def _read_glm4_moe_lite(keys: Keys) -> ModelFields:
    """Reads GLM-4.7-Flash, which has DeepSeek-V3's attention and mixture."""
    for described in (keys, rope_keys.described(keys) or keys):
        described.require_neutral(partial_rotary_factor=(1, None))
    keys = keys.with_defaults(_WIDTHS | {"q_lora_rank": 768})
    router = mixtures.offset_router(keys, 1.8, 1, 1)
    experts = mixtures.sharing_experts(keys, 64, 4, router, width=1536)
    is_neighbours = keys.boolean("rope_interleave", True)
    return latents.model(keys, experts, is_neighbours, first_dense=1,
        ffns=mixtures.by_mlp_types(keys, experts),
    )  # fmt: skip


def _read_glm_moe_dsa(keys: Keys) -> ModelFields:
    """Reads GLM-5, which has DeepSeek-V3.2's parts, with the indexer's rotary pairs as neighbors.
    Most layers of GLM-5.2 read what the last layer before them that has an indexer chose.
    """
    is_shared = _shared_indexers(keys)
    keys = keys.with_defaults(_WIDTHS | {"q_lora_rank": 2048})
    indexer = latents.indexer(keys, num_heads=32, is_neighbours=True)
    model = latents.indexed_model(keys, indexer, num_groups=1, top_groups=1)
    return {**model, "pattern": _sharing(itertools.cycle(model["pattern"]), is_shared)}


def _sharing(layers: Iterable[LayerSpec], is_shared: Sequence[bool]) -> tuple[LayerSpec, ...]:
    """Returns the layers, some of which read the choice of the last one before that has its own."""
    pattern, owner = [], 0
    for number, (layer, reads_choice) in enumerate(zip(layers, is_shared, strict=False)):
        owner = owner if reads_choice else number
        mixer = layer.mixer.changed({"index_owner": owner if reads_choice else None})
        pattern.append(dataclasses.replace(layer, mixer=mixer))
    return tuple(pattern)


def _shared_indexers(keys: Keys) -> list[bool]:
    """Returns for each layer whether it reads an earlier layer's choice, by `indexer_types` or
    `index_topk_pattern`; without them one of `index_topk_freq` layers has an indexer.
    """
    count = fields.num_layers(keys)
    key = "indexer_types" if keys.raw.get("indexer_types") is not None else "index_topk_pattern"
    pattern = keys.raw.get(key)
    if isinstance(pattern, str):
        names = {"F": "full", "S": "shared"}
        keys = keys.updated({key: [names.get(letter, letter) for letter in pattern]})
    kinds = keys.listed(key, count)
    if kinds is None:
        step = keys.integer("index_topk_freq", 1, limit=MOST_LAYERS)
        first = keys.whole("index_skip_topk_offset", 2, limit=MOST_LAYERS)
        shared = [max(layer - first + 1, 0) % step > 0 for layer in range(count)]
    else:
        if any(kind not in ("full", "shared") for kind in kinds):
            raise InputError(f"{key} lists 'full' or 'shared' for each layer")
        shared = [kind == "shared" for kind in kinds]
    if shared[0]:
        raise InputError(f"{key}: the first layer is 'full', because no layer chooses before it")
    return shared


def _write_glm_moe_dsa(config: ModelConfig) -> dict[str, object]:
    shares = (layer.mixer.choice_owner is not None for layer in config.layers)
    kinds = ["shared" if reads_choice else "full" for reads_choice in shares]
    return deepseek.write_indexed(config) | {"indexer_types": kinds}


def _write_glm4_moe(config: ModelConfig) -> dict[str, object]:
    attention = mixtures.attention(config)
    return mixtures.with_heads(config) | mixtures.routed(config) | {
        "partial_rotary_factor": (attention.rope or Rope()).share,
        "use_qk_norm": attention.qk_norm is not None,
        "attention_bias": "qkv" in attention.biases,
    }  # fmt: skip


def _write_glm4_moe_lite(config: ModelConfig) -> dict[str, object]:
    return latents.written(config) | {
        "rope_interleave": config.mixers(Latent)[0].rope.neighbours,
        "mlp_layer_types": mixtures.mlp_types(config),
    }


def _gguf_glm4_moe(keys: GgufKeys) -> ModelFields:
    """Reads GLM-4.5 and 4.6, except their last blocks, which predict a second token, and Solar
    Open, which is no other model there.
    """
    attention = keys.attention(
        dataclasses.replace(keys.rope(has_yarn=True), share=keys.rotary_share),
        qk_norm="head" if keys.has_tensor("blk.0.attn_q_norm.weight") else None,
        biases=("qkv",) if keys.has_tensor("blk.0.attn_q.bias") else (),
    )
    router = gguf_mixtures.read_router(keys, is_normalized=True, scores="sigmoid")
    extra = keys.whole("nextn_predict_layers", limit=keys.num_layers - 1)
    pattern = gguf_mixtures.after_dense(keys, attention, router, extra)
    return {"num_layers": keys.num_layers - extra, "pattern": pattern}


_INDEXER = tuple(f"attention.indexer.{key}" for key in ("head_count", "key_length", "top_k"))
_TYPES = "attention.indexer.types"


def _gguf_glm_dsa(keys: GgufKeys) -> ModelFields:
    """Reads GLM-5, except its last blocks, which predict a second token."""
    extra = keys.whole("nextn_predict_layers", limit=keys.num_layers - 1)
    count = keys.num_layers - extra
    heads, width, top_k = (keys.integer(key) for key in _INDEXER)
    indexer = Indexer(heads, width, top_k, neighbours=True)
    latent = gguf_latents.rotated(keys, indexer=indexer)
    router = gguf_mixtures.read_router(keys, is_normalized=True, scores="sigmoid")
    ffns = gguf_mixtures.feed_forwards(keys, router, count)
    chooses = keys.booleans(_TYPES, count)
    if chooses is None:  # older files: by what the layers have
        chooses = [keys.has_tensor(f"blk.{n}.indexer.attn_k.weight") for n in range(count)]
    if not chooses[0]:
        raise InputError(
            f"metadata {keys.architecture}.{_TYPES} starts with true, because no layer chooses "
            "before the first"
        )
    layers = (LayerSpec(latent, ffn) for ffn in ffns)
    return {
        "num_layers": count,
        "pattern": _sharing(layers, [*map(operator.not_, chooses)]),
    }


def _gguf_indexers(config: ModelConfig) -> Metadata:
    indexer = config.mixers(Latent)[0].indexer or Indexer(1, 1, 1)
    sizes = indexer.num_heads, indexer.head_width, indexer.top_k
    chooses = [layer.mixer.choice_owner is None for layer in config.layers]
    return dict(zip(_INDEXER, sizes, strict=True)) | {_TYPES: chooses}


FAMILIES = (
    Family(
        name="glm4_moe",
        architecture="Glm4MoeForCausalLM",
        read=_read_glm4_moe,
        reads=("attention_bias",),
        write=_write_glm4_moe,
        feed_forwards=(Gated, Experts),
        tensors=hf_names.SHARED_EXPERTS,
        predicting=hf_names.PREDICTING,
        gguf=Gguf(
            gguf_names.POST_NORMED,
            readers={
                "glm4moe": GgufReader(
                    _gguf_glm4_moe,
                    (*gguf_mixtures.DENSE, *YARN, "nextn_predict_layers"),
                    free_widths=("rope.dimension_count",),
                )
            },
            writer=GgufWriter("glm4moe", gguf_rope.yarn_of),
        ),
    ),
    Family(
        name="glm4_moe_lite",
        architecture="Glm4MoeLiteForCausalLM",
        read=_read_glm4_moe_lite,
        reads=("attention_bias",),
        write=_write_glm4_moe_lite,
        mixers=(Latent,),
        feed_forwards=(Gated, Experts),
        tensors=hf_names.LATENT,
        splits=(parts.latent_heads,),
        predicting=hf_names.PREDICTING,
        listed=("mlp_layer_types",),
        gguf=Gguf(gguf_names.LATENT, writer=GgufWriter("deepseek2", read_as="deepseek_v3")),
    ),
    Family(
        name="glm_moe_dsa",
        architecture="GlmMoeDsaForCausalLM",
        read=_read_glm_moe_dsa,
        reads=("attention_bias",),
        write=_write_glm_moe_dsa,
        mixers=(Latent,),
        feed_forwards=(Gated, Experts),
        tensors=hf_names.INDEXED,
        splits=(parts.latent_heads,),
        predicting=hf_names.PREDICTING,
        listed=("mlp_layer_types", "indexer_types"),
        gguf=Gguf(
            {
                **gguf_names.LATENT,
                "mixer/indexer/q": ("indexer.attn_q_b.weight",),
                "mixer/indexer/k": ("indexer.attn_k.weight", "indexer.proj.weight"),
                "mixer/indexer/k_norm/weight": ("indexer.k_norm.weight",),
            },
            readers={
                "glm-dsa": GgufReader(
                    _gguf_glm_dsa,
                    (
                        *(*gguf_mixtures.DENSE, *gguf_latents.ROTATED, *_INDEXER, _TYPES),
                        "nextn_predict_layers",
                    ),
                    gguf_latents.FREE_WIDTHS,
                )
            },
            writer=GgufWriter("glm-dsa", _gguf_indexers),
        ),
    ),
)
