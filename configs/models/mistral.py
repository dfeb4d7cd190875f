"""Mistral 7B (Jiang et al. 2023, arXiv 2310.06825), every layer of which sees a window, Mixtral
8x7B (Jiang et al. 2024, arXiv 2401.04088), where a token visits two of eight feed-forwards, and the
text part of Ministral 3 (Mistral AI 2025).
"""

from configs.kinds.attention import Attention
from configs.kinds.experts import Experts
from configs.kinds.feed_forward import Gated
from configs.kinds.rope import Rope, Yarn
from configs.kinds.temperature import Temperature
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

# Queries grow where positions exceed the context that was stretched.
_STRETCHED = Rope(1_000_000.0, Yarn(16.0, 16_384, attention_factor=1.0))
_HEATED = Attention(32, 8, 128, _STRETCHED, temperature=Temperature(0.1, 16_384))
MINISTRAL3_8B = Preset(
    ModelConfig(
        name="ministral3-8b",
        family="ministral3",
        vocab_size=131_072,
        width=4096,
        num_layers=34,
        max_context=262_144,
        pattern=(LayerSpec(_HEATED, Gated(width=14_336)),),
    ),
    Hub("mistralai/Ministral-3-8B-Instruct-2512-BF16", license="Apache-2.0"),
)
