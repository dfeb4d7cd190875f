"""How far a batch has come, its rate, and the longest it can still take."""

import time
from collections.abc import Callable, Sequence

_EVERY_S = 30.0  # between two lines, where there is no terminal


class BatchProgress:
    """Counts tokens and answers: a bar on a terminal, else a line now and then.

    A request that runs counts as if it took all its tokens, so the time left is an upper bound.
    """

    def __init__(
        self,
        max_tokens: Sequence[int],
        bar: Callable[[int, int, str, str], None],
        say: Callable[[str], None] | None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`max_tokens` are those of each request; `say` is None where the bar can be seen."""
        self.num_tokens = 0
        self.num_answers = 0
        self._max_tokens = list(max_tokens)
        self._total = sum(max_tokens)
        self._bar, self._say, self._clock = bar, say, clock
        self._start: float | None = (
            None  # with the first tokens, so that compilation does not count
        )
        self._first_tokens = 0
        self._last_line_s = clock()

    def add_tokens(self, count: int) -> None:
        self.num_tokens += count
        now = self._clock()
        if self._start is None:
            self._start, self._first_tokens = now, self.num_tokens
        self._bar(self.num_tokens, self._total, "generating", self._rate(now))
        if self._say is not None and now - self._last_line_s >= _EVERY_S:
            self._last_line_s = now
            self._say(self._rate(now) + self._time_left(now))

    def add_answer(self, index: int, num_tokens: int) -> None:
        """Counts a request that has ended with `num_tokens` tokens."""
        self.num_answers += 1
        self._total -= self._max_tokens[index] - num_tokens

    def _rate(self, now: float) -> str:
        line = f"{self.num_answers} of {len(self._max_tokens)} answers"
        rate = self._tokens_a_second(now)
        return f"{line}, {rate:.1f} tokens/s" if rate else line

    def _time_left(self, now: float) -> str:
        rate = self._tokens_a_second(now)
        return f", at most {_duration((self._total - self.num_tokens) / rate)} left" if rate else ""

    def _tokens_a_second(self, now: float) -> float:
        seconds = now - (now if self._start is None else self._start)
        return (self.num_tokens - self._first_tokens) / seconds if seconds > 0 else 0.0


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
