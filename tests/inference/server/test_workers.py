"""Whatever a text does to the process that reads it, its client is told, and others are served."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from inference.server.frames import TextFacts
from inference.server.workers import pool
from tests.inference.server import odd_worker
from tests.inference.server.fake_engine import END, FakeEngine, tokenizer
from tests.inference.server.odd_worker import text
from tests.inference.server.running import running, wait_until
from tests.inference.server.test_processes import is_running

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def server():
    """Whose workers find some texts hard, and are given little."""
    with pytest.MonkeyPatch.context() as patch, running() as one:
        odd_worker.shorten(patch.setattr)
        patch.setattr(pool, "_COMMAND", [sys.executable, "-m", odd_worker.__name__])
        yield one


def workers(server) -> list[int]:
    processes = [worker._process for worker in server.service.texts._pool._workers]
    return [each.pid for each in processes if each is not None and each.poll() is None]


def tokenize(server, what: str):
    return server.post("/tokenize", prompt=text(what))


def told(response) -> str:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == "prompt" and error["code"] == "invalid_value"
    return error["message"]


def test_a_text_that_takes_too_long_ends_its_worker_and_no_other_request(server, monkeypatch):
    monkeypatch.setattr(pool, "_WALL", 100)
    with ThreadPoolExecutor(8) as threads:
        bad = [threads.submit(tokenize, server, "spins") for _ in range(2)]
        good = [threads.submit(tokenize, server, "a") for _ in range(6)]
        for found in bad:
            why = f"prompt: it takes more than {odd_worker.SECONDS:g} s to process"
            assert told(found.result(120)) == why
        assert {found.result(120).json()["count"] for found in good} == {odd_worker.LONG}


def test_a_worker_that_gets_no_processor_time_is_no_fault_of_the_text(server):
    response = tokenize(server, "sleeps")
    assert response.status_code == 503 and "retry-after" in response.headers
    assert tokenize(server, "a").status_code == 200


@pytest.mark.parametrize("path, field", [
    ("/tokenize", "prompt"), ("/v1/completions", "prompt"), ("/v1/embeddings", "input"),
])  # fmt: skip
def test_a_request_waits_for_a_worker_as_long_as_it_may(server, path, field, tmp_path, monkeypatch):
    """Both workers are at work; what they do goes on."""
    assert tokenize(server, "a").status_code == 200  # there is one
    monkeypatch.setattr(pool, "_WALL", 100)
    (tmp_path / "busy").touch()
    with ThreadPoolExecutor(2) as threads:
        busy = [threads.submit(tokenize, server, f"stays {tmp_path}/busy") for _ in range(2)]
        wait_until(lambda: len(server.service.texts._pool._running) == 2)
        how = {"x-request-timeout": "0.05"}
        late = server.http.post(path, json={field: text("a")}, headers=how)
        assert late.status_code == 408 and late.json()["error"]["code"] == "timeout"
        (tmp_path / "busy").unlink()
        assert {found.result(120).json()["count"] for found in busy} == {odd_worker.LONG}


@pytest.mark.skipif(sys.platform != "linux", reason="no limit of memory")
@pytest.mark.parametrize("what", ["grows", "aborts"])
def test_a_text_that_takes_too_much_memory_ends_its_worker(server, what):
    assert told(tokenize(server, what)) == "prompt: it takes more than 64 MB of memory to process"
    assert tokenize(server, "a").status_code == 200


def test_a_worker_that_somebody_ends_is_started_again(server):
    assert tokenize(server, "a").status_code == 200
    before = workers(server)
    for pid in before:  # which have nothing to do
        os.kill(pid, signal.SIGKILL)
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(tokenize, server, "waits")
        wait_until(lambda: set(workers(server)) - set(before))
        time.sleep(0.1)
        for pid in set(workers(server)) - set(before):  # which starts, or is at work
            os.kill(pid, signal.SIGKILL)
        assert found.result(120).json()["count"] == odd_worker.LONG


def test_a_client_that_leaves_costs_no_worker(server):
    assert tokenize(server, "a").status_code == 200
    before = set(workers(server))
    with contextlib.suppress(Exception):
        server.http.post("/tokenize", json={"prompt": text("waits")}, timeout=0.1)
    assert tokenize(server, "a").status_code == 200
    assert set(workers(server)) >= before


def test_a_worker_that_does_not_start_is_no_fault_of_the_text(server, monkeypatch):
    for pid in workers(server):
        os.kill(pid, signal.SIGKILL)
    with monkeypatch.context() as patch:
        patch.setattr(pool, "_COMMAND", [sys.executable, "-c", ""])
        response = tokenize(server, "a")
        assert response.status_code == 503 and "retry-after" in response.headers
    assert tokenize(server, "a").status_code == 200


def test_a_template_that_never_ends_is_an_error(monkeypatch):
    own = tokenizer()
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = "{% if messages[0].content == 'loop' %}" + loop + "{% endif %}"
    facts = TextFacts(TextFacts.of(own).backend, own.vocab_size, own.special_tokens, template, {})
    monkeypatch.setattr(TextFacts, "of", lambda _: facts)
    with running(FakeEngine()) as server:
        asked = {"messages": [{"role": "user", "content": "loop"}]}
        error = server.post("/v1/chat/completions", **asked).json()["error"]
        assert error["param"] == "messages" and "more than 0.8 s" in error["message"]
        assert server.post("/v1/completions", prompt="a", max_tokens=2).status_code == 200


def test_long_texts_of_every_kind_are_encoded_as_short_ones_are(server):
    long = "Grüße 🙂" * 50
    asked = {"prompt": long * 3, "max_tokens": 0, "echo": True}
    assert server.post("/tokenize", prompt=long * 3).json()["tokens"] == tokenizer().encode(
        long * 3
    )
    assert server.post("/v1/completions", prompt=long, max_tokens=0, echo=True).status_code == 400
    assert server.post("/detokenize", tokens=[97] * 5000).json()["prompt"] == "a" * 5000
    assert server.post("/detokenize", tokens=[END] * 5000).json()["prompt"] == "<|end|>" * 5000
    assert server.post("/v1/completions", **asked).status_code == 400
    for messages in (
        [{"role": "user", "content": long[:99]}],
        [{"role": "system", "content": "a"}],
    ):
        tokens = server.post("/tokenize", messages=messages).json()["tokens"]
        assert tokens == tokenizer().apply_chat_template(messages)


def test_a_grammar_is_compiled_once(server, monkeypatch):
    asked = {"prompt": "a", "max_tokens": 9, "structured_outputs": {"regex": "[0-9]{4}"}}
    assert server.post("/v1/completions", **asked).json()["choices"][0]["text"] == "0000"
    monkeypatch.setattr(server.service.texts, "_ask", None)
    assert server.post("/v1/completions", **asked).status_code == 200


def test_workers_load_no_jax():
    code = (
        "import sys\nfrom inference.server.workers import entry\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    loaded = set(run.stdout.split())
    assert "msgspec" in loaded and not loaded & {"jax", "jaxlib", "starlette", "layers"}


def test_workers_end_with_their_server(server):
    """The last of these."""
    assert tokenize(server, "a").status_code == 200
    own = workers(server)
    server.stop()
    server.join()
    assert own and not any(map(is_running, own))
