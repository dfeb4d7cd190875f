"""ERNIE 4.5 (Baidu 2025): Llama with rotary pairs side by side, dense, or with experts and without
the layer that predicts a second token.
"""

import dataclasses

from configs.errors import InputError
from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.kinds.rope import Rope
from configs.model import MOST_LAYERS, LayerSpec, ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields, Table
from inference.families.shared import (
    export_fields,
    fields,
    gguf_mixtures,
    gguf_names,
    hf_names,
    mixtures,
    parts,
    rope_keys,
)
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import GgufKeys

# Far below any sum of a token's weights, by which transformers divides them at least.
_LEAST_SUM = 1e-6


def _rope(keys: Keys) -> Rope:
    """Returns the positions, of a model without biases."""
    keys.require_neutral(use_bias=(False, None))
    return dataclasses.replace(rope_keys.read(keys, 500_000.0), neighbours=True)


def _read_ernie4_5(keys: Keys) -> ModelFields:
    rope = _rope(keys)
    attention = fields.attention(keys, 128, rope=rope)
    return fields.model(keys, rope, attention, tied=True, eps=1e-5)


def _read_ernie4_5_moe(keys: Keys) -> ModelFields:
    rope, layers = _rope(keys), fields.num_layers(keys)
    keys.choice("moe_gate_act", {"softmax": "softmax"}, "softmax")
    if keys.number("moe_norm_min", 1e-12) > _LEAST_SUM:
        raise InputError(f"moe_norm_min is at most {_LEAST_SUM:g}, below every sum of weights")
    width = keys.integer("moe_intermediate_size", 1536)
    experts = mixtures.experts(
        keys.updated({"num_experts_per_tok": keys.integer("moe_k", 6)}),
        "moe_num_experts", 64, None, width,
        Router(has_offsets=keys.boolean("moe_use_aux_free", True)),
        shared_width=width * keys.whole("moe_num_shared_experts", 2),
    )  # fmt: skip
    first = keys.whole("moe_layer_start_index", 1, limit=MOST_LAYERS)
    last = layers - 1  # which -1 stands for, too
    if keys.raw.get("moe_layer_end_index") != -1:
        last = keys.whole("moe_layer_end_index", last, limit=MOST_LAYERS)
    step = keys.integer("moe_layer_interval", 1, limit=MOST_LAYERS)
    ffns = mixtures.by_layer(
        keys, experts, lambda layer: first <= layer <= last and (layer + 1) % step == 0
    )
    return fields.model(keys, rope, fields.attention(keys, rope=rope), ffns, tied=True, eps=1e-5)


def _write_ernie4_5(config: ModelConfig) -> dict[str, object]:
    return export_fields.llama_fields(config) | {"use_bias": False}


def _write_ernie4_5_moe(config: ModelConfig) -> dict[str, object]:
    """Returns the keys; raises an `InputError` if none say which layers have experts."""
    experts, dense = mixtures.mixture(config), mixtures.dense_layers(config)
    numbers = [layer for layer in range(config.num_layers) if layer not in dense]
    first, last = (numbers[0], numbers[-1]) if numbers else (config.num_layers, 0)
    between = [number - before for before, number in zip(numbers, numbers[1:], strict=False)]
    step = max(between, default=1)
    if between != [step] * len(between) or step > 1 and (first + 1) % step:
        raise InputError(f"{config.name}: experts in layers {numbers} have no keys in config.json")
    return mixtures.with_heads(config) | {
        "use_bias": False,
        "intermediate_size": dense[min(dense)].width if dense else experts.width,
        "moe_intermediate_size": experts.width,
        "moe_num_experts": experts.num_experts,
        "moe_num_shared_experts": experts.shared_width // experts.width,
        "moe_k": experts.top_k,
        "moe_use_aux_free": experts.router.has_offsets,
        "moe_layer_start_index": first,
        "moe_layer_end_index": last,
        "moe_layer_interval": step,
    }


def _offsets(prefix: str, layer: LayerSpec, width: int, tensors: Table) -> parts.Parts:
    """Takes the offsets of one group of experts, which stands for all of them."""
    if isinstance(layer.ffn, Experts):
        name, count = f"{prefix}.{_STATICS}", layer.ffn.num_experts
        yield f"{name}.experts", parts.Part(name, (1, count), (count,), slice(0, 1))


def _gguf_ernie4_5(keys: GgufKeys) -> ModelFields:
    return {"pattern": (keys.layer(dataclasses.replace(keys.rope(), neighbours=True)),)}


def _gguf_ernie4_5_moe(keys: GgufKeys) -> ModelFields:
    """Reads ERNIE's experts, whose scores llama.cpp knows to be a softmax."""
    if keys.integer("interleave_moe_layer_step", 1) != 1:
        raise InputError(f"metadata {keys.architecture}.interleave_moe_layer_step must be 1")
    rope = dataclasses.replace(keys.rope(), neighbours=True)
    last = keys.num_layers - 1
    router = dataclasses.replace(
        gguf_mixtures.read_router(keys, is_normalized=True),
        has_offsets=keys.has_tensor(f"blk.{last}.exp_probs_b.bias"),
    )
    return {"pattern": gguf_mixtures.after_dense(keys, keys.attention(rope), router, 0)}


_STATICS = "mlp.moe_statics.e_score_correction_bias"
FAMILIES = (
    Family(
        name="ernie4_5",
        architecture="Ernie4_5ForCausalLM",
        spellings=("Ernie4_5_ForCausalLM",),
        read=_read_ernie4_5,
        write=_write_ernie4_5,
        tensors=hf_names.LLAMA,
        gguf=Gguf(readers={"ernie4_5": GgufReader(_gguf_ernie4_5)}, writer=GgufWriter("ernie4_5")),
    ),
    Family(
        name="ernie4_5_moe",
        architecture="Ernie4_5_MoeForCausalLM",
        read=_read_ernie4_5_moe,
        write=_write_ernie4_5_moe,
        feed_forwards=(Gated, Experts),
        tensors={**hf_names.SHARED_EXPERTS, "ffn/router_offsets": (f"{_STATICS}.experts",)},
        splits=(_offsets,),
        predictor="model.mtp_",
        gguf=Gguf(
            gguf_names.EXPERTS,
            readers={
                "ernie4_5-moe": GgufReader(
                    _gguf_ernie4_5_moe, (*gguf_mixtures.DENSE, "interleave_moe_layer_step")
                )
            },
            writer=GgufWriter("ernie4_5-moe"),
        ),
    ),
)
