"""Lines of digits to sort, a task whose answers are checked by comparing texts."""

import json
import random
from collections.abc import Callable

_DIGITS = 8
_HELD_OUT = 10  # lines whose digits sum to a multiple of it are held out
Line = dict[str, str]


def sorted_only(digits: str, dice: random.Random) -> Line:
    """A prompt, and the answer that is rewarded."""
    return {"prompt": f"{digits}=", "answer": "".join(sorted(digits))}


def in_any_order(digits: str, dice: random.Random) -> Line:
    """A prompt, and a completion that rises, falls or repeats the digits, each a third."""
    rising = "".join(sorted(digits))
    return {"prompt": f"{digits}=", "completion": dice.choice((rising, rising[::-1], digits))}


def lines(
    make: Callable[[str, random.Random], Line], count: int, seed: int, is_held_out: bool = False
) -> list[Line]:
    """Random lines; the same digits are never held out and not."""
    dice = random.Random(seed)
    drawn: list[Line] = []
    while len(drawn) < count:
        digits = "".join(dice.choices("0123456789", k=_DIGITS))
        if (sum(map(int, digits)) % _HELD_OUT == 0) == is_held_out:
            drawn.append(make(digits, dice))
    return drawn


def jsonl(values: list[Line]) -> bytes:
    return "".join(f"{json.dumps(value)}\n" for value in values).encode()
