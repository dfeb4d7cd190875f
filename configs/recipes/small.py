"""The small model: a Llama (Touvron et al. 2023, arXiv 2302.13971) trained from scratch on the
standard library's code, a draft of it, and beside it a mixture of experts (Mixtral's, Jiang et al.
2024, arXiv 2401.04088) and models whose past is, or is in part, of a fixed size: BASED (Arora et
al. 2024, arXiv 2402.18668), of linear attention and a window in turn, S4 (arXiv 2206.11893),
Mamba-2 (arXiv 2405.21060), and Mamba-2 with attention in every third layer, of as many parameters.

    python -m scripts.train
    python -m scripts.train --task=draft
    python -m scripts.train --task=mixture
    python -m scripts.train --task=based
    python -m scripts.train --task=s4
    python -m scripts.train --task=mamba2
    python -m scripts.train --task=hybrid
"""

from configs.kinds.attention import Attention
from configs.kinds.experts import Experts
from configs.kinds.feed_forward import Gated
from configs.kinds.kind import FeedForward, Mixer
from configs.kinds.recurrent.linear_attention import LinearAttention
from configs.kinds.recurrent.mamba import Mamba2
from configs.kinds.recurrent.s4 import S4
from configs.model import LayerSpec, ModelConfig
from configs.recipes.training import Recipe, TrainingConfig


def _model(name: str, width: int, num_layers: int, num_heads: int, ffn: FeedForward) -> ModelConfig:
    attention = Attention(num_heads, num_kv_heads=num_heads // 2, head_width=64)
    family = "llama" if ffn.experts is None else "mixtral"
    return _of_mixers(name, family, width, num_layers, (attention,), ffn)


def _of_mixers(
    name: str,
    family: str,
    width: int,
    num_layers: int,
    mixers: tuple[Mixer, ...],
    ffn: FeedForward | None,
) -> ModelConfig:
    return ModelConfig(
        name=name,
        family=family,
        vocab_size=4096,
        width=width,
        num_layers=num_layers,
        max_context=512,
        pattern=tuple(LayerSpec(mixer, ffn) for mixer in mixers),
        tied=True,
        dtype="float32",
    )


_BASED = (
    LinearAttention(4, key_width=16, value_width=64, feature_map="taylor"),
    Attention(4, num_kv_heads=4, head_width=64, window=64),
)
_MAMBA2 = Mamba2(num_heads=8, head_width=64, state_width=64, norm_width=512)
_HYBRID = (
    *(_MAMBA2, _MAMBA2),
    Attention(4, num_kv_heads=2, head_width=64, rope=None, scale=1 / 8),
)

_AS_LM = TrainingConfig(
    steps=3600, batch=4, window=256, learning_rate=3e-3, warmup_steps=200, checkpoint_every=200
)

# By task.
RECIPES = {
    "lm": Recipe(
        _model("small", width=256, num_layers=6, num_heads=4, ffn=Gated(768)),
        _AS_LM,
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
    "based": Recipe(
        _of_mixers("small-based", "based", 256, 6, _BASED, Gated(768)),
        _AS_LM,
    ),
    "s4": Recipe(
        _of_mixers("small-s4", "s4", 256, 6, (S4(256),), Gated(768)),
        _AS_LM,
    ),
    "mamba2": Recipe(
        _of_mixers("small-mamba2", "mamba2", 256, 11, (_MAMBA2,), ffn=None),
        _AS_LM,
    ),
    "hybrid": Recipe(
        _of_mixers("small-hybrid", "granitemoehybrid", 256, 6, _HYBRID, Gated(560)),
        _AS_LM,
    ),
}  # fmt: skip
