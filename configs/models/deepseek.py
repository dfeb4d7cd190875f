"""DeepSeek-V2 (DeepSeek-AI 2024, arXiv 2405.04434): latent attention, and 160 experts behind all
layers but the first. DeepSeek-V3.2 (DeepSeek-AI 2025; sizes of V3: arXiv 2412.19437): the same over
the 2,048 tokens that an indexer chooses, and 256 experts behind all layers but three.

Planned, not run: latent attention and the mixture of experts are to come. The layer of V3.2 that
predicts a second token is not counted.
"""

import dataclasses

from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.kinds.latent import Indexer, Latent
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from configs.weights import Hub, Preset

_DENSE = Latent(
    num_heads=128,
    rank=512,
    rope_width=64,
    nope_width=128,
    value_width=128,
    query_rank=1536,
    rope=Rope(theta=10_000.0),
)
_SPARSE = dataclasses.replace(_DENSE, indexer=Indexer(num_heads=64, head_width=128, top_k=2048))
_EXPERTS_V2 = Experts(
    num_experts=160,
    top_k=6,
    width=1536,
    router=Router(is_normalized=False, scale=16.0, num_groups=8, top_groups=3),
    shared_width=2 * 1536,
)
_ROUTER_V3 = Router(
    "sigmoid", scale=2.5, has_offsets=True, num_groups=8, top_groups=4, group_best=2
)
_EXPERTS_V3 = Experts(num_experts=256, top_k=8, width=2048, router=_ROUTER_V3, shared_width=2048)

DEEPSEEK_V2 = Preset(
    ModelConfig(
        name="deepseek-v2",
        family="deepseek",
        vocab_size=102_400,
        width=5120,
        num_layers=60,
        max_context=163_840,
        pattern=(LayerSpec(_DENSE, Gated(12_288)),) + (LayerSpec(_DENSE, _EXPERTS_V2),) * 59,
        norm_eps=1e-6,
    ),
    Hub("deepseek-ai/DeepSeek-V2", license="DeepSeek License"),
)
DEEPSEEK_V32 = Preset(
    ModelConfig(
        name="deepseek-v3.2",
        family="deepseek",
        vocab_size=129_280,
        width=7168,
        num_layers=61,
        max_context=163_840,
        pattern=(LayerSpec(_SPARSE, Gated(18_432)),) * 3 + (LayerSpec(_SPARSE, _EXPERTS_V3),) * 58,
        norm_eps=1e-6,
    ),
    Hub("deepseek-ai/DeepSeek-V3.2-Exp", license="MIT"),
)
