"""The perplexity of a text, scored in windows."""

import math
import sys
from collections.abc import Sequence

from configs.errors import InputError
from inference.text.tokenizer import Tokenizer


def default_text() -> str:
    """A text that every machine has: the standard library's help topics sorted by key and joined
    by newlines.
    """
    from pydoc_data.topics import topics

    return "\n".join(topics[key] for key in sorted(topics))


def start(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer puts before a text: models that are trained with a first token need it in
    each window. What it puts after a text, an end token, belongs to no window.
    """
    bare, whole = tokenizer.encode("a", add_special=False), tokenizer.encode("a")
    places = (n for n in range(len(whole)) if whole[n : n + len(bare)] == bare)
    return whole[: next(places, 0)]


def windows(tokens: Sequence[int], first: Sequence[int], size: int) -> list[list[int]]:
    """A text's tokens, in windows of `size` tokens, more than `first` are, which do not overlap and
    begin with `first`; a last one in which nothing is predicted is left out.
    """
    step = size - len(first)
    parts = [[*first, *tokens[i : i + step]] for i in range(0, len(tokens), step)]
    return [window for window in parts if len(window) > 1]


def of(logprobs: Sequence[float]) -> float:
    """The exponential of the mean negative log-probability.

    Raises:
        InputError: it is no number, or too large for one.
    """
    mean = -sum(logprobs) / len(logprobs)
    if not mean < math.log(sys.float_info.max):  # NaN is not either
        raise InputError(f"{mean:.1f} nats a token: the perplexity is too large for a number")
    return math.exp(mean)
