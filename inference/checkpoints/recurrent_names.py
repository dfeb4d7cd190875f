"""Names of recurrent layers' tensors, by the module of a checkpoint that they are in. What it fuses
goes by the names of its parts (`hf/recurrent_parts.py`).
"""

from collections.abc import Mapping

Table = Mapping[str, tuple[str, ...]]


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
