"""The tiny checkpoints with linear attention, or with convolutions alone; see `tiny_recurrent`."""

import re

import torch
from tiny_families import TIED, UNTIED, Case, rope, widths


def _without_decays(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """MiniMax's tensors but for those that follow from the number of heads and of the layer."""
    derived = "slope_rate", "query_decay", "key_decay", "diagonal_decay"
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(derived)}


def _olmo_hybrid(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Kernels as wide as what they convolve (transformers writes thirds of the three), and the
    names of the norms behind attention.
    """
    made = dict(tensors)
    for name in tensors:
        prefix, _, ending = name.rpartition("linear_attn.")
        if ending == "q_conv1d.weight":
            names = [f"{prefix}linear_attn.{part}_conv1d.weight" for part in "qkv"]
            sizes = [len(tensors[f"{prefix}linear_attn.{part}_proj.weight"]) for part in "qkv"]
            kernels = torch.cat([tensors[each] for each in names]).split(sizes)
            made |= {n: kernel.contiguous() for n, kernel in zip(names, kernels, strict=True)}
        layer, _, ending = name.rpartition(".feedforward_layer_norm.")
        if ending and f"{layer}.self_attn.q_proj.weight" in tensors:
            made[f"{layer}.post_attention_layernorm.weight"] = made.pop(name)
    return made


def _kimi_linear(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A dense feed-forward by its own name, which transformers writes as a mixture's."""
    return {
        name.replace("block_sparse_moe", "mlp")
        if re.search(r"block_sparse_moe\.(gate|up|down)_proj", name)
        else name: tensor
        for name, tensor in tensors.items()
    }


def _matrices(tensors: dict[str, torch.Tensor], prefix: str) -> list[dict[str, torch.Tensor]]:
    """The matrices of each expert of a layer."""
    experts = []
    while f"{prefix}.experts.{len(experts)}.down_proj.weight" in tensors:
        base = f"{prefix}.experts.{len(experts)}"
        experts.append({p: tensors[f"{base}.{p}_proj.weight"] for p in ("gate", "up", "down")})
    return experts


def _stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The experts of a layer in two tensors, a gate's rows before those of what it gates."""
    made = {}
    for name, tensor in tensors.items():
        prefix, is_expert, rest = name.partition(".experts.")
        if not is_expert:
            made[name] = tensor
        elif rest == "0.down_proj.weight":
            matrices = _matrices(tensors, prefix)
            made[f"{prefix}.experts.gate_up_proj"] = torch.stack(
                [torch.cat([matrix["gate"], matrix["up"]]) for matrix in matrices]
            )
            made[f"{prefix}.experts.down_proj"] = torch.stack([m["down"] for m in matrices])
    return made


CASES = (
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
        widths(16, 3, 2, 2, 8)
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
            "intermediate_size": 12,
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
    Case(
        "qwen3_5-gqa-sections",
        widths(20, 3, 4, 2, 16)
        | UNTIED
        | {
            "rms_norm_eps": 1e-3,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 4,
            "intermediate_size": 20,
            "attention_bias": True,
            **rope(
                "default", 1e4, partial_rotary_factor=0.5, mrope_section=[2, 1, 1],
                mrope_interleaved=True,
            ),
        },
        seed=411,
        rewrites={"layer_types": None, "full_attention_interval": 3},
        greedy=True,
    ),
    Case(
        "qwen3_5-mha-tied-float32",
        widths(16, 2, 2, 2, 8)
        | TIED
        | {
            "rms_norm_eps": 1e-3,
            "layer_types": ["full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 3,
            "intermediate_size": 16,
            **rope("default", 1e4, partial_rotary_factor=1.0, mrope_section=[2, 1, 1]),
        },
        seed=412,
        dtype=torch.float32,
    ),
    # Experts as published, those of a layer in one tensor; then as transformers writes them.
    Case(
        "qwen3_5_moe-gqa-stacked",
        widths(20, 3, 4, 2, 16)
        | UNTIED
        | {
            "rms_norm_eps": 1e-3,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 4,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 6,
            "shared_expert_intermediate_size": 10,
            **rope(
                "default", 1e4, partial_rotary_factor=0.5, mrope_section=[2, 1, 1],
                mrope_interleaved=True,
            ),
        },
        seed=413,
        version_4_keys=True,
        rewrites={"layer_types": None, "full_attention_interval": 3, "mlp_only_layers": []},
        published=_stacked,
        greedy=True,
    ),
    Case(
        "qwen3_5_moe-mqa-tied-float32",
        widths(16, 2, 2, 1, 8)
        | TIED
        | {
            "rms_norm_eps": 1e-3,
            "layer_types": ["full_attention", "linear_attention"],
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 4,
            "linear_value_head_dim": 6,
            "linear_conv_kernel_dim": 3,
            "num_experts": 3,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 6,
            "attention_bias": True,
            **rope("default", 1e4, partial_rotary_factor=0.25, mrope_section=[1, 0, 0]),
        },
        seed=414,
        dtype=torch.float32,
    ),
    # Steps that overshoot, and norms behind attention, as transformers saves them; then neither
    # rotation nor overshooting, by the names of published files.
    Case(
        "olmo_hybrid-mha-rope",
        widths(24, 2, 4, 4)
        | UNTIED
        | {
            "rms_norm_eps": 1e-3,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 4,
            **rope("default", 1e4),
        },
        seed=421,
        greedy=True,
    ),
    Case(
        "olmo_hybrid-gqa-nope-bias-tied-float32",
        widths(16, 2, 4, 2)
        | TIED
        | {
            "rms_norm_eps": 1e-3,
            "layer_types": ["full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 3,
            "linear_allow_neg_eigval": False,
            "attention_bias": True,
            "intermediate_size": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
        },
        seed=422,
        published=_olmo_hybrid,
        dtype=torch.float32,
    ),
    # By the keys of published files; then as transformers saves it.
    Case(
        "kimi_linear-experts-groups",
        {
            "hidden_size": 20,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 6,
            "v_head_dim": 5,
            "rms_norm_eps": 1e-3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "linear_head_dim": 6,
            "linear_num_heads": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 8,
            "n_shared_experts": 2,
        },
        seed=431,
        published=_kimi_linear,
        rewrites={
            "layer_types": None,
            "mlp_layer_types": None,
            "linear_head_dim": None,
            "linear_num_heads": None,
            "linear_conv_kernel_dim": None,
            "first_k_dense_replace": 1,
            "linear_attn_config": {
                "full_attn_layers": [2],
                "head_dim": 6,
                "kda_layers": [1, 3],
                "num_heads": 4,
                "short_conv_kernel_size": 4,
            },
        },
        greedy=True,
    ),
    Case(
        "kimi_linear-latent-queries-dense-float32",
        {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "kv_lora_rank": 6,
            "q_lora_rank": 10,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 5,
            "v_head_dim": 6,
            "rms_norm_eps": 1e-3,
            "layer_types": ["full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "dense"],
            "intermediate_size": 16,
            "linear_head_dim": 8,
            "linear_num_heads": 2,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
        },
        seed=432,
        dtype=torch.float32,
    ),
    # Decays follow from the number of heads and the layer's; files may hold them, in float32.
    Case(
        "minimax-gqa-factors",
        widths(20, 3, 4, 2, 6)
        | UNTIED
        | {
            "block_size": 16,
            "rms_norm_eps": 1e-2,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "full_attn_alpha_factor": 1.3,
            "full_attn_beta_factor": 0.9,
            "linear_attn_alpha_factor": 1.5,
            "linear_attn_beta_factor": 0.8,
            "mlp_alpha_factor": 1.2,
            "mlp_beta_factor": 1.1,
            **rope("default", 1e4),
        },
        seed=361,
        rewrites={"layer_types": None},
        published=_without_decays,
        greedy=True,
    ),
    Case(
        "minimax-mha-window-tied-float32",
        widths(18, 2, 3, 3)
        | TIED
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "block_size": 12,
            "sliding_window": 24,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size": 8,
            **rope("default", 1e4),
        },
        seed=362,
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
)  # fmt: skip
