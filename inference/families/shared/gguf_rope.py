"""Stretched positions in `.gguf` files."""

import numpy as np

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.rope import Llama3, Rope, Yarn
from configs.model import ModelConfig
from inference.families.shared import gguf_names
from inference.families.shared.gguf_keys import GgufKeys
from inference.families.shared.gguf_states import Metadata
from layers import rope as rope_math


def llama3(keys: GgufKeys) -> Rope:
    """Reads the positions, where Llama 3.1 and later store the divisor of each frequency instead of
    the rule that made it: a ramp, or a step in Llama 4 Scout.

    Raises:
        InputError: the divisors do not follow the rule.
    """
    rope = keys.rope()
    shape = keys.shapes.get(gguf_names.ROPE_FACTORS)
    if shape is None:
        return rope
    plain = rope_math.inverse_frequencies(rope, keys.head_width)
    if shape != plain.shape:
        raise InputError(
            f"{gguf_names.ROPE_FACTORS!r} is {list(shape)}; expected {list(plain.shape)}"
        )
    divisors = keys.read_numbers(gguf_names.ROPE_FACTORS)
    context = keys.integer("rope.scaling.original_context_length", Llama3(1.0).original_context)
    for high in (4.0, 1.0):
        candidate = Rope(rope.theta, Llama3(float(divisors.max()), 1.0, high, context))
        expected = plain / rope_math.inverse_frequencies(candidate, keys.head_width)
        if np.allclose(divisors, expected, rtol=1e-3):
            return candidate
    raise InputError(f"{gguf_names.ROPE_FACTORS!r} does not follow the llama3 rule")


def yarn_keys(config: ModelConfig) -> Metadata:
    """Returns the metadata of positions that YaRN stretches, if it does."""
    rope = next((mixer.rope for mixer in config.mixers(Attention) if mixer.rope), Rope())
    scaling = rope.scaling
    if not isinstance(scaling, Yarn):
        return {}
    metadata: Metadata = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": scaling.factor,
        "rope.scaling.original_context_length": scaling.original_context,
        "rope.scaling.yarn_beta_fast": scaling.beta_fast,
        "rope.scaling.yarn_beta_slow": scaling.beta_slow,
    }
    if scaling.attention_factor is not None:
        metadata["rope.scaling.yarn_attn_factor"] = scaling.attention_factor
    return metadata
