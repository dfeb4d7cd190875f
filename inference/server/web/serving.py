"""Serves until a signal, or until the engine fails."""

import asyncio
import contextlib
import functools
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from configs.errors import InputError
from inference.server.service import Limits, Service
from inference.server.traces import Traces
from inference.server.web.access import NO_PROXY, Keys, Site, is_local
from inference.server.web.app import application, routed
from inference.server.web.guard import GuardedProtocol
from inference.server.web.in_process import Background
from inference.server.web.observed import RequestObserver
from inference.server.web.report import report

_KEEP_ALIVE_S = 5
_REPORT_S = 10.0
_LEAVE_S = 5  # for connections to close after the last answer


def bound(host: str, port: int) -> socket.socket:
    """Returns a listening socket (port 0: a free one); raises an `InputError` if it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # Connections inherit it: the first token of a stream does not wait for an acknowledgement.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(1024)
    except (OSError, OverflowError) as error:
        listening.close()
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"--host={host} --port={port}: {why}") from None
    return listening


class Drains(Protocol):
    """A service that rejects new requests while `is_draining`."""

    is_draining: bool


class DrainingServer(uvicorn.Server):
    """uvicorn with a graceful end: after the first signal, new requests are rejected and running
    ones continue. It ends with the last of them, after `drain_s`, or at the next signal.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: Drains,
        limits: Limits,
        drain_s: float,
        stalled: Callable[[], None] = lambda: None,
        say: Callable[[str], None] | None = None,
    ):
        """`app`: of the service; `drain_s`, `say`: as in `serve`; `stalled`: called when a client
        that reads nothing is disconnected.
        """
        guarded = functools.partial(GuardedProtocol, limits=limits, stalled=stalled)
        config = uvicorn.Config(
            app,
            http=guarded,  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            access_log=False,
            log_level="warning",
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_LEAVE_S,
        )
        super().__init__(config)
        self._service = service
        self._drain_s = drain_s
        self._say = say or (lambda line: None)
        self._signal = ""
        self._num_requests = 0  # running when the signal came
        self._drained_at: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal, or the end of the engine (0)."""
        if sig:
            self._signal = signal.Signals(sig).name
        if self._service.is_draining:
            self.should_exit = self.force_exit = True
        else:
            self._num_requests = len(self.server_state.tasks)
        self._service.is_draining = True

    async def on_tick(self, counter: int) -> bool:
        """Returns whether to end; called ten times a second."""
        if self._service.is_draining and not self.should_exit:
            now = asyncio.get_running_loop().time()
            if self._drained_at is None:
                self._drained_at = now + self._drain_s
                requests = _requests(self._num_requests)
                if self._signal:
                    self._say(f"{self._signal}: draining {requests}, {self._drain_s:g} s at most")
            self.should_exit = not self.server_state.tasks or now > self._drained_at
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes connections; at once after a second signal (Python 3.12 waits for them)."""
        if num_open := len(self.server_state.tasks):
            self._say(f"cut off: {_requests(num_open)}")
        if self.force_exit:
            for connection in list(self.server_state.connections):
                connection.transport.abort()
        await super().shutdown(sockets)


def _requests(count: int) -> str:
    return f"{count} request{'' if count == 1 else 's'}"


async def serve(
    service: Service,
    listening: socket.socket,
    keys: Keys | None = None,
    drain_s: float = 30.0,
    say: Callable[[str], None] | None = None,
    started: Callable[[DrainingServer], None] = lambda server: None,
    traces: Traces | None = None,
    site: Site = NO_PROXY,
    control_keys: Keys | None = None,
) -> None:
    """Starts the engine and serves on a listening socket until a signal.

    Args:
        service: is closed at the end.
        listening: as `bound` returns it.
        keys: of clients; None: no key is needed.
        drain_s: seconds for requests that run when the signal comes.
        say: takes lines for the log: the work of ten seconds, and the end.
        started: called before the first answer.
        traces: of requests; closed at the end.
        control_keys: of clients that may control the engine; None: none may.

    Raises:
        EngineFailed: the engine could not be started, or ended too often.
    """
    host = listening.getsockname()[0]
    service.num_keys = len(keys or ())
    app = application(service, keys, is_local(host), site, control_keys)
    observed = site.around(RequestObserver(app, service.metrics.answered, traces))
    server = DrainingServer(
        observed, service, service.limits, drain_s, service.metrics.stalled, say
    )
    engine = asyncio.create_task(service.client.run())
    engine.add_done_callback(lambda _: server.handle_exit(0, None))
    started(server)
    tasks = [asyncio.create_task(report(service, say, _REPORT_S))] if say else []
    if service.batches is not None:
        owners = frozenset([""]) if keys is None else keys.names
        connect = functools.partial(Background, routed(service))
        tasks.append(asyncio.create_task(service.batches.run(owners, connect, service.num_slots)))
    try:
        await server.serve(sockets=[listening])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await service.client.stop()
        with contextlib.suppress(asyncio.CancelledError):
            await engine  # raises its error
        service.close()
        if traces is not None:
            await asyncio.to_thread(traces.close)
