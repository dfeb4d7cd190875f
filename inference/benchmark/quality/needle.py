"""A needle in a haystack (Kamradt 2023): a fact somewhere in a long text, asked for at its end.

Every fact is a number of five digits of a name that nobody has, so that only the text can tell it.
"""

import dataclasses
import random
from collections.abc import Callable, Sequence

_FIRST = ("Alder", "Bram", "Corva", "Dun", "Elm", "Fenn", "Gal", "Harro", "Ister", "Kess")
_LAST = ("dale", "ford", "gate", "holm", "mere", "moor", "stead", "thorpe", "wick", "worth")


@dataclasses.dataclass(frozen=True)
class Needle:
    """A fact in a text.

    Attributes:
        share: of the text that comes before it, 0 to 1.
        prompt: token ids of the text, the fact in it and the question that the answer continues.
        answer: digits.
    """

    share: float
    prompt: tuple[int, ...]
    answer: str

    def is_found(self, continuation: str) -> bool:
        """Whether a continuation of the prompt tells the answer."""
        return self.answer in continuation


def needles(
    filler: str,
    encode: Callable[[str], Sequence[int]],
    num_tokens: int,
    count: int,
    start: Sequence[int] = (),
    seed: int = 0,
) -> list[Needle]:
    """So many needles, the first at the text's beginning, the last at its end, the others evenly
    between them, each with a fact and a part of the filler of its own.

    Args:
        filler: lines of text, in which facts stand on lines of their own.
        encode: token ids of a text, without what begins or ends a prompt.
        num_tokens: of a prompt at most; it is shorter by less than two lines.
        count: at least 2.
        start: token ids that begin a prompt.
        seed: of names, numbers and parts.

    Raises:
        ValueError: the filler is too short.
    """
    rng = random.Random(seed)
    lines = [f"{line}\n" for line in filler.splitlines() if line.strip()]
    names = rng.sample([first + last for first in _FIRST for last in _LAST], count)
    found = []
    for nth, name in enumerate(names):
        answer = str(rng.randrange(10_000, 100_000))
        fact = encode(f"The magic number of {name} is {answer}.\n")
        question = encode(f"The magic number of {name} is")
        room = num_tokens - len(start) - len(fact) - len(question)
        hay = _lines_of(lines, encode, room, rng.randrange(len(lines)))
        share = nth / (count - 1)
        before = round(share * len(hay))
        prompt = [*start]
        for line in hay[:before]:
            prompt += line
        prompt += fact
        for line in hay[before:]:
            prompt += line
        found.append(Needle(share, (*prompt, *question), answer))
    return found


def _lines_of(
    lines: Sequence[str], encode: Callable[[str], Sequence[int]], room: int, first: int
) -> list[Sequence[int]]:
    """Lines from the first on, around the end, as many as there is room for."""
    found: list[Sequence[int]] = []
    for nth in range(len(lines)):
        line = encode(lines[(first + nth) % len(lines)])
        if len(line) > room:
            return found
        found.append(line)
        room -= len(line)
    raise ValueError("the filler is too short")
