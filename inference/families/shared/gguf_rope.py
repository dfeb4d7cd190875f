"""Stretched positions in `.gguf` files."""

import dataclasses

import numpy as np

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.rope import Llama3, LongRope, Rope, Yarn
from configs.kinds.temperature import Temperature
from configs.model import ModelConfig
from inference.families.shared import gguf_names
from inference.families.shared.gguf_keys import GgufKeys
from inference.families.shared.gguf_states import Metadata
from layers import rope as rope_math

TEMPERATURE, TEMPERATURE_LENGTH = (  # of queries
    "attention.temperature_scale",
    "attention.temperature_length",
)
NEAR_THETA = "rope.freq_base_swa"
ATTENTION_FACTOR = "rope.scaling.attn_factor"  # on cos and sin
YARN_ATTENTION_FACTOR = "rope.scaling.yarn_attn_factor"


def near(keys: GgufKeys, share: float = 1.0) -> Rope:
    """Returns the positions of layers with a window, where others have theirs; `share` rotates."""
    return Rope(keys.number(NEAR_THETA, 10_000.0), share=share)


def near_of(config: ModelConfig) -> Metadata:
    """Returns the inverse of `near`, where a layer has a window."""
    mixers = config.mixers(Attention)
    ropes = [mixer.rope for mixer in mixers if mixer.window is not None and mixer.rope]
    return {NEAR_THETA: ropes[0].theta} if ropes else {}


def temperature(keys: GgufKeys, rope: Rope) -> Temperature | None:
    """Returns the temperature of queries, whose length may be that which YaRN stretches."""
    if not keys.get(TEMPERATURE, (float, int), 0.0):
        return None
    if not isinstance(rope.scaling, Yarn):
        raise InputError(
            f"metadata {keys.architecture}.{TEMPERATURE} goes with rope.scaling.type=yarn"
        )
    length = keys.integer(TEMPERATURE_LENGTH, rope.scaling.original_context)
    return Temperature(keys.number(TEMPERATURE), length)


def llama3(keys: GgufKeys, share: float = 1.0) -> Rope:
    """Reads the positions, where Llama 3.1 and later store the divisor of each frequency instead of
    the rule that made it: a ramp, or a step in Llama 4 Scout.

    Args:
        share: of a head that rotates. The file may have divisors of 1 for the rest of it.

    Raises:
        InputError: the divisors do not follow the rule.
    """
    rope = dataclasses.replace(keys.rope(), share=share)
    shape = keys.shapes.get(gguf_names.ROPE_FACTORS)
    if shape is None:
        return rope
    frequencies = rope_math.inverse_frequencies(rope, keys.head_width)
    if shape not in (frequencies.shape, (keys.head_width // 2,)):
        raise InputError(
            f"{gguf_names.ROPE_FACTORS!r} is {list(shape)}; expected {list(frequencies.shape)}"
        )
    divisors, unrotated = np.split(keys.read_numbers(gguf_names.ROPE_FACTORS), [len(frequencies)])
    context = keys.integer("rope.scaling.original_context_length", Llama3(1.0).original_context)
    for high in (4.0, 1.0) if (unrotated == 1).all() else ():
        candidate = Rope(rope.theta, Llama3(float(divisors.max()), 1.0, high, context), share)
        expected = frequencies / rope_math.inverse_frequencies(candidate, keys.head_width)
        if np.allclose(divisors, expected, rtol=1e-3):
            return candidate
    raise InputError(f"{gguf_names.ROPE_FACTORS!r} does not follow the llama3 rule")


def longrope(keys: GgufKeys) -> Rope:
    """Reads the positions of Phi-3 and later, which may have a factor of each frequency."""
    rope = keys.rope()
    scaling = rope.scaling
    if gguf_names.LONG_FACTORS in keys.shapes and gguf_names.SHORT_FACTORS in keys.shapes:
        scaling = LongRope(
            _factors(keys, gguf_names.SHORT_FACTORS),
            _factors(keys, gguf_names.LONG_FACTORS),
            keys.integer("rope.scaling.original_context_length"),
            keys.number(ATTENTION_FACTOR, 1.0),
        )
    return Rope(rope.theta, scaling, keys.rotary_share)


def longrope_of(config: ModelConfig) -> Metadata:
    """Returns what multiplies cos and sin, which `longrope` reads beside factors."""
    rope = config.mixers(Attention)[0].rope
    scaling = rope.scaling if rope else None
    return {ATTENTION_FACTOR: scaling.attention_factor} if isinstance(scaling, LongRope) else {}


def _factors(keys: GgufKeys, name: str) -> tuple[float, ...]:
    """Returns the shortest decimals that round to the stored numbers: those that were meant."""
    return tuple(float(str(number)) for number in keys.read_numbers(name))


def yarn_of(config: ModelConfig) -> Metadata:
    """Returns `yarn_keys` of the attention that sees most: layers with a window may have none."""
    mixers = sorted(config.mixers(Attention), key=lambda mixer: mixer.window is not None)
    return yarn_keys(next((mixer.rope for mixer in mixers if mixer.rope), Rope()))


def yarn_keys(rope: Rope) -> Metadata:
    """Returns the metadata of positions that YaRN stretches, if it does."""
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
        metadata[YARN_ATTENTION_FACTOR] = scaling.attention_factor
    return metadata
