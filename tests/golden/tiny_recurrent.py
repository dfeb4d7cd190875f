"""The tiny checkpoints whose layers carry a state of fixed size; see `tiny_cases`.

Prompt 0 is longer than the chunks that the reference computes states by, and no multiple of them.
"""

import numpy as np
import tiny_linear
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
    Case(
        "falcon_mamba-bias-tied",
        _without_rotation(24, 2)
        | TIED
        | {"state_size": 6, "conv_kernel": 4, "use_bias": True, "mixer_rms_eps": 0.05},
        seed=351,
        greedy=True,
    ),
    # As in the published file, the inner width is stated, and is not what `expand` says.
    Case(
        "falcon_mamba-rank-untied-float32",
        _without_rotation(16, 2)
        | UNTIED
        | {
            "expand": 16,
            "intermediate_size": 28,
            "time_step_rank": 4,
            "state_size": 5,
            "conv_kernel": 3,
            "use_conv_bias": False,
        },
        seed=352,
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
            "intermediate_size": 12,
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
        widths(12, 2, 3, 1)
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
    # Half of a head rotates, whatever the file says.
    Case(
        "bamba-mqa-groups-bias-limit",
        widths(24, 2, 3, 1)
        | UNTIED
        | {
            "attn_layer_indices": [1],
            "mamba_n_heads": 4,
            "mamba_n_groups": 2,
            "mamba_d_state": 5,
            "mamba_chunk_size": 16,
            "mamba_proj_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "time_step_limit": (0.1, 0.7),
            "intermediate_size": 20,
            **rope("default", 1e4),
        },
        seed=371,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "bamba-mha-one-group-tied-float32",
        widths(16, 2, 2, 2)
        | TIED
        | {
            "attn_layer_indices": [0],
            "mamba_n_heads": 3,
            "mamba_d_head": 16,
            "mamba_expand": 3,
            "mamba_d_state": 4,
            "mamba_d_conv": 3,
            "mamba_chunk_size": 32,
            "mamba_conv_bias": False,
            "intermediate_size": 16,
            **rope("default", 1e4),
        },
        seed=372,
        dtype=torch.float32,
    ),
    # All multipliers, and the gate before the norm; then the norm before the gate; then no norm.
    Case(
        "falcon_h1-gqa-multipliers-gate-norm",
        widths(20, 2, 4, 2, 6)
        | UNTIED
        | {
            "mamba_d_ssm": 24,
            "mamba_n_heads": 4,
            "mamba_n_groups": 2,
            "mamba_d_state": 5,
            "mamba_chunk_size": 16,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "embedding_multiplier": 1.7,
            "lm_head_multiplier": 0.6,
            "mlp_multipliers": [0.8, 1.4],
            "key_multiplier": 0.7,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.9,
            "ssm_multipliers": [0.7, 1.3, 0.8, 1.2, 0.9],
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.75,
            **rope("default", 1e4),
        },
        seed=381,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "falcon_h1-mqa-norm-gate-limit",
        widths(16, 2, 2, 1, 6)
        | UNTIED
        | {
            "mamba_d_ssm": 16,
            "mamba_n_heads": 4,
            "mamba_n_groups": 2,
            "mamba_d_state": 4,
            "mamba_chunk_size": 16,
            "mamba_rms_norm": True,
            "time_step_limit": (0.1, 0.7),
            **rope("default", 1e4),
        },
        seed=382,
    ),
    Case(
        "falcon_h1-mha-no-norm-tied-float32",
        widths(12, 2, 2, 2, 8)
        | TIED
        | {
            "mamba_d_ssm": None,
            "mamba_n_heads": 2,
            "mamba_d_state": 5,
            "mamba_d_conv": 3,
            "mamba_chunk_size": 32,
            "mamba_conv_bias": False,
            "intermediate_size": 16,
            **rope("default", 1e4),
        },
        seed=383,
        dtype=torch.float32,
    ),
    Case(
        "granitemoehybrid-mqa-rope-experts",
        widths(20, 2, 5, 1)
        | UNTIED
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "position_embedding_type": "rope",
            "shared_intermediate_size": 14,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 1.6,
            "logits_scaling": 1.4,
            "residual_multiplier": 0.8,
            "attention_multiplier": 0.4,
            "attention_bias": True,
            "mamba_n_heads": 4,
            "mamba_n_groups": 2,
            "mamba_d_state": 5,
            "mamba_chunk_size": 16,
            "mamba_proj_bias": True,
            "time_step_limit": (0.1, 0.7),
            **rope("default", 1e4),
        },
        seed=391,
        version_4_keys=True,
        rewrites={"layer_types": ["mamba", "attention"]},
        greedy=True,
    ),
    Case(
        "granitemoehybrid-mha-nope-dense-tied-float32",
        widths(16, 2, 2, 2)
        | TIED
        | {
            "layer_types": ["full_attention", "linear_attention"],
            "shared_intermediate_size": 18,
            "num_local_experts": 0,
            "attention_multiplier": 0.3,
            "mamba_n_heads": 4,
            "mamba_d_state": 6,
            "mamba_d_conv": 3,
            "mamba_chunk_size": 32,
            "mamba_conv_bias": False,
        },
        seed=392,
        dtype=torch.float32,
    ),
    # Each layer is a mixer or a feed-forward; by the pattern of published files.
    Case(
        "nemotron_h-gqa-latent-experts",
        {
            "hidden_size": 20,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 6,
            "layers_block_type": [
                "linear_attention", "moe", "full_attention", "mlp", "linear_attention",
            ],
            "mamba_num_heads": 4,
            "mamba_head_dim": 6,
            "n_groups": 2,
            "ssm_state_size": 5,
            "chunk_size": 16,
            "n_routed_experts": 6,
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 8,
            "moe_shared_expert_intermediate_size": 10,
            "moe_latent_size": 12,
            "routed_scaling_factor": 1.5,
            "mlp_bias": True,
        },
        seed=401,
        rewrites={
            "layers_block_type": None, "hybrid_override_pattern": "ME*-M", "num_hidden_layers": 5,
        },
        greedy=True,
    ),
    Case(
        "nemotron_h-mha-bias-float32",
        {
            "hidden_size": 16,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "layers_block_type": ["moe", "linear_attention", "full_attention"],
            "mamba_num_heads": 3,
            "mamba_head_dim": 8,
            "n_groups": 1,
            "ssm_state_size": 5,
            "conv_kernel": 3,
            "chunk_size": 32,
            "use_conv_bias": False,
            "use_bias": True,
            "n_routed_experts": 3,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "moe_intermediate_size": 8,
            "moe_shared_expert_intermediate_size": 8,
            "residual_in_fp32": True,
        },
        seed=402,
        dtype=torch.float32,
    ),
    *tiny_linear.CASES,
)  # fmt: skip
