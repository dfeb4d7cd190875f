"""Requests of one call to an engine, which the caller waits for."""

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from typing import Protocol

from configs.errors import InputError
from inference.outputs import Completion, RequestOutput
from inference.request import SamplingParams
from inference.request_state import RequestState
from inference.scheduling.sequence import FinishReason, Sequence

Prompt = str | Items[int]  # a text or token ids


class Runs(Protocol):
    """What runs requests: an engine."""

    def queue(
        self, prompt: Prompt, params: SamplingParams, unread: deque[RequestOutput]
    ) -> RequestState:
        """Queues a prompt with outputs in `unread`; raises an `InputError` if it is not served."""

    def is_open(self, request: RequestState) -> bool:
        """Whether outputs of a request are to come."""

    def run_step(self) -> None:
        """Runs a step for all requests."""

    def abort(self, id: int) -> None:
        """Ends a request; one that has ended stays so."""


def check_listed(prompts: Items[Prompt]) -> None:
    """Raises an `InputError` for a single text in place of a list."""
    if isinstance(prompts, str):
        raise InputError("one text is given where a list of them is expected")


class RequestBatch:
    """A context: all its requests are queued or none is, and none outlives it."""

    def __init__(self, engine: Runs, prompts: Items[Prompt], params: Items[SamplingParams]):
        """Queues nothing yet; raises an `InputError` for a single text in place of a list."""
        check_listed(prompts)
        self._engine = engine
        self._prompts = list(zip(prompts, params, strict=True))
        self._requests: list[RequestState] = []
        self._unread: deque[RequestOutput] = deque()

    def __enter__(self) -> "RequestBatch":
        """Queues the prompts in order; raises an `InputError` if one is not served."""
        try:
            for prompt, params in self._prompts:
                self._requests.append(self._engine.queue(prompt, params, self._unread))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for request in self._requests:
            self._engine.abort(request.group.id)

    def completions(
        self, on_output: Callable[[RequestOutput], None]
    ) -> Iterator[tuple[int, Completion]]:
        """(Index of the prompt, completion) of each as it ends; outputs go to `on_output`."""
        unfinished = dict(enumerate(self._requests))
        while unfinished:
            while self._unread:
                on_output(self._unread.popleft())
            ended = [index for index, r in unfinished.items() if not self._engine.is_open(r)]
            for index in ended:
                yield index, unfinished.pop(index).group.completion()
            if unfinished and not ended:
                self._engine.run_step()

    def outputs(self) -> Iterator[RequestOutput]:
        while self._unread or any(map(self._engine.is_open, self._requests)):
            if not self._unread:
                self._engine.run_step()
            while self._unread:
                yield self._unread.popleft()

    def read(self) -> list[Sequence]:
        """The sequences of prompts that are only read, once all are, in the order of the prompts;
        raises InputError if the model gave non-finite logits for one.
        """
        for _ in self.outputs():
            pass
        sequences = [request.group.sequences[0] for request in self._requests]
        for index, sequence in enumerate(sequences):
            if sequence.finish_reason is FinishReason.ERROR:
                raise InputError(f"the model gave non-finite logits for text {index}")
        return sequences
