"""Families whose feed-forward reads beside attention, and their relatives with layer norms, among
the tiny checkpoints: layouts of heads, and what each would be without its quirk.
"""

import dataclasses

from configs.kinds.rope import Rope
from configs.model import ModelConfig
from inference.families.shared.fields import ModelFields

LAYOUTS = {
    "cohere": ("gqa", "mha"),
    "cohere2": ("gqa", "mha"),
    "phi": ("mha", "mqa"),
    "gpt_neox": ("mha",),
    "stablelm": ("gqa", "mha"),
    "starcoder2": ("gqa", "mqa"),
}
# The checkpoints whose parts others have; pages of all are those of Llama.
OTHERS = (
    "cohere-mha-untied-bias-float32", "cohere2-mha-untied-float32", "phi-mqa-tied-whole-float32",
    "gpt_neox-mha-in-turn-tied-float32", "stablelm-mha-bias-tied-float32",
    "starcoder2-mqa-untied-no-bias-float32",
)  # fmt: skip


def _with(**changes):
    """What changes these fields of every kind that has them."""

    def changed(model: ModelConfig) -> ModelFields:
        return {"pattern": model.with_kinds(**changes).pattern}

    return changed


def _parallel(norms: int):
    """What has feed-forwards read beside attention, by so many norms, or what it adds to (0)."""

    def changed(model: ModelConfig) -> ModelFields:
        layers = (dataclasses.replace(layer, parallel_norms=norms) for layer in model.pattern)
        return {"pattern": tuple(layers)}

    return changed


VISIBLE = {
    "cohere-gqa-norms-tied": (
        _with(qk_norm=None),
        _with(rope=Rope(500_000.0)),
        lambda model: {"logit_scale": 0.0625},
    ),
    "cohere2-gqa-window-tied": (_with(window=None), _with(rope=Rope(5e4))),
    "gpt_neox-mha-untied": (_with(rope=Rope()), _with(activation="silu"), _parallel(0)),
    "gpt_neox-mha-in-turn-tied-float32": (_parallel(2),),
    "stablelm-gqa-parallel-norms": (_with(rope=Rope()), _with(qk_norm=None)),
    "starcoder2-gqa-window-tied": (_with(window=None), _with(activation="silu")),
    "phi-mha-untied": (
        _with(rope=Rope()),
        _with(activation="silu"),
        lambda model: {"has_head_bias": False},
    ),
}
