"""A request as it was asked, and what came of it: enough to ask another engine for the rest."""

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Callable, Iterator, Sequence

from inference.outputs import RequestOutput
from inference.request import SamplingParams
from inference.scheduling.sequence import derived_seed
from inference.server.frames import Add

Inbox = Callable[[RequestOutput | Exception], None]  # takes a request's outputs, or why none come


class PendingRequest:
    """A request to the engine that has not ended.

    Attributes:
        client: who asks, by the key.
        since: when, by the monotonic clock.
        ids: of the engine's requests that serve it, and the answer that each begins with.
        num_engines: that it was sent to.
        num_blamed: of these, the ones that ended while it was tried alone.
        has_news: set once the last of them brought something, or nothing more comes.
    """

    def __init__(
        self,
        inbox: Inbox,
        tokens: Sequence[int],
        params: SamplingParams,
        num_top_logprobs: int | None,
        accepts_seeds: bool,
        client: str = "",
    ):
        """`accepts_seeds`: what is drawn gets a seed, with which another engine draws alike."""
        if params.seed is None and accepts_seeds and params.temperature:
            params = dataclasses.replace(params, seed=secrets.randbits(63))
        self.client = client
        self.since = time.monotonic()
        self._waited_s = 0.0  # until an engine was asked first
        self.ids: dict[int, int] = {}
        self._inbox = inbox
        self._tokens, self._params, self._num_top_logprobs = list(tokens), params, num_top_logprobs
        self._told: list[list[int]] = [[] for _ in range(params.n)]  # tokens of each answer
        self._is_done = [False] * params.n
        self._most = max(1, params.max_new_tokens)  # tokens of an answer
        self._tells = params.max_new_tokens > 0 and params.num_running == params.n
        self._tells &= not params.beam_width
        self.num_engines = 0
        self.num_blamed = 0
        self.has_news = asyncio.Event()

    @property
    def priority(self) -> int:
        """Among its client's: the lower value goes first."""
        return self._params.priority

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self._tokens)

    @property
    def num_answers(self) -> int:
        """Answers that have not ended."""
        return self._is_done.count(False)

    @property
    def num_sequences(self) -> int:
        """Sequences that the engine runs for these."""
        return self.num_answers + self._params.num_running - self._params.n

    @property
    def num_left(self) -> float:
        """What is left of these, each counted as 1 when it begins."""
        answers = zip(self._told, self._is_done, strict=True)
        missing = sum(1 - len(told) / self._most for told, is_done in answers if not is_done)
        return missing + self.num_sequences - self.num_answers

    @property
    def progress(self) -> float | None:
        """Of its furthest answer: the share of the most tokens that it may have; None: nothing is
        told before the end.
        """
        if not self._tells:
            return None
        answers = zip(self._told, self._is_done, strict=True)
        return max((len(told) for told, is_done in answers if not is_done), default=0) / self._most

    def take(self, output: RequestOutput) -> tuple[float, float | None]:
        """Passes an output on.

        Returns:
            What of its answer is done by it, and what of that is tokens, as shares of the most that
            it may have; None: nothing is told before the end.
        """
        self.has_news.set()
        index = self.ids[output.id] + output.index
        before, told = len(self._told[index]) / self._most, len(output.token_ids) / self._most
        done = told if output.finish_reason is None else 1 - before
        self._told[index] += output.token_ids
        self._is_done[index] |= output.finish_reason is not None
        queued_s = self._waited_s + output.queued_s
        self._inbox(dataclasses.replace(output, index=index, queued_s=queued_s))
        return done, told if self._tells else None

    def fail(self, error: Exception) -> None:
        """Nothing more comes, and why."""
        self.has_news.set()
        self._inbox(error)

    def messages(self, ids: Iterator[int]) -> list[Add]:
        """What asks an engine for all that is missing, under new ids.

        An answer that has begun goes on from its tokens. Those of which nothing was told are asked
        for as in the beginning.
        """
        if not self.num_engines:
            self._waited_s = time.monotonic() - self.since
        self.num_engines += 1
        self.has_news.clear()
        self.ids = {}
        params, most = self._params, self._num_top_logprobs
        if self.client:  # whose priorities are among its own, and the queue has seen to them
            params = dataclasses.replace(params, priority=0)
        if not any(self._told):
            self.ids[id := next(ids)] = 0
            return [Add(id, self._tokens, params, most)]
        found = []
        for index, told in enumerate(self._told):
            if not self._is_done[index]:
                self.ids[id := next(ids)] = index
                seed = None if params.seed is None else derived_seed(params.seed, index)
                own = dataclasses.replace(params, n=1, seed=seed)
                found.append(Add(id, self._tokens, own, most, told))
        return found
