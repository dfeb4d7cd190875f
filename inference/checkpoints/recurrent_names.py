"""Names of recurrent layers' tensors, by the module of a checkpoint that they are in. What it fuses
goes by the names of its parts (`hf/recurrent_parts.py`).
"""

from collections.abc import Mapping

Table = Mapping[str, tuple[str, ...]]


def delta_net(module: str) -> Table:
    """Of Qwen3-Next's gated DeltaNet, which fuses what it is fed, and the numbers of its gates."""
    fused = f"{module}.in_proj_qkvz.weight", f"{module}.in_proj_ba.weight"
    return {
        "delta_net/in": tuple(f"{fused[0]}.{part}" for part in "vqk"),
        "delta_net/gates": (f"{fused[0]}.z", f"{fused[1]}.b", f"{fused[1]}.a"),
        "delta_net/conv": tuple(f"{module}.conv1d.weight.{part}" for part in "vqk"),
        "delta_net/rate": (f"{module}.A_log",),
        "delta_net/step_bias": (f"{module}.dt_bias",),
        "delta_net/out_norm": (f"{module}.norm.weight",),
        "delta_net/out": (f"{module}.out_proj.weight",),
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
