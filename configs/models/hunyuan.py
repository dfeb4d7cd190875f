"""Hunyuan-Large (Tencent 2024, arXiv 2411.02265, 389B of which 52B are active): every second layer
reads the keys and values of the one before; a token visits one expert of 16, and a shared one.

Planned, not run: its checkpoints are not read yet.
"""

from configs.kinds.attention import Attention
from configs.kinds.experts import Experts
from configs.model import LayerSpec, ModelConfig
from configs.weights import Hub, Preset

_EXPERTS = Experts(num_experts=16, top_k=1, width=18_304, shared_width=18_304)
_LAYERS = tuple(
    LayerSpec(
        Attention(
            num_heads=80,
            num_kv_heads=8,
            head_width=80,
            qk_norm="head",
            rotates_first=True,
            owner=layer - 1 if layer % 2 else None,
        ),
        _EXPERTS,
    )
    for layer in range(64)
)

HUNYUAN_LARGE = Preset(
    ModelConfig(
        name="hunyuan-large",
        family="hunyuan",
        vocab_size=128_512,
        width=6400,
        num_layers=64,
        max_context=262_144,
        pattern=_LAYERS,
        tied=True,
    ),
    Hub("tencent/Tencent-Hunyuan-Large", license="Tencent Hunyuan License"),
)
