"""OLMo 2 1B (OLMo Team 2024, arXiv 2501.00656): norms after mixer and feed-forward only, and of all
queries and all keys at once. OLMo 3 7B (OLMo Team 2025, arXiv 2512.13961): three of four layers see
a window, and only the others' positions are stretched. OLMoE 1B-7B (Muennighoff et al. 2024, arXiv
2409.02060): 64 experts, and norms before.
"""

import dataclasses

from configs.kinds.attention import Attention
from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.kinds.rope import Rope, Yarn
from configs.model import LayerSpec, ModelConfig
from configs.weights import Hub, Preset

_ROPE = Rope(theta=500_000.0)
_HEADS = Attention(16, 16, head_width=128, rope=_ROPE, qk_norm="all")
_YARN = Yarn(factor=8.0, original_context=8192, attention_factor=1.2079441541679836)
_LOCAL = Attention(32, 32, head_width=128, rope=_ROPE, window=4096, qk_norm="all")
_GLOBAL = dataclasses.replace(_LOCAL, rope=Rope(theta=500_000.0, scaling=_YARN), window=None)
_EXPERTS = Experts(num_experts=64, top_k=8, width=1024, router=Router(is_normalized=False))

OLMO2_1B = Preset(
    ModelConfig(
        name="olmo2-1b",
        family="olmo2",
        vocab_size=100_352,
        width=2048,
        num_layers=16,
        max_context=4096,
        pattern=(LayerSpec(_HEADS, Gated(width=8192)),),
        norm_eps=1e-6,
        pre_norms=False,
        post_norms=True,
    ),
    Hub("allenai/OLMo-2-0425-1B", license="Apache-2.0"),
)
OLMO3_7B = Preset(
    ModelConfig(
        name="olmo3-7b",
        family="olmo3",
        vocab_size=100_278,
        width=4096,
        num_layers=32,
        max_context=65_536,
        pattern=(LayerSpec(_LOCAL, Gated(11_008)),) * 3 + (LayerSpec(_GLOBAL, Gated(11_008)),),
        norm_eps=1e-6,
        pre_norms=False,
        post_norms=True,
    ),
    Hub("allenai/Olmo-3-1025-7B", license="Apache-2.0"),
)
OLMOE_1B_7B = Preset(
    ModelConfig(
        name="olmoe-1b-7b",
        family="olmoe",
        vocab_size=50_304,
        width=2048,
        num_layers=16,
        max_context=4096,
        pattern=(LayerSpec(dataclasses.replace(_HEADS, rope=Rope(10_000.0)), _EXPERTS),),
    ),
    Hub("allenai/OLMoE-1B-7B-0924", license="Apache-2.0"),
)
