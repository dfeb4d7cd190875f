"""gpt-oss (OpenAI 2025, arXiv 2508.10925)."""

import dataclasses

import numpy as np

from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.kinds.rope import Yarn
from configs.model import LayerSpec, ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields, Table
from inference.families.shared import (
    export_fields,
    fields,
    gguf_mixtures,
    gguf_names,
    gguf_rope,
    gguf_windows,
    hf_names,
    mixtures,
    parts,
    rope_keys,
)
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import YARN, GgufKeys
from inference.families.shared.gguf_states import Metadata


def _read_gpt_oss(keys: Keys) -> ModelFields:
    keys.require_neutral(swiglu_alpha=(1.702, None))
    packed = keys.nested("quantization_config")
    if packed is not None:  # the experts' format
        packed.choice("quant_method", {"mxfp4": "mxfp4"}, "none")
    stretched = {"rope_type": "yarn", "factor": 32.0, "truncate": False}
    original = {"original_max_position_embeddings": 4096}
    stated = rope_keys.described(keys) or Keys(stretched | original, "rope_parameters: ")
    rope = rope_keys.scaled(keys, stated, keys.number("rope_theta", 150_000.0))
    biases = ("qkv", "out") if keys.boolean("attention_bias", True) else ()
    full = fields.attention(keys, 64, rope=rope, biases=biases, has_sinks=True)
    sliding = dataclasses.replace(full, window=keys.optional_integer("sliding_window", 128))
    mixers = fields.by_type(keys, full, sliding, fields.types((True, False)))
    experts = mixtures.experts(
        keys, "num_local_experts", 128, 4, keys.integer("intermediate_size", 2880),
        Router(has_bias=True), activation="quick_gelu", has_bias=True,
        limit=keys.number("swiglu_limit", 7.0), up_offset=1.0,
    )  # fmt: skip
    return fields.model(keys, rope, mixers, experts, eps=1e-5)


def _write_gpt_oss(config: ModelConfig) -> dict[str, object]:
    experts = mixtures.mixture(config)
    raw = mixtures.with_heads(config) | export_fields.layer_types(config) | {
        "intermediate_size": experts.width,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "attention_bias": "qkv" in mixtures.attention(config).biases,
        "swiglu_limit": experts.limit,
    }  # fmt: skip
    raw["rope_scaling"] = raw["rope_scaling"] or {"rope_type": "default"}  # absent, it is yarn
    return raw if raw["sliding_window"] else raw | {"sliding_window": 128}


def _gguf_gpt_oss(keys: GgufKeys) -> ModelFields:
    """Reads gpt-oss. llama.cpp has its limit, offset and pattern as constants, and rounds YaRN's
    ends, which the model does not.
    """
    rope = keys.rope(has_yarn=True)
    if isinstance(rope.scaling, Yarn):
        rope = dataclasses.replace(rope, scaling=dataclasses.replace(rope.scaling, truncate=False))
    full = keys.attention(rope, biases=("qkv", "out"), has_sinks=True)
    sliding = dataclasses.replace(full, window=keys.integer(gguf_windows.WINDOW))
    experts = gguf_mixtures.read_experts(
        keys, Router(has_bias=True), activation="quick_gelu", has_bias=True, limit=7.0,
        up_offset=1.0,
    )  # fmt: skip
    return {"pattern": (LayerSpec(sliding, experts), LayerSpec(full, experts))}


def _gguf_keys(config: ModelConfig) -> Metadata:
    return {gguf_windows.WINDOW: gguf_windows.window(config), **gguf_rope.yarn_of(config)}


def _split_experts(prefix: str, layer: LayerSpec, width: int, tensors: Table) -> parts.Parts:
    """Splits matrices [experts, in, out] of all experts, in which gates and ups alternate."""
    if not isinstance(layer.ffn, Experts):
        return
    E, D, F, name = layer.ffn.num_experts, width, layer.ffn.width, f"{prefix}.mlp.experts"
    gate_up, down, bias = f"{name}.gate_up_proj", f"{name}.down_proj", f"{name}.gate_up_proj_bias"

    for expert in range(E):
        matrix = slice(expert, expert + 1)
        for first, half in enumerate(("gate", "up")):
            yield (
                f"{gate_up}.{expert}.{half}",
                parts.Part(
                    gate_up, (E, D, 2 * F), (F, D), matrix, slice(first, None, 2), transposed=True
                ),
            )
        part = parts.Part(down, (E, F, D), (D, F), matrix, transposed=True)
        yield f"{down}.{expert}", part
    order = np.arange(2 * F).reshape(F, 2).T.ravel()
    yield f"{bias}.ordered", parts.Part(bias, (E, 2 * F), (2 * E, F), slice(0, E), order)


_TENSORS: Table = {
    **hf_names.LLAMA,
    "mixer/sinks": ("self_attn.sinks",),
    "ffn/router": ("mlp.router.weight",),
    "ffn/experts/gate_up": ("mlp.experts.gate_up_proj.{}.gate", "mlp.experts.gate_up_proj.{}.up"),
    "ffn/experts/down": ("mlp.experts.down_proj.{}",),
    "ffn/experts/gate_up_bias": ("mlp.experts.gate_up_proj_bias.ordered",),
    "ffn/experts/down_bias": ("mlp.experts.down_proj_bias",),
}
FAMILIES = (
    Family(
        name="gpt_oss",
        architecture="GptOssForCausalLM",
        read=_read_gpt_oss,
        reads=("attention_bias", "num_local_experts", "quantization_config"),
        write=_write_gpt_oss,
        feed_forwards=(Gated, Experts),
        tensors=_TENSORS,
        splits=(_split_experts,),
        packs_experts=True,
        gguf=Gguf(
            gguf_names.POST_NORMED,
            readers={
                "gpt-oss": GgufReader(
                    _gguf_gpt_oss, (*gguf_mixtures.ROUTED, *YARN, gguf_windows.WINDOW)
                )
            },
            writer=GgufWriter("gpt-oss", _gguf_keys),
        ),
    ),
)
