"""Two processes, either of which may die: no stream hangs, and no process stays behind."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from inference.server.client import engine_client
from inference.server.client.engine_client import State
from inference.server.client.launch import Subprocess
from inference.server.engine_process import entry
from inference.server.service import Limits
from tests.inference.server import events
from tests.inference.server.fake_engine import HANGS, REPLY
from tests.inference.server.fake_process import COMMAND
from tests.inference.server.running import running, wait_until

ROOT = Path(__file__).resolve().parents[3]
TEXT = "/v1/completions"


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def is_running(pid: int) -> bool:
    """Whether there is such a process that has not ended, waited for or not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    with contextlib.suppress(OSError):
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    return not Path("/proc").exists()


KINDS = [
    {}, {"stream": True}, {"temperature": 1, "seed": 3, "n": 2}, {"stream": True, "n": 2},
    {"stop": "42. Grüße, 世界! 🙂 The answer", "stream": True}, {"logprobs": 1, "stream": True},
    {"temperature": 1, "stream": True}, {"best_of": 3, "n": 2, "temperature": 1, "seed": 4},
]  # fmt: skip


def answers(response):
    """The text, tokens and end of each answer."""
    assert response.status_code == 200, response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        found = [c for event in events.read(response.text) for c in event["choices"]]
    else:
        found = response.json()["choices"]
    return [
        (
            "".join(c["text"] for c in found if c["index"] == index),
            [id for c in found if c["index"] == index for id in c["token_ids"]],
            [c["finish_reason"] for c in found if c["index"] == index and c["finish_reason"]],
        )
        for index in range(1 + max(c["index"] for c in found))
    ]


def test_streams_go_on_when_the_engine_is_killed():
    """From the tokens that were told, to the end that they would have had."""
    launcher = Subprocess(COMMAND)
    with running(launcher) as server:

        def ask(kind):
            asked = {"prompt": "a", "max_tokens": 60, "return_token_ids": True} | kind
            return server.post(TEXT, **asked)

        with ThreadPoolExecutor(len(KINDS)) as pool:
            expected = list(map(answers, pool.map(ask, KINDS)))
            before = launcher.pid
            os.kill(before, signal.SIGSTOP)  # none ends before all are there
            found = pool.map(ask, KINDS, timeout=120)
            wait_until(lambda: server.service.client.num_sequences > 8)
            os.kill(before, signal.SIGCONT)
            threading.Event().wait(0.3)
            os.kill(before, signal.SIGKILL)
            gotten = list(map(answers, found))
        assert launcher.pid != before and not is_running(before)
        for kind, got, want in zip(KINDS, gotten, expected, strict=True):
            if kind.get("temperature") and "seed" not in kind:  # nobody knows it
                (text, tokens, reasons), = got  # fmt: skip
                assert bytes(tokens).decode(errors="replace") == text and reasons == ["length"]
                assert len(tokens) == 60 and REPLY in text
            else:
                assert got == want, kind
        last = launcher.pid
    wait_until(lambda: not is_running(last))
    assert server.error is None


def test_an_engine_that_is_killed_while_it_loads_is_started_again():
    launcher, states = Subprocess(COMMAND), []
    with running(launcher) as server:
        server.service.client.on_state = states.append
        for _ in range(2):
            last = launcher.pid
            os.kill(last, signal.SIGKILL)
            wait_until(lambda last=last: launcher.pid != last)
        server.wait_ready()
        assert states.count(State.RESTARTING) == 2 and states[-1] is State.READY
        assert server.post(TEXT, prompt="a", max_tokens=3).status_code == 200


def test_streams_go_on_when_the_engine_is_stopped():
    launcher = Subprocess(COMMAND)
    with running(launcher, Limits(heartbeat_s=2)) as server, ThreadPoolExecutor(1) as pool:
        asked = {"prompt": "a", "max_tokens": 100, "return_token_ids": True}
        before = launcher.pid
        found = pool.submit(server.post, TEXT, **asked)
        wait_until(lambda: server.service.client.num_sequences)
        os.kill(before, signal.SIGSTOP)
        ((text, tokens, reasons),) = answers(found.result(120))
        assert (text, len(tokens), reasons) == (
            bytes(tokens).decode(errors="replace"),
            100,
            ["length"],
        )
        assert launcher.pid != before and not is_running(before)


def test_a_signal_before_a_restart_ends_the_server(monkeypatch):
    monkeypatch.setattr(engine_client, "_FIRST_PAUSE_S", 600)
    launcher = Subprocess(COMMAND)
    with running(launcher) as server:
        last = launcher.pid
        os.kill(last, signal.SIGKILL)
        wait_until(lambda: server.service.client.state is State.RESTARTING)
        server.stop()
        server.join()
        assert launcher.pid == last
    assert server.error is None


def test_an_engine_that_does_not_end_is_ended():
    """Which is no reason to think that somebody else did."""
    command = [sys.executable, "-c", "import time; time.sleep(60)"]

    async def end(signal_first):
        launcher = Subprocess(command)
        launcher.start().close()
        if signal_first:
            os.kill(launcher.pid, signal.SIGKILL)
        return await launcher.end(0.2 if not signal_first else 5)

    assert asyncio.run(end(False)) == 1
    assert asyncio.run(end(True)) == -signal.SIGKILL


def test_a_process_whose_parent_has_gone_loads_nothing(monkeypatch):
    ours, theirs = socket.socketpair()
    assert not entry.is_closed(theirs)
    ours.close()
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(entry, "end_with_parent", lambda: None)
    entry.serve(theirs.detach(), lambda _: pytest.fail("it loads"))


@pytest.fixture
def served():
    """A server as a process of its own: it, its port, and its engine's process."""
    with subprocess.Popen([*COMMAND, "--serve"], cwd=ROOT, stdout=subprocess.PIPE) as process:
        port, engine = map(int, process.stdout.readline().split())
        try:
            yield process, f"http://127.0.0.1:{port}", engine
        finally:
            process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine, signal.SIGKILL)


@pytest.mark.parametrize("prompt", ["a", pytest.param([HANGS], marks=pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux ends a process with its parent"))])  # fmt: skip
def test_an_engine_does_not_outlive_its_server(served, prompt):
    """Not even within a step, when nobody reads the socket."""
    process, url, engine = served
    asked = {"prompt": prompt, "max_tokens": 400, "stream": True}
    with contextlib.suppress(httpx2.HTTPError):
        timer = threading.Timer(0.2, process.kill)
        timer.start()
        httpx2.post(url + TEXT, json=asked, timeout=60)
    timer.join()
    wait_until(lambda: not is_running(engine), 3)  # either would go on for longer


@pytest.mark.parametrize("to_all", [False, True])
def test_a_signal_ends_it_with_status_0(served, to_all):
    """Also where its engine gets it, too."""
    process, url, engine = served
    found = []
    asked = {"prompt": "a", "max_tokens": 150}
    one = 'vllm:num_requests_running{model_name="fake"} 1.0'
    with httpx2.Client(base_url=url, timeout=120) as http:
        thread = threading.Thread(target=lambda: found.append(http.post(TEXT, json=asked)))
        thread.start()
        wait_until(lambda: one in http.get("/metrics").text)
        for pid in [engine, process.pid] if to_all else [process.pid]:
            os.kill(pid, signal.SIGTERM)
        assert process.wait(60) == 0
        thread.join(60)
    assert found[0].json()["usage"]["completion_tokens"] == 150
    wait_until(lambda: not is_running(engine), 20)


def test_the_process_that_speaks_http_loads_no_jax():
    code = (
        "import sys\nfrom inference.server.web import serving\nfrom scripts import serve\n"
        "from inference.server.client import launch\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    loaded = set(run.stdout.split())
    assert "starlette" in loaded and not loaded & {"jax", "jaxlib", "layers", "sharding"}
