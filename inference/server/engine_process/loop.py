"""The loop of the process that owns the engine: messages in, a step, outputs out."""

import contextlib
import dataclasses
import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

from configs.errors import InputError, is_fault
from inference.outputs import RequestOutput
from inference.server.engine_process.channel import Channel
from inference.server.engine_process.served import Served
from inference.server.frames import (
    Abort,
    Add,
    Compiling,
    ConnectionClosed,
    Outputs,
    Ready,
    Refused,
    ToEngine,
)

_HEARTBEAT_S = 0.5
_POLL_S = 0.005
_LOOK_S = 0.01  # between looks whether a step has ended early

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Open:
    """A request that is not finished: the other side's id of it, what it asked to be told of
    log-probabilities, and answers that have not ended.
    """

    id: int
    num_top_logprobs: int | None
    num_answers: int


class EngineLoop:
    """Serves one connection, in the thread that calls `run`."""

    def __init__(self, engine: Served, channel: Channel):
        self._engine = engine
        self._channel = channel
        self._open: dict[int, _Open] = {}  # by the engine's ids
        self._ids: dict[int, int] = {}  # the engine's, by the other side's
        self._preparing: dict[int, tuple[Add, Future[None]]] = {}  # by the other side's ids
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prepare")
        self._is_stopped = False
        self._has_ended = threading.Event()
        self._told_at = 0.0

    def run(self) -> None:
        """Serves until the other side says stop or goes; then nothing runs any more.

        Whatever the engine raises beside what is wrong with one request is raised here.
        """
        try:
            self._channel.send(self._engine.facts())
            self._engine.warm_up()
            self._channel.send(Ready())
            threading.Thread(target=self._tell_of_compiling, daemon=True).start()
            while not self._is_stopped:
                self._turn()
        except ConnectionClosed as error:
            _log.info("the connection ends: %s", error)
        finally:
            self._has_ended.set()
            for id in list(self._open):
                self._forget(id)
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _turn(self) -> None:
        wait_s = _POLL_S if self._preparing else _HEARTBEAT_S
        if self._engine.has_work:
            wait_s = min(self._engine.slack_s(), _LOOK_S)
        for message in self._channel.receive(wait_s):
            self._handle(message)
        for id, (asked, future) in list(self._preparing.items()):
            if future.done():
                del self._preparing[id]
                self._add(asked, future)
        if self._engine.has_work and not self._engine.slack_s():
            told = [told for output in self._engine.step() if (told := self._told(output))]
            if told:
                self._channel.send(Outputs(told))
        if (now := time.monotonic()) - self._told_at >= _HEARTBEAT_S:
            self._channel.send(self._engine.heartbeat())
            self._told_at = now

    def _tell_of_compiling(self) -> None:
        """A loop that waits for a compiler tells nothing, and nobody shall think that it hangs."""
        with contextlib.suppress(ConnectionClosed):
            while not self._has_ended.wait(_HEARTBEAT_S):
                if self._engine.is_compiling:
                    self._channel.send(Compiling())

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
        else:
            self._is_stopped = True

    def _add(self, asked: Add, prepared: Future[None] | None = None) -> None:
        try:
            if prepared is not None:
                prepared.result()
            id = self._engine.add(asked.tokens, asked.params, asked.output)
        except InputError as error:
            self._channel.send(Refused(asked.id, str(error)))
        except BaseException as error:
            if not is_fault(error):
                raise
            _log.exception("a request could not be queued")
            ends = [RequestOutput(asked.id, [], "", "error", n) for n in range(asked.params.n)]
            self._channel.send(Outputs(ends))
        else:
            self._open[id] = _Open(asked.id, asked.num_top_logprobs, asked.params.n)
            self._ids[asked.id] = id

    def _forget(self, id: int) -> None:
        self._engine.abort(id)
        self._ids.pop(self._open.pop(id).id)

    def _told(self, output: RequestOutput) -> RequestOutput | None:
        """What the other side is told of an output; nothing once it has left."""
        request = self._open.get(output.id)
        if request is None:
            return None
        if output.finish_reason is not None:
            request.num_answers -= 1
            if not request.num_answers:
                self._ids.pop(self._open.pop(output.id).id)
        most = request.num_top_logprobs
        if most is None:
            return dataclasses.replace(output, id=request.id, logprobs=(), top_logprobs=())
        tops = [(ids[:most], values[:most]) for ids, values in output.top_logprobs]
        return dataclasses.replace(output, id=request.id, top_logprobs=tops)
