"""Names of recurrent layers' tensors, by the module of a checkpoint that they are in. What it fuses
goes by the names of its parts (`hf/recurrent_parts.py`).
"""

from collections.abc import Mapping

Table = Mapping[str, tuple[str, ...]]


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
