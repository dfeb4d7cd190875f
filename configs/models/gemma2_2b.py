"""Gemma 2 2B (Gemma Team 2024, arXiv 2408.00118): scores and logits within soft caps, every other
layer sees a window.
"""

from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from configs.weights import Hub

_ROPE = Rope(theta=10_000.0)

CONFIG = ModelConfig(
    name="gemma2-2b",
    family="gemma2",
    vocab_size=256_000,
    width=2304,
    ffn_width=9216,
    num_layers=26,
    num_heads=8,
    num_kv_heads=4,
    head_width=256,
    max_context=8192,
    pattern=(LayerSpec(rope=_ROPE, window=4096), LayerSpec(rope=_ROPE)),
    norm_eps=1e-6,
    norm_offset=1.0,
    post_norms=True,
    activation="gelu_tanh",
    score_cap=50.0,
    logit_cap=30.0,
    embedding_scale=2304**0.5,
    tied=True,
)

WEIGHTS = Hub(
    "google/gemma-2-2b-it",
    license="Gemma",
    notice="Gemma is provided under and subject to the Gemma Terms of Use: https://ai.google.dev/gemma/terms",
)
