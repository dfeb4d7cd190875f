"""Gemma 2 2B (Gemma Team 2024, arXiv 2408.00118): scores and logits within soft caps, every other
layer sees a window.
"""

import dataclasses

from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from configs.weights import Hub

_FFN = Gated(width=9216, activation="gelu_tanh")
_GLOBAL = Attention(
    num_heads=8, num_kv_heads=4, head_width=256, rope=Rope(theta=10_000.0), score_cap=50.0
)
_LOCAL = dataclasses.replace(_GLOBAL, window=4096)

CONFIG = ModelConfig(
    name="gemma2-2b",
    family="gemma2",
    vocab_size=256_000,
    width=2304,
    num_layers=26,
    max_context=8192,
    pattern=(LayerSpec(_LOCAL, _FFN), LayerSpec(_GLOBAL, _FFN)),
    norm_eps=1e-6,
    norm_offset=1.0,
    post_norms=True,
    logit_cap=30.0,
    embedding_scale=2304**0.5,
    tied=True,
)

WEIGHTS = Hub(
    "google/gemma-2-2b-it",
    license="Gemma",
    notice="Gemma is provided under and subject to the Gemma Terms of Use: https://ai.google.dev/gemma/terms",
)
