"""The engine requests of one HTTP request, and their outputs in the order in which they come."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from inference.outputs import RequestOutput
from inference.request import SamplingParams
from inference.server.client.engine_client import EngineClient
from inference.server.client.pending_request import PendingRequest
from inference.server.protocol.errors import ApiError


class Deadline:
    """The time by which an HTTP request has to be answered.

    Attributes:
        at: the deadline, by the event loop's clock.
        started: when the request came, by the same clock.
    """

    def __init__(self, limit_s: float):
        """`limit_s`: seconds from now."""
        self._limit_s = limit_s
        self.started = asyncio.get_running_loop().time()
        self.at = self.started + limit_s

    @property
    def spent_s(self) -> float:
        """Seconds since the request came."""
        return asyncio.get_running_loop().time() - self.started

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.at - asyncio.get_running_loop().time()

    def passed(self) -> ApiError:
        """The error of an answer that missed the deadline."""
        why = f"the answer was not finished within {self._limit_s:g} s"
        return ApiError(408, why, code="timeout", may_retry=False)

    @asynccontextmanager
    async def enforce(self) -> AsyncIterator[None]:
        """Ends the block at the deadline with an `ApiError` (408)."""
        try:
            async with asyncio.timeout_at(self.at):
                yield
        except TimeoutError:
            raise self.passed() from None


class Generation:
    """Engine requests that begin and end with one HTTP request. A context: at its end, unfinished
    requests are aborted.

    The requests' `max_tokens` bound the outputs that wait here.
    """

    def __init__(self, client: EngineClient, deadline: Deadline, name: str = ""):
        """`deadline`: of the last output; `name`: of the client's key."""
        self._client = client
        self._name = name
        self._deadline = deadline
        self._queue: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue()
        self._requests: list[PendingRequest] = []
        self._num_due = 0  # answers that have not ended

    def __enter__(self) -> "Generation":
        """Starts the deadline's timer."""
        late = -1, self._deadline.passed()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(self._deadline.at, self._queue.put_nowait, late)
        return self

    def __exit__(self, *exception: object) -> None:
        """Aborts unfinished requests."""
        self._timer.cancel()
        for request in self._requests:
            self._client.abort(request)

    @property
    def is_open(self) -> bool:
        """Whether more outputs will come."""
        return self._num_due > 0

    async def add(
        self,
        key: int,
        tokens: Sequence[int],
        params: SamplingParams,
        num_top_logprobs: int | None = None,
    ) -> None:
        """Adds a request for one prompt; `key` comes back with its outputs.

        Raises:
            ApiError: there is no engine now, or it does not take the request in time.
        """

        def inbox(output: RequestOutput | Exception) -> None:
            self._queue.put_nowait((key, output))

        async with self._deadline.enforce():
            request = await self._client.add(inbox, tokens, params, num_top_logprobs, self._name)
        self._requests.append(request)
        self._num_due += params.n

    async def next(self) -> tuple[int, RequestOutput]:
        """Waits for the next output; returns it with the key of its prompt.

        Raises:
            ApiError: the output comes too late, the engine has ended, or does not serve a request.
        """
        key, output = await self._queue.get()
        if isinstance(output, Exception):
            raise output
        self._num_due -= output.finish_reason is not None
        return key, output
