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

from inference.server.engine_process.channel import Channel
from inference.server.engine_process.loop import EngineLoop
from inference.server.engine_process.served import Served
from inference.server.frames import ConnectionClosed, HostLost, Joining
from sharding import hosts
from sharding.hosts import Report

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


def serve(descriptor: int, load: Callable[[Report], Served]) -> None:
    """Loads an engine and serves the socket behind an inherited descriptor until it is closed.
    SIGTERM has no effect, so that the server can finish its answers if all processes get it.

    Args:
        load: takes what reports on other hosts. On another host than the first it does not return:
            its engine follows the first host's.

    Raises:
        InputError: as `load` does. Errors of the engine are raised as they are.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()
    connection = socket.socket(fileno=descriptor)
    if is_closed(connection):
        connection.close()
        return
    channel = Channel(connection)
    is_read = threading.Event()
    threading.Thread(target=_end_if_closed, args=(connection, is_read), daemon=True).start()

    def report(line: str, is_lost: bool) -> None:
        with contextlib.suppress(ConnectionClosed):
            channel.send(HostLost(line) if is_lost else Joining(line))

    engine = load(report)
    is_read.set()
    if not EngineLoop(engine, channel).run():
        hosts.current().end("the process that speaks HTTP has gone")


def _end_if_closed(connection: socket.socket, is_read: threading.Event) -> None:
    """Ends the process with the connection while nothing is read from it; other hosts are told."""
    hangup = select.poll()
    hangup.register(connection, 0)  # a peer that has gone is reported in any case
    while not is_read.is_set():
        if hangup.poll(_LOOK_MS):
            hosts.current().end()
            os._exit(0)
