"""Requests that wait, and when a batch of them may start."""

import bisect
import itertools
from collections.abc import Callable, Iterator

from configs.engine import EngineConfig
from inference.request import Sequence, Status

_NUM_COMPARED = 16  # sequences whose cached prefixes are looked up when one may overtake


class Waiting:
    """Waiting sequences: the higher priority first, then the earlier arrival."""

    def __init__(self, max_overtakes: int):
        """`max_overtakes`: later arrivals that may go before a sequence."""
        self._max_overtakes = max_overtakes
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Takes a sequence to the place of its rank."""
        bisect.insort(self._sequences, sequence, key=rank)

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence that waits."""
        self._sequences.remove(sequence)

    def next(self, num_cached_tokens: Callable[[Sequence], int]) -> Sequence | None:
        """Who is admitted next: of the first in line of one priority the one with the longest
        cached prefix, unless that would pass somebody who was passed too often, or who was
        preempted. None where nobody can be admitted yet.
        """
        ready = list(itertools.islice(filter(_is_ready, self._sequences), _NUM_COMPARED))
        if not ready:
            return None
        first = ready[0]
        is_fixed = first.num_preemptions or first.num_overtakes >= self._max_overtakes
        if is_fixed or len(ready) == 1 or not self._max_overtakes:
            return first
        peers = [s for s in ready if s.params.priority == first.params.priority]
        return max(peers, key=num_cached_tokens)  # the first of equals

    def take(self, sequence: Sequence) -> None:
        """Removes a sequence that is admitted; those before it were overtaken."""
        index = self._sequences.index(sequence)
        del self._sequences[index]
        for passed in self._sequences[:index]:
            passed.num_overtakes += 1


def _is_ready(sequence: Sequence) -> bool:
    """Whether there is something to feed: nothing is in flight, no search has to choose, and the
    prompt is not computed by another.
    """
    leader = sequence.leader  # one that has ended computes the prompt for nobody
    is_led = leader is not None and leader.status is not Status.FINISHED
    return not (sequence.num_rows_in_flight or sequence.candidates or is_led)


def rank(sequence: Sequence) -> tuple[int, int]:
    """Sorts sequences: the most deserving first."""
    return -sequence.params.priority, sequence.id


def may_start(
    engine: EngineConfig, num_ready: int, num_room: int, oldest_wait_s: float, is_open: bool
) -> bool:
    """Whether a policy that runs whole batches starts one now, nothing running.

    Args:
        engine: policy and `max_wait_s`.
        num_ready: waiting sequences that fit, at most `num_room`.
        num_room: sequences a full batch has.
        oldest_wait_s: what the longest waiting one has waited.
        is_open: more requests will come.
    """
    if num_ready >= num_room or not is_open:
        return True
    return engine.policy == "dynamic" and oldest_wait_s >= engine.max_wait_s
