"""The tiny checkpoints whose layers carry a state of fixed size; see `tiny_cases`.

Prompt 0 is longer than the chunks that the reference computes states by, and no multiple of them.
"""

import numpy as np
import torch
from tiny_families import TIED, UNTIED, Case


def spread(name: str, values: np.ndarray) -> np.ndarray | None:
    """Normal values as those of a parameter that governs a state, or None if it does not.

    Decays of a step then lie between 0.3 and 0.99, so that a text's beginning is felt at its end
    and every part of the recurrence shows.
    """
    if name.endswith("A_log"):
        return values - 1.0
    if name.endswith(("dt_bias", "dt_proj.bias")):
        return 0.7 * values - 1.0
    if name.endswith(".D"):
        return 1.0 + 0.3 * values
    return 0.4 * values if name.endswith(("conv1d.weight", "conv.weight")) else None


def _without_rotation(width: int, num_layers: int) -> dict:
    return {"hidden_size": width, "num_hidden_layers": num_layers}


CASES = (
    # Limits of the step that bite, biases of all projections, two heads a group.
    Case(
        "mamba2-groups-bias-limit",
        _without_rotation(24, 2)
        | UNTIED
        | {
            "num_heads": 6,
            "head_dim": 8,
            "n_groups": 3,
            "state_size": 5,
            "conv_kernel": 4,
            "chunk_size": 16,
            "use_bias": True,
            "time_step_limit": [0.15, 0.6],
        },
        seed=301,
        greedy=True,
    ),
    # One group; no bias at all; a kernel of two tokens.
    Case(
        "mamba2-one-group-tied-float32",
        _without_rotation(20, 2)
        | TIED
        | {
            "num_heads": 4,
            "head_dim": 10,
            "n_groups": 1,
            "state_size": 9,
            "conv_kernel": 2,
            "chunk_size": 32,
            "use_conv_bias": False,
            "residual_in_fp32": False,
        },
        seed=302,
        dtype=torch.float32,
    ),
)  # fmt: skip
