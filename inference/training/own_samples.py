"""What a model writes by itself, for heads to learn it: given no more than the opening of a user's
turn, a chat model writes both sides (Xu et al. 2024, arXiv 2406.08464), others any text.
"""

from collections.abc import Callable

import numpy as np

from configs.errors import InputError
from inference.text.tokenizer import Tokenizer

_MARK = "\u2063"  # a user's message, which no template contains

# (openings, tokens that each is continued by) -> the continuations.
Generate = Callable[[list[list[int]], int], list[list[int]]]


def opening(tokenizer: Tokenizer) -> list[int]:
    """What stands before a user's first words; without a chat template, before a text.

    Raises:
        InputError: nothing does.
    """
    if tokenizer.template is not None:
        before, mark, _ = tokenizer.chat_text([{"role": "user", "content": _MARK}]).partition(_MARK)
        if mark and before:
            return tokenizer.encode(before, add_special=False)
    start = tokenizer.encode("")
    if not start and tokenizer.eos_id is not None:
        start = [tokenizer.eos_id]
    if not start:
        raise InputError("this tokenizer has no token that a text begins with: give --text")
    return start


def write(generate: Generate, start: list[int], count: int, length: int) -> np.ndarray:
    """So many windows of a length, one after the other: int64 ids [count * length]."""
    continuations = generate([start] * count, length - len(start))
    return np.concatenate([np.array((start + tokens)[:length]) for tokens in continuations])


def most_frequent(tokens: np.ndarray, count: int) -> tuple[int, ...]:
    """The ids that occur most often, in order."""
    ids, times = np.unique(tokens, return_counts=True)
    if len(ids) <= count:
        return tuple(map(int, ids))
    frequent = ids[np.argsort(-times, kind="stable")[:count]]
    return tuple(map(int, np.sort(frequent)))
