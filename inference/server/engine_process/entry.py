"""Main function of the engine's process."""

import contextlib
import ctypes
import signal
import socket
import sys
from collections.abc import Callable

from inference.server.engine_process.channel import Channel
from inference.server.engine_process.loop import EngineLoop
from inference.server.engine_process.served import Served

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


def serve(descriptor: int, load: Callable[[], Served]) -> None:
    """Loads an engine and serves the socket behind an inherited descriptor until it is closed.
    SIGTERM has no effect, so that the server can finish its answers if all processes get it.

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
    EngineLoop(load(), channel).run()
