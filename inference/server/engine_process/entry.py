"""Main function of the engine's process."""

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from inference.server.engine_process.channel import Channel
from inference.server.engine_process.loop import EngineLoop
from inference.server.engine_process.served import Served
from inference.server.frames import ConnectionClosed, HostLost, Joining, Stop, ToEngine

if TYPE_CHECKING:  # text workers take the functions above `serve` only
    from sharding.hosts import Report

_GONE = "its server has gone"
_LOOK_MS = 200
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    """Lets the system (Linux) end this process with the thread that started it, even within a step
    or a compilation, when the socket is not read.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def is_closed(connection: socket.socket) -> bool:
    """Whether the peer has gone and left nothing to read. If it ended before `end_with_parent`,
    that has no effect.
    """
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def serve(descriptor: int, load: Callable[["Report"], Served]) -> None:
    """Loads an engine and serves the socket behind an inherited descriptor until it is closed.
    SIGTERM has no effect, so that the server can finish its answers if all processes get it.

    Args:
        load: takes what reports on other hosts. On another host than the first it does not return:
            its engine follows the first host's.

    Raises:
        InputError: as `load` does. Errors of the engine are raised as they are.
    """
    from sharding import hosts

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()
    connection = socket.socket(fileno=descriptor)
    if is_closed(connection):
        connection.close()
        return
    channel = Channel(connection)
    is_read = threading.Event()
    hangup = select.poll()
    hangup.register(connection, 0)  # a peer that has gone is reported in any case
    watch = threading.Thread(target=_end_if_closed, args=(channel, hangup, is_read), daemon=True)
    watch.start()

    def report(line: str, is_lost: bool) -> None:
        with contextlib.suppress(ConnectionClosed):
            channel.send(HostLost(line) if is_lost else Joining(line))

    engine = load(report)
    is_read.set()
    if not EngineLoop(engine, channel).run():
        hosts.current().end(_GONE)


def _end_if_closed(channel: Channel, hangup: select.poll, is_read: threading.Event) -> None:
    """Ends the process with the connection while nothing else reads it. Other hosts are told, and
    end as well if this was asked for.
    """
    from sharding import hosts

    while not is_read.is_set():
        if hangup.poll(_LOOK_MS):
            messages: list[ToEngine] = []
            with contextlib.suppress(ConnectionClosed):
                messages = channel.receive(0)
            hosts.current().end(None if any(isinstance(m, Stop) for m in messages) else _GONE)
            os._exit(0)
