"""A request from its start to its last output."""

import logging
from collections import deque

from configs.errors import is_fault
from inference.outputs import RequestOutput
from inference.scheduling.beam_search import BeamSearch
from inference.scheduling.scheduler import Scheduler
from inference.scheduling.sequence import FinishReason, Sequence, SequenceFault, Status
from inference.scheduling.sequence_group import ParallelSampling, SequenceGroup
from inference.scheduling.step_output import Commit
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
        self._fault: BaseException | None = None  # that came when a text was made again
        self._starts = {s.id: len(s.tokens) for s in sequences}  # tokens before its output
        for sequence in sequences:
            self._follow(sequence, len(sequence.tokens))

    def process(self, commit: Commit) -> None:
        """Makes the outputs that follow from a commit of one of its sequences, and leaves them
        where they are read, once though an interrupt comes between; a fault on the way ends this
        sequence (of a beam search, all), and no other.

        Raises:
            SequenceFault: slots and pages may be left half changed.
        """
        if commit.outputs is None:
            commit.outputs = self._outputs(commit)
        elif self.unread and commit.outputs and self.unread[-1] is commit.outputs[-1]:
            return  # they are there
        self.unread.extend(commit.outputs)

    def start_over(self, commit: Commit) -> None:
        """What is known of the text is what was before a commit whose outputs are not made: an
        interrupt may have come meanwhile. A fault on the way ends the sequence as any of its text
        does, once its outputs are made.
        """
        text, self._fault = "", None
        try:
            text = self._follow(commit.sequence, commit.start)
        except BaseException as error:
            if not is_fault(error):
                raise
            self._fault = error
        self.group.start_over(commit.sequence, text)

    def finish(self, reason: FinishReason) -> None:
        for sequence in self.group.sequences:
            self._scheduler.finish(sequence, reason)

    def _follow(self, sequence: Sequence, num_tokens: int) -> str:
        """Makes the detokenizer that has seen so many of a sequence's tokens; returns the text that
        they brought to it here.
        """
        if self._tokenizer is None:
            return ""
        params = sequence.params
        start = self._starts.get(sequence.id, sequence.num_prompt_tokens)
        how = params.skip_special_tokens, params.shown_special_ids
        detokenizer = Detokenizer(self._tokenizer, params.stop, params.min_tokens, *how)
        detokenizer.push(sequence.tokens[sequence.num_prompt_tokens : start])
        self._detokenizers[sequence.id] = detokenizer
        return detokenizer.push(sequence.tokens[start:num_tokens])

    def _outputs(self, commit: Commit) -> list[RequestOutput]:
        """Outputs of a commit, or of the request's failure."""
        sequence = commit.sequence
        try:
            text = self._new_text(commit)
            if decisions := self.group.decide():
                self._scheduler.apply(decisions)
            return self.group.add(self._output(commit, text))
        except BaseException as error:
            if isinstance(error, SequenceFault) or not is_fault(error):
                raise
            logging.getLogger(__name__).exception("request %d ends with an error", self.group.id)
            for failed in self.group.failing(sequence):
                self._scheduler.finish(failed, FinishReason.ERROR)
                failed.finish_reason = FinishReason.ERROR
            return self.group.fail(self._output(commit, ""))

    def _output(self, commit: Commit, text: str) -> RequestOutput:
        sequence, logprobs, tops = commit.sequence, commit.logprobs, commit.top_logprobs
        if sequence.scores:
            logprobs, tops = sequence.results.prompt_logprobs, sequence.results.prompt_top_logprobs
        reason, embedding = sequence.finish_reason, b""
        if sequence.pools and reason is FinishReason.LENGTH:
            embedding = sequence.embedding.astype("<f4").tobytes()
        return RequestOutput(
            sequence.id, commit.tokens, text, reason and reason.value, 0,
            sequence.history.params_versions,
            logprobs, tops, self._stopped_by(sequence, commit.tokens),
            sequence.prefix.num_hit_tokens or 0, sequence.queued_s, embedding,
            sequence.history.num_preemptions, sequence.failure, sequence.history.version_starts,
        )  # fmt: skip

    def _stopped_by(self, sequence: Sequence, tokens: list[int]) -> str | int | None:
        """The request's own string or token that ended it."""
        if sequence.finish_reason is not FinishReason.STOP:
            return None
        detokenizer = self._detokenizers.get(sequence.id)
        if detokenizer is not None and detokenizer.stopped is not None:
            return detokenizer.stopped
        return tokens[-1] if tokens and tokens[-1] in sequence.params.stop_token_ids else None

    def _new_text(self, commit: Commit) -> str:
        """Text of new tokens, as far as it is certain. A stop string ends the sequence with the
        token that completes it: drafts accepted behind it are dropped.
        """
        sequence = commit.sequence
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault
        detokenizer = self._detokenizers.get(sequence.id)
        if detokenizer is None:
            return ""
        text = detokenizer.push(_without_end(sequence, commit.tokens))
        if detokenizer.stopped is not None:
            num_before = commit.start - sequence.num_prompt_tokens
            commit.cut(max(0, detokenizer.num_tokens - num_before))
        elif sequence.status is Status.FINISHED:
            text += detokenizer.flush()
        if detokenizer.stopped is not None:
            self._scheduler.finish(sequence, FinishReason.STOP)
            sequence.finish_reason = FinishReason.STOP
        return text

    def _text_of(self, sequence: Sequence) -> str:
        """Text of a finished sequence that was not followed as it grew."""
        if self._tokenizer is None:
            return ""
        params = sequence.params
        detokenizer = Detokenizer(
            self._tokenizer,
            skip_special=params.skip_special_tokens,
            shown_ids=params.shown_special_ids,
        )
        tokens = _without_end(sequence, sequence.output_tokens)
        return detokenizer.push(tokens) + detokenizer.flush()


def _without_end(sequence: Sequence, tokens: list[int]) -> list[int]:
    """New tokens but for one that ends the sequence, which is no text."""
    return tokens[:-1] if tokens and sequence.is_end(tokens[-1]) else tokens
