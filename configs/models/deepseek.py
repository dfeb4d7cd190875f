"""DeepSeek-V2 and V2-Lite (DeepSeek-AI 2024, arXiv 2405.04434): latent attention, and 160 or 64
experts behind all layers but the first. DeepSeek-V3 (DeepSeek-AI 2024, arXiv 2412.19437): 256
experts behind all layers but three; published in FP8, which is not read. DeepSeek-V3.2 (DeepSeek-AI
2025): the same over the 2,048 tokens that an indexer chooses. DeepSeek-V4-Flash (DeepSeek-AI 2026):
compressed attention and four residual streams.

Layers of V3 and V4 that predict a second token are not counted.
"""

import dataclasses
import math

from configs.kinds.compressed import Compressed
from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.kinds.hyper_connections import HyperConnections
from configs.kinds.latent import Indexer, Latent
from configs.kinds.rope import Rope, Yarn
from configs.model import LayerSpec, ModelConfig
from configs.weights import Hub, Preset


def _latent(num_heads: int, query_rank: int | None, mscale: float) -> Latent:
    """Positions are stretched forty times; the scores are scaled for it, not cos and sin."""
    yarn = Yarn(factor=40.0, original_context=4096, attention_factor=1.0)
    sharper = 0.1 * mscale * math.log(yarn.factor) + 1
    return Latent(
        num_heads,
        rank=512,
        rope_width=64,
        nope_width=128,
        value_width=128,
        query_rank=query_rank,
        rope=Rope(theta=10_000.0, scaling=yarn, neighbours=True),
        scale=(128 + 64) ** -0.5 * sharper**2,
    )


def _preset(
    name: str, family: str, hub: Hub, vocab_size: int, width: int, dense: tuple[LayerSpec, ...],
    mixtures: tuple[LayerSpec, ...],
) -> Preset:  # fmt: skip
    config = ModelConfig(
        name=name,
        family=family,
        vocab_size=vocab_size,
        width=width,
        num_layers=len(dense) + len(mixtures),
        max_context=163_840,
        pattern=dense + mixtures,
        norm_eps=1e-6,
    )
    return Preset(config, hub)


_V2 = _latent(128, 1536, mscale=0.707)
_V2_LITE = _latent(16, None, mscale=0.707)
_V3 = _latent(128, 1536, mscale=1.0)
_V32 = dataclasses.replace(_V3, indexer=Indexer(num_heads=64, head_width=128, top_k=2048))
_EXPERTS_V2 = Experts(
    num_experts=160,
    top_k=6,
    width=1536,
    router=Router(is_normalized=False, scale=16.0, num_groups=8, top_groups=3),
    shared_width=2 * 1536,
)
_EXPERTS_V2_LITE = Experts(
    num_experts=64,
    top_k=6,
    width=1408,
    router=Router(is_normalized=False),
    shared_width=2 * 1408,
)
_ROUTER_V3 = Router(
    "sigmoid", scale=2.5, has_offsets=True, num_groups=8, top_groups=4, group_best=2
)
_EXPERTS_V3 = Experts(num_experts=256, top_k=8, width=2048, router=_ROUTER_V3, shared_width=2048)

DEEPSEEK_V2 = _preset(
    "deepseek-v2", "deepseek_v2", Hub("deepseek-ai/DeepSeek-V2", "DeepSeek License"), 102_400, 5120,
    (LayerSpec(_V2, Gated(12_288)),), (LayerSpec(_V2, _EXPERTS_V2),) * 59,
)  # fmt: skip
DEEPSEEK_V2_LITE = _preset(
    "deepseek-v2-lite", "deepseek_v2", Hub("deepseek-ai/DeepSeek-V2-Lite", "DeepSeek License"),
    102_400, 2048, (LayerSpec(_V2_LITE, Gated(10_944)),),
    (LayerSpec(_V2_LITE, _EXPERTS_V2_LITE),) * 26,
)  # fmt: skip
DEEPSEEK_V3 = _preset(
    "deepseek-v3", "deepseek_v3", Hub("deepseek-ai/DeepSeek-V3", "DeepSeek License"), 129_280, 7168,
    (LayerSpec(_V3, Gated(18_432)),) * 3, (LayerSpec(_V3, _EXPERTS_V3),) * 58,
)  # fmt: skip
DEEPSEEK_V32 = _preset(
    "deepseek-v3.2", "deepseek_v32", Hub("deepseek-ai/DeepSeek-V3.2-Exp", "MIT"), 129_280, 7168,
    (LayerSpec(_V32, Gated(18_432)),) * 3, (LayerSpec(_V32, _EXPERTS_V3),) * 58,
)  # fmt: skip
# Two layers of windows alone, then by turns entries of 4 tokens that are chosen, and of 128.
_V4_FLASH_SPARSE = Compressed(
    num_heads=64,
    head_width=512,
    query_rank=1024,
    rope_width=64,
    groups=8,
    group_rank=1024,
    window=128,
    stride=4,
    overlaps=True,
    rope=Rope(160_000.0, Yarn(16.0, 65_536, attention_factor=1.0), neighbours=True),
    indexer=Indexer(num_heads=64, head_width=128, top_k=512),
)
_V4_FLASH_HEAVY = dataclasses.replace(_V4_FLASH_SPARSE, stride=128, overlaps=False, indexer=None)
_V4_FLASH_NEAR = dataclasses.replace(_V4_FLASH_HEAVY, stride=0, rope=Rope(neighbours=True))
_V4_FLASH_MIXERS = (_V4_FLASH_NEAR,) * 2 + (_V4_FLASH_SPARSE, _V4_FLASH_HEAVY) * 20
_V4_FLASH_EXPERTS = Experts(
    num_experts=256,
    top_k=6,
    width=2048,
    router=Router("sqrt_softplus", scale=1.5, has_offsets=True),
    shared_width=2048,
    limit=10.0,
)
_V4_FLASH_HASHED = dataclasses.replace(
    _V4_FLASH_EXPERTS, router=Router("sqrt_softplus", scale=1.5, table_rows=129_280)
)
_V4_FLASH = ModelConfig(
    name="deepseek-v4-flash",
    family="deepseek_v4",
    vocab_size=129_280,
    width=4096,
    num_layers=43,
    max_context=1_048_576,
    pattern=tuple(
        LayerSpec(mixer, _V4_FLASH_HASHED if layer < 3 else _V4_FLASH_EXPERTS)
        for layer, mixer in enumerate((*_V4_FLASH_MIXERS, _V4_FLASH_SPARSE))
    ),
    norm_eps=1e-6,
    hyper_connections=HyperConnections(4),
)
DEEPSEEK_V4_FLASH = Preset(_V4_FLASH, Hub("deepseek-ai/DeepSeek-V4-Flash", "MIT"))
