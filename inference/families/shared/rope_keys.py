"""Reads rotary positions of a `config.json`: `rope_theta` and `rope_scaling`, which transformers 4
writes, and `rope_parameters`, which transformers 5 writes.
"""

import dataclasses
import math

from absl import logging

from configs.errors import InputError
from configs.kinds.rope import Dynamic, Linear, Llama3, LongRope, Proportional, Rope, Scaling, Yarn
from inference.families.shared.config_keys import Keys

_SHARE = "partial_rotary_factor"
_MAX_STRETCHED = 1 << 24
_MAX_FACTORS = 1 << 16
# Keys of an object per kind of layer, which few families have.
_LAYERS = ("full_attention", "sliding_attention")
_KINDS = {
    k: k for k in ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
}


def read(keys: Keys, theta: float = 10_000.0) -> Rope:
    """Returns the RoPE of a model with one; `theta` where the file states none."""
    return scaled(keys, described(keys), keys.number("rope_theta", theta))


def described(keys: Keys) -> Keys | None:
    """Returns the object that says how positions rotate: of two the older, as in transformers 5."""
    both = keys.nested("rope_scaling"), keys.nested("rope_parameters")
    return next((stated for stated in both if stated is not None and stated.raw), None)


def by_kind(keys: Keys) -> tuple[Keys | None, Keys | None]:
    """Returns the objects of layers without a window and of those with one; transformers 4 has only
    the former.
    """
    per_kind, older = keys.nested("rope_parameters") or Keys({}), keys.nested("rope_scaling")
    distant, near = (per_kind.nested(f"{kind}_attention") for kind in ("full", "sliding"))
    if older is not None:
        distant = older.with_defaults(distant.raw if distant else {})
    return distant, near


def scaled(keys: Keys, stated: Keys | None, theta: float) -> Rope:
    """Returns the RoPE that an object describes.

    Args:
        keys: the whole configuration.
        stated: the object; None: nothing is scaled.
        theta: the base where the object states none.

    Raises:
        InputError: the object is unsound, or of another kind.
    """
    if stated is None:
        _check_whole(keys, "default")
        return Rope(theta)
    stated.require_neutral(**dict.fromkeys(_LAYERS, (None,)))
    theta = stated.number("rope_theta", theta)
    key = "type" if stated.raw.get("rope_type") is None else "rope_type"
    kind = stated.choice(key, _KINDS, "default")
    if kind == "proportional":
        share = stated.number(_SHARE, 1.0)
        return Rope(theta, Proportional(share, stated.number("factor", 1.0)))
    _check_whole(keys, kind)
    _check_whole(stated, kind)
    return Rope(theta, _scaling(kind, keys, stated))


def _check_whole(keys: Keys, kind: str) -> None:
    """Checks an architecture whose heads rotate whole: transformers ignores a stated share, and
    fails where positions are scaled.
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
    """Returns the RoPE of a share of each head; the object that describes it may state another."""
    return partial_of(keys, described(keys), keys.number("rope_theta", theta), share)


def partial_of(keys: Keys, stated: Keys | None, theta: float, share: float) -> Rope:
    """Returns the same by the object that `scaled` takes."""
    if stated is not None:
        share, stated = stated.number(_SHARE, share), without_share(stated)
    return dataclasses.replace(scaled(without_share(keys), stated, theta), share=share)


def without_share(keys: Keys) -> Keys:
    """Returns the object without the share of each head."""
    return keys.updated({_SHARE: None})


def max_context(keys: Keys, rope: Rope) -> int:
    """Returns the model's context; with two kinds of scaling, a file states the one before it."""
    stored, scaling = keys.integer("max_position_embeddings"), rope.scaling
    if isinstance(scaling, Dynamic | Yarn):
        stretched = scaling.factor * scaling.original_context
        if stretched > _MAX_STRETCHED:
            raise InputError(f"rope factor {scaling.factor:g} stretches the context too far")
        return max(stored, math.floor(stretched))
    return stored


def _scaling(kind: str, keys: Keys, stated: Keys) -> Scaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return Linear(stated.number("factor"))
    longest = keys.integer("max_position_embeddings")
    if kind == "dynamic":  # from the configuration's own length, whatever else is stated
        return Dynamic(stated.number("factor"), longest)
    original = stated.integer("original_max_position_embeddings", longest)
    original = keys.integer("original_max_position_embeddings", original)
    if kind == "llama3":
        ends = stated.number("low_freq_factor"), stated.number("high_freq_factor")
        return Llama3(stated.number("factor"), *ends, original)
    factor = stated.number("factor", longest / original)
    if kind == "yarn":
        ends = stated.number("beta_fast", 32.0), stated.number("beta_slow", 1.0)
        attention = _yarn_attention(stated, factor)
        return Yarn(factor, original, *ends, attention, stated.boolean("truncate", True))
    is_stretched = factor > 1 and original > 1
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if is_stretched else 1.0
    attention = stated.number("attention_factor", default)
    short, long = (stated.numbers(f"{kind}_factor", _MAX_FACTORS) for kind in ("short", "long"))
    return LongRope(short, long, original, attention)


def _yarn_attention(stated: Keys, factor: float) -> float | None:
    """Returns the stated factor, or the one of two scales; None: the paper's."""
    if stated.raw.get("attention_factor") is not None:
        return stated.number("attention_factor")
    if not stated.raw.get("mscale") or not stated.raw.get("mscale_all_dim") or factor <= 1:
        return None
    top, bottom = (
        0.1 * stated.number(f"mscale{end}") * math.log(factor) + 1 for end in ("", "_all_dim")
    )
    return top / bottom
