"""Families whose caches are those of others, among the tiny checkpoints."""

from tests.inference import (
    dense_relatives,
    mistral_relatives,
    mixture_relatives,
    parallel_relatives,
)

LAYOUTS = {"olmo3": ("gqa", "mha")} | dense_relatives.LAYOUTS | parallel_relatives.LAYOUTS
OTHERS = dense_relatives.OTHERS + parallel_relatives.OTHERS
VISIBLE = (
    dense_relatives.VISIBLE
    | parallel_relatives.VISIBLE
    | mistral_relatives.VISIBLE
    | mixture_relatives.VISIBLE
)
# What is told from others by its norms, its factors or where its layers lie, not by what they keep:
# its decode steps and its sums over pages are those of others.
NO_CACHE_OF_THEIR_OWN = (
    "deepseek_v3-mha-groups-yarn", "gemma3-gqa-linear-rope", "gemma4-mha-mqa-experts-float32",
    "glm4_moe-gqa-norm-bias", "gpt2-mha-tied-bare", "olmo2-mha-untied", "olmo3-gqa-yarn",
    "phi3-mha-window",
)  # fmt: skip
