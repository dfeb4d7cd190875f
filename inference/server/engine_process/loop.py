"""The loop of the engine's process: receives messages, runs a step, sends outputs."""

import contextlib
import dataclasses
import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

from configs.errors import InputError, is_fault
from inference.outputs import RequestOutput
from inference.server.engine_process.channel import Channel
from inference.server.engine_process.controls import Controls
from inference.server.engine_process.served import Served
from inference.server.frames import (
    Abort,
    Add,
    Busy,
    ConnectionClosed,
    Outputs,
    Ready,
    Refused,
    Retain,
    Stop,
    ToEngine,
)

_HEARTBEAT_S = 0.5
_POLL_S = 0.005
_LOOK_S = 0.01  # between looks whether a step has ended early

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Open:
    """An unfinished request: the client's id and number of log-probabilities, and open answers."""

    id: int
    num_top_logprobs: int | None
    num_answers: int


class EngineLoop:
    """Serves one connection, in the thread that calls `run`; its client is the HTTP process."""

    def __init__(self, engine: Served, channel: Channel):
        self._engine = engine
        self._channel = channel
        self._open: dict[int, _Open] = {}  # by the engine's ids
        self._ids: dict[int, int] = {}  # client's id -> engine's id
        self._preparing: dict[int, tuple[Add, Future[None]]] = {}  # by the client's ids
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prepare")
        self._controls = Controls(engine, channel.send)
        self._is_stopped = False
        self._has_ended = threading.Event()
        self._heartbeat_at = 0.0

    def run(self) -> bool:
        """Serves until the client sends `Stop` or disconnects, and returns whether it was `Stop`;
        aborts all requests. Raises what the engine raises, except errors of one request.
        """
        try:
            self._channel.send(self._engine.facts())
            self._engine.warm_up()
            self._channel.send(Ready())
            threading.Thread(target=self._report_busy, daemon=True).start()
            while not self._is_stopped:
                self._turn()
        except ConnectionClosed as error:
            _log.info("the connection ends: %s", error)
        finally:
            self._has_ended.set()
            for id in list(self._open):
                self._forget(id)
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._controls.close()
        return self._is_stopped

    def _turn(self) -> None:
        controls = self._controls
        wait_s = _POLL_S if self._preparing or controls.has_due else _HEARTBEAT_S
        if controls.may_step and self._engine.has_work:
            wait_s = min(self._engine.slack_s(), _LOOK_S)
        for message in self._channel.receive(wait_s):
            self._handle(message)
        controls.carry_out()
        for id, (request, future) in list(self._preparing.items() if controls.is_awake else ()):
            if future.done():
                del self._preparing[id]
                self._add(request, future)
        if controls.may_step and self._engine.has_work and not self._engine.slack_s():
            outputs = [self._for_client(output) for output in self._engine.step()]
            if outputs := [output for output in outputs if output is not None]:
                self._channel.send(Outputs(outputs))
        if (now := time.monotonic()) - self._heartbeat_at >= _HEARTBEAT_S:
            self._channel.send(self._engine.heartbeat())
            self._heartbeat_at = now

    def _report_busy(self) -> None:
        """Sends `Busy` while the loop waits for a compiler or weights: it does not look hung."""
        with contextlib.suppress(ConnectionClosed):
            while not self._has_ended.wait(_HEARTBEAT_S):
                if self._engine.is_compiling or self._controls.is_busy:
                    self._channel.send(Busy())

    def _handle(self, message: ToEngine) -> None:
        if isinstance(message, Add):
            if message.params.grammar is None:
                self._add(message)
            else:  # it takes a while to compile
                future = self._thread.submit(self._engine.prepare, message.params)
                self._preparing[message.id] = message, future
        elif isinstance(message, Abort):
            if message.id in self._preparing:
                self._preparing.pop(message.id)[1].cancel()
            if message.id in self._ids:
                self._forget(self._ids[message.id])
        elif isinstance(message, Retain):
            self._engine.retain(message.tokens, message.cache_salt, message.adapter)
        elif isinstance(message, Stop):
            self._is_stopped = True
        else:
            self._controls.take(message)

    def _add(self, request: Add, prepared: Future[None] | None = None) -> None:
        try:
            if prepared is not None:
                prepared.result()
            id = self._engine.add(request.tokens, request.params, request.output)
        except InputError as error:
            self._channel.send(Refused(request.id, str(error)))
        except BaseException as error:
            if not is_fault(error):
                raise
            _log.exception("a request could not be queued")
            ends = [RequestOutput(request.id, [], "", "error", n) for n in range(request.params.n)]
            self._channel.send(Outputs(ends))
        else:
            self._open[id] = _Open(request.id, request.num_top_logprobs, request.params.n)
            self._ids[request.id] = id

    def _forget(self, id: int) -> None:
        self._engine.abort(id)
        self._ids.pop(self._open.pop(id).id)

    def _for_client(self, output: RequestOutput) -> RequestOutput | None:
        """An output with the client's id and log-probabilities; None if its request was aborted."""
        request = self._open.get(output.id)
        if request is None:
            return None
        if output.finish_reason is not None:
            request.num_answers -= 1
            if not request.num_answers:
                self._ids.pop(self._open.pop(output.id).id)
        num_top_logprobs = request.num_top_logprobs
        if num_top_logprobs is None:
            return dataclasses.replace(output, id=request.id, logprobs=(), top_logprobs=())
        tops = [
            (ids[:num_top_logprobs], values[:num_top_logprobs])
            for ids, values in output.top_logprobs
        ]
        return dataclasses.replace(output, id=request.id, top_logprobs=tops)
