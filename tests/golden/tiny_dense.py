"""Dense relatives of Llama, as `tiny_cases` has the other families."""

import torch
from tiny_families import TIED, UNTIED, Case, rope, widths

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
)
