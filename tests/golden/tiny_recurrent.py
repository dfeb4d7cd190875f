"""The tiny checkpoints whose layers carry a state of fixed size; see `tiny_cases`.

Prompt 0 is longer than the chunks that the reference computes states by, and no multiple of them.
"""

import numpy as np
import torch
from tiny_families import TIED, UNTIED, Case, rope, widths


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
    # The rank of the step is derived from the width; then it is stated, and there is no bias.
    Case(
        "mamba-bias-tied",
        _without_rotation(24, 2) | TIED | {"state_size": 6, "conv_kernel": 4, "use_bias": True},
        seed=311,
        greedy=True,
    ),
    Case(
        "mamba-rank-untied-float32",
        _without_rotation(12, 2)
        | UNTIED
        | {
            "expand": 3,
            "time_step_rank": 5,
            "state_size": 3,
            "conv_kernel": 3,
            "use_conv_bias": False,
            "residual_in_fp32": False,
        },
        seed=312,
        dtype=torch.float32,
    ),
    # Attention and experts at odd places, both before and behind a layer of the other kind.
    Case(
        "jamba-gqa-experts-bias",
        widths(20, 4, 4, 2)
        | UNTIED
        | {
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "intermediate_size": 16,
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-3,
            "mamba_d_state": 5,
            "mamba_expand": 1,
            "mamba_proj_bias": True,
        },
        seed=321,
        greedy=True,
        rewrites={"max_position_embeddings": None},
    ),
    Case(
        "jamba-mqa-dense-tied-float32",
        widths(18, 2, 3, 1)
        | TIED
        | {
            "attn_layer_period": 2,
            "attn_layer_offset": 0,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "mamba_d_state": 4,
            "mamba_d_conv": 3,
            "mamba_dt_rank": 3,
            "mamba_conv_bias": False,
        },
        seed=322,
        dtype=torch.float32,
    ),
    # By the keys of published files; two value heads a key head, which are narrower.
    Case(
        "qwen3_next-gqa-shared-experts",
        widths(20, 3, 4, 2, 16)
        | UNTIED
        | {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "rms_norm_eps": 1e-3,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 6,
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 12,
            "mlp_only_layers": [1],
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "attention_bias": True,
            **rope("default", 1e4, partial_rotary_factor=0.25),
        },
        seed=331,
        version_4_keys=True,
        rewrites={"layer_types": None, "full_attention_interval": 3},
        greedy=True,
    ),
    # As many key heads as value heads; half a head rotates; experts in every second layer.
    Case(
        "qwen3_next-mha-listed-tied-float32",
        widths(16, 3, 2, 2, 12)
        | TIED
        | {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "rms_norm_eps": 1e-3,
            "linear_key_head_dim": 4,
            "linear_value_head_dim": 6,
            "linear_conv_kernel_dim": 3,
            "decoder_sparse_step": 2,
            "intermediate_size": 20,
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
            **rope("default", 1e5, partial_rotary_factor=0.5),
        },
        seed=332,
        dtype=torch.float32,
    ),
    # The feed-forward's width is derived as published files have it.
    Case(
        "lfm2-gqa-adjusted-bias-tied",
        widths(24, 3, 4, 2)
        | TIED
        | {
            "full_attn_idxs": [1],
            "conv_bias": True,
            "conv_L_cache": 3,
            "intermediate_size": 35,
            "block_ffn_dim_multiplier": 1.1,
            "block_multiple_of": 8,
            **rope("default", 1e6),
        },
        seed=341,
        version_4_keys=True,
        rewrites={"layer_types": None, "full_attn_idxs": [1]},
        greedy=True,
    ),
    Case(
        "lfm2-mha-listed-untied-float32",
        widths(18, 2, 3, 3)
        | UNTIED
        | {
            "layer_types": ["conv", "full_attention"],
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            **rope("default", 1e4),
        },
        seed=342,
        dtype=torch.float32,
    ),
    Case(
        "falcon_mamba-bias-tied",
        _without_rotation(24, 2)
        | TIED
        | {"state_size": 6, "conv_kernel": 4, "use_bias": True, "mixer_rms_eps": 0.05},
        seed=351,
        greedy=True,
    ),
    Case(
        "falcon_mamba-rank-untied-float32",
        _without_rotation(16, 2)
        | UNTIED
        | {"time_step_rank": 4, "state_size": 5, "conv_kernel": 3, "use_conv_bias": False},
        seed=352,
        dtype=torch.float32,
    ),
)  # fmt: skip
