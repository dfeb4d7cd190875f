"""Phi-3 mini 4k (Abdin et al. 2024, arXiv 2404.14219)."""

from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from configs.weights import Hub, Preset

PHI3_MINI = Preset(
    ModelConfig(
        name="phi3-mini",
        family="phi3",
        vocab_size=32_064,
        width=3072,
        num_layers=32,
        max_context=4096,
        pattern=(
            LayerSpec(
                Attention(
                    num_heads=32,
                    num_kv_heads=32,
                    head_width=96,
                    rope=Rope(theta=10_000.0),
                    window=2047,
                ),
                Gated(width=8192),
            ),
        ),
    ),
    Hub("microsoft/Phi-3-mini-4k-instruct", license="MIT"),
)
