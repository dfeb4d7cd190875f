"""Many clients that leave at any time: nothing of them stays."""

import json
import os
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from inference.server.client.launch import Subprocess
from tests.inference.server.fake_engine import MAX_SEQS
from tests.inference.server.fake_process import COMMAND
from tests.inference.server.running import running, wait_until

ROOT = Path(__file__).resolve().parents[3]


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors are not listed")
def test_clients_that_leave_at_any_time_leave_nothing_behind(monkeypatch):
    monkeypatch.chdir(ROOT)
    launcher = Subprocess(COMMAND)
    with running(launcher) as server:

        def leave(n: int) -> None:
            """Before it was read, while it waits, after some of it, or at the end."""
            dice = random.Random(n)
            asked = {"prompt": "a" * dice.randint(1, 400), "max_tokens": 12, "stream": n % 3 > 0}
            body = json.dumps(asked | {"n": 1 + n % 2}).encode()
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
            kind = "\r\nContent-Type: application/json\r\n\r\n"
            with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
                connection.sendall(
                    f"{head}{len(body)}{kind}".encode() + body[: -(n % 5 == 0) or None]
                )
                connection.settimeout((0.001, 0.02, 0.1, 2)[n % 4])
                try:
                    for _ in range(dice.randint(0, 10)):
                        if not connection.recv(400):
                            break
                except TimeoutError:
                    pass

        server.http.headers["connection"] = "close"
        server.post("/v1/completions", prompt="a", max_tokens=1)
        wait_until(lambda: not server.server.server_state.connections)
        before = [num_descriptors(pid) for pid in (os.getpid(), launcher.pid)]
        with ThreadPoolExecutor(2 * MAX_SEQS) as clients:
            list(clients.map(leave, range(48)))
        wait_until(lambda: not server.service.client.num_sequences)
        told = server.service.client
        wait_until(lambda: not (told.heartbeat.num_running or told.heartbeat.num_waiting))
        wait_until(lambda: [num_descriptors(pid) for pid in (os.getpid(), launcher.pid)] == before)
        own = server.service.client
        assert not (own._open or own._sent or own._num_sent or len(own._waiting))
        assert server.post("/v1/completions", prompt="a", max_tokens=3).status_code == 200
        assert not own.num_restarts
