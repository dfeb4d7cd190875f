"""Requests through a gateway: as without one, and when replicas go."""

import asyncio
import dataclasses
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families

from inference.server.replicas.forwarded import ReplicaLost
from inference.server.service import Limits
from inference.server.web.access import Keys
from tests.inference.server import events
from tests.inference.server.fake_engine import HANGS, MAX_SEQS, REFUSED, FakeEngine, reply
from tests.inference.server.replicas.fleet import running
from tests.inference.server.running import wait_until
from tests.inference.server.test_connections import connect, request

RETRIES, LOST = "ridgeline:replica_retries_total", "ridgeline:replica_lost_streams_total"
LONG = 60
TEXT = bytes(reply(LONG)).decode(errors="replace")
GAP = {"input_prefix": "ab", "input_suffix": "cd"}
KEYS = ["first-key-of-two", "other-key-of-two"]


def text_of(response) -> str:
    assert response.status_code == 200, response.text
    if not response.headers["content-type"].startswith("text/event-stream"):
        return response.json()["choices"][0]["text"]
    return "".join(choice["text"] for choice in events.choices(events.read(response.text)))


@pytest.fixture(scope="module")
def pair():
    with running(FakeEngine(), FakeEngine()) as one:
        yield one


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_those_of_a_replica(pair, stream):
    response = pair.post(prompt="a", max_tokens=LONG, stream=stream, nonsense=1)
    assert text_of(response) == TEXT
    assert response.headers["x-ignored-params"] == "nonsense"
    assert len(response.headers.get_list("x-request-id")) == 1


def response_to(one, **asked) -> list[str]:
    """Types of the events by which an answer is told, and a line of any other kind as it is."""
    lines = one.post("/v1/responses", input="a", stream=True, **asked).text.splitlines()
    plain = 'data: {"type":"response.'
    return [line.removeprefix("event: ") for line in lines if line and not line.startswith(plain)]


@pytest.mark.parametrize("most, last", [(6, "response.incomplete"), (None, "response.completed")])
def test_a_response_ends_with_its_last_event(pair, most, last):
    form = {"format": {"type": "json_object"}}
    told = response_to(pair, max_output_tokens=most, text=None if most else form)
    assert told[0] == "response.created" and told[-1] == last
    assert all(each.startswith("response.") for each in told)


def test_a_response_that_is_cut_ends_with_an_error():
    with running(FakeEngine(step_s=0.02), FakeEngine()) as one:
        asked = {"input": "a", "max_output_tokens": 400, "stream": True}
        with one.http.stream("POST", "/v1/responses", json=asked) as response:
            lines = response.iter_lines()
            assert next(lines) == "event: response.created"
            one.lose(0)
            *_, error, last = [line for line in lines if line]
        assert '"replica_lost"' in error and last == "data: [DONE]" and one.metric(LOST) == 1


@pytest.mark.parametrize("tokens", [1, 6])
def test_a_message_ends_with_its_last_event(pair, tokens):
    asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": tokens, "stream": True}
    lines = pair.http.post("/v1/messages", json=asked).text.splitlines()
    assert lines[0] == "event: message_start" and lines[-3] == "event: message_stop"
    assert pair.metric(LOST) == 0


def test_a_message_that_is_cut_ends_with_an_error():
    with running(FakeEngine(step_s=0.02), FakeEngine()) as one:
        asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 400, "stream": True}
        with one.http.stream("POST", "/v1/messages", json=asked) as response:
            lines = response.iter_lines()
            assert next(lines) == "event: message_start"
            one.lose(0)
            *_, name, error = [line for line in lines if line]
        assert name == "event: error" and one.metric(LOST) == 1
        assert '"api_error"' in error and response.headers["request-id"] in error
        asked = {"messages": [], "max_tokens": 1}
        assert one.http.post("/v1/messages", json=asked).json()["type"] == "error"
        broken = {"content": b"{}", "headers": {"content-type": "text/plain"}}
        assert one.http.post("/v1/messages", **broken).json()["type"] == "error"


def test_an_infill_that_is_cut_ends_with_an_error():
    with running(FakeEngine(step_s=0.02), FakeEngine()) as one:
        asked = GAP | {"n_predict": 400, "stream": True}
        with one.http.stream("POST", "/infill", json=asked) as response:
            lines = response.iter_lines()
            assert '"stop":false,' in next(lines)
            one.lose(0)
            *_, error, last = [line for line in lines if line]
        assert '"replica_lost"' in error and last == "data: [DONE]" and one.metric(LOST) == 1


def test_a_stream_comes_event_by_event():
    with running(FakeEngine(step_s=0.02)) as one:
        asked = {"prompt": "a", "max_tokens": 20, "temperature": 0, "stream": True}
        with one.http.stream("POST", "/v1/completions", json=asked) as response:
            chunks = [chunk for chunk in response.iter_raw() if chunk]
    assert len(chunks) > 10


def test_its_health_says_what_it_does(pair):
    gateway, replicas = pair.gateway, pair.gateway.replicas
    try:
        assert pair.http.get("/health").json() == {"status": "ready"}
        gateway.replicas = None
        response = pair.http.get("/health")
        assert response.status_code == 200 and response.json() == {"status": "loading"}
        assert pair.http.get("/ready").status_code == 503
        gateway.is_draining = True
        assert pair.http.get("/health").json() == {"status": "draining"}
    finally:
        gateway.replicas, gateway.is_draining = replicas, False


@pytest.mark.parametrize("path", ["/v1/models", "/version", "/openapi.json", "/docs"])
def test_what_is_asked_for_without_a_body_is_passed_on(pair, path):
    assert pair.http.get(path).status_code == 200
    assert pair.http.post(path, json={}).status_code == 405


def test_what_is_nested_too_deep_is_a_bad_request(pair):
    headers = {"content-type": "application/json"}
    response = pair.http.post("/v1/completions", content=b"[" * 100_000, headers=headers)
    assert response.status_code == 400 and "message" in response.json()["error"]


@pytest.mark.parametrize("asked, status", [
    ({"content": b"{}"}, 415), ({"json": {"prompt": 1}}, 400),
    ({"json": {"prompt": [REFUSED]}}, 400),
    ({"json": {"prompt": "a", "model": "other"}}, 404), ({"json": {"prompt": "a" * 2000}}, 413),
])  # fmt: skip
def test_errors_are_passed_on(asked, status):
    with running(FakeEngine(), limits=Limits(body_bytes=1000)) as one:
        response = one.http.post("/v1/completions", **asked)
        assert response.status_code == status and "message" in response.json()["error"]
        assert one.http.get("/nothing").status_code == 404
        assert one.post(prompt="a").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_without_a_token_goes_to_another_replica(stream):
    first, second = FakeEngine(), FakeEngine()
    second.may_go_on.set()
    with running(first, second) as one, ThreadPoolExecutor() as pool:
        found = pool.submit(one.post, prompt=[HANGS], max_tokens=LONG, stream=stream)
        wait_until(lambda: first.prompts)
        one.lose(0)
        assert text_of(found.result()) == TEXT
        assert one.fleet.asked == [0, 1]
        assert one.metric(RETRIES) == 1 and one.metric(LOST) == 0


def test_a_whole_answer_is_tried_again_though_tokens_were_there():
    """Its client was told none of them."""
    first, longer = FakeEngine(step_s=0.02), bytes(reply(400)).decode(errors="replace")
    with running(first, FakeEngine()) as one, ThreadPoolExecutor() as pool:
        found = pool.submit(one.post, prompt="a", max_tokens=400)
        wait_until(lambda: first.num_steps > 5)
        one.lose(0)
        assert text_of(found.result()) == longer and one.fleet.asked == [0, 1]


def test_a_stream_that_has_begun_ends_with_an_error():
    longer = bytes(reply(400)).decode(errors="replace")
    with running(FakeEngine(step_s=0.02), FakeEngine()) as one:
        asked = {"prompt": "a", "max_tokens": 400, "temperature": 0, "stream": True}
        with one.http.stream("POST", "/v1/completions", json=asked) as response:
            lines = response.iter_lines()
            first = next(lines)
            one.lose(0)
            rest = [line for line in lines if line]
        *told, last = events.read("\n\n".join([first, *rest]) + "\n\n")
        assert last["error"]["code"] == "replica_lost" and last["error"]["type"] == "server_error"
        text = "".join(choice["text"] for choice in events.choices(told))
        assert text and longer.startswith(text) and text != longer
        assert one.fleet.asked == [0] and one.metric(LOST) == 1
        assert text_of(one.post(prompt="a", max_tokens=LONG)) == TEXT


def test_a_stream_that_is_whole_has_no_error():
    """Its replica has gone between the last event and the end of the answer."""
    with running(FakeEngine()) as one:

        async def answer(request, answer=one.fleet.answer):
            async for part in answer(request):
                yield part
            one.fleet.gone[0].set()
            raise ReplicaLost

        one.fleet.answer = answer
        assert text_of(one.post(prompt="a", max_tokens=6, stream=True)) == TEXT[:4]
        one.fleet.gone[0].clear()
        assert text_of(one.post(prompt="a", max_tokens=6)) == TEXT[:4]
        wait_until(one.fleet.gone[0].is_set)
        one.fleet.gone[0].clear()
        assert response_to(one, max_output_tokens=6)[-1] == "response.incomplete"
        one.fleet.gone[0].clear()
        told = one.post("/infill", **GAP, n_predict=6, stream=True).text
        assert told.endswith("\n\n") and '"stop":true,' in told.splitlines()[-2]
        assert one.metric(LOST) == 0


def test_what_nobody_expects_is_told_in_the_shape_of_other_errors(caplog):
    with running(FakeEngine()) as one:
        num_parts = 0

        async def answer(request, answer=one.fleet.answer):
            told = 0
            async for part in answer(request):
                if told == num_parts:
                    raise ValueError("odd")
                yield part
                told += 1

        one.fleet.answer = answer
        for stream in (False, True):
            response = one.post(prompt="a", max_tokens=LONG, stream=stream)
            assert response.status_code == 500 and "odd" not in response.text
            assert response.json()["error"]["type"] == "server_error"
        num_parts = 3
        *told, last = events.read(one.post(prompt="a", max_tokens=LONG, stream=True).text)
        assert len(told) == 3 and last["error"]["type"] == "server_error"

        async def metrics():
            raise ValueError("odd")

        one.fleet.metrics = metrics
        assert one.http.get("/metrics").json()["error"]["type"] == "server_error"


def test_a_request_that_ends_its_replicas_is_given_up():
    engines = [FakeEngine() for _ in range(4)]
    with running(*engines) as one, ThreadPoolExecutor() as pool:
        found = pool.submit(one.post, prompt=[HANGS], stream=True)
        for n, engine in enumerate(engines[:3]):
            wait_until(lambda engine=engine: engine.prompts)
            one.lose(n)
        response = found.result()
        assert response.status_code == 500 and response.headers["x-should-retry"] == "false"
        assert response.json()["error"]["code"] == "replica_lost"
        assert one.fleet.asked == [0, 1, 2] and not engines[3].prompts


def test_where_one_has_no_room_another_may_have():
    first, second = FakeEngine(step_s=0.01), FakeEngine(step_s=0.01)
    with ThreadPoolExecutor(64) as pool, running(first, second) as one:
        first.gate.clear()
        second.gate.clear()
        asked = {"max_tokens": 30, "n": 4, "temperature": 1}
        found = [pool.submit(one.post, prompt="a", **asked) for _ in range(2 * 5 * MAX_SEQS // 4)]
        clients = [service.client for service in one.fleet.services]
        wait_until(lambda: sum(each.num_sequences for each in clients) == 4 * len(found))
        full = one.post(prompt="a", **asked)
        assert full.status_code == 503 and full.headers["retry-after"] == "1"
        first.gate.set()
        second.gate.set()
        assert all(each.result().status_code == 200 for each in found)
        assert {0, 1} == {*one.fleet.asked}


def test_without_a_replica_a_request_is_not_kept_for_ever():
    with running(FakeEngine(), limits=Limits(request_s=0.2)) as one:
        one.lose(0)
        wait_until(lambda: one.http.get("/ready").status_code == 503)
        response = one.post(prompt="a")
        assert response.status_code == 503 and response.json()["error"]["code"] == "unavailable"
        assert one.http.get("/health").status_code == 200


def test_a_client_says_how_long_it_waits():
    with running(FakeEngine(step_s=0.02)) as one:
        asked = {"prompt": "a", "max_tokens": 400}
        for value, status, code in (("0.3", 408, "timeout"), ("none", 400, "invalid_value")):
            headers = {"x-request-timeout": value}
            response = one.http.post("/v1/completions", json=asked, headers=headers)
            assert response.status_code == status and response.json()["error"]["code"] == code


def test_another_replica_has_the_seconds_that_are_left():
    first, second = FakeEngine(), FakeEngine()
    second.may_go_on.set()
    with running(first, second) as one, ThreadPoolExecutor() as pool:
        found = pool.submit(one.post, prompt=[HANGS], max_tokens=LONG)
        wait_until(lambda: first.prompts)
        time.sleep(0.3)
        one.lose(0)
        assert text_of(found.result()) == TEXT
        headers = [dict(request.headers) for request in one.fleet.requests]
        left = [float(each[b"x-request-timeout"]) for each in headers]
        assert left[0] <= 600 and left[1] <= left[0] - 0.3


@pytest.mark.parametrize("stream", [False, True])
def test_no_replica_has_a_request_for_longer_than_its_client_waits(stream):
    """Whether it was lost when the time is over, or goes on as if it were not."""
    with running(FakeEngine(step_s=0.02), limits=Limits(request_s=0.3)) as one:

        async def answer(request, answer=one.fleet.answer):
            if not stream:
                await asyncio.sleep(0.4)
                raise ReplicaLost
            headers = [(k, v) for k, v in request.headers if k != b"x-request-timeout"]
            headers.append((b"x-request-timeout", b"600"))
            one.fleet.services[0].limits = Limits()
            async for part in answer(dataclasses.replace(request, headers=tuple(headers))):
                yield part

        one.fleet.answer = answer
        response = one.post(prompt="a", max_tokens=400, stream=stream)
        told = events.read(response.text)[-1] if stream else response.json()
        assert told["error"]["code"] == "timeout" and told["error"]["type"] == "timeout_error"
        assert response.status_code == (200 if stream else 408)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(stream):
    engine = FakeEngine(step_s=0.01)
    with running(engine) as one:
        body = json.dumps({"prompt": "a", "max_tokens": 400, "stream": stream}).encode()
        with connect(one) as connection:
            connection.sendall(request(body))
            wait_until(lambda: engine.running)
            if stream:
                assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        wait_until(lambda: engine.aborted and not engine.running)
        service = one.fleet.services[0]
        wait_until(lambda: not service.client.num_sequences)
        (line,) = [
            line
            for line in service.metrics.text().decode().splitlines()
            if line.startswith("ridgeline:client_disconnects_total{")
        ]
        assert line.endswith(" 1.0")


def test_metrics_of_all_replicas_are_one_text(pair):
    pair.post(prompt="a", max_tokens=3)
    text = pair.http.get("/metrics").text
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    found = {family.name: family for family in text_string_to_metric_families(text)}
    labels = [sample.labels["replica"] for sample in found["vllm:num_requests_running"].samples]
    assert labels == ["0", "1"]
    latency = found["vllm:e2e_request_latency_seconds"]
    assert latency.type == "histogram" and {s.labels["replica"] for s in latency.samples} >= {"0"}
    ended = found["vllm:request_success"].samples
    assert sum(s.value for s in ended if s.labels["finished_reason"] == "length") >= 1


def test_a_key_is_known_to_the_replicas_by_its_name_alone():
    engine = FakeEngine()
    with running(engine, keys=Keys(KEYS)) as one:
        for key in (*KEYS, KEYS[0]):
            header = {"authorization": f"Bearer {key}"}
            response = one.http.post("/v1/completions", json={"prompt": "a" * 300}, headers=header)
            assert response.status_code == 200
        assert one.post(prompt="a").status_code == 401
        assert one.http.get("/metrics").status_code == 401
        assert one.http.get("/ready").status_code == one.http.get("/docs").status_code == 200
        salts = [params.cache_salt for params in engine.params]
        assert salts[0] == salts[2] != salts[1]
        seen = one.fleet.requests
        assert not any(key.encode() in repr(each).encode() for each in seen for key in KEYS)
        assert seen[0].prefixes == seen[2].prefixes != seen[1].prefixes


def test_while_it_drains_nothing_new_is_served():
    engine = FakeEngine(step_s=0.02)
    with running(engine) as one, ThreadPoolExecutor() as pool:
        found = pool.submit(one.post, prompt="a", max_tokens=LONG, stream=True)
        wait_until(lambda: engine.prompts)
        one.gateway.is_draining = True
        assert one.http.get("/ready").status_code == 503
        refused = one.post(prompt="a")
        assert refused.status_code == 503 and "shutting down" in refused.text
        assert text_of(found.result()) == TEXT


def test_nothing_stays_behind():
    with running(FakeEngine(), FakeEngine()) as one:
        before = threading.active_count()
        for n in range(20):
            body = json.dumps({"prompt": "a", "max_tokens": 2, "stream": n % 2 == 0})
            one.http.post(
                "/v1/completions", content=body, headers={"content-type": "application/json"}
            )
        assert threading.active_count() <= before + 1
        assert not any(service.client.num_sequences for service in one.fleet.services)


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches", "/v1/files/file-x/content"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_files_and_batches_are_not_stored(pair, method, path):
    response = pair.http.request(
        method, path, **({"files": {"file": b""}} if method == "POST" else {})
    )
    assert response.status_code == 501 and response.headers["x-should-retry"] == "false"
    assert "scripts.batch --url" in response.json()["error"]["message"]
