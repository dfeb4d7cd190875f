"""Jamba (Lieber et al. 2024, arXiv 2403.19887): Mamba, attention without positions, and experts."""

import dataclasses
from collections.abc import Callable

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.kinds.kind import MOST_MATRICES, FeedForward, Mixer
from configs.kinds.recurrent.selective import Mamba
from configs.model import MOST_LAYERS, LayerSpec, ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields, Table
from inference.families.shared import (
    export_fields,
    fields,
    gguf_mixtures,
    gguf_names,
    gguf_states,
    hf_names,
    mixtures,
    parts,
    state_space,
)
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import GgufKeys

_DEFAULTS = {
    "vocab_size": 65_536, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 262_144,
}  # fmt: skip


def _read_jamba(keys: Keys) -> ModelFields:
    keys = keys.with_defaults(_DEFAULTS)
    keys.require_neutral(sliding_window=(None,), mamba_inner_layernorms=(True, None))
    sizes = fields.llama_fields(keys)
    width, layers = sizes["width"], range(sizes["num_layers"])
    mamba = Mamba(
        keys.integer("mamba_expand", 2) * width,
        keys.integer("mamba_d_state", 16),
        state_space.step_rank(keys, "mamba_dt_rank", width),
        keys.integer("mamba_d_conv", 4),
        state_space.biases(keys, "mamba_proj_bias", "mamba_conv_bias"),
        norms="weighted",
    )
    attention = fields.attention(keys, rope=None)
    dense, count = fields.gated(keys), keys.integer("num_experts", 16, limit=MOST_MATRICES)
    experts = None if count == 1 else _experts(keys, count, dense)
    attends, has_experts = _every(keys, "attn", 8, 4), _every(keys, "expert", 2, 1)
    pattern = fields.pattern(
        [attention if attends(layer) else mamba for layer in layers],
        [experts if experts and has_experts(layer) else dense for layer in layers],
    )
    longest = keys.integer("max_position_embeddings", _DEFAULTS["max_position_embeddings"])
    return {**sizes, "max_context": longest, "pattern": pattern}


def _experts(keys: Keys, count: int, dense: Gated) -> Experts:
    """Returns a mixture of experts as wide as a dense layer."""
    top_k = keys.integer("num_experts_per_tok", 2)
    if top_k > count:
        raise InputError(f"num_experts_per_tok={top_k} is more than num_experts={count}")
    return Experts(count, top_k, dense.width, Router(is_normalized=False))


def _every(keys: Keys, kind: str, period: int, offset: int) -> Callable[[int], bool]:
    """Returns whether a layer is of a kind that every so many are, as a function of its number."""
    period = keys.integer(f"{kind}_layer_period", period, limit=MOST_LAYERS)
    offset = keys.whole(f"{kind}_layer_offset", offset, limit=MOST_LAYERS)
    if offset >= period:
        raise InputError(f"{kind}_layer_offset={offset} is not below {kind}_layer_period={period}")
    return lambda layer: layer % period == offset


def _write_jamba(config: ModelConfig) -> dict[str, object]:
    attends = [isinstance(layer.mixer, Attention) for layer in config.layers]
    mixes = [isinstance(layer.ffn, Experts) for layer in config.layers]
    attention = state_space.attention(config)
    mamba = next(iter(config.mixers(Mamba)), Mamba(config.width, 1, 1))
    experts, dense = mixtures.mixture(config), mixtures.dense_layers(config)
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": dense[min(dense)].width if dense else experts.width,
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        **export_fields.heads(attention),
        **_repeated("attn", attends),
        **_repeated("expert", mixes),
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "mamba_expand": mamba.channels // config.width,
        "mamba_d_state": mamba.state_width,
        "mamba_dt_rank": mamba.step_rank,
        "mamba_d_conv": mamba.conv_width,
        "mamba_conv_bias": "conv" in mamba.biases,
        "mamba_proj_bias": "in" in mamba.biases,
    }


def _repeated(kind: str, layers: list[bool]) -> dict[str, int]:
    """Returns the period and the offset of a kind; without such layers, the first is behind all."""
    numbers = [layer for layer, is_kind in enumerate(layers) if is_kind]
    first = numbers[0] if numbers else len(layers)
    period = numbers[1] - first if len(numbers) > 1 else max(first + 1, len(layers))
    return {f"{kind}_layer_period": period, f"{kind}_layer_offset": first % period}


def _gguf_jamba(keys: GgufKeys) -> ModelFields:
    """Reads Jamba: a layer with keys attends, and a layer with a router has experts."""
    layers, dense = [], Gated(keys.ffn_width)
    for layer, kv_heads in enumerate(keys.kv_heads()):
        mixer: Mixer = dataclasses.replace(gguf_states.selective(keys, layer), norms="weighted")
        if kv_heads:
            mixer = gguf_states.attention(keys, layer, kv_heads)
        ffn: FeedForward = dense
        if keys.has_tensor(f"blk.{layer}.ffn_gate_inp.weight"):
            ffn = gguf_mixtures.read_experts(keys, Router(is_normalized=False), keys.ffn_width)
        layers.append(LayerSpec(mixer, ffn))
    return {"pattern": tuple(layers)}


_TENSORS: Table = {
    **hf_names.LLAMA,
    **hf_names.mamba("mamba"),
    "final_norm": ("model.final_layernorm.weight",),
    "ffn_norm": ("pre_ff_layernorm.weight",),
    "ffn/gate_up": ("feed_forward.gate_proj.weight", "feed_forward.up_proj.weight"),
    "ffn/down": ("feed_forward.down_proj.weight",),
    "ffn/router": ("feed_forward.router.weight",),
    "ffn/experts/gate_up": (
        "feed_forward.experts.{}.gate_proj.weight",
        "feed_forward.experts.{}.up_proj.weight",
    ),
    "ffn/experts/down": ("feed_forward.experts.{}.down_proj.weight",),
}
FAMILIES = (
    Family(
        name="jamba",
        architecture="JambaForCausalLM",
        read=_read_jamba,
        write=_write_jamba,
        mixers=(Attention, Mamba),
        feed_forwards=(Gated, Experts),
        tensors=_TENSORS,
        splits=(parts.conv_taps,),
        gguf=Gguf(
            gguf_names.STATES,
            readers={"jamba": GgufReader(_gguf_jamba, (*gguf_states.MAMBA, *gguf_mixtures.COUNTS))},
            writer=GgufWriter("jamba", has_states=True),
        ),
    ),
)
