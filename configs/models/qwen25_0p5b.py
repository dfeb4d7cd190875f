"""Qwen2.5 0.5B (Qwen Team 2024, arXiv 2412.15115): biases on queries, keys and values."""

from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from configs.weights import Hub

CONFIG = ModelConfig(
    name="qwen2.5-0.5b",
    family="qwen2",
    vocab_size=151_936,
    width=896,
    num_layers=24,
    max_context=32_768,
    pattern=(
        LayerSpec(
            Attention(
                num_heads=14,
                num_kv_heads=2,
                head_width=64,
                rope=Rope(theta=1_000_000.0),
                biases=("qkv",),
            ),
            Gated(width=4864),
        ),
    ),
    norm_eps=1e-6,
    tied=True,
)

WEIGHTS = Hub("Qwen/Qwen2.5-0.5B-Instruct", license="Apache-2.0")
