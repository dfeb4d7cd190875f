"""Tiny checkpoints of families whose feed-forward reads beside attention, and of their relatives
with layer norms.
"""

import torch
from tiny_families import TIED, UNTIED, Case, layers, rope, widths


def _neox(width: int, num_layers: int, heads: int) -> dict:
    """Widths of a family whose heads are all those of keys."""
    sizes = widths(width, num_layers, heads, heads)
    del sizes["num_key_value_heads"]
    return sizes


def _as_pythia(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    for layer in range(2):
        prefix = f"gpt_neox.layers.{layer}.attention"
        tensors[f"{prefix}.bias"] = mask.clone()
        tensors[f"{prefix}.masked_bias"] = torch.tensor(-1e9)
    return tensors


CASES = (
    # The keys of published files, which transformers leaves unread.
    Case(
        "cohere2-gqa-window-tied",
        widths(40, 4, 4, 2)
        | TIED
        | rope("default", 5e4)
        | {"layer_types": layers("ssfs"), "logit_scale": 0.7},
        seed=1001,
        version_4_keys=True,
        rewrites={
            "layer_types": None,
            "sliding_window_pattern": 3,
            "layer_switch": 3,
            "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj",
            "rotary_pct": 1.0,
            "use_embedding_sharing": True,
            "use_gated_activation": True,
            "use_parallel_block": True,
            "use_parallel_embedding": True,
            "use_qk_norm": False,
        },
        greedy=True,
    ),
    # No biases: llama.cpp's windows, which it has in three layers of four.
    Case(
        "cohere2-mha-untied-float32",
        widths(30, 4, 3, 3) | UNTIED | {"logit_scale": 1.3},
        seed=1002,
        dtype=torch.float32,
    ),
    Case(
        "cohere-gqa-norms-tied",
        widths(40, 3, 4, 2) | TIED | {"use_qk_norm": True, "logit_scale": 0.7},
        seed=1003,
        version_4_keys=True,
        rewrites={"max_position_embeddings": 128, "model_max_length": 256},
        greedy=True,
    ),
    Case(
        "cohere-mha-untied-bias-float32",
        widths(30, 2, 3, 3)
        | UNTIED
        | rope("default", 1e4)
        | {"attention_bias": True, "logit_scale": 0.8},
        seed=1004,
        dtype=torch.float32,
    ),
    Case(
        "phi-mha-untied",
        widths(48, 2, 4, 4) | UNTIED | rope("default", 1e4, partial_rotary_factor=0.5),
        seed=1005,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "phi-mqa-tied-whole-float32",
        widths(36, 2, 3, 1)
        | TIED
        | rope("default", 500.0, partial_rotary_factor=1.0)
        | {"hidden_act": "gelu"},
        seed=1006,
        dtype=torch.float32,
    ),
    # Named and masked as Pythia's files are.
    Case(
        "gpt_neox-mha-untied",
        _neox(48, 2, 4) | UNTIED | rope("default", 1e4, partial_rotary_factor=0.5),
        seed=1007,
        version_4_keys=True,
        rewrites={"rope_theta": None, "rope_scaling": None, "attention_bias": None},
        published=_as_pythia,
        greedy=True,
    ),
    Case(
        "gpt_neox-mha-in-turn-tied-float32",
        _neox(36, 2, 3)
        | TIED
        | rope("default", 500.0, partial_rotary_factor=1.0)
        | {"use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_fast"},
        seed=1008,
        dtype=torch.float32,
    ),
    Case(
        "stablelm-gqa-parallel-norms",
        widths(48, 2, 4, 2)
        | UNTIED
        | rope("default", 1e4, partial_rotary_factor=0.5)
        | {"qk_layernorm": True, "use_parallel_residual": True},
        seed=1009,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "stablelm-mha-bias-tied-float32",
        widths(36, 2, 3, 3)
        | TIED
        | rope("default", 500.0, partial_rotary_factor=1.0)
        | {"use_qkv_bias": True},
        seed=1010,
        dtype=torch.float32,
    ),
    Case(
        "starcoder2-gqa-window-tied",
        widths(40, 2, 4, 2) | TIED | rope("default", 1e5) | {"sliding_window": 24},
        seed=1011,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "starcoder2-mqa-untied-no-bias-float32",
        widths(36, 2, 3, 1) | UNTIED | rope("default", 500.0) | {"use_bias": False},
        seed=1012,
        dtype=torch.float32,
    ),
)
