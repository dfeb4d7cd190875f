"""Llama 3 70B (Grattafiori et al. 2024, arXiv 2407.21783)."""

from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from configs.weights import Hub

_ATTENTION = Attention(
    num_heads=64,
    num_kv_heads=8,
    head_width=128,
    rope=Rope(theta=500_000.0),
)

CONFIG = ModelConfig(
    name="llama3-70b",
    family="llama",
    vocab_size=128_256,
    width=8192,
    num_layers=80,
    max_context=8192,
    pattern=(LayerSpec(_ATTENTION, Gated(width=28_672)),),
    norm_eps=1e-5,
)

WEIGHTS = Hub("meta-llama/Meta-Llama-3-70B-Instruct", license="Llama 3 Community License")
