"""The tiny checkpoints of DeepSeek-V4: several residual streams, experts by token id, and attention
over entries of several tokens.
"""

import re

import numpy as np
import torch
from tiny_families import TIED, UNTIED, Case, widths

_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
_YARN = {
    "type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 8,
    "beta_slow": 1,
}  # fmt: skip


def spread(name: str, values: np.ndarray) -> np.ndarray | None:
    """Normal values as those of a parameter that a deviation of 0.2 would hide, or None."""
    if re.search(r"(attn_hc|ffn_hc|hc_head)\.(hc_)?scale$", name):
        return 1.0 + 0.3 * values
    if re.search(r"(attn_hc|ffn_hc|hc_head)\.(hc_)?base$|position_bias$|sinks$", name):
        return values
    return None


def _published(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """DeepSeek's names, which transformers 5 writes except for those outside of layers."""
    made = {}
    for name, tensor in tensors.items():
        published = name.removeprefix("model.").replace("embed_tokens", "embed")
        published = published.replace("hc_head.hc", "hc_head")
        made[published.replace(".attn.norm.", ".attn.kv_norm.")] = tensor
    return made


def token_experts(shape: tuple[int, ...], num_experts: int, generator: np.random.Generator):  # noqa: ANN201
    """Different experts for each token id, i64[V, J]."""
    order = generator.permuted(np.tile(np.arange(num_experts), (shape[0], 1)), axis=1)
    return order[:, : shape[1]]


CASES = (
    # Every kind of layer, in transformers' spelling.
    Case(
        "deepseek_v4-sparse-heavy-windows",
        widths(24, 4, 6, 1, 12)
        | UNTIED
        | {
            "layer_types": ["sliding_attention", _SPARSE, _HEAVY, _SPARSE],
            "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
            "compress_rates": {_SPARSE: 4, _HEAVY: 8},
            "partial_rotary_factor": 1 / 3,
            "rope_scaling": _YARN,
            "compress_rope_theta": 1000.0,
            "rope_theta": 100.0,
            "q_lora_rank": 10,
            "o_groups": 3,
            "o_lora_rank": 5,
            "sliding_window": 20,
            "index_n_heads": 16,
            "index_head_dim": 8,
            "index_topk": 6,
            "hc_mult": 3,
            "hc_sinkhorn_iters": 3,
            "hc_eps": 1e-3,
            "swiglu_limit": 0.4,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 10,
            "routed_scaling_factor": 1.7,
        },
        seed=501,
        greedy=True,
    ),
    # In the keys of published files; the sparse layer reads all that the short prompt has.
    Case(
        "deepseek_v4-published-tied-float32",
        widths(20, 3, 2, 1, 10)
        | TIED
        | {
            "layer_types": [_SPARSE, "sliding_attention", _SPARSE],
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            "compress_rates": {_SPARSE: 4, _HEAVY: 128},
            "partial_rotary_factor": 0.4,
            "q_lora_rank": 8,
            "o_groups": 1,
            "o_lora_rank": 6,
            "sliding_window": 9,
            "index_n_heads": 12,
            "index_head_dim": 6,
            "index_topk": 10,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 20,
            "swiglu_limit": 1.0,
            "n_routed_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
        },
        seed=502,
        dtype=torch.float32,
        rewrites={
            "layer_types": None,
            "compress_rates": None,
            "mlp_layer_types": None,
            "partial_rotary_factor": None,
            "rope_parameters": None,
            "compress_ratios": [4, 0, 4, 0],
            "num_hash_layers": 1,
            "qk_rope_head_dim": 4,
            "rope_theta": 10000,
            "compress_rope_theta": 160000,
            "rope_scaling": None,
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
        },
        published=_published,
    ),
)
