"""MiniMax-M2 (MiniMax 2025, 230B of which 10B are active): 256 experts behind every layer, whose
choice has learned offsets; norms over all heads of queries and of keys; half of each head rotates.
"""

from configs.kinds.attention import Attention
from configs.kinds.experts import Experts, Router
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from configs.weights import Hub, Preset

_HEADS = Attention(
    num_heads=48,
    num_kv_heads=8,
    head_width=128,
    rope=Rope(theta=5_000_000.0, share=0.5),
    qk_norm="all",
)
_EXPERTS = Experts(num_experts=256, top_k=8, width=1536, router=Router("sigmoid", has_offsets=True))

MINIMAX_M2 = Preset(
    ModelConfig(
        name="minimax-m2",
        family="minimax_m2",
        vocab_size=200_064,
        width=3072,
        num_layers=62,
        max_context=196_608,
        pattern=(LayerSpec(_HEADS, _EXPERTS),),
        norm_eps=1e-6,
    ),
    Hub("MiniMaxAI/MiniMax-M2", license="MIT"),
)
