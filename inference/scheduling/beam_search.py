"""Beam search over the candidates that steps return. It decides; the scheduler acts."""

import dataclasses
from collections.abc import Callable

from inference.outputs import RequestOutput
from inference.scheduling.sequence import (
    AdapterUse,
    Budget,
    FinishReason,
    History,
    Prefix,
    Results,
    Sequence,
    Status,
)
from inference.scheduling.sequence_group import Result, SequenceGroup
from inference.scheduling.step_schedule import Decisions


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
            beam.seed, needs_commit=True, prefix=Prefix(beam.prefix.key),
            adapter=AdapterUse(beam.adapter.weights),
            results=Results(
                [*beam.results.logprobs, self.logprob],
                [*beam.results.top_logprobs, beam.candidates],
            ),
            budget=Budget(beam.budget.num_excess_tokens),
            history=History(
                beam.history.arrival_s, params_versions=beam.history.params_versions,
                version_starts=beam.history.version_starts,
            ),
        )  # fmt: skip


class BeamSearch(SequenceGroup):
    """A beam search, as transformers does it (`GenerationMixin._beam_search`, version 5).

    All beams have the same length. When the candidates of each are known, the best
    `beam_width` continuations of all that do not end are the next beams; those among the best
    `beam_width` of all continuations that do end are hypotheses, of which as many are kept.

    A beam that continues stays in its slot with its best continuation; its others are forked from
    it and take the ids of beams that end.
    """

    def __init__(self, first: Sequence, text_of: Callable[[Sequence], str]):
        """Starts with `first`, a sequence in the scheduler that ends with the prompt; the ids that
        follow its own are the other beams'. `text_of` returns a finished sequence's text.
        """
        super().__init__([first], range(first.id, first.id + first.params.beam_width))
        self._text_of = text_of
        self._hypotheses: list[tuple[float, Sequence]] = []  # by score, best first
        self._decided = (0, Decisions())  # by beams of so many tokens, and what, last

    @property
    def is_finished(self) -> bool:
        return all(beam.status is Status.FINISHED for beam in self.sequences)

    def decide(self) -> Decisions | None:
        """The next beams, once all have their candidates."""
        if any(beam.status is Status.FINISHED for beam in self.sequences):  # not a finite logit
            return _all_end(self.sequences, FinishReason.ERROR)
        if self.sequences and all(beam.candidates for beam in self.sequences):
            return self._advance()
        return None

    def add(self, output: RequestOutput) -> list[RequestOutput]:
        return self._outputs() if self.is_finished else []

    def failing(self, sequence: Sequence) -> list[Sequence]:
        return self.sequences

    def start_over(self, sequence: Sequence, text: str) -> None:
        """What was decided may not have been applied; beams that were forked wait in any case."""
        num_tokens, decisions = self._decided
        for beam, reason in decisions.ended:
            if beam.status is not Status.FINISHED:
                beam.status, beam.finish_reason = Status.FINISHED, reason
        for beam, token, logprob in decisions.chosen:
            if len(beam.tokens) == num_tokens:
                beam.choose(token, logprob)

    def fail(self, output: RequestOutput) -> list[RequestOutput]:
        """The beams as they are, without text, which may be what failed."""
        self._text_of = lambda sequence: ""
        self.sequences = self.sequences or [sequence for _, sequence in self._hypotheses]
        for beam in self.sequences:
            beam.finish_reason = FinishReason.ERROR
        return self._outputs()

    def _results(self) -> list[Result]:
        unfinished = [(self._score(beam), beam) for beam in self.sequences]  # of a search cut short
        has_failed = any(beam.finish_reason is FinishReason.ERROR for beam in self.sequences)
        results = (unfinished if has_failed else [*self._hypotheses, *unfinished])[: self.params.n]
        results += results[-1:] * (self.params.n - len(results))  # one beam until the search begins
        return [(sequence, self._text_of(sequence), score) for score, sequence in results]

    def _advance(self) -> Decisions:
        """Adds the new hypotheses and chooses the next beams."""
        width = self.params.beam_width
        ranked = sorted(
            (
                _Continuation(sum(beam.results.logprobs) + logprob, beam, token, logprob)
                for beam in self.sequences
                for token, logprob in zip(*(beam.candidates or ()), strict=True)
            ),
            key=lambda continuation: -continuation.logprob_sum,
        )
        first = self.sequences[0]
        is_last = len(first.tokens) + 1 == first.max_length
        hypotheses = list(self._hypotheses)
        for continuation in ranked[:width]:
            if is_last or continuation.is_end:
                hypothesis = continuation.sequence(self.id)
                reason = FinishReason.STOP if continuation.is_end else FinishReason.LENGTH
                hypothesis.status, hypothesis.finish_reason = Status.FINISHED, reason
                hypotheses.append((self._score(hypothesis), hypothesis))
        hypotheses = sorted(hypotheses, key=lambda scored: -scored[0])[:width]
        chosen = [] if is_last else [c for c in ranked if not c.is_end][:width]
        beams: list[Sequence] = []
        decisions = _all_end(self.sequences, FinishReason.ABORT)
        if chosen and not self._is_settled(hypotheses, chosen[0]):
            beams, decisions = self._continue(chosen)
        decided = len(first.tokens), decisions
        self._hypotheses, self.sequences, self._decided = hypotheses, beams, decided  # at once
        return decisions

    def _is_settled(self, hypotheses: list[tuple[float, Sequence]], best: _Continuation) -> bool:
        """Whether no hypothesis is to be found any more: exactly so for a length penalty of 0 or
        less, and taken to be so for others, which may yet favour a longer one.
        """
        if len(hypotheses) < self.params.beam_width:
            return False
        num_tokens = best.beam.num_output_tokens + 1
        score = best.logprob_sum / num_tokens**self.params.length_penalty
        return self.params.early_stopping or score <= hypotheses[-1][0]

    def _continue(self, chosen: list[_Continuation]) -> tuple[list[Sequence], Decisions]:
        """The beams that these continuations become, and what that takes."""
        best: dict[Sequence, _Continuation] = {}  # of each beam that continues
        for continuation in chosen:
            best.setdefault(continuation.beam, continuation)
        ended = [beam for beam in self.sequences if beam not in best]
        used_ids = {beam.id for beam in best}
        free_ids = iter([id for id in self.ids if id not in used_ids])
        forks: list[tuple[Sequence, Sequence]] = []
        beams: list[Sequence] = []
        for continuation in chosen:
            beam = continuation.beam
            if best[beam] is not continuation:
                beam = continuation.sequence(next(free_ids))
                forks.append((continuation.beam, beam))
            beams.append(beam)
        return beams, Decisions(
            ended=tuple((beam, FinishReason.ABORT) for beam in ended),
            forks=tuple(forks),
            chosen=tuple(
                (beam, continuation.token, continuation.logprob)
                for beam, continuation in best.items()
            ),
        )

    def _score(self, sequence: Sequence) -> float:
        num_tokens = max(1, len(sequence.results.logprobs))
        return sum(sequence.results.logprobs) / num_tokens**self.params.length_penalty


def _all_end(beams: list[Sequence], reason: FinishReason) -> Decisions:
    return Decisions(ended=tuple((beam, reason) for beam in beams))
