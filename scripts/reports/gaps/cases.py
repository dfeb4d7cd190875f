"""Names to fill in, and whether two ways to fill them differ by more than chance."""

import itertools
import keyword
import math
import random
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_MAX_CHARS = 700  # of both texts, some 200 tokens
_NAME = re.compile(r" ?\b[A-Za-z_]\w{3,}")  # with its blank, as tokens begin: no token is cut


class Case(NamedTuple):
    """A text with a gap where a name is.

    Attributes:
        middle: the name, with the blank before it.
        recurs: the name is in the suffix, and not in the prefix.
    """

    prefix: str
    middle: str
    suffix: str
    recurs: bool


def chosen(
    documents: Sequence[str], num: int, lines_before: int, lines_after: int, seed: int
) -> tuple[list[Case], list[Case]]:
    """Returns `num` random cases whose names recur, and `num` of any names, in turns of documents.

    Args:
        lines_before, lines_after: of a case, in addition to the line with the gap.
    """
    dice = random.Random(seed)
    streams = [_cases(document, lines_before, lines_after, dice) for document in documents]
    dice.shuffle(streams)
    in_turns = [case for row in itertools.zip_longest(*streams) for case in row if case is not None]
    return [case for case in in_turns if case.recurs][:num], in_turns[:num]


def _cases(
    document: str, lines_before: int, lines_after: int, dice: random.Random
) -> Iterator[Case]:
    """Yields a case of each line that has one, in a random order."""
    lines = document.splitlines(keepends=True)
    places = list(range(lines_before, len(lines) - lines_after))
    dice.shuffle(places)
    for n in places:
        line = lines[n]
        names = [match for match in _NAME.finditer(line) if not keyword.iskeyword(match[0].strip())]
        if not names or line.lstrip().startswith("#"):
            continue
        match = dice.choice(names)
        prefix = "".join(lines[n - lines_before : n]) + line[: match.start()]
        suffix = line[match.end() :] + "".join(lines[n + 1 : n + 1 + lines_after])
        if len(prefix) + len(suffix) <= _MAX_CHARS:
            word = re.compile(rf"\b{match[0].strip()}\b")
            recurs = word.search(suffix) is not None and word.search(prefix) is None
            yield Case(prefix, match[0], suffix, recurs)


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> tuple[int, int, float]:
    """Returns how often only the first is right, only the second is, and how likely a difference
    as large is by chance (McNemar's exact test, two-sided).
    """
    only_first = sum(a and not b for a, b in zip(first, second, strict=True))
    only_second = sum(b and not a for a, b in zip(first, second, strict=True))
    total, least = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(total, k) for k in range(least + 1)) / 2**total
    return only_first, only_second, min(1.0, 2 * tail)
