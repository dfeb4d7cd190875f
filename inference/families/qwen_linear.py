"""Qwen3-Next (Qwen Team 2025), with a mixture, and Qwen3.5 (2026), with dense feed-forwards or a
mixture: gated DeltaNet, and attention with an output gate. Qwen3.6 has the names of Qwen3.5.
"""

import dataclasses
from collections.abc import Sequence

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.experts import Experts
from configs.kinds.feed_forward import Gated
from configs.kinds.kind import FeedForward, Mixer
from configs.kinds.recurrent.delta_net import DeltaNet
from configs.kinds.rope import Rope
from configs.model import MOST_LAYERS, ModelConfig
from inference.families import qwen_moe
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields, Table
from inference.families.shared import (
    delta_net,
    fields,
    gguf_mixtures,
    gguf_names,
    gguf_states,
    hf_names,
    mixtures,
    parts,
    rope_keys,
)
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import GgufKeys
from inference.families.shared.gguf_states import Metadata


def _read_qwen3_next(keys: Keys) -> ModelFields:
    keys = keys.with_defaults({"num_key_value_heads": 2, "intermediate_size": 5632})
    experts = mixtures.experts(
        keys, "num_experts", 512, 10, keys.integer("moe_intermediate_size", 512),
        mixtures.softmax_router(keys, True), has_shared_gate=True,
        shared_width=keys.integer("shared_expert_intermediate_size", 512),
    )  # fmt: skip
    return _read(keys, qwen_moe.some_dense(keys, experts))


def _read_qwen3_5(keys: Keys) -> ModelFields:
    """Reads the text part of Qwen3.5, where the sections of positions are equal."""
    keys = keys.with_defaults({"num_key_value_heads": 4, "intermediate_size": 12288})
    return _read(keys, fields.gated(keys))


def _read_qwen3_5_moe(keys: Keys) -> ModelFields:
    """Reads the text part of Qwen3.5's mixtures, whose routers always normalize."""
    keys = keys.with_defaults({"num_key_value_heads": 2})
    keys.require_neutral(norm_topk_prob=(True, None))
    experts = mixtures.experts(
        keys, "num_experts", 256, 8, keys.integer("moe_intermediate_size", 512),
        has_shared_gate=True,
        shared_width=keys.integer("shared_expert_intermediate_size", 512),
    )  # fmt: skip
    return _read(keys, experts)


def _read(keys: Keys, ffns: FeedForward | Sequence[FeedForward]) -> ModelFields:
    keys.require_neutral(
        attn_output_gate=(True, None),  # by a sigmoid
        output_gate_type=("swish", "silu", None),  # of the other layers
    )
    rope = rope_keys.partial(keys, 10_000.0, keys.number("partial_rotary_factor", 0.25))
    attention = fields.attention(keys, 256, rope=rope, qk_norm="head", has_output_gate=True)
    mixer = DeltaNet(
        num_heads=keys.integer("linear_num_value_heads", 32),
        num_key_heads=keys.integer("linear_num_key_heads", 16),
        key_width=keys.integer("linear_key_head_dim", 128),
        value_width=keys.integer("linear_value_head_dim", 128),
        conv_width=keys.integer("linear_conv_kernel_dim", 4),
    )
    interval = keys.integer("full_attention_interval", 4, limit=MOST_LAYERS)
    mixers = delta_net.by_type(keys, mixer, attention, lambda layer: (layer + 1) % interval == 0)
    return {**fields.model(keys, rope, mixers, ffns), "norm_offset": 1.0}


def _write_qwen3_next(config: ModelConfig) -> dict[str, object]:
    shared = mixtures.mixture(config).shared_width
    return qwen_moe.write_mixture(config) | _mixer_keys(config) | {
        "shared_expert_intermediate_size": shared,
    }  # fmt: skip


def _write_qwen3_5_moe(config: ModelConfig) -> dict[str, object]:
    raw = _write_qwen3_next(config)
    for key in ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"):
        del raw[key]
    return raw | {"attn_output_gate": True}


def _write_qwen3_5(config: ModelConfig) -> dict[str, object]:
    ffn = config.layers[0].ffn
    assert isinstance(ffn, Gated), "config_export checks the kinds"
    raw = mixtures.with_heads(config) | _mixer_keys(config)
    return raw | {"intermediate_size": ffn.width, "attn_output_gate": True}


def _mixer_keys(config: ModelConfig) -> dict[str, object]:
    attention = mixtures.attention(config)
    return delta_net.linear_keys(config) | {
        "attention_bias": "out" in attention.biases,
        "partial_rotary_factor": (attention.rope or Rope()).share,
    }


def _fused_tensors(module: str) -> Table:
    """Returns Qwen3-Next's names of gated DeltaNet, which fuse gates with convolved channels."""
    fused, numbers = f"{module}.in_proj_qkvz.weight", f"{module}.in_proj_ba.weight"
    return {
        **_tensors(module),
        "delta_net/in": tuple(f"{fused}.{part}" for part in "vqk"),
        "delta_net/gates": (f"{fused}.z", f"{numbers}.b", f"{numbers}.a"),
    }


def _tensors(module: str) -> Table:
    return {
        "delta_net/in": tuple(f"{module}.in_proj_qkv.weight.{part}" for part in "vqk"),
        "delta_net/gates": tuple(f"{module}.in_proj_{part}.weight" for part in "zba"),
        "delta_net/conv": tuple(f"{module}.conv1d.weight.{part}" for part in "vqk"),
        "delta_net/rate": (f"{module}.A_log",),
        "delta_net/step_bias": (f"{module}.dt_bias",),
        "delta_net/out_norm": (f"{module}.norm.weight",),
        "delta_net/out": (f"{module}.out_proj.weight",),
    }


def _gguf(keys: GgufKeys) -> ModelFields:
    """Reads any of the architectures, except their last blocks, which predict a second token. Which
    tensors a layer has says of what kind it is.
    """
    extra = keys.whole("nextn_predict_layers", limit=keys.num_layers - 1)
    layers = range(keys.num_layers - extra)
    mixers = [_gguf_mixer(keys, number) for number in layers]
    ffns = [_gguf_ffn(keys, number) for number in layers]
    return {
        "num_layers": len(layers),
        "pattern": fields.pattern(mixers, ffns),
        "norm_offset": 1.0,
    }


def _gguf_mixer(keys: GgufKeys, number: int) -> Mixer:
    if keys.has_tensor(f"blk.{number}.attn_q.weight"):
        return gguf_states.attention(
            keys, number, keys.integer("attention.head_count_kv"), qk_norm="head",
            rope=dataclasses.replace(keys.rope(), share=keys.rotary_share), has_output_gate=True,
        )  # fmt: skip
    heads, inner = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    if inner % heads:
        raise InputError(
            f"metadata {keys.architecture}.ssm.inner_size={inner} is no multiple of "
            f"ssm.time_step_rank={heads}"
        )
    return DeltaNet(
        heads,
        keys.integer("ssm.group_count"),
        keys.integer("ssm.state_size"),
        inner // heads,
        keys.integer("ssm.conv_kernel"),
    )


def _gguf_ffn(keys: GgufKeys, number: int) -> FeedForward:
    if not keys.has_tensor(f"blk.{number}.ffn_gate_inp.weight"):
        return Gated(keys.ffn_width)
    return gguf_mixtures.read_experts(
        keys, gguf_mixtures.read_router(keys, is_normalized=True), has_shared_gate=True,
        shared_width=keys.integer("expert_shared_feed_forward_length"),
    )  # fmt: skip


def _gguf_metadata(config: ModelConfig) -> Metadata:
    """Returns the keys of the delta rule, and how often a layer attends.

    Raises:
        InputError: layers attend in another order than llama.cpp has.
    """
    linear = delta_net.first(config)
    attends = [isinstance(layer.mixer, Attention) for layer in config.layers]
    interval = [*attends, True].index(True) + 1
    if attends != [number % interval == 0 for number in range(1, len(attends) + 1)]:
        raise InputError(
            f"{config.name}: in a .gguf file every layer of so many attends, and here layers "
            f"{[number for number, is_attention in enumerate(attends) if is_attention]}"
        )
    return {
        "ssm.conv_kernel": linear.conv_width,
        "ssm.state_size": linear.key_width,
        "ssm.group_count": linear.num_key_heads,
        "ssm.time_step_rank": linear.num_heads,
        "ssm.inner_size": linear.inner_width,
        "full_attention_interval": interval,
    }


def _gguf_reader(*reads: str) -> GgufReader:
    return GgufReader(_gguf, (*_GGUF_KEYS, *reads), free_widths=("rope.dimension_count",))


# The last two change nothing: positions of texts are equal in all sections.
_GGUF_KEYS = (
    "ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size",
    "nextn_predict_layers", "full_attention_interval", "rope.dimension_sections",
)  # fmt: skip
_PREDICTING = "mtp_num_hidden_layers"
_BETAS_DECAYS = tuple(f"{gguf_names.BETAS_DECAYS}.{part}" for part in "ba")
FAMILIES = (
    Family(
        name="qwen3_next",
        architecture="Qwen3NextForCausalLM",
        read=_read_qwen3_next,
        reads=("attention_bias",),
        write=_write_qwen3_next,
        mixers=(Attention, DeltaNet),
        feed_forwards=(Gated, Experts),
        tensors={**qwen_moe.SHARED_EXPERT, **_fused_tensors("linear_attn")},
        splits=(parts.delta_net,),
        predicting=hf_names.PREDICTING_APART,
        predicting_key=_PREDICTING,
        predicting_layers="mtp.layers",
        predictor="mtp.",
        gguf=Gguf(
            {
                **gguf_names.DELTA_NET,
                "delta_net/gates": ("attn_gate.weight", *_BETAS_DECAYS),
            },
            readers={"qwen3next": _gguf_reader(*gguf_mixtures.ROUTED)},
            writer=GgufWriter("qwen3next", _gguf_metadata),
        ),
    ),
    Family(
        name="qwen3_5",
        architecture="Qwen3_5ForCausalLM",
        model_type="qwen3_5_text",
        read=_read_qwen3_5,
        reads=("attention_bias",),
        write=_write_qwen3_5,
        mixers=(Attention, DeltaNet),
        feed_forwards=(Gated,),
        tensors={**hf_names.LLAMA, **_tensors("linear_attn")},
        splits=(parts.delta_net,),
        predicting=hf_names.PREDICTING_APART,
        predicting_key=_PREDICTING,
        predicting_layers="mtp.layers",
        predictor="mtp.",
        wrapper="Qwen3_5ForConditionalGeneration",
        ignored=("model.visual",),
        gguf=Gguf(
            gguf_names.DELTA_NET,
            has_heads_in_turns=True,
            readers={"qwen35": _gguf_reader()},
            writer=GgufWriter("qwen35", _gguf_metadata),
        ),
    ),
    Family(
        name="qwen3_5_moe",
        architecture="Qwen3_5MoeForCausalLM",
        model_type="qwen3_5_moe_text",
        read=_read_qwen3_5_moe,
        reads=("attention_bias",),
        write=_write_qwen3_5_moe,
        mixers=(Attention, DeltaNet),
        feed_forwards=(Experts,),
        tensors={**qwen_moe.SHARED_EXPERT, **_tensors("linear_attn")},
        splits=(parts.delta_net,),
        stacks=qwen_moe.STACKS,
        predicting=hf_names.PREDICTING_APART,
        predicting_key=_PREDICTING,
        predicting_layers="mtp.layers",
        predictor="mtp.",
        wrapper="Qwen3_5MoeForConditionalGeneration",
        ignored=("model.visual",),
        gguf=Gguf(
            gguf_names.DELTA_NET,
            has_heads_in_turns=True,
            readers={"qwen35moe": _gguf_reader(*gguf_mixtures.ROUTED)},
            writer=GgufWriter("qwen35moe", _gguf_metadata),
        ),
    ),
)
