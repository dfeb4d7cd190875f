"""What a step returns, and how its rows are taken into their sequences."""

import dataclasses
import math
from typing import Generic, TypeVar

import numpy as np

from inference.outputs import Alternatives, RequestOutput
from inference.scheduling.sequence import FinishReason, Sequence, Status
from inference.scheduling.step_schedule import ScheduledChunk, StepSchedule

Array = TypeVar("Array")  # numpy's on the host, JAX's on the device and while a step is traced


@dataclasses.dataclass(frozen=True)
class StepOutput(Generic[Array]):
    """What the host learns of a step: Y rows of both rectangles, W tokens each (1 + k, of trees as
    many as their longest branch brings; a prefill chunk emits one at most), n alternatives. On the
    host those of all data shards, one behind the other.
    """

    tokens: Array  # i32[Y, W]
    num_emitted: Array  # i32[Y]
    num_drafts: Array  # i32[Y] that were verified; [0] in a step without any
    num_levels: Array  # i32[Y], likewise: the most of these that follow each other
    finite: Array  # bool[Y] False: the row's logits held a NaN or an infinity
    logprobs: Array  # f32[Y, W] the model's own, before every filter
    top_ids: Array  # i32[Y, W, n]
    top_logprobs: Array  # f32[Y, W, n]
    target_logprobs: Array  # f32[chunks, tokens] scored steps only
    target_top_ids: Array  # i32[chunks, tokens, n]
    target_top_logprobs: Array  # f32[chunks, tokens, n]
    pooled: Array  # f32[chunks, D] sums of final hidden states; [0, 0] without embeddings


@dataclasses.dataclass(eq=False, slots=True)
class Commit:
    """What a step brings to one sequence: it is noted first and then written, so that what an
    interrupt leaves half done is done again.

    Attributes:
        sequence: whose results these are.
        start: the number of its tokens before.
        tokens, logprobs, top_logprobs: new ones, the latter empty in an engine without them.
        candidates: of a beam.
        reason: why the sequence ends with them, if it does.
        outputs: what the request returns of it; None: not made yet.
    """

    sequence: Sequence
    start: int
    tokens: list[int]
    logprobs: list[float]
    top_logprobs: list[Alternatives]
    candidates: Alternatives | None = None
    reason: FinishReason | None = None
    outputs: list[RequestOutput] | None = None

    def write(self) -> None:
        """Writes results into the sequence, whatever of them it has."""
        sequence = self.sequence
        first = self.start - sequence.num_prompt_tokens
        sequence.results.logprobs[first:] = self.logprobs
        sequence.results.top_logprobs[first:] = self.top_logprobs
        sequence.tokens[self.start :] = self.tokens
        if self.candidates is not None:
            sequence.candidates = self.candidates

    def cut(self, num_tokens: int) -> None:
        """Leaves so many of the tokens: the text ends with them."""
        self.tokens, self.logprobs, self.top_logprobs = (
            self.tokens[:num_tokens], self.logprobs[:num_tokens], self.top_logprobs[:num_tokens],
        )  # fmt: skip
        self.write()

    def restore(self) -> None:
        """Writes results, and that the sequence has ended, after an interrupt; a beam whose search
        went on from them stays as it is.
        """
        sequence = self.sequence
        if self.candidates is None or len(sequence.tokens) == self.start:
            self.write()
        if self.reason is not None:
            sequence.status, sequence.finish_reason = Status.FINISHED, self.reason


class StepResults:
    """A step's output, read row by row."""

    def __init__(self, schedule: StepSchedule, output: StepOutput[np.ndarray]):
        self._shape = schedule.shape
        self._output = output
        self._has_alternatives = output.top_ids.shape[-1] > 0
        self._finite, self._num_emitted = output.finite.tolist(), output.num_emitted.tolist()
        self._num_drafts, self._num_levels = output.num_drafts.tolist(), output.num_levels.tolist()
        self._tokens, self._logprobs = output.tokens.tolist(), output.logprobs.tolist()

    def num_drafted(self, row: int) -> int:
        """Drafts that a row verified."""
        return self._num_drafts[row] if self._num_drafts else 0

    def num_levels(self, row: int) -> int:
        """How many of these could be right, where there were any."""
        return self._num_levels[row]

    def num_accepted(self, row: int) -> int:
        """How many of these were right."""
        return self._num_emitted[row] - 1

    def commit(self, row: int, chunk: ScheduledChunk) -> Commit | None:
        """Counts as computed what a row fed of its sequence, which has not ended, and returns what
        it brings, not written yet; None: nothing.
        """
        sequence, num_emitted = chunk.sequence, self._num_emitted[row]
        reason = None if self._finite[row] else FinishReason.ERROR
        if reason is None and sequence.status is Status.RUNNING:
            nth_shard, own_row = divmod(row, self._shape.num_rows)
            nth_chunk = own_row - self._shape.decode[0]
            num_kept = num_emitted if nth_chunk < 0 else chunk.length
            sequence.num_computed_tokens += num_kept
            sequence.num_scheduled_tokens -= chunk.most_kept - num_kept  # rejected drafts
            sequence.drafts = ()
            if sequence.is_only_read:
                index = nth_shard * self._shape.prefill[0] + nth_chunk
                add = self._add_scores if sequence.scores else self._add_pooled
                reason = add(index, chunk)
        if reason is not None:
            return Commit(sequence, len(sequence.tokens), [], [], [], None, reason)
        if not num_emitted:
            return None
        if sequence.params.beam_width:  # the search chooses, not the device
            candidates = self._alternatives(row, 0)
            return Commit(sequence, len(sequence.tokens), [], [], [], candidates)
        return self._commit_tokens(row, num_emitted, sequence)

    def _commit_tokens(self, row: int, num_emitted: int, sequence: Sequence) -> Commit:
        """Sampled tokens, up to one that ends the sequence."""
        tokens, logprobs, start = self._tokens[row], self._logprobs[row], len(sequence.tokens)
        constraint, room = sequence.constraint, sequence.max_length - start
        reason, n = None, 0
        for token in tokens[:num_emitted]:
            n += 1
            if constraint is not None:
                constraint.accept(token)
                if constraint.has_failed:
                    reason = FinishReason.ERROR
                    break
            if sequence.is_end(token) or (constraint is not None and constraint.is_complete):
                reason = FinishReason.STOP
                break
            if n >= room:
                reason = FinishReason.LENGTH
                break
        if n < len(tokens):
            tokens, logprobs = tokens[:n], logprobs[:n]
        tops: list[Alternatives] = []
        if self._has_alternatives:
            tops = [self._alternatives(row, w) for w in range(n)]
        return Commit(sequence, start, tokens, logprobs, tops, None, reason)

    def _add_scores(self, index: int, chunk: ScheduledChunk) -> FinishReason | None:
        """Adds the log-probabilities of a chunk of a prompt; says whether it was the last."""
        output, sequence, fed = self._output, chunk.sequence, slice(chunk.length)
        logprobs = output.target_logprobs[index, fed].tolist()
        if not all(map(math.isfinite, logprobs)):  # a window may have hidden it from the last token
            return FinishReason.ERROR
        sequence.results.prompt_logprobs += logprobs
        if self._has_alternatives:
            ids, values = output.target_top_ids[index, fed], output.target_top_logprobs[index, fed]
            sequence.results.prompt_top_logprobs += zip(ids.tolist(), values.tolist(), strict=True)
        return _end_of_prompt(sequence)

    def _add_pooled(self, index: int, chunk: ScheduledChunk) -> FinishReason | None:
        """Adds what a chunk of a prompt adds to its vector; says whether it was the last."""
        sequence, pooled_D = chunk.sequence, self._output.pooled[index].astype(np.float64)
        if not np.isfinite(pooled_D).all():
            return FinishReason.ERROR
        sequence.results.pooled = (
            pooled_D if sequence.results.pooled is None else sequence.results.pooled + pooled_D
        )
        return _end_of_prompt(sequence)

    def _alternatives(self, row: int, w: int) -> tuple[list[int], list[float]]:
        """(ids, log-probabilities) of the most likely tokens at one position."""
        return self._output.top_ids[row, w].tolist(), self._output.top_logprobs[row, w].tolist()


def _end_of_prompt(sequence: Sequence) -> FinishReason | None:
    """Why a prompt that is only read ends, once all of it is committed."""
    is_done = not sequence.num_pending_tokens and not sequence.in_flight.num_rows
    return FinishReason.LENGTH if is_done else None
