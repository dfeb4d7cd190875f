"""The requests of an engine that have not ended, and their outputs until these are read.

Tokens of the host are the truth: slots, pages and steps follow from them, and are made anew after
an interrupt. What a commit brings is noted before it is written, and stays noted until its outputs
are where they are read, so an interrupt at any point loses and doubles none.
"""

import itertools
from collections import deque

from configs.errors import InputError
from inference.outputs import RequestOutput
from inference.request import SamplingParams
from inference.request_state import RequestState
from inference.scheduling.scheduler import Scheduler
from inference.scheduling.sequence import Sequence
from inference.text.tokenizer import Tokenizer


class OpenRequests:
    """Requests by the ids of their sequences.

    Attributes:
        unread: outputs of requests that no call waits for, until `take_outputs`.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer | None):
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._requests: dict[int, RequestState] = {}
        self.unread: deque[RequestOutput] = deque()

    def __len__(self) -> int:
        """Sequences that may run for them."""
        return len(self._requests)

    def __contains__(self, id: int) -> bool:
        """Whether outputs of a request are to come."""
        return id in self._requests

    def __getitem__(self, id: int) -> RequestState:
        return self._requests[id]

    @property
    def sequences(self) -> list[Sequence]:
        """Of all requests, those that have ended before the others included."""
        requests = dict.fromkeys(self._requests.values())
        return [sequence for request in requests for sequence in request.group.sequences]

    def parent(self, id: int, params: SamplingParams) -> Sequence:
        """The sequence of a request that can be forked; raises as `Engine.fork`."""
        sequence = self[id].group.sequences[0] if id in self else None
        if sequence is None or sequence.is_only_read:
            raise InputError(f"request {id} is not generating: there is nothing to fork")
        if any(p.num_running > 1 or p.beam_width for p in (sequence.params, params)):
            raise InputError("a fork and what it is forked from have one answer each: leave n=1")
        if params.max_new_tokens <= sequence.num_output_tokens:
            raise InputError(
                f"request {id} has generated {sequence.num_output_tokens} tokens: a fork's "
                f"max_new_tokens is more, not {params.max_new_tokens}"
            )
        return sequence

    def add(self, sequences: list[Sequence]) -> RequestState:
        """Queues the sequences of a new request; raises as `Scheduler.add`."""
        request = self._new(sequences)  # first: the text of what is known of an answer may fail
        for sequence in sequences:
            self._scheduler.add(sequence)
        return self._note(request)

    def fork(self, parent: Sequence, child: Sequence) -> RequestState:
        """Starts a request that continues another's tokens; raises as `Scheduler.fork`."""
        request = self._new([child])
        self._scheduler.fork(parent, child)
        return self._note(request)

    def remove(self, request: RequestState) -> None:
        self._requests = {id: r for id, r in self._requests.items() if r is not request}

    def take_outputs(self) -> list[RequestOutput]:
        """Unread outputs, taken by one call that no interrupt divides."""
        pops = itertools.repeat((), len(self.unread))
        return list(itertools.starmap(self.unread.popleft, pops))

    def process(self) -> None:
        commits = self._scheduler.commits
        while commits:
            commit = commits[0]
            request = self._requests.get(commit.sequence.id)
            if request is not None:  # else ended by what another of its sequences brought
                request.process(commit)
                if request.group.is_finished:
                    self.remove(request)
            commits.popleft()

    def start_over(self) -> None:
        """Writes what was committed and has no outputs yet, whatever an interrupt left of it."""
        commits = [commit for commit in self._scheduler.commits if commit.outputs is None]
        for commit in commits:
            commit.restore()
        for commit in commits[:1]:  # none is begun before the one ahead of it is done
            if request := self._requests.get(commit.sequence.id):
                request.start_over(commit)

    def _new(self, sequences: list[Sequence]) -> RequestState:
        return RequestState(sequences, self._scheduler, self._tokenizer, self.unread)

    def _note(self, request: RequestState) -> RequestState:
        self._requests |= dict.fromkeys(request.group.ids, request)
        return request
