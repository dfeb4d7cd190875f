"""The engine as the process that speaks HTTP sees it."""

import asyncio
import contextlib
import enum
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from inference.outputs import RequestOutput
from inference.request import SamplingParams
from inference.server import frames
from inference.server.client.launch import Launcher
from inference.server.frames import (
    Abort,
    Add,
    ConnectionClosed,
    FromEngine,
    Heartbeat,
    Loaded,
    Message,
    Outputs,
    Ready,
    Refused,
    Stop,
)

_RESTARTS, _WITHIN_S = 3, 600.0
_FIRST_PAUSE_S = 0.1  # before a restart; doubled for each further one
_END_S = 10.0  # for the process to end by itself

_log = logging.getLogger(__name__)

Inbox = Callable[[RequestOutput | Exception], None]  # takes a request's outputs, or why none come


class State(enum.StrEnum):
    """Where the engine stands."""

    LOADING = "loading"
    WARMING = "warming up"
    READY = "ready"
    RESTARTING = "restarting"
    ENDED = "ended"


class EngineLost(Exception):
    """The engine's process has gone, and with it the request."""


class EngineFailed(RuntimeError):
    """The engine cannot be started, or does not stay."""


class RequestRefused(Exception):
    """The engine does not serve a request; the message says why."""


class EngineClient:
    """Starts an engine, and again should it end; all in one thread, by one event loop.

    Attributes:
        state: where it stands.
        facts: what the engine said of itself; None until it is loaded.
        heartbeat: its latest; `heard_at` is when anything was heard last.
        num_restarts: how often it ended and was started again.
        on_state: called with each new state.
    """

    def __init__(self, launcher: Launcher, on_state: Callable[[State], None] = lambda _: None):
        self.state = State.LOADING
        self.facts: Loaded | None = None
        self.heartbeat = Heartbeat()
        self.heard_at = time.monotonic()
        self.num_restarts = 0
        self.on_state = on_state
        self._launcher = launcher
        self._writer: asyncio.StreamWriter | None = None
        self._open: dict[int, tuple[Inbox, int]] = {}  # with the answers that have not ended
        self._ids = itertools.count(1)
        self._is_stopped = False

    @property
    def num_sequences(self) -> int:
        """Answers that the engine has not finished."""
        return sum(num_answers for _, num_answers in self._open.values())

    async def run(self) -> None:
        """Keeps an engine until `stop`.

        Raises:
            EngineFailed: it could not be started, or ended too often.
        """
        ends: deque[float] = deque()
        try:
            while True:
                was_ready = await self._serve()
                if self._is_stopped:
                    await self._launcher.end(_END_S if was_ready else 0)
                    return
                status = await self._launcher.end(_END_S)
                self._lose(EngineLost())
                ends.append(time.monotonic())
                while ends and ends[0] < ends[-1] - _WITHIN_S:
                    ends.popleft()
                if not was_ready or len(ends) > _RESTARTS:
                    raise EngineFailed(f"the engine ended with status {status}")
                _log.error("the engine ended with status %d: it is started again", status)
                self.num_restarts += 1
                self._enter(State.RESTARTING)
                await asyncio.sleep(_FIRST_PAUSE_S * 2 ** (len(ends) - 1))
        finally:
            self._enter(State.ENDED)
            self._lose(EngineLost())
            await self._launcher.end(0)

    async def stop(self) -> None:
        """Ends the engine; `run` returns."""
        self._is_stopped = True
        with contextlib.suppress(EngineLost):
            await self._send(Stop())
        if self._writer is not None:
            self._writer.close()

    async def add(
        self,
        inbox: Inbox,
        tokens: Sequence[int],
        params: SamplingParams,
        num_top_logprobs: int | None = None,
    ) -> int:
        """Queues a prompt, whose outputs go to `inbox`; returns the request's id.

        Raises:
            EngineLost: there is no engine now.
        """
        id = next(self._ids)
        self._open[id] = inbox, params.n
        try:
            await self._send(Add(id, list(tokens), params, num_top_logprobs))
        except BaseException:
            self.abort(id)
            raise
        return id

    def abort(self, id: int) -> None:
        """Ends a request; one that has ended, or was lost, stays so."""
        if self._open.pop(id, None) is not None and self._writer is not None:
            self._writer.write(frames.encode(Abort(id)))

    async def _serve(self) -> bool:
        """Serves one engine to its end; says whether it was ready once."""
        connection = self._launcher.start()
        reader, self._writer = await asyncio.open_unix_connection(sock=connection)
        was_ready = False
        try:
            while True:
                header = await reader.readexactly(frames.HEADER_BYTES)
                data = await reader.readexactly(frames.length(header))
                self._take(frames.FROM_ENGINE.decode(data))
                was_ready |= self.state is State.READY
        except (asyncio.IncompleteReadError, OSError, ConnectionClosed):
            return was_ready
        finally:
            self._writer.close()
            self._writer = None

    def _take(self, message: FromEngine) -> None:
        self.heard_at = time.monotonic()
        if isinstance(message, Outputs):
            for output in message.outputs:
                self._pass_on(output)
        elif isinstance(message, Heartbeat):
            self.heartbeat = message
        elif isinstance(message, Loaded):
            self.facts = message
            self._enter(State.WARMING)
        elif isinstance(message, Ready):
            self._enter(State.READY)
        elif isinstance(message, Refused) and (asked := self._open.pop(message.id, None)):
            asked[0](RequestRefused(message.reason))

    def _pass_on(self, output: RequestOutput) -> None:
        asked = self._open.get(output.id)
        if asked is None:  # aborted meanwhile
            return
        inbox, num_answers = asked
        if output.finish_reason is not None:
            self._open[output.id] = inbox, num_answers - 1
            if num_answers == 1:
                del self._open[output.id]
        inbox(output)

    def _lose(self, error: Exception) -> None:
        lost, self._open = self._open, {}
        for inbox, _ in lost.values():
            inbox(error)

    def _enter(self, state: State) -> None:
        self.state = state
        self.on_state(state)

    async def _send(self, message: Message) -> None:
        """Sends a message, once the engine has read enough of the earlier ones."""
        writer = self._writer
        if writer is None:
            raise EngineLost
        writer.write(frames.encode(message))
        try:
            await writer.drain()
        except OSError:
            raise EngineLost from None
