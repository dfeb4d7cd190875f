"""Character.AI's stack ("Optimizing AI Inference at Character.AI", 2024): one key/value head, a
window of 1,024 tokens in five layers of six; all caches, global ones too, are shared by two layers.

Widths are Llama 2 13B's, since theirs are not published. Nor are weights: it is planned, not run.
"""

import dataclasses

from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.model import LayerSpec, ModelConfig
from configs.recipes import smaller_caches
from configs.weights import UNPUBLISHED, Preset

_GLOBAL = Attention(num_heads=40, num_kv_heads=1, head_width=128)
_LOCAL = dataclasses.replace(_GLOBAL, window=1024)
_FFN = Gated(13_824)

CHARACTER_AI = Preset(
    smaller_caches.shared_by(
        ModelConfig(
            name="character-ai",
            family="llama",
            vocab_size=32_000,
            width=5120,
            num_layers=36,
            max_context=8192,
            pattern=(LayerSpec(_GLOBAL, _FFN),) + (LayerSpec(_LOCAL, _FFN),) * 5,
        ),
        2,
    ),
    UNPUBLISHED,
)
