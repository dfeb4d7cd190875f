"""The tiny checkpoints of newer mixtures, which have parts of others; see `tiny_cases`."""

import torch
from tiny_families import TIED, UNTIED, Case, layers, rope, widths


def _positions(sliding_theta: float, **full: float | str) -> dict:
    """Rotary positions of both kinds of layers."""
    return {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4} | full,
            "sliding_attention": {"rope_type": "default", "rope_theta": sliding_theta},
        }
    }


# What the published files of Ling 2.0 say where the reference has other keys.
_LING = {
    "architectures": ["BailingMoeV2ForCausalLM"],
    "n_routed_experts": None,
    "n_shared_experts": None,
    "attention_bias": None,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "use_bias": False,
}
CASES = (
    # A dense layer before those with experts; offsets decide, and are left out.
    Case(
        "lfm2_moe-gqa-dense-bias-tied",
        widths(24, 3, 4, 2)
        | TIED
        | {
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_bias": True,
            "num_dense_layers": 1,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "routed_scaling_factor": 1.5,
            **rope("default", 1e6),
        },
        seed=401,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "lfm2_moe-mqa-no-offsets-float32",
        widths(18, 2, 3, 1)
        | UNTIED
        | {
            "layer_types": ["full_attention", "conv"],
            "conv_L_cache": 4,
            "num_dense_layers": 0,
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "norm_topk_prob": False,
            "use_expert_bias": False,
            **rope("default", 1e4),
        },
        seed=402,
        dtype=torch.float32,
    ),
    # Offsets beside a softmax; experts in every second layer, or behind one.
    Case(
        "ernie4_5_moe-gqa-dense-shared",
        widths(40, 3, 4, 2, 12)
        | UNTIED
        | {
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_num_shared_experts": 2,
            "moe_intermediate_size": 12,
        },
        seed=411,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "ernie4_5_moe-mqa-interval-tied-float32",
        widths(36, 3, 3, 1)
        | TIED
        | {
            "moe_num_experts": 5,
            "moe_k": 2,
            "moe_num_shared_experts": 0,
            "moe_intermediate_size": 12,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 1,
            "moe_layer_interval": 2,
        },
        seed=412,
        dtype=torch.float32,
    ),
    Case(
        "granitemoe-gqa-scales",
        widths(40, 2, 4, 2)
        | UNTIED
        | {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 1.5,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.4,
            "logits_scaling": 0.5,
        },
        seed=421,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "granitemoe-mha-bias-tied-float32",
        widths(36, 2, 3, 3)
        | TIED
        | {"num_local_experts": 4, "num_experts_per_tok": 3, "attention_bias": True},
        seed=422,
        dtype=torch.float32,
    ),
    Case(
        "granitemoeshared-gqa-scales",
        widths(40, 2, 4, 2)
        | UNTIED
        | {
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 20,
            "embedding_multiplier": 1.5,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.4,
            "logits_scaling": 0.5,
        },
        seed=423,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "granitemoeshared-mqa-tied-float32",
        widths(36, 2, 3, 1)
        | TIED
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 0,
            "attention_multiplier": 0.3,
        },
        seed=424,
        dtype=torch.float32,
    ),
    # By the names and keys of published files; transformers has the same as Sarvam's.
    Case(
        "bailing_moe_v2-gqa-partial-groups",
        widths(40, 3, 4, 2, 16)
        | UNTIED
        | {
            "first_k_dense_replace": 1,
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "n_group": 3,
            "topk_group": 2,
            **rope("default", 1e4, partial_rotary_factor=0.5),
        },
        seed=431,
        rewrites=_LING
        | {
            "num_experts": 6,
            "num_shared_experts": 1,
            "moe_shared_expert_intermediate_size": 12,
            "use_qkv_bias": False,
            "rope_parameters": None,
            "rope_theta": 1e4,
            "rope_scaling": None,
            "partial_rotary_factor": 0.5,
        },
        greedy=True,
    ),
    Case(
        "bailing_moe_v2-mqa-bias-tied-float32",
        widths(36, 2, 3, 1, 8)
        | TIED
        | {
            "first_k_dense_replace": 0,
            "n_routed_experts": 4,
            "n_shared_experts": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "attention_bias": True,
            "routed_scaling_factor": 1.2,
            **rope("default", 1e4),
        },
        seed=432,
        dtype=torch.float32,
        rewrites=_LING | {"num_experts": 4, "num_shared_experts": 2, "use_qkv_bias": True},
    ),
    Case(
        "solar_open-gqa-yarn",
        widths(40, 2, 4, 2, 12)
        | UNTIED
        | {
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "routed_scaling_factor": 1.5,
            **rope("yarn", 1e4, factor=4.0, original_max_position_embeddings=32),
        },
        seed=441,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "solar_open-mqa-bias-tied-float32",
        widths(36, 2, 3, 1, 8)
        | TIED
        | {
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "attention_bias": True,
            "n_group": 3,
            "topk_group": 2,
            "norm_topk_prob": False,
        },
        seed=442,
        dtype=torch.float32,
    ),
    # The base is stretched once; lists of one number for each layer, as published.
    Case(
        "hunyuan_v1_moe-gqa-alpha",
        widths(40, 2, 4, 2, 10)
        | UNTIED
        | {
            "num_experts": 6,
            "moe_topk": [3, 2],
            **rope("dynamic", 1e4, factor=1.0, alpha=50.0),
        },
        seed=455,
        rewrites={"moe_intermediate_size": [12, 12], "num_shared_expert": [1, 1]},
        greedy=True,
    ),
    Case(
        "hunyuan_v1_moe-mqa-tied-float32",
        widths(36, 2, 3, 1, 8)
        | TIED
        | {"num_experts": 5, "moe_topk": 2, **rope("default", 1e4)},
        seed=456,
        dtype=torch.float32,
    ),
    Case(
        "hy_v3-gqa-dense",
        widths(40, 3, 4, 2, 12)
        | UNTIED
        | {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "moe_intermediate_size": 12,
            "router_scaling_factor": 1.5,
        },
        seed=451,
        rewrites={
            "mlp_layer_types": None,
            "first_k_dense_replace": 1,
            "expert_hidden_dim": 12,
        },
        greedy=True,
    ),
    Case(
        "hy_v3-mqa-listed-tied-float32",
        widths(36, 3, 3, 1, 8)
        | TIED
        | {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
        seed=452,
        dtype=torch.float32,
    ),
    # As published: letters, experts as booleans, and another spelling of the architecture.
    Case(
        "exaone_moe-gqa-window",
        widths(40, 4, 4, 2, 12)
        | UNTIED
        | {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "layer_types": layers("ssff"),
            **rope("default", 1e4),
        },
        seed=461,
        version_4_keys=True,
        rewrites={
            "architectures": ["ExaoneMoEForCausalLM"],
            "sliding_window_pattern": "LLG",
            "layer_types": layers("ssff"),
            "mlp_layer_types": None,
            "is_moe_layer": [False, True, True, True],
        },
        greedy=True,
    ),
    Case(
        "exaone_moe-mqa-groups-tied-float32",
        widths(36, 2, 3, 1, 8)
        | TIED
        | {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "moe_intermediate_size": 12,
            "n_group": 3,
            "topk_group": 1,
            "layer_types": layers("fs"),
            "mlp_layer_types": ["sparse", "dense"],
            **rope("default", 1e4),
        },
        seed=462,
        dtype=torch.float32,
    ),
    # Latent attention without any mixture.
    Case(
        "youtu-mha-lite-yarn",
        widths(40, 2, 4, 4)
        | UNTIED
        | {
            "kv_lora_rank": 14,
            "q_lora_rank": None,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 6,
            "v_head_dim": 12,
            **rope(
                "yarn", factor=8.0, original_max_position_embeddings=32, mscale=1.0,
                mscale_all_dim=0.8, beta_fast=8.0,
            ),
        },
        seed=481,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "youtu-mha-halves-tied-float32",
        widths(36, 2, 3, 3)
        | TIED
        | {
            "kv_lora_rank": 10,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 6,
            "qk_nope_head_dim": 8,
            "v_head_dim": 10,
            "rope_interleave": False,
        },
        seed=482,
        dtype=torch.float32,
    ),
    Case(
        "mellum-gqa-window-yarn",
        widths(40, 4, 4, 2, 12)
        | UNTIED
        | {
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "layer_types": layers("sssf"),
            **_positions(
                100.0, rope_type="yarn", factor=8.0, original_max_position_embeddings=32,
                attention_factor=1.2,
            ),
        },
        seed=471,
        greedy=True,
    ),
    Case(
        "mellum-mqa-bias-dense-tied-float32",
        widths(36, 3, 3, 1, 8)
        | TIED
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "norm_topk_prob": False,
            "attention_bias": True,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
        seed=472,
        dtype=torch.float32,
    ),
    # Each expert counts among those that are not far below it; the file has its own names.
    Case(
        "phimoe-gqa-longrope-bias",
        widths(40, 2, 4, 2, 12)
        | UNTIED
        | {
            "num_local_experts": 6,
            "router_jitter_noise": 0.3,
            "attention_bias": True,
            "lm_head_bias": True,
        }
        | rope(
            "longrope",
            short_factor=[1.0 + 0.2 * i for i in range(6)],
            long_factor=[1.5 + 0.7 * i for i in range(6)],
            short_mscale=1.2,
            long_mscale=1.2,
            original_max_position_embeddings=128,
        ),
        seed=811,
        version_4_keys=True,
        rewrites={"architectures": ["PhiMoEForCausalLM"]},
        greedy=True,
    ),
    Case(
        "phimoe-mqa-window-tied-float32",
        widths(36, 2, 3, 1) | TIED | {"num_local_experts": 5, "sliding_window": 24},
        seed=812,
        dtype=torch.float32,
    ),
    # DeepSeek-V3 with a norm behind each mixture.
    Case(
        "axk1-mha-groups-yarn",
        widths(40, 3, 5, 5)
        | UNTIED
        | {
            "kv_lora_rank": 18,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 10,
            "v_head_dim": 6,
            "q_lora_rank": 22,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "n_routed_experts": 9,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 12,
            "n_group": 3,
            "topk_group": 2,
        }
        | rope(
            "yarn",
            factor=8.0,
            original_max_position_embeddings=32,
            mscale=1.0,
            mscale_all_dim=1.0,
            beta_fast=8.0,
        ),
        seed=821,
        version_4_keys=True,
        rewrites={"mlp_layer_types": None, "first_k_dense_replace": 1, "moe_layer_freq": 1},
        greedy=True,
    ),
    Case(
        "axk1-mha-halves-tied-float32",
        widths(36, 2, 3, 3)
        | TIED
        | {
            "kv_lora_rank": 10,
            "qk_rope_head_dim": 6,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "q_lora_rank": 14,
            "mlp_layer_types": ["sparse", "dense"],
            "n_routed_experts": 4,
            "n_shared_experts": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
        },
        seed=822,
        dtype=torch.float32,
    ),
)  # fmt: skip
