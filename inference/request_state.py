"""A request from its start to its last output."""

import logging
from collections import deque

from inference.outputs import RequestOutput
from inference.scheduling.beam_search import BeamSearch
from inference.scheduling.scheduler import Scheduler
from inference.scheduling.sequence import FinishReason, Sequence, Status
from inference.scheduling.sequence_group import ParallelSampling, SequenceGroup
from inference.text.detokenizer import Detokenizer
from inference.text.tokenizer import Tokenizer


class RequestState:
    """The sequences of one request and their text.

    Attributes:
        group: the sequences that run for it.
        unread: where its outputs wait until they are read.
    """

    def __init__(
        self,
        sequences: list[Sequence],
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        unread: deque[RequestOutput],
    ):
        """`sequences` as `InputProcessor` makes them; of a fork, with output tokens already."""
        params = sequences[0].params
        self.group: SequenceGroup = ParallelSampling(sequences)
        if params.beam_width:
            self.group = BeamSearch(sequences[0], self._text_of)
        self.unread = unread
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._detokenizers: dict[int, Detokenizer] = {}  # by the id of the sequence
        self._num_told = {one.id: one.num_output_tokens for one in sequences}  # of its tokens
        if tokenizer is not None:
            for sequence in sequences:
                how = params.stop, params.min_tokens, params.skip_special_tokens
                own = Detokenizer(tokenizer, *how)
                own.push(sequence.output_tokens)
                self._detokenizers[sequence.id] = own

    def process(self, sequence: Sequence, tokens: list[int]) -> None:
        """Makes the outputs that follow from a commit of one of its sequences; a fault on the way
        ends this request, and no other.

        Args:
            sequence: that was committed.
            tokens: its new ones.
        """
        try:
            text = self._new_text(sequence, tokens)
            if decisions := self.group.decide():
                self._scheduler.apply(decisions)
            outputs = self.group.add(self._output(sequence, tokens, text))
        except Exception:
            logging.getLogger(__name__).exception("request %d ends with an error", self.group.id)
            self.finish(FinishReason.ERROR)
            outputs = self.group.fail(sequence, tokens)
        self.unread.extend(outputs)

    def finish(self, reason: FinishReason) -> None:
        """Ends all of its sequences."""
        for sequence in self.group.sequences:
            self._scheduler.finish(sequence, reason)

    def _output(self, sequence: Sequence, tokens: list[int], text: str) -> RequestOutput:
        """What is new of one sequence."""
        reason = sequence.finish_reason
        logprobs, tops = sequence.prompt_logprobs, sequence.prompt_top_logprobs
        if not sequence.scores:
            start = self._num_told.get(sequence.id, 0)  # beams have none; they are told as a whole
            self._num_told[sequence.id] = end = start + len(tokens)
            logprobs, tops = sequence.logprobs[start:end], sequence.top_logprobs[start:end]
        return RequestOutput(
            sequence.id, tokens, text, reason and reason.value, 0, sequence.params_versions,
            logprobs, tops, self._stopped_by(sequence, tokens),
            min(sequence.num_cached_tokens, sequence.num_prompt_tokens), sequence.queued_s,
            _embedding(sequence), sequence.num_preemptions,
        )  # fmt: skip

    def _stopped_by(self, sequence: Sequence, tokens: list[int]) -> str | int | None:
        """The request's own string or token that ended it."""
        detokenizer = self._detokenizers.get(sequence.id)
        if detokenizer is not None and detokenizer.stopped is not None:
            return detokenizer.stopped
        is_own = bool(tokens) and tokens[-1] in sequence.params.stop_ids
        return tokens[-1] if is_own and sequence.finish_reason is FinishReason.STOP else None

    def _new_text(self, sequence: Sequence, tokens: list[int]) -> str:
        """Text of new tokens, as far as it is certain; a stop string ends the sequence."""
        detokenizer = self._detokenizers.get(sequence.id)
        if detokenizer is None:
            return ""
        text = detokenizer.push(_without_end(sequence, tokens))
        if detokenizer.stopped is not None:
            self._scheduler.finish(sequence, FinishReason.STOP)
            sequence.finish_reason = FinishReason.STOP
        elif sequence.status is Status.FINISHED:
            text += detokenizer.flush()
        return text

    def _text_of(self, sequence: Sequence) -> str:
        """Text of a finished sequence that was not followed as it grew."""
        if self._tokenizer is None:
            return ""
        skip_special = sequence.params.skip_special_tokens
        detokenizer = Detokenizer(self._tokenizer, skip_special=skip_special)
        tokens = _without_end(sequence, sequence.output_tokens)
        return detokenizer.push(tokens) + detokenizer.flush()


def _without_end(sequence: Sequence, tokens: list[int]) -> list[int]:
    """New tokens but for one that ends the sequence, which is no text."""
    return tokens[:-1] if tokens and sequence.is_end(tokens[-1]) else tokens


def _embedding(sequence: Sequence) -> bytes:
    """The vector of a prompt, as `RequestOutput` has it."""
    is_there = sequence.pools and sequence.finish_reason is FinishReason.LENGTH
    return sequence.embedding.astype("<f4").tobytes() if is_there else b""
