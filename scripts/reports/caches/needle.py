"""A needle in a haystack (Kamradt 2023): a fact somewhere in a long text, asked for at its end.

Every fact is a number of five digits of a name that nobody has, so that only the text can tell it.
"""

import dataclasses
import itertools
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
    """So many needles of one text, each with a fact of its own: the first is at the text's
    beginning, the last at its end, the others are evenly between them.

    Args:
        filler: lines of text, of which the first are taken; facts stand on lines of their own.
        encode: token ids of a text, without what begins or ends a prompt.
        num_tokens: of a prompt at most; it is shorter by less than two lines.
        count: at least 2.
        start: token ids that begin a prompt.
        seed: of names and numbers.

    Raises:
        ValueError: the filler is too short.
    """
    rng = random.Random(seed)
    names = rng.sample([first + last for first in _FIRST for last in _LAST], count)
    answers = [str(rng.randrange(10_000, 100_000)) for _ in names]
    questions = [encode(f"The magic number of {name} is") for name in names]
    facts = [
        encode(f"The magic number of {name} is {answer}.\n")
        for name, answer in zip(names, answers, strict=True)
    ]
    longest = max(
        len(fact) + len(question) for fact, question in zip(facts, questions, strict=True)
    )
    lines = [f"{line}\n" for line in filler.splitlines() if line.strip()]
    hay = _first(lines, encode, num_tokens - len(start) - longest)
    prompts = []
    for nth, (fact, question, answer) in enumerate(zip(facts, questions, answers, strict=True)):
        share = nth / (count - 1)
        at = round(share * len(hay))
        parts = (start, *hay[:at], fact, *hay[at:], question)
        prompts.append(Needle(share, tuple(itertools.chain(*parts)), answer))
    return prompts


def _first(
    lines: Sequence[str], encode: Callable[[str], Sequence[int]], room: int
) -> list[Sequence[int]]:
    """As many lines as there is room for."""
    lines_taken: list[Sequence[int]] = []
    for line in lines:
        tokens = encode(line)
        if len(tokens) > room:
            return lines_taken
        lines_taken.append(tokens)
        room -= len(tokens)
    raise ValueError("the filler is too short")
