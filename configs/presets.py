"""The presets: `--model=NAME`."""

import dataclasses

from configs import (
    gemma3_270m,
    llama2_13b,
    llama2_70b,
    llama3_8b,
    llama3_70b,
    smollm2_135m,
)
from configs.errors import InputError
from configs.model import ModelConfig
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
}


def get(name: str) -> Preset:
    """The preset of that name.

    Raises:
        InputError: no such preset.
    """
    if name not in NAMES:
        raise InputError(f"no preset {name!r}; valid: {', '.join(NAMES)}")
    return NAMES[name]
