"""Granite 4 H (IBM 2025): Mamba-2, attention in some layers, and scales of embeddings, residuals
and logits; and Granite 3 (2024): Llama with these scales, dense or with experts.
"""

from configs.errors import InputError, shown
from configs.kinds.attention import Attention
from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.kinds.kind import MOST_MATRICES, FeedForward
from configs.kinds.recurrent.mamba import Mamba2
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from inference.families.family import (
    Family,
    Gguf,
    GgufReader,
    GgufWriter,
    Metadata,
    ModelFields,
    Table,
)
from inference.families.shared import (
    export_fields,
    fields,
    gguf_mixtures,
    gguf_names,
    gguf_states,
    hf_names,
    mixtures,
    parts,
    rope_keys,
    state_space,
)
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import GgufKeys

_DEFAULTS = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
}  # fmt: skip


def _read_hybrid(keys: Keys) -> ModelFields:
    keys, layers = keys.with_defaults(_DEFAULTS), fields.num_layers(keys)
    keys.require_neutral(
        position_embedding_type=("rope", "nope", None),
        normalization_function=("rmsnorm", None),
    )
    has_rope = keys.raw.get("position_embedding_type") == "rope"
    rope = rope_keys.read(keys) if has_rope else None
    scale = keys.number("attention_multiplier", 1.0)
    attention = fields.attention(keys, rope=rope, scale=scale)
    state = state_space.mamba2(keys, state_space.expanded(keys))
    kinds = keys.listed("layer_types", layers) or keys.listed("layers_block_type", layers)
    kinds = kinds or ["linear_attention"] * layers
    mixers = [_by_name(kind, attention, state) for kind in kinds]
    model = fields.model(keys, rope or Rope(), mixers, _hybrid_ffn(keys))
    return {**model, **_read_scales(keys)}


def _hybrid_ffn(keys: Keys) -> Gated | Experts:
    activation = fields.activation(keys)
    shared = keys.integer("shared_intermediate_size", 1024)
    experts = keys.whole("num_local_experts", 8, limit=MOST_MATRICES)
    if not experts:
        return Gated(shared, activation)
    chosen = keys.integer("num_experts_per_tok", 2)
    return Experts(
        experts, chosen, keys.integer("intermediate_size"), shared_width=shared,
        activation=activation,
    )  # fmt: skip


def _by_name(kind: object, attention: Attention, state: Mamba2) -> Attention | Mamba2:
    """Returns the mixer by the name that transformers 4 or 5 has for it."""
    names: dict[str, Attention | Mamba2] = {
        "attention": attention, "full_attention": attention,
        "mamba": state, "linear_attention": state,
    }  # fmt: skip
    if not isinstance(kind, str) or kind not in names:
        raise InputError(f"layer type {shown(kind)} is not supported; valid: {', '.join(names)}")
    return names[kind]


def _write_hybrid(config: ModelConfig) -> dict[str, object]:
    attention, ffn = state_space.attention(config), config.layers[0].ffn
    attends = [isinstance(layer.mixer, Attention) for layer in config.layers]
    raw = state_space.expanded_keys(config)
    raw.pop("mlp_bias", None)
    raw |= {
        "position_embedding_type": "rope" if attention.rope else "nope",
        "layer_types": ["attention" if attend else "mamba" for attend in attends],
    } | _write_scales(config)
    if isinstance(ffn, Experts):
        return raw | {
            "num_local_experts": ffn.num_experts,
            "num_experts_per_tok": ffn.top_k,
            "intermediate_size": ffn.width,
            "shared_intermediate_size": ffn.shared_width,
        }
    return raw | {"num_local_experts": 0, "shared_intermediate_size": raw["intermediate_size"]}


def _read_granite(keys: Keys) -> ModelFields:
    """Reads Granite 3 (IBM 2024): Llama with the scales of Granite 4."""
    rope = rope_keys.read(keys)
    scale = keys.number("attention_multiplier", 1.0)
    attention = fields.attention(keys, rope=rope, scale=scale)
    return {**fields.model(keys, rope, attention), **_read_scales(keys)}


def _read_moe(keys: Keys) -> ModelFields:
    return _with_experts(keys.with_defaults(_DEFAULTS), 0)


def _read_moe_shared(keys: Keys) -> ModelFields:
    shared = keys.whole("shared_intermediate_size", 0)
    return _with_experts(keys.with_defaults(_DEFAULTS), shared)


def _with_experts(keys: Keys, shared_width: int) -> ModelFields:
    rope = rope_keys.read(keys)
    scale = keys.number("attention_multiplier", 1.0)
    attention = fields.attention(keys, rope=rope, scale=scale)
    experts = mixtures.experts(
        keys, "num_local_experts", 8, 2, keys.integer("intermediate_size"),
        shared_width=shared_width,
    )  # fmt: skip
    return {**fields.model(keys, rope, attention, experts), **_read_scales(keys)}


def _read_scales(keys: Keys) -> ModelFields:
    return {
        "embedding_scale": keys.number("embedding_multiplier", 1.0),
        "residual_scale": keys.number("residual_multiplier", 1.0),
        "logit_scale": 1 / keys.number("logits_scaling", 1.0),
    }


def _write_granite(config: ModelConfig) -> dict[str, object]:
    return export_fields.llama_fields(config) | _write_scales(config)


def _write_moe(config: ModelConfig) -> dict[str, object]:
    experts, attention = mixtures.mixture(config), mixtures.attention(config)
    return mixtures.with_heads(config) | _write_scales(config) | {
        "attention_bias": "out" in attention.biases,
        "intermediate_size": experts.width,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "shared_intermediate_size": experts.shared_width,
    }  # fmt: skip


def _write_scales(config: ModelConfig) -> dict[str, object]:
    attention = state_space.attention(config)
    scale = attention.head_width**-0.5 if attention.scale is None else attention.scale
    return {
        "attention_multiplier": scale,
        "embedding_multiplier": config.embedding_scale,
        "residual_multiplier": config.residual_scale,
        "logits_scaling": round(1 / config.logit_scale, 9),
    }


def _gguf_granite(keys: GgufKeys) -> ModelFields:
    scale = keys.number("attention.scale") if keys.has("attention.scale") else None
    return {"pattern": (keys.layer(keys.rope(), scale=scale),), **_gguf_read_scales(keys)}


def _gguf_granite_moe(keys: GgufKeys) -> ModelFields:
    scale = keys.number("attention.scale") if keys.has("attention.scale") else None
    shared = keys.whole("expert_shared_feed_forward_length")
    experts = gguf_mixtures.read_experts(keys, Router(), keys.ffn_width, shared_width=shared)
    layer = LayerSpec(keys.attention(keys.rope(), scale=scale), experts)
    family = "granitemoeshared" if shared else "granitemoe"
    return {"family": family, "pattern": (layer,), **_gguf_read_scales(keys)}


def _gguf_read_scales(keys: GgufKeys) -> ModelFields:
    return {
        "embedding_scale": keys.number("embedding_scale", 1.0),
        "residual_scale": keys.number("residual_scale", 1.0),
        "logit_scale": 1 / keys.number("logit_scale", 1.0),
    }


def _gguf_hybrid(keys: GgufKeys) -> ModelFields:
    scale = keys.number("attention.scale") if keys.has("attention.scale") else None
    rope = keys.rope() if keys.boolean("rope.scaling.finetuned", True) else None
    ffn: FeedForward = Gated(keys.ffn_width)
    if keys.whole("expert_count"):
        shared = keys.whole("expert_shared_feed_forward_length")
        ffn = gguf_mixtures.read_experts(keys, Router(), keys.ffn_width, shared_width=shared)
    layers = [
        LayerSpec(
            gguf_states.attention(keys, layer, kv_heads, rope=rope, scale=scale)
            if kv_heads
            else gguf_states.state_space(keys, layer),
            ffn,
        )
        for layer, kv_heads in enumerate(keys.kv_heads())
    ]
    return {"pattern": tuple(layers), **_gguf_read_scales(keys)}


def _gguf_scales(config: ModelConfig) -> Metadata:
    attention = next(iter(config.mixers(Attention)), None)
    scales: Metadata = {}
    if attention is not None and attention.scale is not None:
        scales["attention.scale"] = attention.scale
    return scales | {
        "embedding_scale": config.embedding_scale,
        "residual_scale": config.residual_scale,
        "logit_scale": 1 / config.logit_scale,
        "rope.scaling.finetuned": attention is not None and attention.rope is not None,
    }


_TENSORS: Table = {
    **hf_names.LLAMA,
    **hf_names.mamba2("mamba"),
    "ffn/gate_up": ("shared_mlp.input_linear.weight",),
    "ffn/down": ("shared_mlp.output_linear.weight",),
    "ffn/shared/gate_up": ("shared_mlp.input_linear.weight",),
    "ffn/shared/down": ("shared_mlp.output_linear.weight",),
    "ffn/router": ("block_sparse_moe.router.layer.weight",),
    "ffn/experts/gate_up": ("block_sparse_moe.input_linear.weight",),
    "ffn/experts/down": ("block_sparse_moe.output_linear.weight",),
}
_GGUF_SCALES = ("embedding_scale", "residual_scale", "logit_scale", "attention.scale")
FAMILIES = (
    Family(
        name="granite",
        architecture="GraniteForCausalLM",
        read=_read_granite,
        reads=("attention_bias", "mlp_bias"),
        write=_write_granite,
        tensors=hf_names.LLAMA,
        gguf=Gguf(
            is_interleaved=True,
            readers={"granite": GgufReader(_gguf_granite, _GGUF_SCALES)},
            writer=GgufWriter("granite", _gguf_scales),
        ),
    ),
    Family(
        name="granitemoehybrid",
        architecture="GraniteMoeHybridForCausalLM",
        read=_read_hybrid,
        reads=("attention_bias", "num_local_experts"),
        write=_write_hybrid,
        mixers=(Attention, Mamba2),
        feed_forwards=(Gated, Experts),
        tensors=_TENSORS,
        splits=(parts.mamba2,),
        gguf=Gguf(
            gguf_names.STATES,
            is_interleaved=True,
            readers={
                "granitehybrid": GgufReader(
                    _gguf_hybrid, (*gguf_states.MAMBA2, *gguf_mixtures.ROUTED, *_GGUF_SCALES)
                )
            },
            writer=GgufWriter("granitehybrid", _gguf_scales, has_states=True),
        ),
    ),
    *(
        Family(
            name=name,
            architecture=architecture,
            read=read,
            reads=("attention_bias", "num_local_experts"),
            write=_write_moe,
            feed_forwards=(Experts,),
            tensors=_TENSORS,
            gguf=Gguf(
                gguf_names.EXPERTS,
                is_interleaved=True,
                readers=readers,
                writer=GgufWriter("granitemoe", _gguf_scales),
            ),
        )
        for name, architecture, read, readers in (
            (
                "granitemoe",
                "GraniteMoeForCausalLM",
                _read_moe,
                {
                    "granitemoe": GgufReader(
                        _gguf_granite_moe, (*gguf_mixtures.ROUTED, *_GGUF_SCALES)
                    )
                },
            ),
            ("granitemoeshared", "GraniteMoeSharedForCausalLM", _read_moe_shared, {}),
        )
    ),
)
