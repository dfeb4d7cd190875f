"""Families whose feed-forward reads beside attention, and their relatives with layer norms, among
the tiny checkpoints: layouts of heads, and what each would be without its quirk.
"""

from configs.kinds.rope import Rope
from configs.model import ModelConfig
from inference.families.shared.fields import ModelFields

LAYOUTS = {
    "cohere": ("gqa", "mha"),
    "cohere2": ("gqa", "mha"),
    "phi": ("mha", "mqa"),
}
# The checkpoints whose parts others have; pages of all are those of Llama.
OTHERS = (
    "cohere-mha-untied-bias-float32", "cohere2-mha-untied-float32", "phi-mqa-tied-whole-float32",
)  # fmt: skip


def _with(**changes):
    """What changes these fields of every kind that has them."""

    def changed(model: ModelConfig) -> ModelFields:
        return {"pattern": model.with_kinds(**changes).pattern}

    return changed


VISIBLE = {
    "cohere-gqa-norms-tied": (
        _with(qk_norm=None),
        _with(rope=Rope(500_000.0)),
        lambda model: {"logit_scale": 0.0625},
    ),
    "cohere2-gqa-window-tied": (_with(window=None), _with(rope=Rope(5e4))),
    "phi-mha-untied": (
        _with(rope=Rope()),
        _with(activation="silu"),
        lambda model: {"has_head_bias": False},
    ),
}
