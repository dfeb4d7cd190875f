"""Windows of attention in the metadata of `.gguf` files."""

from configs.errors import InputError
from configs.model import ModelConfig
from inference.families.shared.gguf_keys import GgufKeys
from inference.families.shared.gguf_states import Metadata

WINDOW = "attention.sliding_window"
SLIDES = f"{WINDOW}_pattern"  # which layers have it
KEYS = WINDOW, SLIDES


def slides(keys: GgufKeys, count: int) -> list[bool]:
    """Returns which of `count` layers have a window; raises an `InputError` if none is said to."""
    stated = keys.booleans(SLIDES, count)
    if stated is None:
        raise InputError(f"metadata {keys.architecture}.{SLIDES} is missing")
    return stated


def window(config: ModelConfig) -> int:
    """Returns the window of the layers that have one; 0: none has."""
    return next((spec.window for spec in config.cache_specs if spec.window), 0)


def written(config: ModelConfig) -> Metadata:
    """Returns the window, and which layers have it."""
    slide = [config.stored_by(n).window is not None for n in range(config.num_layers)]
    return {WINDOW: window(config), SLIDES: slide}
