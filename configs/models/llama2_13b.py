"""Llama 2 13B (Touvron et al. 2023, arXiv 2307.09288)."""

from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from configs.weights import Hub

_ATTENTION = Attention(
    num_heads=40,
    num_kv_heads=40,
    head_width=128,
    rope=Rope(theta=10_000.0),
)

CONFIG = ModelConfig(
    name="llama2-13b",
    family="llama",
    vocab_size=32_000,
    width=5120,
    num_layers=40,
    max_context=4096,
    pattern=(LayerSpec(_ATTENTION, Gated(width=13_824)),),
    norm_eps=1e-5,
)

WEIGHTS = Hub("meta-llama/Llama-2-13b-hf", license="Llama 2 Community License")
