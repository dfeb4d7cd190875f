"""Steps of prompts alone: each is computed up to its last token, by a *leader* of the sequence that
waits to decode.
"""

from collections.abc import Hashable, Iterable, Iterator

from configs.cache import CacheSpec
from inference.request import SamplingParams
from inference.runtime.model_runner import ModelRunner
from inference.runtime.steps_in_flight import StepsInFlight
from inference.scheduling.scheduler import Scheduler
from inference.scheduling.sequence import History, Prefix, Sequence, Status


class Leaders:
    """Leaders, scheduled and computed by a scheduler and a runner that decode nothing.

    Attributes:
        scheduler, model_runner: theirs.
    """

    def __init__(self, scheduler: Scheduler, model_runner: ModelRunner):
        scheduler.shapes = tuple(shape for shape in scheduler.shapes if not shape.decode[0])
        self.scheduler, self.model_runner = scheduler, model_runner
        self._overlaps = model_runner.config.engine.scheduling.overlap
        self._steps = StepsInFlight(scheduler, model_runner)

    def __len__(self) -> int:
        """Steps in flight."""
        return len(self._steps)

    @property
    def compile_s(self) -> float:
        return self._steps.compile_s

    def launch(self) -> bool:
        """Starts a step where there is one to start, and does not wait."""
        return len(self._steps) <= self._overlaps and self._steps.launch(is_open=False)

    def commit(self, waits: bool) -> Iterator[Sequence]:
        """Commits the steps that are done, and the oldest one even if it `waits` for it. Yields the
        leaders that have ended with that, which were only read or gave non-finite logits, before
        the next step, which may fail, is fetched.
        """
        yield from self._ended()  # what an interrupt left, or a fault
        while len(self._steps) and (waits or self._steps.is_done):
            waits = False
            step, output = self._steps.fetch()
            self.scheduler.commit(step.schedule, output)
            yield from self._ended()
            self._steps.record(step)

    def _ended(self) -> Iterator[Sequence]:
        commits = self.scheduler.commits
        while commits:
            yield commits[0].sequence
            commits.popleft()

    def clear(self) -> set[Sequence]:
        """Forgets the steps in flight; returns the leaders that have ended otherwise than by a
        commit.
        """
        self._steps.clear()
        for commit in self.scheduler.commits:
            commit.restore()
        return {commit.sequence for commit in self.scheduler.commits}

    def start_over(self, leaders: Iterable[Sequence]) -> None:
        """Has these computed again, from nothing."""
        self.scheduler.start_over(leaders)


def is_complete(leader: Sequence) -> bool:
    """Whether all of the prompt but its last token is in pages."""
    is_running = leader.status is Status.RUNNING
    return is_running and leader.num_computed_tokens == len(leader.tokens) - 1


def leader_of(
    id: int, params: SamplingParams, tokens: list[int], key: Hashable | None, arrival_s: float
) -> Sequence:
    """What computes a prompt, whose prefix is cached by `key`."""
    leader = Sequence(
        id, params, tokens, len(tokens), sends_pages=True, prefix=Prefix(key),
        history=History(arrival_s),
    )  # fmt: skip
    leader.max_length = len(tokens)
    return leader


def sent_pages(spec: CacheSpec, pages: range, num_tokens: int, page_tokens: int) -> list[int]:
    """Those of a leader's pages (indices in the sequence) that decoding from `num_tokens` on sees,
    and which are sent.
    """
    dead = spec.dead_pages(num_tokens, page_tokens)
    return [index for index in pages if index not in dead]
