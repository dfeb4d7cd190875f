"""gpt-oss 20B and 120B (OpenAI 2025, arXiv 2508.10925): sinks in attention, every second layer of
which sees a window, and a token visits four experts, all with biases. Published in MXFP4, which is
read as bfloat16.
"""

import dataclasses

from configs.kinds.attention import Attention
from configs.kinds.experts import Experts, Router
from configs.kinds.rope import Rope, Yarn
from configs.model import LayerSpec, ModelConfig
from configs.weights import Hub, Preset

_GLOBAL = Attention(
    num_heads=64,
    num_kv_heads=8,
    head_width=64,
    rope=Rope(150_000.0, Yarn(factor=32.0, original_context=4096, truncate=False)),
    biases=("qkv", "out"),
    has_sinks=True,
)
_LOCAL = dataclasses.replace(_GLOBAL, window=128)


def _preset(name: str, num_layers: int, num_experts: int) -> Preset:
    experts = Experts(
        num_experts,
        top_k=4,
        width=2880,
        router=Router(has_bias=True),
        activation="quick_gelu",
        has_bias=True,
        limit=7.0,
        up_offset=1.0,
    )
    config = ModelConfig(
        name=name,
        family="gpt_oss",
        vocab_size=201_088,
        width=2880,
        num_layers=num_layers,
        max_context=131_072,
        pattern=(LayerSpec(_LOCAL, experts), LayerSpec(_GLOBAL, experts)),
    )
    return Preset(config, Hub(f"openai/{name}", license="Apache-2.0"))


GPT_OSS_20B = _preset("gpt-oss-20b", 24, 32)
GPT_OSS_120B = _preset("gpt-oss-120b", 36, 128)
