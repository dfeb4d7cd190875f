"""Mistral 7B (Jiang et al. 2023, arXiv 2310.06825): every layer sees a window."""

from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from configs.weights import Hub

CONFIG = ModelConfig(
    name="mistral-7b",
    family="mistral",
    vocab_size=32_000,
    width=4096,
    num_layers=32,
    max_context=32_768,
    pattern=(
        LayerSpec(
            Attention(
                num_heads=32, num_kv_heads=8, head_width=128, rope=Rope(theta=10_000.0), window=4096
            ),
            Gated(width=14_336),
        ),
    ),
    norm_eps=1e-5,
)

WEIGHTS = Hub("mistralai/Mistral-7B-v0.1", license="Apache-2.0")
