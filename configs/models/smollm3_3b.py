"""SmolLM3 3B (Hugging Face 2025): every fourth layer does not rotate (Yang et al. 2025, arXiv
2501.18795).
"""

from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from configs.weights import Hub

_FFN = Gated(width=11_008)
_ROTATING = LayerSpec(
    Attention(num_heads=16, num_kv_heads=4, head_width=128, rope=Rope(theta=5_000_000.0)), _FFN
)
_STILL = LayerSpec(Attention(num_heads=16, num_kv_heads=4, head_width=128, rope=None), _FFN)

CONFIG = ModelConfig(
    name="smollm3-3b",
    family="smollm3",
    vocab_size=128_256,
    width=2048,
    num_layers=36,
    max_context=65_536,
    pattern=(_ROTATING,) * 3 + (_STILL,),
    norm_eps=1e-6,
    tied=True,
)

WEIGHTS = Hub("HuggingFaceTB/SmolLM3-3B", license="Apache-2.0")
