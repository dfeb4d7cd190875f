"""Granite 4.0 H Small (IBM 2025, 32B of which 9B are active): Mamba-2 layers, one in ten with
attention, all with a mixture of 72 experts; the layout of Jamba (arXiv 2403.19887).
"""

from configs.kinds.attention import Attention
from configs.kinds.experts import Experts
from configs.kinds.recurrent.mamba import Mamba2
from configs.model import LayerSpec, ModelConfig
from configs.weights import Hub, Preset

_EXPERTS = Experts(num_experts=72, top_k=10, width=768, shared_width=2 * 768)
_STATE = LayerSpec(
    Mamba2(num_heads=128, head_width=64, state_width=128, norm_width=128 * 64), _EXPERTS
)
_ATTENTION = LayerSpec(
    Attention(num_heads=32, num_kv_heads=8, head_width=128, rope=None, scale=1 / 128), _EXPERTS
)

GRANITE4_H_SMALL = Preset(
    ModelConfig(
        name="granite4-h-small",
        family="granitemoehybrid",
        vocab_size=100_352,
        width=4096,
        num_layers=40,
        max_context=131_072,
        pattern=(_STATE,) * 5 + (_ATTENTION,) + (_STATE,) * 4,
        embedding_scale=12.0,
        residual_scale=0.22,
        logit_scale=1 / 16,
        tied=True,
    ),
    Hub("ibm-granite/granite-4.0-h-small", license="Apache-2.0"),
)
