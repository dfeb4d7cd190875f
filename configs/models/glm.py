"""GLM 4.5 Air (Zeng et al. 2025, arXiv 2508.06471, 106B of which 12B are active): 128 experts and a
shared one behind all layers but the first, whose choice has learned offsets; half of each head
rotates. Its layer that predicts a second token is not counted.
"""

from configs.kinds.attention import Attention
from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from configs.weights import Hub, Preset

_HEADS = Attention(
    num_heads=96,
    num_kv_heads=8,
    head_width=128,
    rope=Rope(theta=1_000_000.0, share=0.5),
    biases=("qkv",),
)
_EXPERTS = Experts(
    num_experts=128,
    top_k=8,
    width=1408,
    router=Router("sigmoid", has_offsets=True, group_best=2),
    shared_width=1408,
)

GLM45_AIR = Preset(
    ModelConfig(
        name="glm-4.5-air",
        family="glm4_moe",
        vocab_size=151_552,
        width=4096,
        num_layers=46,
        max_context=131_072,
        pattern=(LayerSpec(_HEADS, Gated(10_944)),) + (LayerSpec(_HEADS, _EXPERTS),) * 45,
    ),
    Hub("zai-org/GLM-4.5-Air", license="MIT"),
)
