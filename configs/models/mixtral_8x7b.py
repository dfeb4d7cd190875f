"""Mixtral 8x7B (Jiang et al. 2024, arXiv 2401.04088): of eight feed-forwards a token visits two.

Planned, not run: the mixture of experts is to come.
"""

from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Experts
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from configs.weights import Hub

CONFIG = ModelConfig(
    name="mixtral-8x7b",
    family="mixtral",
    vocab_size=32_000,
    width=4096,
    num_layers=32,
    max_context=32_768,
    pattern=(
        LayerSpec(
            Attention(num_heads=32, num_kv_heads=8, head_width=128, rope=Rope(theta=1_000_000.0)),
            Experts(num_experts=8, top_k=2, width=14_336),
        ),
    ),
    norm_eps=1e-5,
)

WEIGHTS = Hub("mistralai/Mixtral-8x7B-v0.1", license="Apache-2.0")
