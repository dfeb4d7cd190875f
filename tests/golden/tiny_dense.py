"""Dense relatives of Llama, as `tiny_cases` has the other families."""

import torch
from tiny_families import TIED, UNTIED, Case, layers, rope, widths

CASES = (
    # The base is stretched once for all lengths: 16 ** (10 / 8) is 32.
    Case(
        "hunyuan_v1_dense-gqa-alpha",
        widths(36, 2, 4, 2, 10)
        | UNTIED
        | rope("dynamic", alpha=16.0, factor=1.0, beta_fast=32, beta_slow=1, mscale=1.0),
        seed=601,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "hunyuan_v1_dense-mha-bias-tied-float32",
        widths(30, 2, 3, 3, 8) | TIED | {"attention_bias": True},
        seed=602,
        dtype=torch.float32,
    ),
    Case(
        "seed_oss-gqa-qkv-bias",
        widths(36, 2, 4, 2, 10) | UNTIED | rope("default", 1e6),
        seed=611,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "seed_oss-mha-out-bias-tied-float32",
        widths(30, 2, 3, 3, 8)
        | TIED
        | {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
        seed=612,
        dtype=torch.float32,
    ),
    # Layers without a window do not rotate; where no layer has one, all rotate.
    Case(
        "exaone4-gqa-window",
        widths(40, 3, 4, 2)
        | UNTIED
        | {"sliding_window": 24, "layer_types": layers("ssf")}
        | rope(
            "llama3",
            1e6,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
        seed=621,
        version_4_keys=True,
        rewrites={"sliding_window_pattern": "LLG"},
        greedy=True,
    ),
    Case(
        "exaone4-mha-tied-float32",
        widths(30, 2, 3, 3) | TIED | {"sliding_window": None, "layer_types": layers("ff")},
        seed=622,
        dtype=torch.float32,
    ),
    Case(
        "arcee-gqa-yarn",
        widths(36, 2, 4, 2, 10)
        | UNTIED
        | rope("yarn", 500.0, factor=4.0, original_max_position_embeddings=64, mscale=1.0),
        seed=631,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "arcee-mha-bias-tied-float32",
        widths(30, 2, 3, 3, 8) | TIED | {"attention_bias": True, "mlp_bias": True},
        seed=632,
        dtype=torch.float32,
    ),
)
