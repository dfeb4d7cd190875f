"""DeepSeek-V3.2 (DeepSeek-AI 2025; sizes of V3: arXiv 2412.19437): latent attention over the 2,048
tokens that an indexer chooses, and 256 experts behind all layers but three.

Planned, not run. The layer that predicts a second token is not counted.
"""

import dataclasses

from configs.kinds.rope import Rope
from configs.mixers import Experts, Indexer, Latent
from configs.model import LayerSpec, ModelConfig
from configs.weights import Hub

_FIRST = LayerSpec(
    mixer="latent",
    rope=Rope(theta=10_000.0),
    latent=Latent(rank=512, rope_width=64, nope_width=128, value_width=128, query_rank=1536),
    indexer=Indexer(num_heads=64, head_width=128, top_k=2048),
)
_REST = dataclasses.replace(
    _FIRST,
    ffn="experts",
    experts=Experts(num_experts=256, top_k=8, width=2048, num_shared=1),
)

CONFIG = ModelConfig(
    name="deepseek-v3.2",
    family="deepseek",
    vocab_size=129_280,
    width=7168,
    ffn_width=18_432,
    num_layers=61,
    num_heads=128,
    num_kv_heads=128,
    head_width=192,
    max_context=163_840,
    pattern=(_FIRST,) * 3 + (_REST,) * 58,
    norm_eps=1e-6,
)

WEIGHTS = Hub("deepseek-ai/DeepSeek-V3.2-Exp", license="MIT")
