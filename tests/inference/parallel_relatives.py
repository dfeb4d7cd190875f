"""Families whose feed-forward reads beside attention, and their relatives with layer norms, among
the tiny checkpoints: layouts of heads, and what each would be without its quirk.
"""

from configs.kinds.rope import Rope
from tests.inference.model_changes import parallel, with_fields

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
VISIBLE = {
    "cohere-gqa-norms-tied": (
        with_fields(qk_norm=None),
        with_fields(rope=Rope(500_000.0)),
        lambda model: {"logit_scale": 0.0625},
    ),
    "cohere2-gqa-window-tied": (with_fields(window=None), with_fields(rope=Rope(5e4))),
    "phi-mha-untied": (
        with_fields(rope=Rope()),
        with_fields(activation="silu"),
        lambda model: {"has_head_bias": False},
    ),
    "gpt_neox-mha-untied": (with_fields(rope=Rope()), with_fields(activation="silu"), parallel(0)),
    "gpt_neox-mha-in-turn-tied-float32": (parallel(2),),
    "stablelm-gqa-parallel-norms": (with_fields(rope=Rope()), with_fields(qk_norm=None)),
    "starcoder2-gqa-window-tied": (with_fields(window=None), with_fields(activation="silu")),
}
