"""DeepSeek-V3.2 (DeepSeek-AI 2025; sizes of V3: arXiv 2412.19437): latent attention over the 2,048
tokens that an indexer chooses, and 256 experts behind all layers but three.

Planned, not run. The layer that predicts a second token is not counted.
"""

from configs.kinds.feed_forward import Experts, Gated
from configs.kinds.latent import Indexer, Latent
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
    indexer=Indexer(num_heads=64, head_width=128, top_k=2048),
)
_FIRST = LayerSpec(_ATTENTION, Gated(width=18_432))
_REST = LayerSpec(_ATTENTION, Experts(num_experts=256, top_k=8, width=2048, num_shared=1))

CONFIG = ModelConfig(
    name="deepseek-v3.2",
    family="deepseek",
    vocab_size=129_280,
    width=7168,
    num_layers=61,
    max_context=163_840,
    pattern=(_FIRST,) * 3 + (_REST,) * 58,
    norm_eps=1e-6,
)

WEIGHTS = Hub("deepseek-ai/DeepSeek-V3.2-Exp", license="MIT")
