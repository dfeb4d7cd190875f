"""The tiny checkpoints with experts, and with latent attention; see `tiny_cases`."""

import torch
from tiny_families import TIED, UNTIED, Case, layers, rope, widths


def _latent(rank: int, rotary: int, nope: int, value: int, query_rank: int | None = None) -> dict:
    return {
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": nope,
        "v_head_dim": value,
        "q_lora_rank": query_rank,
    }


_INDEXED = {
    "index_n_heads": 8,
    "index_head_dim": 14,
    "n_routed_experts": 9,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 12,
}

CASES = (
    # Odd numbers of experts; in the last one a token visits all of them.
    Case(
        "mixtral-gqa-float32",
        widths(40, 2, 4, 2) | UNTIED | {"num_local_experts": 5, "num_experts_per_tok": 3},
        seed=101,
        dtype=torch.float32,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "mixtral-mqa-window-all",
        widths(36, 2, 3, 1, 10)
        | TIED
        | {"sliding_window": 24, "num_local_experts": 3, "num_experts_per_tok": 3},
        seed=102,
    ),
    # Layers without experts, by step and by list; a shared expert behind a gate.
    Case(
        "qwen2_moe-mha-dense-layers",
        widths(36, 5, 3, 3)
        | UNTIED
        | {
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 28,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
        seed=111,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "qwen2_moe-gqa-window",
        widths(40, 3, 4, 2)
        | TIED
        | {
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 36,
            "num_experts": 5,
            "num_experts_per_tok": 1,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 1,
        },
        seed=112,
    ),
    Case(
        "qwen3_moe-gqa-float32",
        widths(32, 3, 4, 2, 10)
        | UNTIED
        | {
            "moe_intermediate_size": 12,
            "num_experts": 9,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
        seed=121,
        dtype=torch.float32,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "qwen3_moe-mqa-bias-window",
        widths(36, 2, 3, 1, 10)
        | TIED
        | {
            "moe_intermediate_size": 28,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 24,
        },
        seed=122,
    ),
    Case(
        "olmoe-mha-float32",
        widths(36, 2, 3, 3) | UNTIED | {"num_experts": 6, "num_experts_per_tok": 5},
        seed=131,
        dtype=torch.float32,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "olmoe-gqa-norm",
        widths(40, 2, 4, 2)
        | TIED
        | {"num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True},
        seed=132,
    ),
    # Queries at once, as in V2-Lite; then by a latent vector, with groups and stretched positions.
    Case(
        "deepseek_v2-mha-lite",
        widths(36, 3, 3, 3)
        | UNTIED
        | _latent(18, 6, 8, 10)
        | {
            "first_k_dense_replace": 1,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
        },
        seed=141,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "deepseek_v2-mha-groups-yarn",
        widths(40, 2, 4, 4)
        | TIED
        | _latent(14, 8, 6, 12, query_rank=22)
        | {
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 4.0,
        }
        | rope(
            "yarn", factor=8.0, original_max_position_embeddings=32, mscale=0.7,
            mscale_all_dim=0.9, beta_fast=8.0,
        ),
        seed=142,
    ),
    Case(
        "deepseek_v3-mha-groups-yarn",
        widths(40, 3, 5, 5)
        | UNTIED
        | _latent(18, 8, 10, 6, query_rank=22)
        | {
            "first_k_dense_replace": 1,
            "n_routed_experts": 9,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 12,
            "n_group": 3,
            "topk_group": 2,
        }
        | rope(
            "yarn", factor=8.0, original_max_position_embeddings=32, mscale=1.0,
            mscale_all_dim=1.0, beta_fast=8.0,
        ),
        seed=151,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "deepseek_v3-mha-halves-float32",
        widths(36, 2, 3, 3)
        | TIED
        | _latent(10, 6, 8, 12)
        | {
            "first_k_dense_replace": 0,
            "n_routed_experts": 4,
            "n_shared_experts": 2,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 12,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rope_interleave": False,
        },
        seed=152,
        dtype=torch.float32,
    ),
    # An indexer chooses fewer tokens than either prompt has; of eight heads no score is 0.
    Case(
        "deepseek_v32-mha-yarn",
        widths(40, 3, 5, 5)
        | UNTIED
        | _latent(18, 8, 10, 6, query_rank=22)
        | _INDEXED
        | {"index_topk": 12, "first_k_dense_replace": 1, "n_group": 3, "topk_group": 2}
        | rope(
            "yarn", factor=8.0, original_max_position_embeddings=32, mscale=1.0,
            mscale_all_dim=1.0, beta_fast=8.0,
        ),
        seed=153,
        greedy=True,
    ),
    # And here more than the short prompt has, fewer than the long one.
    Case(
        "deepseek_v32-mha-tied-float32",
        widths(36, 2, 3, 3)
        | TIED
        | _latent(10, 6, 8, 12, query_rank=16)
        | _INDEXED
        | {"index_topk": 40, "mlp_layer_types": ["sparse", "dense"], "n_group": 1, "topk_group": 1},
        seed=154,
        dtype=torch.float32,
    ),
    Case(
        "glm_moe_dsa-mha-listed",
        widths(36, 3, 3, 3)
        | UNTIED
        | _latent(18, 6, 8, 10, query_rank=22)
        | _INDEXED
        | {"index_topk": 20, "mlp_layer_types": ["dense", "sparse", "sparse"]},
        seed=156,
    ),
    # Layers that read what an earlier layer's indexer chose, with and without another between.
    Case(
        "glm_moe_dsa-mha-shared-tied-float32",
        widths(24, 5, 2, 2)
        | TIED
        | _latent(10, 6, 8, 10, query_rank=14)
        | _INDEXED
        | {
            "index_topk": 14,
            "mlp_layer_types": ["dense", "dense", "sparse", "dense", "dense"],
            "indexer_types": ["full", "full", "shared", "shared", "full"],
            "intermediate_size": 16,
        },
        seed=157,
        dtype=torch.float32,
        greedy=True,
    ),
    Case(
        "glm4_moe-gqa-norm-bias",
        widths(40, 3, 4, 2, 12)
        | UNTIED
        | {
            "first_k_dense_replace": 1,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 1.5,
        },
        seed=161,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "glm4_moe-mqa-groups-float32",
        widths(36, 2, 3, 1, 8)
        | TIED
        | {
            "first_k_dense_replace": 0,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "n_group": 3,
            "topk_group": 1,
        },
        seed=162,
        dtype=torch.float32,
    ),
    # Values that are keys, fewer heads without a window, by the keys of published files.
    Case(
        "gemma4-mha-mqa-experts-float32",
        widths(36, 4, 3, 3, 8)
        | UNTIED
        | {
            "global_head_dim": 12,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "intermediate_size": 20,
            "hidden_size_per_layer_input": 0,
            "layer_types": layers("ssfs"),
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 12,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.5
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        seed=197,
        dtype=torch.float32,
        rewrites={"per_layer_config": None, "global_head_dim": 12, "num_global_key_value_heads": 1},
        greedy=True,
    ),
    # The limit bites: the feed-forward's inputs reach beyond it.
    Case(
        "gpt_oss-gqa-limit",
        widths(40, 3, 4, 2, 12)
        | UNTIED
        | {"num_local_experts": 5, "num_experts_per_tok": 3, "swiglu_limit": 0.8},
        seed=171,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "gpt_oss-mqa-full",
        widths(36, 2, 3, 1, 10)
        | TIED
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "layer_types": layers("ff"),
            **rope("default", 1e4),
        },
        seed=172,
    ),
    # Relatives: the parts above in other combinations, one checkpoint each.
    Case(
        "dots1-gqa-window",
        widths(40, 3, 4, 2, 12)
        | UNTIED
        | {
            "first_k_dense_replace": 1,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "sliding_window": 24,
            "max_window_layers": 2,
        },
        seed=191,
    ),
    Case(
        "flex_olmo-mha-float32",
        widths(36, 2, 3, 3) | UNTIED | {"num_experts": 7, "num_experts_per_tok": 5},
        seed=192,
        dtype=torch.float32,
    ),
    Case(
        "glm4_moe_lite-mha-listed",
        widths(36, 3, 3, 3)
        | UNTIED
        | _latent(18, 6, 8, 10, query_rank=22)
        | {
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "n_routed_experts": 5,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
        },
        seed=193,
    ),
    Case(
        "minimax_m2-gqa-partial",
        widths(40, 2, 4, 2, 16)
        | UNTIED
        | {
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            **rope("default", 1e4, partial_rotary_factor=0.5),
        },
        seed=194,
    ),
)  # fmt: skip
