"""A request with the tokens emitted so far: enough to continue it on another engine."""

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Callable, Iterator, Sequence

from inference.outputs import RequestOutput
from inference.request import SamplingParams
from inference.scheduling.sequence import derived_seed
from inference.server.frames import Add

_LAST = 2**31 - 1  # value of `priority`, of which the lowest goes first

Inbox = Callable[[RequestOutput | Exception], None]  # takes a request's outputs, or its error


class PendingRequest:
    """A request to the engine that has not ended.

    Attributes:
        client: name of the client's key.
        is_background: it runs in slots that no other request needs.
        since: when it came, by the monotonic clock.
        ids: ids of the engine's requests that serve it -> index of the first answer of each.
        num_engines: engines that it was sent to.
        num_blamed: engines that ended while it was tried alone.
        has_news: set once the latest engine has sent an output, or nothing more comes.
    """

    def __init__(
        self,
        inbox: Inbox,
        tokens: Sequence[int],
        params: SamplingParams,
        num_top_logprobs: int | None,
        accepts_seeds: bool,
        client: str = "",
        is_background: bool = False,
    ):
        """`accepts_seeds`: a sampled request gets a seed, so that another engine draws the same."""
        if params.seed is None and accepts_seeds and params.temperature:
            params = dataclasses.replace(params, seed=secrets.randbits(63))
        self.client = client
        self.is_background = is_background
        self.since = time.monotonic()
        self._waited_s = 0.0  # until the first engine got it
        self.ids: dict[int, int] = {}
        self._inbox = inbox
        self._tokens, self._params, self._num_top_logprobs = list(tokens), params, num_top_logprobs
        self._emitted: list[list[int]] = [[] for _ in range(params.n)]  # tokens of each answer
        self._is_done = [False] * params.n
        self._max_tokens = max(1, params.max_new_tokens)  # tokens of an answer
        self._streams = params.max_new_tokens > 0 and params.num_running == params.n
        self._streams &= not params.beam_width
        self.num_engines = 0
        self.num_blamed = 0
        self.has_news = asyncio.Event()

    @property
    def priority(self) -> int:
        return self._params.priority

    @property
    def generates(self) -> bool:
        """Whether it has answers: a prompt that is only read has none."""
        return self._params.max_new_tokens > 0 and self._params.pooling is None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._tokens)

    @property
    def num_answers(self) -> int:
        return self._is_done.count(False)

    @property
    def num_sequences(self) -> int:
        """Sequences that the engine runs for the open answers."""
        return self.num_answers + self._params.num_running - self._params.n

    @property
    def num_left(self) -> float:
        """Sequences to go, each counted as the share of its `max_tokens` that is not emitted."""
        answers = zip(self._emitted, self._is_done, strict=True)
        missing = sum(1 - self._share(tokens) for tokens, is_done in answers if not is_done)
        return missing + self.num_sequences - self.num_answers

    @property
    def progress(self) -> float | None:
        """Share of `max_tokens` that the longest open answer has; None: it is not streamed."""
        if not self._streams:
            return None
        answers = zip(self._emitted, self._is_done, strict=True)
        return self._share(max((t for t, is_done in answers if not is_done), key=len, default=()))

    def take(self, output: RequestOutput) -> tuple[float, float | None]:
        """Passes an output on.

        Returns:
            Shares of `max_tokens`: progress of the answer, and the part of it that is new tokens
            (None: the answer is not streamed).
        """
        self.has_news.set()
        index = self.ids[output.id] + output.index
        before, new = self._share(self._emitted[index]), self._share(output.token_ids)
        done = new if output.finish_reason is None else 1 - before
        self._emitted[index] += output.token_ids
        self._is_done[index] |= output.finish_reason is not None
        queued_s = self._waited_s + output.queued_s
        self._inbox(dataclasses.replace(output, index=index, queued_s=queued_s))
        return done, new if self._streams else None

    def _share(self, tokens: Sequence[int]) -> float:
        return len(tokens) / self._max_tokens

    def take_back(self) -> None:
        """Notes that its engine drops it; a later message continues from the same tokens."""
        self.ids = {}
        self.num_engines -= 1

    def fail(self, error: Exception) -> None:
        self.has_news.set()
        self._inbox(error)

    def end(self) -> None:
        """Ends its open answers where they are."""
        self.has_news.set()
        for index, is_done in enumerate(self._is_done):
            if not is_done:
                self._is_done[index] = True
                self._inbox(RequestOutput(0, [], "", "abort", index))

    def messages(self, ids: Iterator[int]) -> list[Add]:
        """Requests to an engine for everything that is missing, under new ids.

        An answer that has begun continues from its tokens. If none has, one message asks for all.
        """
        if not self.num_engines:
            self._waited_s = time.monotonic() - self.since
        self.num_engines += 1
        self.has_news.clear()
        self.ids = {}
        params, num_top_logprobs = self._params, self._num_top_logprobs
        if self.is_background:
            params = dataclasses.replace(params, priority=_LAST)
        elif self.client:  # priorities order one client's requests: the queue has applied them
            params = dataclasses.replace(params, priority=0)
        if not any(self._emitted):
            self.ids[id := next(ids)] = 0
            return [Add(id, self._tokens, params, num_top_logprobs)]
        messages = []
        for index, emitted in enumerate(self._emitted):
            if not self._is_done[index]:
                self.ids[id := next(ids)] = index
                seed = None if params.seed is None else derived_seed(params.seed, index)
                answer_params = dataclasses.replace(params, n=1, seed=seed)
                messages.append(Add(id, self._tokens, answer_params, num_top_logprobs, emitted))
        return messages
