"""A process that owns an engine, from its first line to its last."""

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
    """Where the system can, ends this process with the thread that started it, even within a step
    or a compilation, in which nobody looks at the socket.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has gone and left nothing to read: it may have ended before
    `end_with_parent`, which then does nothing.
    """
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def serve(descriptor: int, load: Callable[[], Served]) -> None:
    """Loads an engine and serves the socket behind an inherited descriptor until it is closed.
    SIGTERM has no effect: whoever sends it to all processes lets the server end its answers.

    Raises:
        InputError: as `load` does; or the engine cannot go on, with whatever it raised.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()
    connection = socket.socket(fileno=descriptor)
    if is_closed(connection):
        connection.close()
        return
    channel = Channel(connection)
    EngineLoop(load(), channel).run()
