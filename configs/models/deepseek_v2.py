"""DeepSeek-V2 (DeepSeek-AI 2024, arXiv 2405.04434): latent attention, and 160 experts behind all
layers but the first.

Planned, not run: latent attention and the mixture of experts are to come.
"""

import dataclasses

from configs.kinds.rope import Rope
from configs.mixers import Experts, Latent
from configs.model import LayerSpec, ModelConfig
from configs.weights import Hub

_FIRST = LayerSpec(
    mixer="latent",
    rope=Rope(theta=10_000.0),
    latent=Latent(rank=512, rope_width=64, nope_width=128, value_width=128, query_rank=1536),
)
_REST = dataclasses.replace(
    _FIRST,
    ffn="experts",
    experts=Experts(num_experts=160, top_k=6, width=1536, num_shared=2),
)

CONFIG = ModelConfig(
    name="deepseek-v2",
    family="deepseek",
    vocab_size=102_400,
    width=5120,
    ffn_width=12_288,
    num_layers=60,
    num_heads=128,
    num_kv_heads=128,
    head_width=192,
    max_context=163_840,
    pattern=(_FIRST,) + (_REST,) * 59,
    norm_eps=1e-6,
)

WEIGHTS = Hub("deepseek-ai/DeepSeek-V2", license="DeepSeek License")
