"""The tiny checkpoints of mixtures whose heads have gates or narrow values; see `tiny_cases`."""

import torch
from tiny_families import TIED, UNTIED, Case, layers, rope, widths


def _positions(full: dict, sliding: dict) -> dict:
    """Rotary positions of both kinds of layers."""
    objects = {"full_attention": full, "sliding_attention": sliding}
    return {
        "rope_parameters": {kind: {"rope_type": "default"} | own for kind, own in objects.items()}
    }


_HALF, _WHOLE = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}, {"rope_theta": 100.0}
CASES = (
    Case(
        "afmoe-gqa-window-scaled",
        widths(40, 4, 4, 2, 12)
        | UNTIED
        | {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "num_shared_experts": 1,
            "moe_intermediate_size": 12,
            "num_dense_layers": 1,
            "route_scale": 1.5,
            "mup_enabled": True,
            **rope("default", 1e4),
        },
        seed=501,
        version_4_keys=True,
        rewrites={"layer_types": None, "route_norm": True, "score_func": "sigmoid", "n_group": 1},
        greedy=True,
    ),
    Case(
        "afmoe-mqa-bias-listed-tied-float32",
        widths(36, 2, 3, 1, 8)
        | TIED
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "moe_intermediate_size": 12,
            "num_dense_layers": 0,
            "attention_bias": True,
            "layer_types": layers("fs"),
            **rope("default", 1e4),
        },
        seed=502,
        dtype=torch.float32,
    ),
    # More heads in layers with windows; positions of both kinds.
    Case(
        "laguna-gqa-heads-yarn",
        widths(40, 3, 4, 2, 12)
        | UNTIED
        | {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 20,
            "moe_routed_scaling_factor": 1.5,
            "gating": "per-head",
            "layer_types": layers("fss"),
            "num_attention_heads_per_layer": [4, 6, 6],
            **_positions(
                _HALF | {
                    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32,
                    "attention_factor": 1.2,
                },
                _WHOLE,
            ),
        },
        seed=511,
        greedy=True,
    ),
    Case(
        "laguna-mqa-elements-tied-float32",
        widths(36, 3, 3, 1, 8)
        | TIED
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 12,
            "gating": "per-element",
            "attention_bias": True,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            **_positions(_HALF, _WHOLE),
        },
        seed=512,
        dtype=torch.float32,
    ),
    # By the keys of published files, whose window counts the tokens before a query.
    Case(
        "mimo_v2_flash-gqa-sinks",
        widths(40, 4, 4, 1, 12)
        | UNTIED
        | {
            "v_head_dim": 8,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "layer_types": layers("fssf"),
            "sliding_window": 24,
            "attention_value_scale": 0.6,
            **_positions(_HALF, _HALF | {"rope_theta": 100.0}),
        },
        seed=521,
        rewrites={
            "hybrid_layer_pattern": [0, 1, 1, 0],
            "moe_layer_freq": [0, 1, 1, 1],
            "mlp_layer_types": None,
            "sliding_window_size": 23,
            "swa_num_key_value_heads": 2,
            "swa_num_attention_heads": 4,
            "layernorm_epsilon": 1e-5,
            "routed_scaling_factor": None,
        },
        greedy=True,
    ),
    Case(
        "mimo_v2_flash-mha-bias-wide-tied-float32",
        widths(36, 2, 4, 2, 8)
        | TIED
        | {
            "v_head_dim": 8,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "layer_types": layers("sf"),
            "mlp_layer_types": ["sparse", "sparse"],
            "n_group": 3,
            "topk_group": 2,
            "attention_bias": True,
            "attention_value_scale": None,
            **_positions(_WHOLE | {"partial_rotary_factor": 1.0}, _HALF),
        },
        seed=522,
        dtype=torch.float32,
    ),
)  # fmt: skip
