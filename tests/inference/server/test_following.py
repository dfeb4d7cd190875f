"""What a server says of hosts that are missing or lost, and what starts those that follow."""

import asyncio
import signal
import socket
import threading

import pytest

from inference.server import frames
from inference.server.client.engine_client import EngineClient, EngineFailed
from inference.server.client.following import Following
from inference.server.client.launch import Thread
from inference.server.engine_process.channel import Channel
from inference.server.engine_process.loop import EngineLoop
from inference.server.frames import HostLost, Joining
from tests.inference.server.fake_engine import FakeEngine
from tests.inference.server.running import running, wait_until

LOST = "host 1 is lost: its connection ended"


class Hosted(Thread):
    """Engines that wait for another host, which may be lost."""

    def __init__(self):
        super().__init__(FakeEngine)
        self.has_come = threading.Event()

    def _run(self, channel: Channel) -> None:
        self._channel = channel
        channel.send(Joining("waits for host 1"))
        self.has_come.wait(60)
        channel.send(Joining(""))
        EngineLoop(self._load(), channel).run()
        channel.close()

    def lose(self) -> None:
        self.has_come.clear()
        self._channel.send(HostLost(LOST))
        self._channel._connection.shutdown(socket.SHUT_RDWR)


def test_a_missing_host_and_a_lost_one_are_named():
    engines = Hosted()
    with running(engines, waits=False) as server:

        def message() -> str:
            response = server.http.get("/ready")
            return "" if response.status_code == 200 else response.json()["error"]["message"]

        wait_until(lambda: message() == "the engine is loading: waits for host 1")
        engines.has_come.set()
        server.wait_ready()
        assert server.post("/v1/completions", prompt="a", max_tokens=3).status_code == 200
        engines.lose()
        wait_until(lambda: message() == f"the engine is restarting: {LOST}")
        wait_until(lambda: message() == "the engine is restarting: waits for host 1")
        refused = server.post("/v1/completions", prompt="a")
        assert refused.status_code == 503 and "waits for host 1" in refused.text
        engines.has_come.set()
        server.wait_ready()
        assert server.post("/v1/completions", prompt="a", max_tokens=3).status_code == 200
    assert server.error is None


def test_without_restarts_the_first_loss_ends_it():
    async def loaded(_):
        pass

    async def main():
        engines = Hosted()
        engines.has_come.set()
        client = EngineClient(engines, loaded, 60, restarts=False)
        client.on_state = lambda state: state == "ready" and engines.lose()
        await client.run()

    with pytest.raises(EngineFailed, match=f"^{LOST}$"):
        asyncio.run(main())


class Engines:
    """Starts of a follower's engine: of each whether the hosts come together, and its status; a
    signal comes where the status is one.
    """

    def __init__(self, *ends: tuple[bool, int | signal.Signals]):
        self.ends, self.num_starts, self.following = ends, 0, None

    def start(self) -> socket.socket:
        client, self._connection = socket.socketpair()
        (has_joined, self._end), self.num_starts = self.ends[self.num_starts], self.num_starts + 1
        if has_joined:
            self._connection.sendall(frames.encode(Joining("")))
        if isinstance(self._end, signal.Signals):
            signals = (1, 2) if has_joined else (1,)  # the first lets host 0 end first
            for after in signals:
                asyncio.get_running_loop().call_later(
                    after / 20, self.following._on_signal, self._end
                )
        else:
            self._connection.close()
        return client

    async def end(self, grace_s: float) -> int:
        self._connection.close()
        return -9 if isinstance(self._end, signal.Signals) else self._end


@pytest.mark.parametrize("ends, restarts, num_starts, error", [
    ([(True, 1), (True, -9), (True, 0)], True, 3, None),
    ([(False, 0)], True, 1, None),
    ([(False, 1)], True, 1, "the engine ended with status 1"),
    ([(True, 1)], False, 1, "the engine ended with status 1"),
    ([(True, 1), *[(False, 1)] * 5], True, 6, "the engine ended with status 1"),
    ([(True, 1), *[(False, 1)] * 4, (True, 1), (False, 0)], True, 7, None),
    ([(True, signal.SIGTERM)], True, 1, None),
    ([(True, 1), (False, signal.SIGINT)], True, 2, None),
])  # fmt: skip
def test_a_follower_starts_again_until_host_0_has_ended(ends, restarts, num_starts, error):
    engines, lines = Engines(*ends), []
    engines.following = Following(engines, restarts, 60, lines.append)
    if error is None:
        asyncio.run(engines.following.run())
    else:
        with pytest.raises(EngineFailed, match=error):
            asyncio.run(engines.following.run())
    assert engines.num_starts == num_starts
    assert sum("it is started again" in line for line in lines) == num_starts - 1
    if ends[-1][0] and isinstance(ends[-1][1], signal.Signals):
        assert lines[-1] == "SIGTERM: following host 0 until it ends, 60 s at most"
