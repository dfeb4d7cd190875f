"""Where the engine runs: in a process of its own, or in a thread of this one."""

import asyncio
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from inference.server.engine_process.channel import Channel
from inference.server.engine_process.loop import EngineLoop

if TYPE_CHECKING:  # a process that speaks HTTP loads no engine
    from inference.server.engine_process.served import Served

_POLL_S = 0.02


class Launcher(Protocol):
    """Starts engines, one after the other."""

    def start(self) -> socket.socket:
        """Starts an engine; returns the client's end of its connection."""

    async def end(self, grace_s: float) -> int:
        """Waits for the engine's end, kills it after `grace_s`, and returns its exit status."""


class Subprocess:
    """An engine in a process of its own, which ends with this one."""

    def __init__(self, command: Sequence[str]):
        """`command`: what starts it; the descriptor of its socket is added as a flag."""
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the engine; None before the first start."""
        return None if self._process is None else self._process.pid

    def start(self) -> socket.socket:
        client_end, engine_end = socket.socketpair()
        with engine_end:
            descriptor = engine_end.fileno()
            self._process = subprocess.Popen(
                [*self._command, f"--engine_socket={descriptor}"],
                stdin=subprocess.DEVNULL,
                pass_fds=[descriptor],
                start_new_session=True,  # Ctrl-C at the terminal is for this process, which drains
            )
        return client_end

    async def end(self, grace_s: float) -> int:
        """Waits for the engine's end, and kills it after `grace_s`.

        Returns:
            Its exit status, or 1 if it was killed here: SIGKILL would mean that others killed it.
        """
        process = self._process
        if process is None:
            return 0
        until, is_late = time.monotonic() + grace_s, False
        while (status := process.poll()) is None:
            if time.monotonic() >= until:
                is_late = True
                process.kill()  # which takes a while where it holds much memory
            await asyncio.sleep(_POLL_S)
        return 1 if is_late else status


class Thread:
    """An engine in a thread of this process, as tests and notebooks want it."""

    def __init__(self, load: "Callable[[], Served]"):
        """`load`: makes the engine, in that thread."""
        self._load = load
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self) -> socket.socket:
        client_end, engine_end = socket.socketpair()
        self._thread = threading.Thread(target=self._run, args=(Channel(engine_end),), daemon=True)
        self._thread.start()
        return client_end

    async def end(self, grace_s: float) -> int:
        """Waits for the thread's end, which cannot be forced; returns 0, or 1 if it failed."""
        thread = self._thread
        if thread is not None:
            await asyncio.to_thread(thread.join, grace_s)
        return int(self._error is not None or (thread is not None and thread.is_alive()))

    def _run(self, channel: Channel) -> None:
        try:
            EngineLoop(self._load(), channel).run()
        except BaseException as error:
            self._error = error
        finally:
            channel.close()
