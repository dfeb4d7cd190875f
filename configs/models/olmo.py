"""OLMo 2 1B (OLMo Team 2024, arXiv 2501.00656): norms after mixer and feed-forward only, and of all
queries and all keys at once.
"""

from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from configs.weights import Hub, Preset

OLMO2_1B = Preset(
    ModelConfig(
        name="olmo2-1b",
        family="olmo2",
        vocab_size=100_352,
        width=2048,
        num_layers=16,
        max_context=4096,
        pattern=(
            LayerSpec(
                Attention(
                    num_heads=16,
                    num_kv_heads=16,
                    head_width=128,
                    rope=Rope(theta=500_000.0),
                    qk_norm="all",
                ),
                Gated(width=8192),
            ),
        ),
        norm_eps=1e-6,
        pre_norms=False,
        post_norms=True,
    ),
    Hub("allenai/OLMo-2-0425-1B", license="Apache-2.0"),
)
