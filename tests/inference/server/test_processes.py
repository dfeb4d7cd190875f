"""Two processes, either of which may die: no stream hangs, and no process stays behind."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx2
import pytest

from inference.server.client.launch import Subprocess
from tests.inference.server import events
from tests.inference.server.fake_engine import HANGS
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


def test_an_engine_that_is_killed():
    launcher = Subprocess(COMMAND)
    with running(launcher) as server:
        first, found = launcher.pid, []

        def ask():
            asked = {"prompt": "a", "max_tokens": 400, "stream": True}
            found.append(server.http.post(TEXT, json=asked))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.service.client.num_sequences == 8)
        os.kill(first, signal.SIGKILL)
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive(), "a stream hangs"
        assert len(found) == 8
        for response in found:  # those that had begun end with an event
            last = (
                events.read(response.text)[-1] if response.status_code == 200 else response.json()
            )
            assert last["error"]["code"] == "unavailable"
        server.wait_ready()
        assert launcher.pid != first and not is_running(first)
        assert server.post(TEXT, prompt="a", max_tokens=2).status_code == 200
        second = launcher.pid
    wait_until(lambda: not is_running(second))
    assert server.error is None


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
        httpx2.post(url + TEXT, json=asked, timeout=10)
    timer.join()
    wait_until(lambda: not is_running(engine), 2)


def test_a_signal_ends_it_with_status_0(served):
    process, url, engine = served
    found = []
    asked = {"prompt": "a", "max_tokens": 50}
    thread = threading.Thread(target=lambda: found.append(httpx2.post(url + TEXT, json=asked)))
    thread.start()
    wait_until(lambda: "num_requests_running" in httpx2.get(url + "/metrics").text)
    threading.Event().wait(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    thread.join(10)
    assert found[0].json()["usage"]["completion_tokens"] == 50
    wait_until(lambda: not is_running(engine), 2)


def test_the_process_that_speaks_http_loads_no_jax():
    code = (
        "import sys\nfrom inference.server.web import serving\nfrom scripts import serve\n"
        "from inference.server.client import launch\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    loaded = set(run.stdout.split())
    assert "starlette" in loaded and not loaded & {"jax", "jaxlib", "layers", "sharding"}
