"""The server on another host than the first, whose engine follows the first host's, and the one
that computes prompts for others: neither speaks HTTP.
"""

import asyncio
import signal
from collections.abc import Callable

from inference.server import frames
from inference.server.client.engine_client import EngineFailed
from inference.server.client.launch import Launcher
from inference.server.frames import ConnectionClosed, Joining, Stop

_STARTS = 5  # in a row that did not bring the hosts together
_END_S = 10.0  # for the process to end by itself


class Following:
    """Starts an engine, and starts it again if it or another host ends, until the first host has
    ended as it should.
    """

    def __init__(
        self, launcher: Launcher, restarts: bool, drain_s: float, say: Callable[[str], None]
    ):
        """`restarts`: an engine that ends is started again. `drain_s`: seconds after a signal in
        which the first host may finish its answers, 0 for an engine that has no first host. `say`:
        takes lines for the log.
        """
        self._launcher, self._restarts, self._drain_s, self._say = launcher, restarts, drain_s, say
        self._writer: asyncio.StreamWriter | None = None
        self._has_joined = False  # the hosts were together, with the latest engine
        self._leaving: asyncio.TimerHandle | None = None
        self._has_left = False

    async def run(self) -> None:
        """Returns once the first host has ended, or a signal ends this one. Raises EngineFailed if
        the hosts do not come together, or the engine ended and is not started again.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        has_ever_joined, num_starts = False, 0
        while not self._has_left:
            status = await self._follow()
            if status == 0 or self._has_left:
                return
            has_ever_joined |= self._has_joined
            num_starts = 0 if self._has_joined else num_starts + 1
            why = f"the engine ended with status {status}"
            if not (has_ever_joined and self._restarts) or num_starts >= _STARTS:
                raise EngineFailed(why)
            self._say(f"{why}: it is started again")

    async def _follow(self) -> int:
        """Starts an engine; returns its exit status."""
        self._has_joined = False
        connection = self._launcher.start()
        reader, self._writer = await asyncio.open_unix_connection(sock=connection)
        try:
            while True:
                header = await reader.readexactly(frames.HEADER_BYTES)
                data = await reader.readexactly(frames.length(header))
                message = frames.FROM_ENGINE.decode(data)
                self._has_joined |= message == Joining("")
        except (asyncio.IncompleteReadError, OSError, ConnectionClosed):
            return await self._launcher.end(_END_S)
        finally:
            self._writer.close()
            self._writer = None

    def _on_signal(self, number: signal.Signals) -> None:
        """At the first signal the first host may get it, too, and drain; the second ends it, or
        the first where nothing is waited for.
        """
        if self._leaving is not None or not self._has_joined or not self._drain_s:
            self._leave()
            return
        self._leaving = asyncio.get_running_loop().call_later(self._drain_s, self._leave)
        self._say(f"{number.name}: following host 0 until it ends, {self._drain_s:g} s at most")

    def _leave(self) -> None:
        """Ends the engine, which says so to the first host."""
        self._has_left = True
        if self._writer is not None:
            self._writer.write(frames.encode(Stop()))
            self._writer.close()
