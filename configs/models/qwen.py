"""Qwen2.5 0.5B (Qwen Team 2024, arXiv 2412.15115), with biases on queries, keys and values, and
Qwen3 0.6B (Qwen Team 2025, arXiv 2505.09388), with a norm of each query and key head.
"""

from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from configs.weights import Hub, Preset

_ROPE = Rope(theta=1_000_000.0)
_BIASED = Attention(num_heads=14, num_kv_heads=2, head_width=64, rope=_ROPE, biases=("qkv",))
_NORMED = Attention(num_heads=16, num_kv_heads=8, head_width=128, rope=_ROPE, qk_norm="head")

QWEN25_0P5B = Preset(
    ModelConfig(
        name="qwen2.5-0.5b",
        family="qwen2",
        vocab_size=151_936,
        width=896,
        num_layers=24,
        max_context=32_768,
        pattern=(LayerSpec(_BIASED, Gated(width=4864)),),
        norm_eps=1e-6,
        tied=True,
    ),
    Hub("Qwen/Qwen2.5-0.5B-Instruct", license="Apache-2.0"),
)
QWEN3_0P6B = Preset(
    ModelConfig(
        name="qwen3-0.6b",
        family="qwen3",
        vocab_size=151_936,
        width=1024,
        num_layers=28,
        max_context=40_960,
        pattern=(LayerSpec(_NORMED, Gated(width=3072)),),
        norm_eps=1e-6,
        tied=True,
    ),
    Hub("Qwen/Qwen3-0.6B", license="Apache-2.0"),
)
