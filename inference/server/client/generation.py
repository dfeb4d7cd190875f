"""What one HTTP request asks of the engine, and the outputs in the order in which they come."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from inference.outputs import RequestOutput
from inference.request import SamplingParams
from inference.server.client.engine_client import EngineClient
from inference.server.client.pending_request import PendingRequest


class DeadlinePassed(Exception):
    """The answer took longer than it may; says how many seconds that are."""


class Deadline:
    """By when an HTTP request is answered, whatever it asks of the engine.

    Attributes:
        at: by the event loop's clock.
        started: when the request came, by the same.
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
        """Seconds from now."""
        return self.at - asyncio.get_running_loop().time()

    def passed(self) -> DeadlinePassed:
        """What is raised then."""
        return DeadlinePassed(f"{self._limit_s:g}")

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """The block ends by then.

        Raises:
            DeadlinePassed: it did not.
        """
        try:
            async with asyncio.timeout_at(self.at):
                yield
        except TimeoutError:
            raise self.passed() from None


class Generation:
    """Requests to the engine that begin and end with one HTTP request. A context: whatever is not
    finished at its end is aborted.

    What waits here is bounded by the tokens asked for.
    """

    def __init__(self, client: EngineClient, deadline: Deadline, name: str = ""):
        """`deadline`: of the last output; `name`: who asks, by the key."""
        self._client = client
        self._name = name
        self._deadline = deadline
        self._queue: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue()
        self._asked: list[PendingRequest] = []
        self._num_due = 0  # answers that have not ended

    def __enter__(self) -> "Generation":
        """Nothing is asked yet."""
        late = -1, self._deadline.passed()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(self._deadline.at, self._queue.put_nowait, late)
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends what is not finished."""
        self._timer.cancel()
        for asked in self._asked:
            self._client.abort(asked)

    @property
    def is_open(self) -> bool:
        """Whether outputs are to come."""
        return self._num_due > 0

    async def add(
        self,
        key: int,
        tokens: Sequence[int],
        params: SamplingParams,
        num_top_logprobs: int | None = None,
    ) -> None:
        """Asks for one prompt; `key` is returned with its outputs.

        Raises:
            DeadlinePassed: the engine does not take it in time.
            EngineLost: there is no engine now.
        """

        def inbox(output: RequestOutput | Exception) -> None:
            self._queue.put_nowait((key, output))

        async with self._deadline.kept():
            asked = await self._client.add(inbox, tokens, params, num_top_logprobs, self._name)
        self._asked.append(asked)
        self._num_due += params.n

    async def next(self) -> tuple[int, RequestOutput]:
        """The next output, with the key of its prompt.

        Raises:
            DeadlinePassed: it comes too late.
            EngineLost: the engine has gone.
            RequestRefused: it does not serve one of the requests.
        """
        key, output = await self._queue.get()
        if isinstance(output, Exception):
            raise output
        self._num_due -= output.finish_reason is not None
        return key, output
