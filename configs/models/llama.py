"""Llama 2 (Touvron et al. 2023, arXiv 2307.09288) and Llama 3 (Grattafiori et al. 2024, arXiv
2407.21783).
"""

from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from configs.weights import Hub, Preset


def _preset(
    name: str, hub_id: str, width: int, num_layers: int, num_heads: int, num_kv_heads: int,
    ffn_width: int,
) -> Preset:  # fmt: skip
    is_2 = name.startswith("llama2")
    rope = Rope(theta=10_000.0 if is_2 else 500_000.0)
    config = ModelConfig(
        name=name,
        family="llama",
        vocab_size=32_000 if is_2 else 128_256,
        width=width,
        num_layers=num_layers,
        max_context=4096 if is_2 else 8192,
        pattern=(LayerSpec(Attention(num_heads, num_kv_heads, 128, rope), Gated(ffn_width)),),
    )
    return Preset(config, Hub(hub_id, f"Llama {2 if is_2 else 3} Community License"))


LLAMA2_13B = _preset("llama2-13b", "meta-llama/Llama-2-13b-hf", 5120, 40, 40, 40, 13_824)
LLAMA2_70B = _preset("llama2-70b", "meta-llama/Llama-2-70b-hf", 8192, 80, 64, 8, 28_672)
LLAMA3_8B = _preset("llama3-8b", "meta-llama/Meta-Llama-3-8B-Instruct", 4096, 32, 32, 8, 14_336)
LLAMA3_70B = _preset("llama3-70b", "meta-llama/Meta-Llama-3-70B-Instruct", 8192, 80, 64, 8, 28_672)
