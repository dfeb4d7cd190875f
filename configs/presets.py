"""The presets: `--model=NAME`."""

import dataclasses

from configs.errors import InputError
from configs.model import ModelConfig
from configs.models import (
    deepseek_v2,
    deepseek_v32,
    gemma2_2b,
    gemma3_270m,
    gpt2,
    granite4_h_small,
    hunyuan_large,
    llama2_13b,
    llama2_70b,
    llama3_8b,
    llama3_70b,
    mamba2_2p7b,
    mistral_7b,
    mixtral_8x7b,
    olmo2_1b,
    phi3_mini,
    qwen3_0p6b,
    qwen25_0p5b,
    smollm2_135m,
    smollm3_3b,
)
from configs.weights import Weights


@dataclasses.dataclass(frozen=True)
class Preset:
    """A model and where its weights come from."""

    config: ModelConfig
    weights: Weights


NAMES = {
    "smollm2-135m": Preset(smollm2_135m.CONFIG, smollm2_135m.WEIGHTS),
    "gemma3-270m": Preset(gemma3_270m.CONFIG, gemma3_270m.WEIGHTS),
    "llama2-13b": Preset(llama2_13b.CONFIG, llama2_13b.WEIGHTS),
    "llama2-70b": Preset(llama2_70b.CONFIG, llama2_70b.WEIGHTS),
    "llama3-8b": Preset(llama3_8b.CONFIG, llama3_8b.WEIGHTS),
    "llama3-70b": Preset(llama3_70b.CONFIG, llama3_70b.WEIGHTS),
    "qwen2.5-0.5b": Preset(qwen25_0p5b.CONFIG, qwen25_0p5b.WEIGHTS),
    "mistral-7b": Preset(mistral_7b.CONFIG, mistral_7b.WEIGHTS),
    "qwen3-0.6b": Preset(qwen3_0p6b.CONFIG, qwen3_0p6b.WEIGHTS),
    "smollm3-3b": Preset(smollm3_3b.CONFIG, smollm3_3b.WEIGHTS),
    "gemma2-2b": Preset(gemma2_2b.CONFIG, gemma2_2b.WEIGHTS),
    "phi3-mini": Preset(phi3_mini.CONFIG, phi3_mini.WEIGHTS),
    "olmo2-1b": Preset(olmo2_1b.CONFIG, olmo2_1b.WEIGHTS),
    "gpt2": Preset(gpt2.CONFIG, gpt2.WEIGHTS),
}

# Models whose mixers or feed-forwards are to come: their cost is known before they run.
PLANNED = {
    "mixtral-8x7b": Preset(mixtral_8x7b.CONFIG, mixtral_8x7b.WEIGHTS),
    "deepseek-v2": Preset(deepseek_v2.CONFIG, deepseek_v2.WEIGHTS),
    "deepseek-v3.2": Preset(deepseek_v32.CONFIG, deepseek_v32.WEIGHTS),
    "hunyuan-large": Preset(hunyuan_large.CONFIG, hunyuan_large.WEIGHTS),
    "granite4-h-small": Preset(granite4_h_small.CONFIG, granite4_h_small.WEIGHTS),
    "mamba2-2.7b": Preset(mamba2_2p7b.CONFIG, mamba2_2p7b.WEIGHTS),
}


def get(name: str) -> Preset:
    """The preset of that name, planned ones included.

    Raises:
        InputError: no such preset.
    """
    known = NAMES | PLANNED
    if name not in known:
        raise InputError(f"no preset {name!r}; valid: {', '.join(known)}")
    return known[name]
