"""Rotary positions of a `config.json`: `rope_theta` and `rope_scaling` as transformers 4 writes
them, `rope_parameters` as transformers 5 does.
"""

import dataclasses
import math

from absl import logging

from configs.errors import InputError
from configs.kinds.rope import (
    Dynamic,
    Linear,
    Llama3,
    LongRope,
    Proportional,
    Rope,
    Scaling,
    Yarn,
)
from inference.families.shared.config_keys import Keys

_SHARE = "partial_rotary_factor"
_MAX_STRETCHED = 1 << 24
_MAX_FACTORS = 1 << 16
# Under these names an object holds one for each kind of layer, which few families have.
_LAYERS = ("full_attention", "sliding_attention")
_KINDS = {
    k: k for k in ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
}


def read(keys: Keys, theta: float = 10_000.0) -> Rope:
    """The one RoPE of a model; `theta` where the file names none."""
    return scaled(keys, described(keys), keys.number("rope_theta", theta))


def described(keys: Keys) -> Keys | None:
    """The object that says how positions rotate; where there are two, transformers 5 takes the
    older one.
    """
    both = keys.nested("rope_scaling"), keys.nested("rope_parameters")
    return next((own for own in both if own is not None and own.raw), None)


def by_kind(keys: Keys) -> tuple[Keys | None, Keys | None]:
    """The objects of layers without a window and of those with one; transformers 4 has one of the
    first alone.
    """
    per_kind, older = keys.nested("rope_parameters") or Keys({}), keys.nested("rope_scaling")
    distant, near = (per_kind.nested(f"{kind}_attention") for kind in ("full", "sliding"))
    if older is not None:
        distant = Keys((distant.raw if distant else {}) | older.raw, older.label)
    return distant, near


def scaled(keys: Keys, own: Keys | None, theta: float) -> Rope:
    """RoPE by the object that describes it.

    Args:
        keys: the whole configuration.
        own: the object; None: nothing is scaled.
        theta: the base where the object names none.

    Raises:
        InputError: the object is unsound, or of another kind.
    """
    if own is None:
        _check_whole(keys, "default")
        return Rope(theta)
    own.require_neutral(dict.fromkeys(_LAYERS, (None,)))
    theta = own.number("rope_theta", theta)
    kind = own.choice(
        "type" if own.raw.get("rope_type") is None else "rope_type", _KINDS, "default"
    )
    if kind == "proportional":
        share = own.number(_SHARE, 1.0)
        return Rope(theta, Proportional(share, own.number("factor", 1.0)))
    _check_whole(keys, kind)
    _check_whole(own, kind)
    return Rope(theta, _scaling(kind, keys, own))


def _check_whole(keys: Keys, kind: str) -> None:
    """Of an architecture whose heads rotate whole, as transformers has it: of a share that is named
    it takes no notice, or, where positions are scaled, it fails.
    """
    share = keys.number(_SHARE, 1.0)
    if share != 1 and kind != "default":
        raise InputError(
            f"{keys.label}{_SHARE}={share:g} with rope_type={kind} is not supported: transformers "
            "scales positions for this share of each head, and fails to rotate it; leave it out"
        )
    if share != 1:
        logging.log_first_n(
            logging.WARNING,
            "%s%s=%g has no effect: heads of this architecture rotate whole, in transformers, too",
            1,
            *(keys.label, _SHARE, share),
        )


def partial(keys: Keys, theta: float, share: float) -> Rope:
    """RoPE of a share of each head, which the object that describes it may name."""
    keys, own = without_share(keys), described(keys)
    if own is not None:
        share, own = own.number(_SHARE, share), without_share(own)
    rope = scaled(keys, own, keys.number("rope_theta", theta))
    return dataclasses.replace(rope, share=share)


def without_share(keys: Keys) -> Keys:
    """The object without the share of each head that it names."""
    return Keys(keys.raw | {_SHARE: None}, keys.label)


def max_context(keys: Keys, rope: Rope) -> int:
    """Tokens a model is good for: of two kinds of stretching a configuration states the length
    before it.
    """
    stored, scaling = keys.integer("max_position_embeddings"), rope.scaling
    if isinstance(scaling, Dynamic | Yarn):
        stretched = scaling.factor * scaling.original_context
        if stretched > _MAX_STRETCHED:
            raise InputError(f"rope factor {scaling.factor:g} stretches the context too far")
        return max(stored, math.floor(stretched))
    return stored


def _scaling(kind: str, keys: Keys, own: Keys) -> Scaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return Linear(own.number("factor"))
    longest = keys.integer("max_position_embeddings")
    if kind == "dynamic":  # from the configuration's own length, whatever else is stated
        return Dynamic(own.number("factor"), longest)
    original = own.integer("original_max_position_embeddings", longest)
    original = keys.integer("original_max_position_embeddings", original)
    if kind == "llama3":
        ends = own.number("low_freq_factor"), own.number("high_freq_factor")
        return Llama3(own.number("factor"), *ends, original)
    factor = own.number("factor", longest / original)
    if kind == "yarn":
        ends = own.number("beta_fast", 32.0), own.number("beta_slow", 1.0)
        attention = _yarn_attention(own, factor)
        return Yarn(factor, original, *ends, attention, own.boolean("truncate", True))
    is_stretched = factor > 1 and original > 1
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if is_stretched else 1.0
    attention = own.number("attention_factor", default)
    short, long = (own.numbers(f"{kind}_factor", _MAX_FACTORS) for kind in ("short", "long"))
    return LongRope(short, long, original, attention)


def _yarn_attention(own: Keys, factor: float) -> float | None:
    """The factor that is stated, or follows from two scales; None: the paper's."""
    if own.raw.get("attention_factor") is not None:
        return own.number("attention_factor")
    if not own.raw.get("mscale") or not own.raw.get("mscale_all_dim") or factor <= 1:
        return None
    top, bottom = (
        0.1 * own.number(f"mscale{end}") * math.log(factor) + 1 for end in ("", "_all_dim")
    )
    return top / bottom
