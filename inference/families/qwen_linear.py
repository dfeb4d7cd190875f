"""Qwen3-Next (Qwen Team 2025), with a mixture, and Qwen3.5 (2026), with dense feed-forwards or a
mixture, without layers that predict a second token: gated DeltaNet, and attention with an output
gate. Qwen3.6 has the names of Qwen3.5.
"""

from collections.abc import Sequence

from configs.kinds.attention import Attention
from configs.kinds.experts import Experts
from configs.kinds.feed_forward import Gated
from configs.kinds.kind import FeedForward
from configs.kinds.recurrent.delta_net import DeltaNet
from configs.kinds.rope import Rope
from configs.model import MOST_LAYERS, ModelConfig
from inference.families import qwen_moe
from inference.families.family import Family, ModelFields, Table
from inference.families.shared import delta_net, fields, hf_names, mixtures, parts, rope_keys
from inference.families.shared.config_keys import Keys


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


# Published in bfloat16 the experts of a layer are one tensor, in FP8 each has its own.
_STACKS: Table = {
    "mlp.experts.gate_up_proj": tuple(f"mlp.experts.{{}}.{p}_proj.weight" for p in ("gate", "up")),
    "mlp.experts.down_proj": ("mlp.experts.{}.down_proj.weight",),
}
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
        predictor="mtp",
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
        predictor="mtp",
        wrapper="Qwen3_5ForConditionalGeneration",
        ignored=("model.visual",),
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
        stacks=_STACKS,
        predictor="mtp",
        wrapper="Qwen3_5MoeForConditionalGeneration",
        ignored=("model.visual",),
    ),
)
