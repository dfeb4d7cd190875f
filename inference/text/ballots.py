"""What answers say in the end, by which those that agree are counted."""

import re

from inference.text.thoughts import MARKS

_BOX = "\\boxed{"
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def ballot(answer: str) -> str:
    r"""Returns what the last `\boxed{}` of an answer holds, else its last number, else its last
    line without case, all behind its thought; "": it says nothing.
    """
    for marks in MARKS:
        answer = answer.rpartition(marks.closing)[2]
    if (boxed := _boxed(answer)) is not None:
        return "".join(boxed.split())
    if numbers := _NUMBER.findall(answer):
        return _plain(numbers[-1])
    lines = [line.strip() for line in answer.splitlines() if line.strip()]
    return lines[-1].casefold().rstrip(".!") if lines else ""


def _boxed(answer: str) -> str | None:
    start = answer.rfind(_BOX)
    if start < 0:
        return None
    depth, begin = 1, start + len(_BOX)
    for at in range(begin, len(answer)):
        depth += (answer[at] == "{") - (answer[at] == "}")
        if not depth:
            return answer[begin:at]
    return None


def _plain(number: str) -> str:
    """Digits alone: `1,000.50` is `1000.5`."""
    whole, _, fraction = number.replace(",", "").partition(".")
    fraction = fraction.rstrip("0")
    return f"{whole}.{fraction}" if fraction else whole
