"""The small model: a Llama (Touvron et al. 2023, arXiv 2302.13971) trained from scratch on the
standard library's code, a draft of it, and a mixture of experts beside it (Mixtral's, Jiang et al.
2024, arXiv 2401.04088).

    python -m scripts.train
    python -m scripts.train --task=draft
    python -m scripts.train --task=mixture
"""

from configs.kinds.attention import Attention
from configs.kinds.experts import Experts
from configs.kinds.feed_forward import Gated
from configs.kinds.kind import FeedForward
from configs.model import LayerSpec, ModelConfig
from configs.recipes.training import Recipe, TrainingConfig


def _model(name: str, width: int, num_layers: int, num_heads: int, ffn: FeedForward) -> ModelConfig:
    attention = Attention(num_heads, num_kv_heads=num_heads // 2, head_width=64)
    return ModelConfig(
        name=name,
        family="llama" if ffn.experts is None else "mixtral",
        vocab_size=4096,
        width=width,
        num_layers=num_layers,
        max_context=512,
        pattern=(LayerSpec(attention, ffn),),
        tied=True,
        dtype="float32",
    )


# By task.
RECIPES = {
    "lm": Recipe(
        _model("small", width=256, num_layers=6, num_heads=4, ffn=Gated(768)),
        TrainingConfig(
            steps=3600, batch=4, window=256, learning_rate=3e-3, warmup_steps=200,
            checkpoint_every=200,
        ),
    ),
    "draft": Recipe(
        _model("small-draft", width=160, num_layers=2, num_heads=2, ffn=Gated(480)),
        TrainingConfig(
            steps=3600, batch=4, window=256, learning_rate=4e-3, warmup_steps=200,
            checkpoint_every=600,
        ),
    ),
    "mixture": Recipe(
        _model(
            "small-mixture", width=128, num_layers=4, num_heads=2,
            ffn=Experts(num_experts=8, top_k=2, width=128),
        ),
        TrainingConfig(
            steps=1300, batch=8, window=256, learning_rate=3e-3, warmup_steps=100,
            checkpoint_every=325,
        ),
    ),
}  # fmt: skip
