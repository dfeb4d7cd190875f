"""The engine as the process that speaks HTTP sees it."""

import asyncio
import contextlib
import enum
import itertools
import logging
import operator
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from inference.outputs import RequestOutput
from inference.request import SamplingParams
from inference.server import frames
from inference.server.client.engine_control import EngineControl
from inference.server.client.engine_ends import EngineEnds
from inference.server.client.engine_totals import EngineTotals
from inference.server.client.fair_queue import FairQueue
from inference.server.client.launch import Launcher
from inference.server.client.pending_request import Inbox, PendingRequest
from inference.server.client.turnover import Turnover
from inference.server.frames import (
    Abort,
    ConnectionClosed,
    Control,
    Controlled,
    FromEngine,
    Heartbeat,
    HostLost,
    Joining,
    Loaded,
    Outputs,
    Ready,
    Refused,
    Retain,
    Stop,
)
from inference.server.protocol import sampling
from inference.server.protocol.errors import ApiError, unavailable

_RESTARTS = 5  # in ten minutes
_FIRST_PAUSE_S = 0.05  # before a restart; doubled for each further one
_HOST_LOST = 256  # in place of a status: the engine ended because another host had
_KILLED = (0, -signal.SIGKILL, -signal.SIGTERM, _HOST_LOST)  # 0: no engine has ended yet
_END_S = 10.0  # for the process to end by itself
_LOADING_END_S = 2.0  # the same while it loads
_LOOKS = 4  # within the silence after which an engine counts as dead
_AHEAD = 4  # the engine gets one request more for each 4 slots
_SHARED = 4  # beside other requests, background requests start in every fourth slot only

_IS_BACKGROUND = operator.attrgetter("is_background")

_LOST = "{}, and with it the request: send it again"
_FAILED = "the engine failed at this request, more than once: it is not tried any further"

_log = logging.getLogger(__name__)


class State(enum.StrEnum):
    """The state of the engine."""

    LOADING = "loading"
    WARMING = "warming up"
    READY = "ready"
    RESTARTING = "restarting"
    ENDED = "ended"


class EngineFailed(RuntimeError):
    """The engine cannot be started, or ended too often."""


class EngineClient:
    """Starts an engine, and restarts it if it ends. Requests then continue from their tokens, and
    greedy and seeded ones get the same tokens. Everything runs in one event loop.

    Attributes:
        facts: the engine's description of itself; None until `is_loaded` is set.
        control: pauses the engine, lets it sleep and changes its weights.
        heard_at: when the latest message came, of any kind.
        num_restarts: how often the engine ended and was started again.
        trouble: why the latest engine ended, or which host the next one waits for; "" while it
            loads and serves.
        on_state: called with each new state.
    """

    def __init__(
        self,
        launcher: Launcher,
        on_loaded: Callable[[Loaded], Awaitable[None]],
        silence_s: float,
        restarts: bool = True,
    ):
        """`on_loaded`: takes `facts`; the engine is not ready before it returns.
        `silence_s`: a ready engine that sends nothing for so long is ended.
        `restarts`: an engine that ends is started again.
        """
        self.state = State.LOADING
        self.facts: Loaded | None = None
        self.is_loaded = asyncio.Event()
        self.control = EngineControl(self._send_control, self._abort_running, self._reopen)
        self._totals = EngineTotals()
        self.heartbeat_at = time.monotonic()
        self.heard_at = time.monotonic()
        self.num_restarts = 0
        self.trouble = ""
        self.on_state: Callable[[State], None] = lambda _: None
        self._on_loaded = on_loaded
        self._launcher = launcher
        self._silence_s = silence_s
        self._restarts = restarts
        self._is_silent = False
        self._is_host_lost = False
        self._writer: asyncio.StreamWriter | None = None
        self._waiting = FairQueue()  # the engine gets what it can run and little more
        self._background = FairQueue()  # requests for slots that these do not need
        self._sent: dict[PendingRequest, None] = {}  # sent to the engine and not ended
        self._num_sent = 0  # sequences of these, without background requests
        self._num_in_background = 0  # sequences of background requests that were sent
        self._is_short = False  # sequences wait in the engine, for slots or pages
        self._num_of_client: Counter[str] = Counter()  # sequences of each client, sent or waiting
        self._turnover = Turnover()
        self._open: dict[int, PendingRequest] = {}  # sent, by the ids of the engine's requests
        self._holds = True  # new requests wait until the engine has those of the last engine
        self._alone: PendingRequest | None = None  # the only request that a new engine has
        self._status = 0  # exit status of the last engine that had requests
        self._ends = EngineEnds()
        self._ids = itertools.count(1)
        self._going_on: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()

    @property
    def heartbeat(self) -> Heartbeat:
        """The latest heartbeat, with the counters of all engines added up."""
        return self._totals.heartbeat

    @property
    def num_sequences(self) -> int:
        """Sequences sent or waiting, without background requests, which delay no other."""
        return self._num_of_client.total()

    def num_held(self, client: str) -> int:
        return self._num_of_client[client]

    def expected_wait_s(self, num_sequences: int, client: str = "", priority: int = 0) -> float:
        """Seconds until a client's `num_sequences` more have slots; 0 where nothing is known."""
        if self.facts is None:
            return 0.0
        num_each = (self.num_sequences - self._num_sent) / max(1, len(self._waiting))
        num_ahead = self._num_sent + num_each * self._waiting.num_ahead(client, priority)
        num_missing = num_ahead + num_sequences - self.facts.num_slots
        if num_missing <= 0:
            return 0.0
        # Answers that began together end together: until the first ends, no slot is free.
        shares = (request.progress for request in self._sent if not request.is_background)
        progresses = [share for share in shares if share is not None]
        remaining = self._turnover.remaining(max(progresses)) if progresses else None
        first = 1 if remaining is None else self.facts.num_slots * remaining
        return self._turnover.wait_s(first + num_missing - 1)

    def end_s(self, num_sequences: int) -> float:
        """Seconds until `num_sequences` have ended; 0 where nothing is known."""
        return self._turnover.wait_s(num_sequences)

    async def run(self) -> None:
        """Keeps an engine running until `stop`; raises `EngineFailed` if it ends too often."""
        was_ever_ready = False
        try:
            while not self._stopped.is_set():
                was_ready = await self._serve()
                if self._stopped.is_set():
                    await self._launcher.end(_END_S if was_ready else _LOADING_END_S)
                    return
                status = await self._launcher.end(0 if self._is_silent else _END_S)
                if self._is_host_lost:
                    status = _HOST_LOST
                else:
                    self.trouble = f"the engine ended with status {status}"
                self._totals.end()
                self._open = {}
                if was_ready:
                    was_ever_ready, self._status = True, status
                self._note_end(status)
                if not (was_ever_ready and self._restarts) or len(self._ends) > _RESTARTS:
                    raise EngineFailed(self.trouble)
                _log.error("%s: the engine is started again", self.trouble)
                self.num_restarts += 1
                self._enter(State.RESTARTING)
                with contextlib.suppress(TimeoutError):
                    pause_s = _FIRST_PAUSE_S * 2 ** (len(self._ends) - 1)
                    await asyncio.wait_for(self._stopped.wait(), pause_s)
        finally:
            self._enter(State.ENDED)
            for request in [*self._sent, *self._waiting, *self._background]:
                self._fail(request, self._lost())
            await self._launcher.end(0)

    def _lost(self) -> ApiError:
        """What a request ends with that no engine continues."""
        return unavailable(_LOST.format(self.trouble or "the engine ended"))

    def _note_end(self, status: int) -> None:
        """Counts the end of an engine.

        A request that was tried alone fails if the engine failed by itself, or was killed for the
        second time. The ends that it caused no longer count once an engine answers other requests.
        """
        self._ends.add()
        suspect, self._alone = self._alone, None
        if suspect is None or suspect not in self._sent:
            self._ends.suspect_any()
        else:
            suspect.num_blamed += 1
            if status not in _KILLED or suspect.num_blamed > 1:
                self._fail(suspect, ApiError(500, _FAILED, code="engine_error", may_retry=False))
                self._ends.explain(suspect.num_blamed)

    async def stop(self) -> None:
        """Ends the engine; `run` returns."""
        self._stopped.set()
        if self._writer is not None:
            self._writer.write(frames.encode(Stop()))
            self._writer.close()
            # An engine that does not read would keep it open for ever.
            asyncio.get_running_loop().call_later(_END_S, self._writer.transport.abort)

    async def add(
        self,
        inbox: Inbox,
        tokens: Sequence[int],
        params: SamplingParams,
        num_top_logprobs: int | None = None,
        client: str = "",
        is_background: bool = False,
    ) -> PendingRequest:
        """Queues a prompt, whose outputs go to `inbox`. The engine gets it in the client's turn; a
        restarted engine gets the last one's unfinished requests before it.

        Args:
            is_background: the engine gets it while slots are free, in the client's turn among such
                requests. It gives it back if other requests need its slots.

        Raises:
            ApiError: 503, there is no engine now.
        """
        if self.facts is None or self._writer is None:
            raise self._lost()
        request = PendingRequest(
            inbox, tokens, params, num_top_logprobs, self.facts.accepts_seeds, client, is_background
        )
        self._queue_of(request).add(request)
        if not is_background:
            self._num_of_client[client] += request.num_sequences
        self._release()
        try:
            if self._writer is not None:  # once the engine has read enough of the earlier ones
                await self._writer.drain()
        except OSError:
            pass  # the next engine gets the request, or `run` fails it
        except BaseException:
            self.abort(request)
            raise
        return request

    def abort(self, request: PendingRequest) -> None:
        request.has_news.set()
        self._drop(request)
        self._forget(request)
        self._release()

    def retain(self, tokens: Sequence[int], params: SamplingParams) -> None:
        """Lets what the engine cached of a conversation outlive other prefixes until it goes on."""
        if self._writer is not None:
            self._send_control(Retain(list(tokens), params.cache_salt, params.adapter))

    def _send_control(self, message: Control | Retain) -> None:
        if self._writer is None:
            raise self._lost()
        self._writer.write(frames.encode(message))

    def _abort_running(self) -> None:
        """Ends all answers that are generated where they are, but for those of batches."""
        for request in [*self._sent, *self._waiting]:
            if request.generates and not request.is_background:
                self._drop(request)
                self._forget(request)
                request.end()

    def _reopen(self) -> None:
        """Sends requests, unless they are held from now on."""
        if self.control.is_held:
            self._turnover.look(is_full=False)
        self._release()

    def _drop(self, request: PendingRequest) -> None:
        """Has the engine end what it runs of a request."""
        for id in request.ids:
            if self._open.pop(id, None) is not None and self._writer is not None:
                self._writer.write(frames.encode(Abort(id)))

    def _release(self) -> None:
        """Sends the requests that the engine has room for."""
        if self._holds or self.control.is_held or self._writer is None or self.facts is None:
            return
        max_sent = self.facts.num_slots + max(1, self.facts.num_slots // _AHEAD)
        while self._waiting and self._num_sent < max_sent:
            self._send(self._waiting.pop())
        self._turnover.look(is_full=self._num_sent >= self.facts.num_slots)
        self._share_slots(self.facts.num_slots)

    def _send(self, request: PendingRequest) -> None:
        self._sent[request] = None
        self._count_sent(request, request.num_sequences)
        self._ask(request)

    def _share_slots(self, num_slots: int) -> None:
        """Takes slots back from background requests, the newest first, or gives them free ones.
        Beside others they get none while the engine has sequences that wait for pages.
        """
        num_free = 0 if self._is_short and self._num_sent else num_slots - self._num_sent
        if self._num_in_background > num_free:
            for request in [request for request in self._sent if request.is_background][::-1]:
                self._take_back(request)
                if self._num_in_background <= num_free:
                    break
        num_shared = max(1, num_slots // _SHARED) if self._num_sent else num_slots
        while self._background:
            num_sequences = self._background.next.num_sequences
            # A request of more than that runs alone: otherwise all others would wait behind it.
            num_usable = min(num_free, max(num_shared, num_sequences))
            if self._num_in_background + num_sequences > num_usable:
                break
            self._send(self._background.pop())

    def _take_back(self, request: PendingRequest) -> None:
        self._drop(request)
        request.take_back()
        self._count_sent(request, -request.num_sequences)
        del self._sent[request]
        self._background.put_back(request)

    def _queue_of(self, request: PendingRequest) -> FairQueue:
        return self._background if request.is_background else self._waiting

    def _count_sent(self, request: PendingRequest, num_sequences: int) -> None:
        if request.is_background:
            self._num_in_background += num_sequences
        else:
            self._num_sent += num_sequences

    def _ask(self, request: PendingRequest) -> None:
        """Sends the missing part of a request to the current engine."""
        assert self._writer is not None
        messages = request.messages(self._ids)
        self._open |= dict.fromkeys(request.ids, request)
        for message in messages:
            self._writer.write(frames.encode(message))

    async def _go_on(self) -> None:
        """Sends a new engine the last one's unfinished requests, and then newer ones.

        All at once if the last engine was killed. If it failed by itself, or engines ended
        repeatedly, a request may be the cause (perhaps by its memory): each request is then tried
        alone until it has a token (`_note_end`).
        """
        was_killed = self._status in _KILLED
        await self.control.restore(self.facts.adapters if self.facts else ())
        for request in sorted(self._sent, key=_IS_BACKGROUND):
            await self.control.has_weights()
            if request not in self._sent:  # aborted meanwhile
                continue
            if self._writer is None:
                return
            is_alone = request.num_engines > 1 or not was_killed
            self._alone = request if is_alone else None
            self._ask(request)
            if is_alone:
                await request.has_news.wait()
        self._alone, self._holds = None, False
        self._release()

    async def _serve(self) -> bool:
        """Serves one engine until it ends; returns whether it was ever ready."""
        connection = self._launcher.start()
        reader, self._writer = await asyncio.open_unix_connection(sock=connection)
        was_ready = self._is_silent = self._is_host_lost = False
        watching = asyncio.create_task(self._end_if_silent(self._writer.transport))
        try:
            while not self._stopped.is_set():
                header = await reader.readexactly(frames.HEADER_BYTES)
                data = await reader.readexactly(frames.length(header))
                message = frames.FROM_ENGINE.decode(data)
                self._take(message)
                if isinstance(message, Loaded):
                    await self._on_loaded(message)
                was_ready |= self.state is State.READY
        except (asyncio.IncompleteReadError, OSError, ConnectionClosed):
            pass  # the engine has ended
        finally:
            watching.cancel()
            self._holds = True
            self._turnover.look(is_full=False)
            self.control.lost()
            if self._going_on is not None:
                self._going_on.cancel()
            self._writer.close()
            self._writer = None
        return was_ready

    async def _end_if_silent(self, transport: asyncio.WriteTransport) -> None:
        """Ends an engine that is silent at several looks in a row: if this process was stopped for
        a while, it reads the engine's messages between two looks.
        """
        num_silent, heard_at = 0, self.heard_at
        while num_silent < _LOOKS:
            await asyncio.sleep(self._silence_s / _LOOKS)
            is_silent = self.state is State.READY and self.heard_at == heard_at
            num_silent, heard_at = num_silent + 1 if is_silent else 0, self.heard_at
        _log.error("the engine said nothing for %g s: it is ended", self._silence_s)
        self._is_silent = True
        transport.abort()

    def _take(self, message: FromEngine) -> None:
        self.heard_at = time.monotonic()
        if isinstance(message, Outputs):
            for output in message.outputs:
                self._pass_on(output)
            self._release()
        elif isinstance(message, Heartbeat):
            self._is_short = message.num_waiting > message.num_deferred
            if self._num_in_background or self._background:
                self._release()
            message.num_waiting += self.num_sequences - self._num_sent
            message.oldest_waiting_s = max(message.oldest_waiting_s, self._waiting.oldest_s)
            self._totals.take(message)
            self.heartbeat_at = self.heard_at
        elif isinstance(message, Joining):
            self.trouble = message.waits
        elif isinstance(message, HostLost):
            self.trouble, self._is_host_lost = message.why, True
        elif isinstance(message, Loaded):
            self.facts = message
            self.is_loaded.set()
            self.trouble = ""
            self._enter(State.WARMING)
        elif isinstance(message, Ready):
            self._enter(State.READY)
            self._going_on = asyncio.create_task(self._go_on())
        elif isinstance(message, Controlled):
            self.control.take(message)
        elif isinstance(message, Refused) and (request := self._open.get(message.id)):
            self.abort(request)  # all its answers
            request.fail(sampling.invalid(message.reason))

    def _pass_on(self, output: RequestOutput) -> None:
        request = self._open.get(output.id)
        if request is None:  # aborted meanwhile
            return
        self._ends.answered()
        if request is self._alone:
            self._alone = None
        num_before = request.num_sequences
        progress = request.take(output)
        if not request.is_background:
            self._turnover.add(*progress)
        self._queue_of(request).served(request.client, len(output.token_ids))
        self._leave(request, num_before - request.num_sequences)
        if not request.num_answers:
            self._forget(request)

    def _fail(self, request: PendingRequest, error: Exception) -> None:
        self._forget(request)
        self._release()
        request.fail(error)

    def _forget(self, request: PendingRequest) -> None:
        """Removes a request, whether sent, waiting or neither."""
        if request in self._sent:
            if not request.is_background:
                self._turnover.add(request.num_left)
            self._leave(request, request.num_sequences)
            del self._sent[request]
        elif request in (queue := self._queue_of(request)):
            queue.discard(request)
            if not request.is_background:
                self._num_of_client[request.client] -= request.num_sequences
        for id in request.ids:
            self._open.pop(id, None)

    def _leave(self, request: PendingRequest, num_sequences: int) -> None:
        """Removes ended sequences of a sent request from the counts."""
        if not request.is_background:
            self._num_of_client[request.client] -= num_sequences
        self._count_sent(request, -num_sequences)

    def _enter(self, state: State) -> None:
        self.state = state
        self.on_state(state)
