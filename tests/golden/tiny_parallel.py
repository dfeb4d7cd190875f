"""Tiny checkpoints of families whose feed-forward reads beside attention, and of their relatives
with layer norms.
"""

import torch
from tiny_families import TIED, UNTIED, Case, layers, rope, widths

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
)
