"""The presets: `--model=NAME`."""

from configs.errors import InputError
from configs.models import (
    character_ai,
    deepseek,
    gemma,
    glm,
    gpt2,
    gpt_oss,
    granite,
    hunyuan,
    llama,
    mamba,
    minimax,
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
        mistral.MIXTRAL_8X7B,
        qwen.QWEN15_MOE_A2P7B,
        qwen.QWEN3_30B_A3B,
        qwen.QWEN3_235B_A22B,
        olmo.OLMOE_1B_7B,
        deepseek.DEEPSEEK_V2,
        deepseek.DEEPSEEK_V2_LITE,
        deepseek.DEEPSEEK_V3,
        deepseek.DEEPSEEK_V32,
        deepseek.DEEPSEEK_V4_FLASH,
        glm.GLM45_AIR,
        gpt_oss.GPT_OSS_20B,
        gpt_oss.GPT_OSS_120B,
        olmo.OLMO3_7B,
        gemma.GEMMA4_E2B,
        gemma.GEMMA4_E4B,
        gemma.GEMMA4_26B_A4B,
        gemma.GEMMA4_31B,
        granite.GRANITE4_H_SMALL,
        qwen.QWEN36_35B_A3B,
        minimax.MINIMAX_M2,
        gemma.GEMMA3_4B,
        gemma.GEMMA4_12B,
        mistral.MINISTRAL3_8B,
    )
}

# Models whose checkpoints are not read: their cost is known before they run.
PLANNED = {
    preset.config.name: preset
    for preset in (
        hunyuan.HUNYUAN_LARGE,
        mamba.MAMBA2_2P7B,
        character_ai.CHARACTER_AI,
    )
}


def get(name: str) -> Preset:
    """The preset of that name, planned ones included.

    Raises:
        InputError: no such preset.
    """
    presets = NAMES | PLANNED
    if name not in presets:
        raise InputError(f"no preset {name!r}; valid: {', '.join(presets)}")
    return presets[name]
