"""The sequences of one request, and what their results mean to it."""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items

from inference.outputs import Completion, RequestOutput, alternatives
from inference.scheduling.sequence import FinishReason, Sequence
from inference.scheduling.step_schedule import Decisions
from inference.text.ballots import ballot

# An output of a request: its sequence, its text, and its score in a beam search.
Result = tuple[Sequence, str, float | None]


class SequenceGroup(ABC):
    """The sequences that run for one request.

    Attributes:
        id: the request's, which is its first sequence's.
        ids: of all sequences that ever run for it.
        sequences: those that it has now.
        params: what was asked.
    """

    def __init__(self, sequences: list[Sequence], ids: Items[int]):
        self.id = sequences[0].id
        self.ids = ids
        self.sequences = sequences
        self._first = sequences[0]
        self.params = sequences[0].params
        self._stopped_by: dict[int, str | int | None] = {}  # of each sequence that has ended

    @property
    @abstractmethod
    def is_finished(self) -> bool:
        """Whether no outputs of it are to come."""

    def decide(self) -> Decisions | None:
        """What the scheduler has to do now that a sequence was committed, if anything."""
        return None

    @abstractmethod
    def add(self, output: RequestOutput) -> list[RequestOutput]:
        """Takes the output of one sequence; returns the request's outputs that follow from it."""

    @abstractmethod
    def failing(self, sequence: Sequence) -> list[Sequence]:
        """The sequences that end with a fault in one of them."""

    @abstractmethod
    def fail(self, output: RequestOutput) -> list[RequestOutput]:
        """Takes the last output, without text, of a sequence that a fault lies in, once all that
        end with it have; returns the request's outputs that follow.
        """

    @abstractmethod
    def start_over(self, sequence: Sequence, text: str) -> None:
        """Restores the state before a sequence's commit, when it had this text: an interrupt may
        have left half of what the commit means.
        """

    @abstractmethod
    def _results(self) -> list[Result]:
        """The results of the request in their order."""

    def completion(self) -> Completion:
        first, *siblings = [
            Completion(
                self.id,
                sequence.tokens[: sequence.num_prompt_tokens],
                sequence.output_tokens,
                text,
                str(sequence.finish_reason),
                sequence.results.logprobs,
                alternatives(sequence.results.top_logprobs),
                score,
                params_versions=sequence.history.params_versions,
                version_starts=sequence.history.version_starts,
                kept_prompt_tokens=sequence.num_prompt_tokens - sequence.budget.num_excess_tokens,
            )
            for sequence, text, score in self._results()
        ]
        return dataclasses.replace(first, others=tuple(siblings))

    def _outputs(self) -> list[RequestOutput]:
        """All results at once and whole, where their order is only known in the end."""
        return [
            RequestOutput(
                self.id,
                sequence.output_tokens,
                text,
                str(sequence.finish_reason),
                index,
                sequence.history.params_versions,
                sequence.results.logprobs,
                sequence.results.top_logprobs,
                self._stopped_by.get(sequence.id),
                self._first.prefix.num_hit_tokens or 0,
                num_preemptions=sequence.history.num_preemptions,
                failure=sequence.failure,
                version_starts=sequence.history.version_starts,
            )  # fmt: skip
            for index, (sequence, text, _) in enumerate(self._results())
        ]


class ParallelSampling(SequenceGroup):
    """Sequences that are sampled independently of each other, each with a seed of its own."""

    def __init__(self, sequences: list[Sequence]):
        """`sequences` have consecutive ids."""
        super().__init__(sequences, [sequence.id for sequence in sequences])
        self._texts = dict.fromkeys(self.ids, "")
        self._open = set(self.ids)

    @property
    def is_finished(self) -> bool:
        """Whether the last output of every sequence was taken."""
        return not self._open

    def add(self, output: RequestOutput) -> list[RequestOutput]:
        """As they come; with `best_of` all in the end."""
        self._texts[output.id] += output.text
        if output.finish_reason is not None:
            self._open.discard(output.id)
            self._stopped_by[output.id] = output.stopped_by
        if self.params.best_of is None and output.id == self.id:
            return [output]  # the request's first answer, as it is
        if self.params.best_of is None:
            return [dataclasses.replace(output, id=self.id, index=output.id - self.id)]
        return self._outputs() if self.is_finished else []

    def failing(self, sequence: Sequence) -> list[Sequence]:
        return [sequence]

    def fail(self, output: RequestOutput) -> list[RequestOutput]:
        return self.add(output)

    def start_over(self, sequence: Sequence, text: str) -> None:
        """The sequence has this text, and has not ended."""
        self._texts[sequence.id] = text
        self._open.add(sequence.id)

    def _rank(self) -> Callable[[Sequence], tuple[int, float]]:
        """What `best_of` ranks by: votes, where it counts them, then log-probability. What was cut
        off has no vote.
        """
        ballots = {
            sequence.id: ballot(self._texts[sequence.id])
            for sequence in self.sequences
            if self.params.vote and sequence.finish_reason is FinishReason.STOP
        }
        votes = Counter(ballots.values())
        votes[""] = 0
        return lambda sequence: (votes[ballots.get(sequence.id, "")], _mean_logprob(sequence))

    def _results(self) -> list[Result]:
        ranked = self.sequences
        if self.params.best_of is not None:
            ranked = sorted(ranked, key=self._rank(), reverse=True)[: self.params.n]
        return [(sequence, self._texts[sequence.id], None) for sequence in ranked]


def _mean_logprob(sequence: Sequence) -> float:
    """Of a sequence's tokens; one that failed comes last."""
    if sequence.finish_reason is FinishReason.ERROR or not sequence.results.logprobs:
        return -math.inf
    return sum(sequence.results.logprobs) / len(sequence.results.logprobs)
