"""Connections that are slow, large, no HTTP at all, or end too early."""

import contextlib
import itertools
import json
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from inference.server.service import Limits
from inference.server.web.access import Keys
from tests.inference.server.fake_engine import MAX_SEQS, FakeEngine
from tests.inference.server.running import running, wait_until

ASKED = [{"role": "user", "content": "a"}]
BODY = json.dumps({"prompt": "a", "max_tokens": 400}).encode()
SHORT = json.dumps({"prompt": "a", "max_tokens": 30, "stream": True}).encode()
STREAM = json.dumps({"prompt": "a", "max_tokens": 400, "stream": True}).encode()


def request(body: bytes, length: int | None = None, more: str = "") -> bytes:
    size = len(body) if length is None else length
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {size}\r\n{more}\r\n"
    ).encode() + body


def connect(server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", httpx2.URL(server.url).port), timeout=60)


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes it."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


@pytest.fixture(scope="module")
def small():
    """Takes requests that are small."""
    with running(limits=Limits(body_bytes=2000, head_bytes=3000)) as server:
        yield server


@pytest.fixture(scope="module")
def short():
    """Waits for a short time."""
    with running(limits=Limits(body_s=0.3, head_s=0.3)) as server:
        yield server


@pytest.fixture
def slow():
    """Of an engine that takes 100 ms a step."""
    engine = FakeEngine(step_s=0.1)
    with running(engine) as server:
        yield engine, server


@pytest.mark.parametrize("sent, status", [
    (b"GET / HTTP/1.1\r\nHost: local", 408),
    (b"", 408),
    (request(BODY[:5], length=len(BODY)), 408),
    (b"GET / HTTP/1.1\r\nX: " + b"a" * 4000, 431),
    (b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 1000 + b"\r\n", 431),
    (b"GET /" + b"a" * 4000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431),
    (request(b"a" * 3000), 413),
    (request(b"", length=10**12), 413),
    (request(BODY, more="Transfer-Encoding: chunked\r\n"), 400),
    (request(BODY, more="Content-Length: 3\r\n"), 400),
    (request(BODY, length=-1), 400),
    (b"\x16\x03\x01\x02\x00\x01\x00", 400),
    (b"CONNECT localhost:22 HTTP/1.1\r\nHost: localhost\r\n\r\nSSH", 405),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: a\r\nX: a\x00b\r\n\r\n", 400),
])  # fmt: skip
def test_requests_that_end_their_connection(small, short, sent, status):
    server = short if status == 408 else small
    with connect(server) as connection:
        connection.sendall(sent)
        answer = read_all(connection)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert json.loads(body)["error"]["message"]
    assert server.http.get("/ready").status_code == 200


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens?beta=true"])
@pytest.mark.parametrize("more, status, kind", [
    ("X: a", 408, "timeout_error"),
    ("X: " + "a" * 4000, 431, "invalid_request_error"),
    ("Content-Length: -1\r\n", 400, "invalid_request_error"),
])  # fmt: skip
def test_requests_that_end_their_connection_are_refused_in_the_shape_of_their_path(
    small, short, path, more, status, kind
):
    with connect(short if status == 408 else small) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 9\r\n{more}".encode())
        answer, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    refusal = json.loads(body)
    assert (refusal["type"], refusal["error"]["type"]) == ("error", kind)


@pytest.mark.parametrize("asked", [
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n",
    b"Connection: keep-alive\r\nConnection: upgrade\r\nUpgrade: websocket\r\n",
])  # fmt: skip
def test_a_request_for_another_protocol_is_answered_in_this_one(server, asked):
    """Body and all, however it is cut, as are those before and behind it."""
    ask = request(json.dumps({"prompt": "a", "max_tokens": 1}).encode())
    upgrade = ask.replace(b"Host", asked + b"Host")
    with connect(server) as connection:
        for cuts in ([], [40, 200], [len(upgrade) - 3], [len(upgrade) + 30]):
            sent = upgrade + ask + upgrade
            for start, end in itertools.pairwise([0, *cuts, len(sent)]):
                connection.sendall(sent[start:end])
                time.sleep(0.01)
            answers = b""
            while answers.count(b'"usage"') < 3:
                part = connection.recv(65536)
                assert part, answers
                answers += part
            assert answers.count(b"HTTP/1.1 200") == 3 and b"upgrade" not in answers.lower()


@pytest.mark.parametrize("more, status", [("", 413), ("Connection: close\r\n", 404)])
def test_who_sends_all_before_reading_gets_the_answer(small, more, status):
    """Though it is there long before: a reset would take it away."""
    sent = request(b"a" * 25_000, more=more)
    if status == 404:
        sent = sent.replace(b"/v1/completions", b"/no")
    with connect(small) as connection:
        connection.sendall(sent[:300])
        wait_until(lambda: connection.recv(9, socket.MSG_PEEK))
        for n in range(300, len(sent), 1000):
            connection.sendall(sent[n : n + 1000])
            time.sleep(0.001)
        assert read_all(connection).startswith(b"HTTP/1.1 %d " % status)
    with connect(small) as connection, pytest.raises(OSError):  # but not for ever
        connection.sendall(request(b"", length=10**12))
        while True:
            connection.sendall(b"a" * 10_000)


def test_bodies_in_chunks_have_the_same_limits(small):
    how = {"content-type": "application/json"}

    def body(size):
        yield b'{"max_tokens": 1, "prompt": "a"'
        yield b" " * size
        yield b"}"

    assert small.http.post("/v1/completions", content=body(9), headers=how).status_code == 200
    assert small.http.post("/v1/completions", content=body(3000), headers=how).status_code == 413


@pytest.mark.parametrize("trailers", [b"X: a\r\n" * 1000, b"X: " + b"a" * 4000])
def test_trailers_have_the_limit_of_heads(small, trailers):
    with connect(small) as connection:
        head, _, body = request(BODY, more="Transfer-Encoding: chunked\r\n").partition(b"\r\n\r\n")
        head = b"\r\n".join(line for line in head.split(b"\r\n") if b"Length" not in line)
        connection.sendall(head + b"\r\n\r\n%x\r\n" % len(body) + body + b"\r\n")
        time.sleep(0.1)
        connection.sendall(b"0\r\n" + trailers)
        assert read_all(connection).startswith(b"HTTP/1.1 431 ")


def test_trailers_are_no_headers():
    with running(keys=Keys(["a" * 16])) as server, connect(server) as connection:
        chunked = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        own = b"Authorization: Bearer " + b"a" * 16
        connection.sendall(chunked + b"\r\n0\r\n" + own + b"\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("more", [b"a", b"\r\n"])
def test_what_follows_an_answer_does_not_keep_the_connection(short, more):
    with connect(short) as connection:
        length = b"Content-Length: 100\r\n" * (more == b"a")
        connection.sendall(b"POST /no HTTP/1.1\r\nHost: localhost\r\n" + length + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 404 ")
        connection.sendall(more)
        connection.settimeout(3)
        while connection.recv(65536):
            pass


@pytest.mark.parametrize("more", [
    b"GET / HTTP/1.1\r\nHost: local", b"\x16\x03", b"GET / HTTP/1.1\r\nX: " + b"a" * 4000,
    b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 1000 + b"\r\n",
])  # fmt: skip
def test_a_bad_request_is_refused_behind_the_answers_before_it(more, caplog):
    """Whether it comes with them or while they are streamed, and nothing behind it is served."""
    status = 408 if more.endswith(b"local") else 400 if more == b"\x16\x03" else 431
    limits = Limits(head_bytes=3000, head_s=0.3)
    with running(FakeEngine(step_s=0.01), limits) as server:
        for early in (request(SHORT) * 2, b""):
            with connect(server) as connection:
                connection.sendall(early + request(SHORT) + more * bool(early))
                answer = b"" if early else connection.recv(65536)
                if not early:
                    connection.sendall(more)
                if status != 408:
                    connection.sendall(request(SHORT))
                answer += read_all(connection)
                host, port = connection.getsockname()
            *served, refused = answer.split(b"HTTP/1.1 ")[1:]
            assert len(served) == (3 if early else 1), answer
            assert all(each.startswith(b"200") and b"[DONE]" in each for each in served)
            assert refused.startswith(b"%d " % status) and b"connection: close" in refused
            assert (f"{host}:{port}: {status}, " in caplog.text) is (status != 408)


def test_a_connection_serves_one_request_after_the_other(server):
    ask = request(json.dumps({"prompt": "a", "max_tokens": 1}).encode())
    with connect(server) as connection:
        connection.sendall(ask * 20)
        answers = b""
        while answers.count(b"HTTP/1.1 200") < 20:
            part = connection.recv(65536)
            assert part, answers
            answers += part


def test_a_failure_leaves_the_connection_to_the_next_request(server, monkeypatch, caplog):
    monkeypatch.setattr(server.service.metrics, "text", lambda: 1 / 0)
    with connect(server) as connection:
        for _ in range(2):
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}}"):
                part = connection.recv(65536)
                assert part, answer
                answer += part
            assert answer.startswith(b"HTTP/1.1 500") and b"the server failed" in answer
            id = re.search(rb"x-request-id: (\w+)", answer)[1].decode()
            line = f"request {id}: 500 internal_error: ZeroDivisionError: division by zero ("
            assert caplog.messages[-1].startswith(line), caplog.text
    assert "Traceback" not in caplog.text and len(caplog.messages) == 2
    caplog.set_level("DEBUG", "inference.server.failures")
    assert server.http.get("/metrics").status_code == 500 and "Traceback" in caplog.text


@pytest.mark.parametrize("body", [BODY, STREAM])
def test_a_client_that_disconnects_frees_the_engine_within_a_step(slow, body):
    engine, server = slow
    with connect(server) as connection:
        connection.sendall(request(body))
        wait_until(lambda: engine.num_steps > 1)
        if body is STREAM:
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        engine.gate.clear()
    wait_until(lambda: not server.service.client.num_sequences)
    before = engine.num_steps
    engine.gate.set()
    wait_until(lambda: engine.aborted)
    assert engine.num_steps - before <= 1 and not engine.running  # the step that was to come
    counted = 'ridgeline:client_disconnects_total{model_name="fake"} 1.0'
    wait_until(lambda: counted in server.http.get("/metrics").text)


def test_a_client_that_disconnects_takes_all_answers_along(slow):
    engine, server = slow
    with connect(server) as connection:
        many = {"prompt": ["a", "b"], "n": 2, "max_tokens": 400, "stream": True}
        connection.sendall(request(json.dumps(many).encode()))
        wait_until(lambda: engine.num_steps > 1)
    wait_until(lambda: not engine.running)
    assert len(engine.aborted) == 2


def test_a_stream_in_which_nothing_happens_is_kept_alive():
    """And an answer that takes too long ends: as an event once the stream has begun."""
    engine, limits = FakeEngine(step_s=0.25), Limits(request_s=1.5, idle_s=0.1)
    with ThreadPoolExecutor(1) as threads, running(engine, limits) as server:
        with connect(server) as connection:
            connection.sendall(request(STREAM, more="Connection: close\r\n"))
            asked = {"prompt": "a", "max_tokens": 400}
            whole = threads.submit(server.post, "/v1/completions", **asked)
            answer = read_all(connection)
        assert b": keep-alive\n\n" in answer and b'"code":"timeout"' in answer
        assert answer.rstrip(b"\r\n0").endswith(b"data: [DONE]")
        late = whole.result(120)
        assert late.status_code == 408 and late.json()["error"]["type"] == "timeout_error"
        wait_until(lambda: not engine.running)


def test_who_does_not_read_is_disconnected():
    """And its request ended, while others are served."""
    engine = FakeEngine(step_s=0.01)
    with running(engine, Limits(stall_s=0.3)) as server, socket.socket() as connection:
        for listening in server.server.servers[0].sockets:  # whose connections inherit it
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", server.port))
        many = {"prompt": ["a" * 100] * 5, "n": MAX_SEQS, "max_tokens": 400, "logprobs": 20}
        connection.sendall(request(json.dumps(many | {"stream": True}).encode()))
        wait_until(lambda: engine.running)
        wait_until(lambda: engine.aborted)
        wait_until(lambda: not engine.running and not server.service.client.num_sequences)
        assert server.post("/v1/completions", prompt="a", max_tokens=3).status_code == 200
        stalls = 'ridgeline:stream_stalls_total{model_name="fake"} 1.0\n'
        assert stalls in server.http.get("/metrics").text
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            answer = read_all(connection)
        assert b"[DONE]" not in answer


def test_requests_beyond_the_limit_are_refused_in_the_same_shape():
    with running(FakeEngine(step_s=0.05), Limits(connections=2)) as server:
        with connect(server) as first, connect(server) as second:
            for connection in (first, second):
                connection.sendall(request(STREAM))
                assert connection.recv(65536).startswith(b"HTTP/1.1 200")
            refused = server.post("/v1/completions", prompt="a")
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "unavailable"
            for path in ("/health", "/ready"):
                assert server.http.get(path).status_code == 200
        # The answers would take 20 s: nobody waits for their end.
        wait_until(lambda: server.post("/v1/completions", prompt="a").status_code == 200, 10)


@pytest.mark.parametrize("path, asked", [
    ("/v1/completions", {"prompt": "ab", "echo": True, "logprobs": 1}),
    ("/v1/completions", {"prompt": "ab", "prompt_logprobs": 1}),
    ("/v1/chat/completions", {"messages": ASKED, "prompt_logprobs": 1}),
])  # fmt: skip
def test_all_that_a_request_asks_for_has_one_deadline(path, asked):
    # There is time for one step, and nearly for two.
    with running(FakeEngine(step_s=1.3), Limits(request_s=2.55)) as server:
        server.post("/tokenize", messages=ASKED)  # starts what renders templates
        generates = {name: asked[name] for name in ("prompt", "messages") if name in asked}
        assert server.post(path, **generates, max_tokens=1).status_code == 200
        assert server.post(path, **asked, max_tokens=1).status_code == 408
