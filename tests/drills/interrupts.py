"""KeyboardInterrupt at any line of `Engine.step`: no token is lost."""

import importlib
import random
import time
from typing import Any

from tests import compiling
from tests.drills.harness import Drill, Outcome, Setting, Skipped

_TRIALS = "tests.inference.test_interrupts"
_LIMIT_S, _LEAST = 55.0, 20  # as many trials as it has room for, what is compiled included


def _trials() -> Any:
    try:
        return importlib.import_module(_TRIALS)
    except ModuleNotFoundError:
        raise Skipped(f"{_TRIALS.replace('.', '/')}.py is not there") from None


def interrupts(setting: Setting) -> Outcome:
    """Runs of an engine, interrupted at a line or two: outputs are those of an undisturbed run."""
    trials, num = _trials(), setting.size(2000, 20)
    lost: list[str] = []
    start, num_run = time.monotonic(), 0
    with compiling.quickly():
        engine, undisturbed = trials.make(), trials.Interrupts()
        expected, _ = trials.answers(engine, undisturbed)
        while num_run < num and time.monotonic() - start < _LIMIT_S:
            lines = _lines(setting.dice, undisturbed.count, num_run, num)
            engine.rebuild()
            if reason := _lost(trials, engine, lines, expected):
                lost.append(f"lines {lines}: {reason}")
                engine = trials.make()
            num_run += 1
    return Outcome(
        not lost and num_run >= _LEAST,
        f"{len(lost)} of {num_run} interrupted runs ({undisturbed.count} lines each) lost a token"
        + (f": {'; '.join(lost[:3])}" if lost else ""),
        {"runs": num_run, "lost": lost},
    )


def _lines(dice: random.Random, count: int, nth: int, num: int) -> tuple[int, ...]:
    """Spread over a run; in half of the trials a second one soon after it."""
    first = 1 + (nth * 7919 % num) * count // num
    return (first, first + dice.randint(1, 400)) if dice.random() < 0.5 else (first,)


def _lost(trials: Any, engine: Any, lines: tuple[int, ...], expected: Any) -> str | None:
    try:
        results, _ = trials.answers(engine, trials.Interrupts(*lines))
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return None if results == expected else "other outputs"


DRILLS = (
    Drill(
        "interrupts", "KeyboardInterrupt at lines spread over Engine.step: 0 runs lose a token",
        interrupts, limit_s=70,
    ),
)  # fmt: skip
