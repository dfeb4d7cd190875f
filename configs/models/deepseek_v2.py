"""DeepSeek-V2 (DeepSeek-AI 2024, arXiv 2405.04434): latent attention, and 160 experts behind all
layers but the first.

Planned, not run: latent attention and the mixture of experts are to come.
"""

from configs.kinds.feed_forward import Experts, Gated
from configs.kinds.latent import Latent
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from configs.weights import Hub

_ATTENTION = Latent(
    num_heads=128,
    rank=512,
    rope_width=64,
    nope_width=128,
    value_width=128,
    query_rank=1536,
    rope=Rope(theta=10_000.0),
)
_FIRST = LayerSpec(_ATTENTION, Gated(width=12_288))
_REST = LayerSpec(_ATTENTION, Experts(num_experts=160, top_k=6, width=1536, num_shared=2))

CONFIG = ModelConfig(
    name="deepseek-v2",
    family="deepseek",
    vocab_size=102_400,
    width=5120,
    num_layers=60,
    max_context=163_840,
    pattern=(_FIRST,) + (_REST,) * 59,
    norm_eps=1e-6,
)

WEIGHTS = Hub("deepseek-ai/DeepSeek-V2", license="DeepSeek License")
