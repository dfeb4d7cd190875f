"""Names of recurrent layers' tensors, by the module of a checkpoint that they are in. What it fuses
goes by the names of its parts (`hf/recurrent_parts.py`).
"""

from collections.abc import Mapping

Table = Mapping[str, tuple[str, ...]]


def qwen3_next(module: str) -> Table:
    """Of gated DeltaNet as Qwen3-Next has it, gates beside what is convolved."""
    fused, numbers = f"{module}.in_proj_qkvz.weight", f"{module}.in_proj_ba.weight"
    return {
        **qwen3_5(module),
        "delta_net/in": tuple(f"{fused}.{part}" for part in "vqk"),
        "delta_net/gates": (f"{fused}.z", f"{numbers}.b", f"{numbers}.a"),
    }


def qwen3_5(module: str) -> Table:
    """Of gated DeltaNet as Qwen3.5 has it."""
    return {
        "delta_net/in": tuple(f"{module}.in_proj_qkv.weight.{part}" for part in "vqk"),
        "delta_net/gates": tuple(f"{module}.in_proj_{part}.weight" for part in "zba"),
        "delta_net/conv": tuple(f"{module}.conv1d.weight.{part}" for part in "vqk"),
        "delta_net/rate": (f"{module}.A_log",),
        "delta_net/step_bias": (f"{module}.dt_bias",),
        "delta_net/out_norm": (f"{module}.norm.weight",),
        "delta_net/out": (f"{module}.out_proj.weight",),
    }


def olmo_hybrid(module: str) -> Table:
    """Of gated DeltaNet as OLMo Hybrid has it, where every matrix is on its own."""
    return {
        "delta_net/in": tuple(f"{module}.{part}_proj.weight" for part in "vqk"),
        "delta_net/gates": tuple(f"{module}.{part}_proj.weight" for part in "gba"),
        "delta_net/conv": tuple(f"{module}.{part}_conv1d.weight.{part}" for part in "vqk"),
        "delta_net/rate": (f"{module}.A_log",),
        "delta_net/step_bias": (f"{module}.dt_bias",),
        "delta_net/out_norm": (f"{module}.o_norm.weight",),
        "delta_net/out": (f"{module}.o_proj.weight",),
    }


def kimi_linear(module: str) -> Table:
    """Of Kimi Delta Attention, whose decays and gates are projected in two steps."""
    return {
        **olmo_hybrid(module),
        "delta_net/gates": (f"{module}.b_proj.weight",),
        "delta_net/down": (f"{module}.f_a_proj.weight", f"{module}.g_a_proj.weight"),
        "delta_net/decay_up": (f"{module}.f_b_proj.weight",),
        "delta_net/gate_up": (f"{module}.g_b_proj.weight",),
        "delta_net/rate": (f"{module}.A_log.heads",),
    }


def mamba(module: str) -> Table:
    """Of Mamba."""
    return {
        "mamba/in": (f"{module}.in_proj.weight",),
        "mamba/conv": (f"{module}.conv1d.weight.taps",),
        "mamba/conv_bias": (f"{module}.conv1d.bias",),
        "mamba/choice": (f"{module}.x_proj.weight",),
        "mamba/step": (f"{module}.dt_proj.weight",),
        "mamba/step_norm": (f"{module}.dt_layernorm.weight",),
        "mamba/b_norm": (f"{module}.b_layernorm.weight",),
        "mamba/c_norm": (f"{module}.c_layernorm.weight",),
        "mamba/decay": (f"{module}.A_log",),
        "mamba/skip": (f"{module}.D",),
        "mamba/out": (f"{module}.out_proj.weight",),
    }


def mamba2(module: str) -> Table:
    """Of Mamba-2."""
    return {
        "mamba2/in": tuple(f"{module}.in_proj.weight.{part}" for part in ("x", "B", "C")),
        "mamba2/in_bias": tuple(f"{module}.in_proj.bias.{part}" for part in ("x", "B", "C")),
        "mamba2/gates": tuple(f"{module}.in_proj.weight.{part}" for part in ("z", "dt")),
        "mamba2/gates_bias": tuple(f"{module}.in_proj.bias.{part}" for part in ("z", "dt")),
        "mamba2/conv": (f"{module}.conv1d.weight.taps",),
        "mamba2/conv_bias": (f"{module}.conv1d.bias",),
        "mamba2/decay": (f"{module}.A_log",),
        "mamba2/step_bias": (f"{module}.dt_bias",),
        "mamba2/skip": (f"{module}.D",),
        "mamba2/out_norm": (f"{module}.norm.weight",),
        "mamba2/out": (f"{module}.out_proj.weight",),
    }


# What families with Mamba-2 layers have besides, or otherwise than those they are relatives of.
BAMBA: Table = {
    **mamba2("mamba"),
    "final_norm": ("model.final_layernorm.weight",),
    "ffn_norm": ("pre_ff_layernorm.weight",),
    "ffn/gate_up": ("feed_forward.gate_proj.weight", "feed_forward.up_proj.weight"),
    "ffn/down": ("feed_forward.down_proj.weight",),
}
GRANITE: Table = {
    **mamba2("mamba"),
    "ffn/gate_up": ("shared_mlp.input_linear.weight",),
    "ffn/down": ("shared_mlp.output_linear.weight",),
    "ffn/shared/gate_up": ("shared_mlp.input_linear.weight",),
    "ffn/shared/down": ("shared_mlp.output_linear.weight",),
    "ffn/router": ("block_sparse_moe.router.layer.weight",),
    "ffn/experts/gate_up": ("block_sparse_moe.input_linear.weight",),
    "ffn/experts/down": ("block_sparse_moe.output_linear.weight",),
}
NEMOTRON: Table = {
    "mixer/qkv": tuple(f"mixer.{part}_proj.weight" for part in "qkv"),
    "mixer/out": ("mixer.o_proj.weight",),
    "ffn_norm": ("norm.weight",),
    "ffn/up": ("mixer.up_proj.weight",),
    "ffn/down": ("mixer.down_proj.weight",),
    "ffn/router": ("mixer.gate.weight",),
    "ffn/router_offsets": ("mixer.gate.e_score_correction_bias",),
    "ffn/latent_down": ("mixer.fc1_latent_proj.weight",),
    "ffn/latent_up": ("mixer.fc2_latent_proj.weight",),
    "ffn/experts/up": ("mixer.experts.{}.up_proj.weight",),
    "ffn/experts/down": ("mixer.experts.{}.down_proj.weight",),
    "ffn/shared/up": ("mixer.shared_experts.up_proj.weight",),
    "ffn/shared/down": ("mixer.shared_experts.down_proj.weight",),
}


def short_conv(module: str) -> Table:
    """Of LFM2's convolutions."""
    return {
        "short_conv/in": (f"{module}.in_proj.weight",),
        "short_conv/conv": (f"{module}.conv.weight.taps",),
        "short_conv/conv_bias": (f"{module}.conv.bias",),
        "short_conv/out": (f"{module}.out_proj.weight",),
    }


def lightning(module: str) -> Table:
    """Of MiniMax-Text-01's lightning attention."""
    return {
        "linear_attention/in": tuple(f"{module}.qkv_proj.weight.{part}" for part in "qkv"),
        "linear_attention/gate": (f"{module}.output_gate.weight",),
        "linear_attention/out_norm": (f"{module}.norm.weight",),
        "linear_attention/out": (f"{module}.out_proj.weight",),
    }
