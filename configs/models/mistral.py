"""Mistral 7B (Jiang et al. 2023, arXiv 2310.06825), every layer of which sees a window, and Mixtral
8x7B (Jiang et al. 2024, arXiv 2401.04088), where a token visits two of eight feed-forwards.
"""

from configs.kinds.attention import Attention
from configs.kinds.experts import Experts
from configs.kinds.feed_forward import Gated
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from configs.weights import Hub, Preset


def _config(name: str, layer: LayerSpec) -> ModelConfig:
    return ModelConfig(
        name=name,
        family=name.partition("-")[0],
        vocab_size=32_000,
        width=4096,
        num_layers=32,
        max_context=32_768,
        pattern=(layer,),
    )


_WINDOWED = Attention(32, 8, head_width=128, rope=Rope(theta=10_000.0), window=4096)
_GLOBAL = Attention(32, 8, head_width=128, rope=Rope(theta=1_000_000.0))
_EXPERTS = Experts(num_experts=8, top_k=2, width=14_336)

MISTRAL_7B = Preset(
    _config("mistral-7b", LayerSpec(_WINDOWED, Gated(width=14_336))),
    Hub("mistralai/Mistral-7B-v0.1", license="Apache-2.0"),
)
MIXTRAL_8X7B = Preset(
    _config("mixtral-8x7b", LayerSpec(_GLOBAL, _EXPERTS)),
    Hub("mistralai/Mixtral-8x7B-v0.1", license="Apache-2.0"),
)
