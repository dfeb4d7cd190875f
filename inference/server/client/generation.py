"""The engine requests of one HTTP request, and their outputs in the order in which they come."""

import asyncio
from collections.abc import Sequence

from inference.outputs import RequestOutput
from inference.request import SamplingParams
from inference.server.client.engine_client import EngineClient
from inference.server.client.pending_request import PendingRequest
from inference.server.protocol.caller import Caller


class Generation:
    """Engine requests that begin and end with one HTTP request. A context: at its end, unfinished
    requests are aborted.

    The requests' `max_tokens` bound the outputs that wait here.
    """

    def __init__(self, client: EngineClient, caller: Caller):
        """`caller`: has the deadline of the last output."""
        self._client = client
        self._caller = caller
        self._queue: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue()
        self._requests: list[PendingRequest] = []
        self._num_due = 0  # answers that have not ended

    def __enter__(self) -> "Generation":
        deadline, loop = self._caller.deadline, asyncio.get_running_loop()
        self._timer = loop.call_at(deadline.at, self._queue.put_nowait, (-1, deadline.passed()))
        return self

    def __exit__(self, *exception: object) -> None:
        self._timer.cancel()
        for request in self._requests:
            self._client.abort(request)

    @property
    def is_open(self) -> bool:
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

        async with self._caller.deadline.enforce():
            request = await self._client.add(
                inbox, tokens, params, num_top_logprobs, self._caller.name,
                self._caller.is_background,
            )  # fmt: skip
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
