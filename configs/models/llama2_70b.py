"""Llama 2 70B (Touvron et al. 2023, arXiv 2307.09288): eight key/value heads for 64 query heads."""

from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from configs.weights import Hub

_ATTENTION = Attention(
    num_heads=64,
    num_kv_heads=8,
    head_width=128,
    rope=Rope(theta=10_000.0),
)

CONFIG = ModelConfig(
    name="llama2-70b",
    family="llama",
    vocab_size=32_000,
    width=8192,
    num_layers=80,
    max_context=4096,
    pattern=(LayerSpec(_ATTENTION, Gated(width=28_672)),),
    norm_eps=1e-5,
)

WEIGHTS = Hub("meta-llama/Llama-2-70b-hf", license="Llama 2 Community License")
