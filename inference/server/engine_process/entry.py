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


def serve(descriptor: int, load: Callable[[], Served]) -> None:
    """Loads an engine and serves the socket behind an inherited descriptor until it is closed.

    Raises:
        InputError: as `load` does; or the engine cannot go on, with whatever it raised.
    """
    end_with_parent()
    channel = Channel(socket.socket(fileno=descriptor))
    EngineLoop(load(), channel).run()
