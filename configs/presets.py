"""The presets: `--model=NAME`."""

from configs.errors import InputError
from configs.models import (
    deepseek,
    gemma,
    gpt2,
    granite,
    hunyuan,
    llama,
    mamba,
    mistral,
    olmo,
    phi,
    qwen,
    smollm,
)
from configs.weights import Preset

NAMES = {
    preset.config.name: preset
    for preset in (
        smollm.SMOLLM2_135M,
        gemma.GEMMA3_270M,
        llama.LLAMA2_13B,
        llama.LLAMA2_70B,
        llama.LLAMA3_8B,
        llama.LLAMA3_70B,
        qwen.QWEN25_0P5B,
        mistral.MISTRAL_7B,
        qwen.QWEN3_0P6B,
        smollm.SMOLLM3_3B,
        gemma.GEMMA2_2B,
        phi.PHI3_MINI,
        olmo.OLMO2_1B,
        gpt2.GPT2,
    )
}

# Models whose mixers or feed-forwards are to come: their cost is known before they run.
PLANNED = {
    preset.config.name: preset
    for preset in (
        mistral.MIXTRAL_8X7B,
        deepseek.DEEPSEEK_V2,
        deepseek.DEEPSEEK_V32,
        hunyuan.HUNYUAN_LARGE,
        granite.GRANITE4_H_SMALL,
        mamba.MAMBA2_2P7B,
    )
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
