"""`scripts.serve` with `--role=prefill` and `--role=decode`: the texts of one process, whichever is
killed.
"""

import contextlib
import os
import random
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import numpy as np
import openai
import pytest

from tests import compiling
from tests.inference.server.running import wait_until
from tests.inference.server.test_processes import is_running
from tests.inference.server.test_real_engine import COMMAND, TEXT, TINY, children
from tests.scripts.test_hosts import free_port

ROOT = Path(__file__).resolve().parents[3]
START_S = 180  # on a busy machine
BASE = [flag for flag in COMMAND if flag != "--port=0"]
PLANNED = "--set=prefill.bandwidth=1e9"


class Roles:
    """Processes that compute prompts, and servers that decode; with a client of the first."""

    def __init__(self, folder: Path, num_prefill: int, num_decode: int = 1):
        self._folder, self._environment = folder, compiling.environment(folder / "cache")
        self.ports = [free_port() for _ in range(num_prefill)]
        self.prefill = [self._start(f"prefill{i}", "--role=prefill", f"--port={port}")
                        for i, port in enumerate(self.ports)]  # fmt: skip
        roles = []
        if num_prefill:
            hosts = ",".join(f"127.0.0.1:{port}" for port in self.ports)
            roles = ["--role=decode", f"--set=prefill.hosts={hosts}", PLANNED]
        self.decode = [self._start(f"decode{i}", "--port=0", *roles) for i in range(num_decode)]
        for index in range(num_decode):
            wait_until(lambda i=index: " answers, " in self.log(f"decode{i}"), START_S)
        self.urls = [re.search(r"http://\S+", self.log(f"decode{i}"))[0] for i in range(num_decode)]
        self.http = httpx2.Client(base_url=self.urls[0], timeout=START_S)

    def _start(self, name: str, *flags: str) -> subprocess.Popen:
        with (self._folder / f"{name}.log").open("w") as log:
            return subprocess.Popen([*BASE, *flags], cwd=ROOT, env=self._environment, stderr=log)

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def wait_ready(self) -> None:
        for url in self.urls:
            wait_until(lambda u=url: httpx2.get(f"{u}/ready").status_code == 200, START_S)
            if num := len(self.prefill):  # which may come later
                wait_until(lambda u=url, n=num: self.metric("prefill_processes", u) == n, START_S)

    def metric(self, name: str, url: str = "") -> float:
        text = httpx2.get(f"{url or self.urls[0]}/metrics").text
        return float(re.search(rf"^ridgeline:{name}\{{.*\}} (\S+)$", text, re.MULTILINE)[1])

    def end(self) -> list[int]:
        """Their exit statuses, after SIGTERM."""
        processes = [*self.decode, *self.prefill]
        for process in processes:
            process.send_signal(signal.SIGTERM)
        return [process.wait(60) for process in processes]


@contextlib.contextmanager
def started(folder: Path, num_prefill: int, num_decode: int = 1) -> Iterator[Roles]:
    folder.mkdir()
    roles = Roles(folder, num_prefill, num_decode)
    try:
        roles.wait_ready()
        yield roles
    finally:
        roles.http.close()
        for process in (*roles.decode, *roles.prefill):
            if process.poll() is None:
                process.kill()
                process.wait()


def test_two_processes_give_the_texts_of_one_though_the_first_is_killed(tmp_path):
    with np.load(TINY / "expected.npz") as golden, started(tmp_path / "roles", 1) as roles:
        expected = [golden[f"greedy_{n}"].tolist() for n in range(4)]
        bodies = [{"prompt": golden[f"ids_{n}"].tolist(), "max_tokens": 24, "temperature": 0,
                   "return_token_ids": True} for n in range(4)]  # fmt: skip

        def answers():
            with ThreadPoolExecutor(4) as pool:
                posts = [pool.submit(roles.http.post, TEXT, json=body) for body in bodies]
                return [post.result().json()["choices"][0]["token_ids"] for post in posts]

        assert answers() == expected
        wait_until(lambda: roles.metric("prefill_received_bytes_total"))
        os.kill(children(roles.prefill[0].pid)[0], signal.SIGKILL)
        assert answers() == expected  # here
        wait_until(lambda: len(children(roles.prefill[0].pid)) == 1)
        engines = [children(p.pid)[-1] for p in (*roles.decode, *roles.prefill)]
        assert roles.end() == [0, 0]
    wait_until(lambda: not any(map(is_running, engines)))


# --- long -----------------------------------------------------------------------------------------


def requests(count: int) -> list[dict]:
    """Greedy and seeded, some with a prefix in common."""
    rng = random.Random(0)
    words = ["the", "ridge", "line", "of", "hills", "above", "an", "old", "town", "to", "trade"]
    prefix = " ".join(rng.choices(words, k=12))
    bodies = []
    for index in range(count):
        prompt = " ".join(rng.choices(words, k=rng.randint(1, 25)))
        body = {"prompt": f"{prefix} {prompt}" if index % 3 == 0 else prompt}
        body |= {"temperature": 0} if index % 2 else {"temperature": 1, "seed": index}
        bodies.append(body | {"max_tokens": rng.randint(1, 40)})
    return bodies


def texts(roles: Roles, bodies: list[dict], kill=lambda num_done: None) -> list[str]:
    """Of all requests, by OpenAI's client, sixteen at a time, over all servers in turn; `kill` is
    called after each.
    """
    done, counting = 0, threading.Lock()
    clients = [openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
               for url in roles.urls]  # fmt: skip
    model = clients[0].models.list().data[0].id

    def text(request: tuple[int, dict]) -> str:
        nonlocal done
        index, body = request
        answer = clients[index % len(clients)].completions.create(model=model, **body)
        with counting:
            done += 1
            kill(done)
        return answer.choices[0].text

    with ThreadPoolExecutor(16) as pool:
        answered = [*pool.map(text, enumerate(bodies))]
    for client in clients:
        client.close()
    return answered


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_decode", [1, 2])
def test_200_requests_lose_nothing_where_either_side_is_killed(tmp_path, num_decode, capsys):
    bodies = requests(200)
    with started(tmp_path / "one", 0) as alone:
        expected = texts(alone, bodies)
    with started(tmp_path / "roles", 2, num_decode) as roles:

        def kill(num_done: int) -> None:
            if num_done == 60:
                os.kill(children(roles.prefill[0].pid)[0], signal.SIGKILL)
            if num_done == 130:
                os.kill(children(roles.decode[0].pid)[-1], signal.SIGKILL)

        answered = texts(roles, bodies, kill)
        wait_until(lambda: roles.metric("prefill_processes") == 2, START_S)
        num_bytes = roles.metric("prefill_received_bytes_total")
        seconds = roles.metric("prefill_received_seconds_total")
        planned = roles.metric("prefill_planned_bandwidth_bytes")
        assert roles.end() == [0] * (2 + num_decode)
    assert answered == expected
    assert "the engine ended with status -9: it is started again" in roles.log("prefill0")
    assert "is lost: its connection ended" in roles.log("decode0")
    line = r"pages of prompts: .* MB came at .* MB/s \(planned 1,000 MB/s\) from \d prefill"
    assert re.search(line, roles.log("decode0"))
    with capsys.disabled():
        print(f"\n{num_decode} decode: {num_bytes / 1e6:.1f} MB of pages at "
              f"{num_bytes / seconds / 1e6:.0f} MB/s, planned {planned / 1e6:.0f} MB/s; "
              f"{len(answered)} of {len(bodies)} texts are those of one process")  # fmt: skip
