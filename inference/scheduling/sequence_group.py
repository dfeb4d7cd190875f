"""The answers to one request: sequences that are sampled side by side, or the beams of a search."""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Items

from inference.outputs import Completion, Update, completion
from inference.request import FinishReason, Sequence, Status
from inference.scheduling.scheduler import Scheduler


class Answers(ABC):
    """One request: what runs for it, and what comes of that.

    Attributes:
        id: the request's, which is its first sequence's.
        ids: of all sequences that ever run for it.
        sequences: those that it has now.
    """

    def __init__(self, sequences: list[Sequence], ids: Items[int]):
        self.id = sequences[0].id
        self.ids = ids
        self.sequences = sequences
        self._params = sequences[0].params

    @property
    @abstractmethod
    def is_finished(self) -> bool:
        """Whether no news of it is to come."""

    @abstractmethod
    def take(self, update: Update) -> list[Update]:
        """News of one sequence after a step, as the news of the request that follow from it."""

    @abstractmethod
    def _results(self) -> list[tuple[Sequence, str, float | None]]:
        """The answers in their order: the sequence, its text, and its score in a beam search."""

    def completion(self) -> Completion:
        """What became of the request."""
        first, *others = [
            dataclasses.replace(completion(sequence, text), id=self.id, score=score)
            for sequence, text, score in self._results()
        ]
        return dataclasses.replace(first, others=tuple(others))

    def _updates(self) -> list[Update]:
        """Every answer at once and whole, where their order is only known in the end."""
        return [
            Update(self.id, sequence.output_tokens, text, str(sequence.finish_reason), index)
            for index, (sequence, text, _) in enumerate(self._results())
        ]


class Samples(Answers):
    """Answers that are sampled independently of each other, each by a seed of its own."""

    def __init__(self, sequences: list[Sequence]):
        """One sequence an answer, their ids in a row."""
        super().__init__(sequences, [sequence.id for sequence in sequences])
        self._texts = dict.fromkeys(self.ids, "")
        self._num_open = len(sequences)

    @property
    def is_finished(self) -> bool:
        """Whether the end of every answer was taken."""
        return not self._num_open

    def take(self, update: Update) -> list[Update]:
        """As they come; with `best_of` all in the end."""
        self._texts[update.id] += update.text
        self._num_open -= update.finish_reason is not None
        if self._params.best_of is None:
            return [dataclasses.replace(update, id=self.id, index=update.id - self.id)]
        return self._updates() if self.is_finished else []

    def _results(self) -> list[tuple[Sequence, str, float | None]]:
        ranked = self.sequences
        if self._params.best_of is not None:
            ranked = sorted(ranked, key=_mean_logprob, reverse=True)[: self._params.n]
        return [(sequence, self._texts[sequence.id], None) for sequence in ranked]


@dataclasses.dataclass(frozen=True)
class _Continuation:
    """A beam and a token after it."""

    logprob_sum: float  # of all output tokens, this one included
    beam: Sequence
    token: int
    logprob: float

    @property
    def is_end(self) -> bool:
        return self.beam.is_end(self.token)

    def sequence(self, id: int) -> Sequence:
        """A waiting sequence of its own."""
        beam = self.beam
        assert beam.candidates is not None
        return Sequence(
            id, beam.params, [*beam.tokens, self.token], beam.num_prompt_tokens, beam.eos_ids,
            beam.seed, logprobs=[*beam.logprobs, self.logprob],
            top_logprobs=[*beam.top_logprobs, beam.candidates], needs_commit=True,
            arrival_s=beam.arrival_s, cache_key=beam.cache_key,
        )  # fmt: skip


class Beams(Answers):
    """A beam search, as transformers does it (`GenerationMixin._beam_search`, version 5).

    All beams have the same length. When the candidates of each are known, the best
    `beam_width` continuations of all that do not end are the next beams; those among the best
    `beam_width` of all continuations that do end are hypotheses, of which as many are kept.

    A beam that goes on stays in its slot with its best continuation; its others are forked from it
    and take the ids of beams that do not go on.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        first: Sequence,
        max_context: int,
        text_of: Callable[[Sequence], str],
    ):
        """Starts with `first`, a sequence that ends with the prompt.

        Args:
            scheduler: of the engine.
            first: queued; the ids that follow its own are the other beams'.
            max_context: longest sequence in tokens.
            text_of: the text that a finished sequence has generated.
        """
        super().__init__([first], range(first.id, first.id + first.params.beam_width))
        self._scheduler = scheduler
        self._longest = min(first.max_tokens, max_context)
        self._text_of = text_of
        self._found: list[tuple[float, Sequence]] = []  # hypotheses by score, best first

    @property
    def is_finished(self) -> bool:
        """Whether the search is over."""
        return all(beam.status is Status.FINISHED for beam in self.sequences)

    def take(self, update: Update) -> list[Update]:
        """Goes on when all beams have their candidates; the hypotheses are news in the end."""
        if any(beam.status is Status.FINISHED for beam in self.sequences):  # not a finite logit
            self._end(FinishReason.ERROR)
        elif all(beam.candidates for beam in self.sequences):
            self._advance()
        return self._updates() if self.is_finished else []

    def _results(self) -> list[tuple[Sequence, str, float | None]]:
        left = [(self._score(beam), beam) for beam in self.sequences]  # of a search cut short
        has_failed = any(beam.finish_reason is FinishReason.ERROR for beam in self.sequences)
        found = (left if has_failed else [*self._found, *left])[: self._params.n]
        return [(sequence, self._text_of(sequence), score) for score, sequence in found]

    def _advance(self) -> None:
        """Chooses the next beams and the new hypotheses."""
        width = self._params.beam_width
        ranked = sorted(
            (
                _Continuation(sum(beam.logprobs) + logprob, beam, token, logprob)
                for beam in self.sequences
                for token, logprob in zip(*(beam.candidates or ()), strict=True)
            ),
            key=lambda continuation: -continuation.logprob_sum,
        )
        is_last = len(self.sequences[0].tokens) + 1 == self._longest
        for continuation in ranked[:width]:
            if is_last or continuation.is_end:
                found = continuation.sequence(self.id)
                reason = FinishReason.STOP if continuation.is_end else FinishReason.LENGTH
                found.status, found.finish_reason = Status.FINISHED, reason
                self._found.append((self._score(found), found))
        self._found = sorted(self._found, key=lambda found: -found[0])[:width]
        onward = [] if is_last else [c for c in ranked if not c.is_end][:width]
        if onward and not self._is_settled(onward[0]):
            self._reparent(onward)
        else:
            self._end(FinishReason.ABORT)
            self.sequences = []

    def _is_settled(self, best: _Continuation) -> bool:
        """Whether no hypothesis is to be found any more: exactly so for a length penalty of 0 or
        less, and taken to be so for others, which may yet favour a longer one.
        """
        if len(self._found) < self._params.beam_width:
            return False
        num_tokens = best.beam.num_output_tokens + 1
        score = best.logprob_sum / num_tokens**self._params.length_penalty
        return self._params.early_stopping or score <= self._found[-1][0]

    def _reparent(self, onward: list[_Continuation]) -> None:
        """Makes these continuations the beams."""
        heirs: dict[Sequence, _Continuation] = {}
        for continuation in onward:
            heirs.setdefault(continuation.beam, continuation)
        for beam in self.sequences:
            if beam not in heirs:
                self._scheduler.finish(beam, FinishReason.ABORT)
        free_ids = [id for id in self.ids if all(id != beam.id for beam in heirs)]
        self.sequences = []
        for continuation in onward:
            beam = continuation.beam
            if heirs[beam] is not continuation:
                beam = continuation.sequence(free_ids.pop(0))
                self._scheduler.fork(continuation.beam, beam)
            self.sequences.append(beam)
        for beam, continuation in heirs.items():  # once their forks have their tokens
            assert beam.candidates is not None
            beam.logprobs.append(continuation.logprob)
            beam.top_logprobs.append(beam.candidates)
            self._scheduler.choose(beam, continuation.token)

    def _end(self, reason: FinishReason) -> None:
        for beam in self.sequences:
            self._scheduler.finish(beam, reason)

    def _score(self, sequence: Sequence) -> float:
        return (
            sum(sequence.logprobs) / max(1, len(sequence.logprobs)) ** self._params.length_penalty
        )


def _mean_logprob(sequence: Sequence) -> float:
    """What `best_of` ranks by; an answer that failed comes last."""
    if sequence.finish_reason is FinishReason.ERROR or not sequence.logprobs:
        return -math.inf
    return sum(sequence.logprobs) / len(sequence.logprobs)
