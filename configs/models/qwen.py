"""Qwen2.5 0.5B (Qwen Team 2024, arXiv 2412.15115), with biases on queries, keys and values, and
Qwen3 0.6B (Qwen Team 2025, arXiv 2505.09388), with a norm of each query and key head. Of either
kind a mixture: Qwen1.5 MoE A2.7B (Qwen Team 2024, arXiv 2407.10671), with a feed-forward that all
tokens visit, behind a gate of its own, and Qwen3 30B A3B and 235B A22B. Qwen3.6 35B A3B (2026) has
such a mixture in each layer, and gated DeltaNet (Yang et al. 2024, arXiv 2412.06464) in three of
four layers.
"""

from configs.kinds.attention import Attention
from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.kinds.recurrent.delta_net import DeltaNet
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from configs.weights import Hub, Preset

_ROPE = Rope(theta=1_000_000.0)
_BIASED = Attention(num_heads=14, num_kv_heads=2, head_width=64, rope=_ROPE, biases=("qkv",))
_NORMED = Attention(num_heads=16, num_kv_heads=8, head_width=128, rope=_ROPE, qk_norm="head")
_BIASED_MHA = Attention(16, 16, head_width=128, rope=_ROPE, biases=("qkv",))
_NORMED_GQA = Attention(32, 4, head_width=128, rope=_ROPE, qk_norm="head")
_SIXTY = Experts(
    num_experts=60,
    top_k=4,
    width=1408,
    router=Router(is_normalized=False),
    shared_width=5632,
    has_shared_gate=True,
)
_GATED_GQA = Attention(
    num_heads=16,
    num_kv_heads=2,
    head_width=256,
    rope=Rope(theta=10_000_000.0, share=0.25),
    qk_norm="head",
    has_output_gate=True,
)
_DELTA_NET = DeltaNet(num_heads=32, num_key_heads=16, key_width=128, value_width=128)
_MANY = Experts(num_experts=256, top_k=8, width=512, shared_width=512, has_shared_gate=True)

QWEN25_0P5B = Preset(
    ModelConfig(
        name="qwen2.5-0.5b",
        family="qwen2",
        vocab_size=151_936,
        width=896,
        num_layers=24,
        max_context=32_768,
        pattern=(LayerSpec(_BIASED, Gated(width=4864)),),
        norm_eps=1e-6,
        tied=True,
    ),
    Hub("Qwen/Qwen2.5-0.5B-Instruct", license="Apache-2.0"),
)
QWEN3_0P6B = Preset(
    ModelConfig(
        name="qwen3-0.6b",
        family="qwen3",
        vocab_size=151_936,
        width=1024,
        num_layers=28,
        max_context=40_960,
        pattern=(LayerSpec(_NORMED, Gated(width=3072)),),
        norm_eps=1e-6,
        tied=True,
    ),
    Hub("Qwen/Qwen3-0.6B", license="Apache-2.0"),
)
QWEN15_MOE_A2P7B = Preset(
    ModelConfig(
        name="qwen1.5-moe-a2.7b",
        family="qwen2_moe",
        vocab_size=151_936,
        width=2048,
        num_layers=24,
        max_context=8192,
        pattern=(LayerSpec(_BIASED_MHA, _SIXTY),),
        norm_eps=1e-6,
    ),
    Hub("Qwen/Qwen1.5-MoE-A2.7B", license="Tongyi Qianwen License"),
)
QWEN3_30B_A3B = Preset(
    ModelConfig(
        name="qwen3-30b-a3b",
        family="qwen3_moe",
        vocab_size=151_936,
        width=2048,
        num_layers=48,
        max_context=40_960,
        pattern=(LayerSpec(_NORMED_GQA, Experts(num_experts=128, top_k=8, width=768)),),
        norm_eps=1e-6,
    ),
    Hub("Qwen/Qwen3-30B-A3B", license="Apache-2.0"),
)
QWEN3_235B_A22B = Preset(
    ModelConfig(
        name="qwen3-235b-a22b",
        family="qwen3_moe",
        vocab_size=151_936,
        width=4096,
        num_layers=94,
        max_context=40_960,
        pattern=(
            LayerSpec(
                Attention(64, 4, head_width=128, rope=_ROPE, qk_norm="head"),
                Experts(num_experts=128, top_k=8, width=1536),
            ),
        ),
        norm_eps=1e-6,
    ),
    Hub("Qwen/Qwen3-235B-A22B", license="Apache-2.0"),
)
QWEN36_35B_A3B = Preset(
    ModelConfig(
        name="qwen3.6-35b-a3b",
        family="qwen3_5_moe",
        vocab_size=248_320,
        width=2048,
        num_layers=40,
        max_context=262_144,
        pattern=(*(LayerSpec(_DELTA_NET, _MANY),) * 3, LayerSpec(_GATED_GQA, _MANY)),
        norm_eps=1e-6,
        norm_offset=1.0,
    ),
    Hub("Qwen/Qwen3.6-35B-A3B", license="Apache-2.0"),
)
