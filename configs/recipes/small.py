"""The small model: a Llama (Touvron et al. 2023, arXiv 2302.13971) trained from scratch on the
standard library's code, and a draft of it.

    python -m scripts.train
    python -m scripts.train --task=draft
"""

from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.model import LayerSpec, ModelConfig
from configs.recipes.training import Recipe, TrainingConfig


def _model(name: str, width: int, num_layers: int, num_heads: int, ffn_width: int) -> ModelConfig:
    attention = Attention(num_heads, num_kv_heads=num_heads // 2, head_width=64)
    return ModelConfig(
        name=name,
        family="llama",
        vocab_size=4096,
        width=width,
        num_layers=num_layers,
        max_context=512,
        pattern=(LayerSpec(attention, Gated(ffn_width)),),
        tied=True,
        dtype="float32",
    )


# By task.
RECIPES = {
    "lm": Recipe(
        _model("small", width=256, num_layers=6, num_heads=4, ffn_width=768),
        TrainingConfig(
            steps=3600, batch=4, window=256, learning_rate=3e-3, warmup_steps=200,
            checkpoint_every=200,
        ),
    ),
    "draft": Recipe(
        _model("small-draft", width=160, num_layers=2, num_heads=2, ffn_width=480),
        TrainingConfig(
            steps=3600, batch=4, window=256, learning_rate=4e-3, warmup_steps=200,
            checkpoint_every=600,
        ),
    ),
}  # fmt: skip
