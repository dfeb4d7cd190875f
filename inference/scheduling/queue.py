"""Sequences that wait to start, in the order of their rank."""

import bisect
import itertools
from collections.abc import Callable, Iterator

from inference.scheduling.sequence import Sequence, Status

_NUM_COMPARED = 16  # sequences whose cached prefixes are looked up when one may overtake


class WaitingQueue:
    """Waiting sequences: the lowest `priority` value first, then the earlier arrival."""

    def __init__(self, max_overtakes: int):
        """`max_overtakes`: later arrivals that may go before a sequence."""
        self._max_overtakes = max_overtakes
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self._sequences, sequence, key=rank)

    def remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)

    def next(
        self,
        num_cached_tokens: Callable[[Sequence], int],
        may_start: Callable[[Sequence], bool] = lambda sequence: True,
    ) -> Sequence | None:
        """The sequence to admit next: among the first of one priority that may start the one with
        the longest cached prefix, unless it would overtake one that was overtaken too often, or
        preempted. None where none can be admitted yet.
        """
        ready = list(itertools.islice(filter(_is_ready, self._sequences), _NUM_COMPARED))
        if not ready:
            return None
        first = ready[0]
        history = first.history
        is_fixed = history.num_preemptions or history.num_overtakes >= self._max_overtakes
        if is_fixed or not self._max_overtakes:
            return first if may_start(first) else None
        ready = list(filter(may_start, ready))
        if len(ready) < 2:
            return ready[0] if ready else None
        peers = [s for s in ready if s.params.priority == ready[0].params.priority]
        return max(peers, key=num_cached_tokens)  # the first of equals

    def pop(self, sequence: Sequence) -> None:
        """Removes a sequence that is admitted; those before it were overtaken."""
        index = self._sequences.index(sequence)
        del self._sequences[index]
        for overtaken in self._sequences[:index]:
            overtaken.history.num_overtakes += 1


def _is_ready(sequence: Sequence) -> bool:
    """Whether there is something to feed: nothing is in flight, no search has to choose, and no
    leader computes the prompt, or one on other chips has.
    """
    leader = sequence.leader  # one that has ended computes no prompt
    is_led = leader is not None and leader.status is not Status.FINISHED and not sequence.sender
    return not (sequence.in_flight.num_rows or sequence.candidates or is_led)


def rank(sequence: Sequence) -> tuple[int, int]:
    """Sorts sequences: the first is admitted first and preempted last."""
    return sequence.params.priority, sequence.id
