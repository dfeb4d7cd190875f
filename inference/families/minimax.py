"""MiniMax-Text-01 (MiniMax 2025, arXiv 2501.08313) and M1 (arXiv 2506.13585): lightning attention,
softmax attention in some layers, and normed residuals; and MiniMax-M2 (2025).
"""

import dataclasses

import numpy as np

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.kinds.recurrent.linear_attention import LinearAttention
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from inference.families import mixtral
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields, Table
from inference.families.shared import (
    export_fields,
    fields,
    gguf_mixtures,
    gguf_names,
    mixtures,
    parts,
    rope_keys,
)
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import GgufKeys

_FULL, _LINEAR = "full_attention", "linear_attention"
_FACTORS = {_FULL: "full_attn", _LINEAR: "linear_attn"}  # as their keys begin
_PUBLISHED = {"full_attn": "full_attention", "linear_attn": "linear_attention", "mlp": "mlp"}
_LISTED = "attn_type_list"  # of published files
_DEFAULTS = {
    "vocab_size": 32_000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 131_072,
}  # fmt: skip


def _read_minimax(keys: Keys) -> ModelFields:
    stated = {key: value for key, value in keys.raw.items() if value is not None}
    keys = Keys(_DEFAULTS | stated, keys.label)
    keys.require_neutral(postnorm=(True, None), shared_intermediate_size=(0, None))
    if keys.raw.get(_LISTED) is not None:  # as published: residuals are not normed by default
        keys.require_neutral(postnorm=(True,))
    width = keys.integer("head_dim", fields.attention(keys).head_width)
    share = keys.integer("rotary_dim", width) / width
    rope = rope_keys.partial(keys, 1_000_000.0, keys.number("partial_rotary_factor", share))
    full = fields.attention(keys, rope=rope, window=keys.optional_integer("sliding_window"))
    width = keys.integer("intermediate_size", 14_336)
    ffn = mixtures.experts(keys, "num_local_experts", 8, 2, width)
    kinds, to_ffn = _layer_types(keys), _factors(keys, "mlp")
    layers = []
    for number, kind in enumerate(kinds):
        mixer = full if kind == _FULL else _lightning(full, number, len(kinds))
        layers.append(LayerSpec(mixer, ffn, factors=(_factors(keys, _FACTORS[kind]), to_ffn)))
    return {**fields.llama_fields(keys, rope, eps=1e-5), "pattern": fields.repeated(layers)}


def _lightning(full: Attention, layer: int, num_layers: int) -> LinearAttention:
    """Returns linear attention with as many heads as queries; deeper layers decay less."""
    decay = 1 - layer / (num_layers - 1 + 1e-5) + 1e-5
    width = full.head_width
    return LinearAttention(full.num_heads, width, width, decay=decay, has_gated_norm=True)


def _factors(keys: Keys, part: str) -> tuple[float, float]:
    """Returns the factors of a part: by transformers' keys, else by those of published files."""
    alpha, beta = (
        keys.number(f"{part}_{x}_factor", keys.number(f"layernorm_{_PUBLISHED[part]}_{x}", 1.0))
        for x in ("alpha", "beta")
    )
    return alpha, beta


def _layer_types(keys: Keys) -> list[str]:
    """Returns the listed kinds, or alternating ones, softmax attention first."""
    numbers = keys.listed(_LISTED, fields.num_layers(keys))
    if numbers is not None and keys.raw.get("layer_types") is None:
        if any(number not in (0, 1) for number in numbers):
            raise InputError(f"{_LISTED} lists 0 (lightning) or 1 (softmax) for each layer")
        return [_FULL if number else _LINEAR for number in numbers]
    alternating = [_LINEAR if layer % 2 else _FULL for layer in range(fields.num_layers(keys))]
    return fields.layer_types(keys, _FACTORS) or alternating


def _read_minimax_m2(keys: Keys) -> ModelFields:
    """Reads MiniMax-M2, which has OLMo 2's norms of queries and keys, positions in a share of each
    head, and DeepSeek-V3's choice of experts.
    """
    keys.require_neutral(
        use_qk_norm=(True, None),
        qk_norm_type=("per_layer", None),
        use_routing_bias=(True, None),
        scoring_func=("sigmoid", None),
        shared_intermediate_size=(0, None),
    )
    if any(number != 1 for number in keys.listed(_LISTED, fields.num_layers(keys)) or ()):
        raise InputError(f"{_LISTED} with a layer that is not 1 (softmax) is not supported")
    width = keys.integer("head_dim", 128)
    rotary = keys.integer("rotary_dim", width)
    share = keys.number("partial_rotary_factor", rotary / width)
    rope = rope_keys.partial(keys, 5_000_000.0, share)
    attention = fields.attention(keys, width, rope=rope, qk_norm="all")
    router = Router("sigmoid", has_offsets=True)
    ffn_width = keys.integer("intermediate_size", 1536)
    experts = mixtures.experts(keys, "num_local_experts", 256, 8, ffn_width, router)
    return fields.model(keys, rope, attention, experts)


def _write_minimax(config: ModelConfig) -> dict[str, object]:
    ffn, kinds = config.layers[0].ffn, [_kind(layer) for layer in config.layers]
    experts = ffn if isinstance(ffn, Experts) else Experts(1, 1, 1, Router())
    attention = _attention(config)
    rope = attention.rope or Rope()
    factors = dict(zip(kinds, (layer.factors for layer in config.layers), strict=True))
    raw = {
        **export_fields.sizes(config, rope),
        **export_fields.heads(attention),
        "rotary_dim": rope.rotating(attention.head_width),
        "sliding_window": attention.window,
        "layer_types": kinds,
        "intermediate_size": experts.width,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "postnorm": True,
    }
    for kind, pairs in factors.items():
        for part, pair in zip((_FACTORS[kind], "mlp"), pairs, strict=True):
            raw |= {f"{part}_alpha_factor": pair[0], f"{part}_beta_factor": pair[1]}
    return raw


def _kind(layer: LayerSpec) -> str:
    return _FULL if isinstance(layer.mixer, Attention) else _LINEAR


def _attention(config: ModelConfig) -> Attention:
    """Returns softmax attention, or its like in a model of linear attention alone."""
    for attention in config.mixers(Attention):
        return attention
    linear = config.mixers(LinearAttention)[0]
    return Attention(linear.num_heads, linear.num_heads, linear.value_width, rope=None)


def _write_minimax_m2(config: ModelConfig) -> dict[str, object]:
    attention, raw = mixtures.attention(config), mixtral.write(config)
    del raw["sliding_window"]
    return raw | {
        "rotary_dim": (attention.rope or Rope()).rotating(attention.head_width),
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "use_routing_bias": True,
    }


def _gguf_minimax_m2(keys: GgufKeys) -> ModelFields:
    rope = dataclasses.replace(keys.rope(), share=keys.rotary_share)
    router = gguf_mixtures.read_router(keys, is_normalized=True, scores="sigmoid")
    experts = gguf_mixtures.read_experts(keys, dataclasses.replace(router, group_best=1))
    return {"pattern": (LayerSpec(keys.attention(rope, qk_norm="all"), experts),)}


def _lightning_names(module: str) -> Table:
    return {
        "linear_attention/in": tuple(f"{module}.qkv_proj.weight.{part}" for part in "qkv"),
        "linear_attention/gate": (f"{module}.output_gate.weight",),
        "linear_attention/out_norm": (f"{module}.norm.weight",),
        "linear_attention/out": (f"{module}.out_proj.weight",),
    }


def _split_heads(prefix: str, layer: LayerSpec, width: int, tensors: Table) -> parts.Parts:
    """Splits a matrix of queries, keys and values, in which each head's rows are adjacent."""
    for kind in layer.mixer.parts:
        if isinstance(kind, LinearAttention):
            name = tensors["linear_attention/in"][0]
            N, M = kind.num_heads, kind.key_width
            stored = N * (2 * M + kind.value_width), width
            rows_NX = np.arange(stored[0]).reshape(N, -1)
            rows = {"q": rows_NX[:, :M], "k": rows_NX[:, M : 2 * M], "v": rows_NX[:, 2 * M :]}
            yield from parts.gathered(f"{prefix}.{name.removesuffix('.q')}", stored, rows)


FAMILIES = (
    Family(
        name="minimax",
        architecture="MiniMaxForCausalLM",
        spellings=("MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"),
        read=_read_minimax,
        reads=("num_local_experts",),
        write=_write_minimax,
        mixers=(Attention, LinearAttention),
        feed_forwards=(Experts,),
        tensors={**mixtral.TENSORS, **_lightning_names("self_attn")},
        splits=(_split_heads,),
        derived=tuple(
            f".self_attn.{part}"
            for part in ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
        ),
    ),
    Family(
        name="minimax_m2",
        architecture="MiniMaxM2ForCausalLM",
        read=_read_minimax_m2,
        reads=("num_local_experts",),
        write=_write_minimax_m2,
        feed_forwards=(Gated, Experts),
        tensors={
            **mixtral.TENSORS,
            "ffn/router_offsets": ("block_sparse_moe.e_score_correction_bias",),
        },
        gguf=Gguf(
            gguf_names.EXPERTS,
            readers={
                "minimax-m2": GgufReader(
                    _gguf_minimax_m2,
                    gguf_mixtures.ROUTED,
                    free_widths=("rope.dimension_count",),
                )
            },
            writer=GgufWriter("minimax-m2"),
        ),
    ),
)
