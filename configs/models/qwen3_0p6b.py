"""Qwen3 0.6B (Qwen Team 2025, arXiv 2505.09388): a norm of each query and key head."""

from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from configs.weights import Hub

CONFIG = ModelConfig(
    name="qwen3-0.6b",
    family="qwen3",
    vocab_size=151_936,
    width=1024,
    num_layers=28,
    max_context=40_960,
    pattern=(
        LayerSpec(
            Attention(
                num_heads=16,
                num_kv_heads=8,
                head_width=128,
                rope=Rope(theta=1_000_000.0),
                qk_norm="head",
            ),
            Gated(width=3072),
        ),
    ),
    norm_eps=1e-6,
    tied=True,
)

WEIGHTS = Hub("Qwen/Qwen3-0.6B", license="Apache-2.0")
