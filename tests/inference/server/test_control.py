"""What controls the engine over HTTP: who may, pauses, sleep, other weights, restarts."""

import contextlib
import json
import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from configs.errors import InputError
from inference.server.client.launch import Thread
from inference.server.web.access import Keys
from inference.server.web.operations import CONTROL
from tests.inference.server.fake_engine import MAX_SEQS, FakeEngine, head, reply
from tests.inference.server.running import running, wait_until

TEXT, UPDATE = "/v1/completions", "/update_weights"
KEY, CONTROLS = "key-0123456789abcdef", "control-0123456789ab"
AS_CONTROL = {"authorization": f"Bearer {CONTROLS}"}
ASKED = {"temperature": 0, "return_token_ids": True}
PATHS = [(op.path, op.method) for op in CONTROL]


@contextlib.contextmanager
def controlled(engine=None):
    with running(engine, control_keys=Keys([CONTROLS])) as server:
        yield server


class Bounded(FakeEngine):
    """Begins no step from `most` on: what a test does meanwhile comes before the answers end."""

    most = math.inf

    def slack_s(self):
        return 0.01 if self.num_steps >= self.most else 0.0

    def halt_after(self, num_steps: int) -> None:
        self.most = self.num_steps + num_steps

    def go_on(self) -> None:
        self.most = math.inf


@pytest.fixture(scope="module")
def bounded():
    return Bounded()


@pytest.fixture(scope="module")
def steered(bounded):
    """Its server, which each test leaves awake and without requests."""
    with controlled(bounded) as server:
        yield server
        assert not bounded.running
        status = control(server, "/is_sleeping")
        assert not (status["is_sleeping"] or status["is_paused"])


def version_of(server) -> int:
    return control(server, "/is_sleeping")["weight_version"]


def control(server, path, status=200, /, **body):
    how = {"headers": AS_CONTROL}
    if path == "/is_sleeping":
        response = server.http.get(path, **how)
    else:
        response = server.http.post(path, **how, **({"json": body} if body else {}))
    assert response.status_code == status, response.text
    if status != 200:
        message = response.json()["error"]["message"]
        assert "\n" not in message
        return message
    return response.json()


@contextlib.contextmanager
def streamed(server, path=TEXT, **asked):
    """The events of a stream as they come."""
    body = {"prompt": "a", "stream": True} | ASKED | asked
    with server.http.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        lines = (line for line in response.iter_lines() if line.startswith("data: {"))
        yield (json.loads(line.removeprefix("data: ")) for line in lines)


def versions_of(chunks) -> list[list[int]]:
    return [v for chunk in chunks for c in chunk["choices"] for v in c["weight_versions"]]


def ids_of(chunks) -> list[int]:
    return [id for chunk in chunks for c in chunk["choices"] for id in c["token_ids"]]


# --- who may --------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [None, Keys([KEY])])
def test_without_keys_of_their_own_they_do_not_exist(keys):
    with running(keys=keys) as server:
        for path, method in PATHS:
            how = {"headers": {"authorization": f"Bearer {KEY}"}}
            assert server.http.request(method, path, **how).status_code == 404
        described = server.http.get("/openapi.json", headers=how["headers"]).json()["paths"]
        assert not described.keys() & {path for path, _ in PATHS}


def test_a_key_of_their_own_opens_nothing_else():
    with running(keys=Keys([KEY]), control_keys=Keys([CONTROLS])) as server:
        for path, method in PATHS:
            for headers, status in (
                ({}, 401), ({"authorization": f"Bearer {KEY}"}, 403), ({"x-api-key": KEY}, 403),
                ({"x-api-key": f"{CONTROLS}x"}, 401),
            ):  # fmt: skip
                response = server.http.request(method, path, headers=headers)
                assert response.status_code == status
                assert "\n" not in response.json()["error"]["message"]
            other = "POST" if method == "GET" else "GET"
            assert server.http.request(other, path, headers=AS_CONTROL).status_code == 405
            assert server.http.request(method, f"{path}/", headers=AS_CONTROL).status_code == 401
            for end in ("%0A", "%0D", "%00", "%E2%80%A8"):  # before which a pattern's `$` may match
                for headers in ({}, {"x-api-key": KEY}, AS_CONTROL):
                    response = server.http.request(method, f"{path}{end}", headers=headers)
                    assert response.status_code == 404
        assert server.http.get("/v1/models", headers=AS_CONTROL).status_code == 401
        assert control(server, "/is_sleeping") == {
            "is_sleeping": False, "is_paused": False, "weight_version": 0,
        }  # fmt: skip
        described = server.http.get("/openapi.json", headers={"x-api-key": KEY}).json()["paths"]
        assert {path for path, _ in PATHS} <= described.keys()


def test_a_server_without_other_keys_has_them_too():
    with controlled() as server:
        assert server.http.post("/pause").status_code == 401
        assert server.post(TEXT, prompt="a", max_tokens=1).status_code == 200


# --- what is refused ------------------------------------------------------------------------------


def test_bad_input_is_one_line_and_changes_nothing(steered):
    server, before = steered, control(steered, "/is_sleeping")
    for path, status, message, body in (
        ("/resume", 409, "is not paused", {}),
        ("/wake_up", 409, "does not sleep", {}),
        ("/wake_up?path=step1", 409, "does not sleep", {}),
        ("/sleep?level=3", 400, "level", {}),
        ("/sleep?level=0", 400, "level", {}),
        ("/sleep?level=deep", 400, "level", {}),
        ("/sleep?tags=weights", 400, "tags", {}),
        ("/pause?mode=wait", 400, "mode is one of abort, keep", {}),
        (UPDATE, 400, "path is required", {"weight_version": 3}),
        (UPDATE, 400, "path", {"path": ""}),
        (UPDATE, 400, "path", {"path": 7}),
        (UPDATE, 400, "weight_version", {"path": "step1", "weight_version": 0}),
        (UPDATE, 400, "is another model than fake", {"path": "other"}),
        (UPDATE, 400, "could not be read: Input/output error", {"path": "broken"}),
    ):
        assert message in control(server, path, status, **body)
        assert control(server, "/is_sleeping") == before
    version = version_of(server) + 5
    named = {"weight_version": version}
    assert control(server, UPDATE, path="step1", **named)["weight_version"] == version
    assert f"must be above {version}" in control(server, UPDATE, 400, path="step2", **named)
    control(server, "/sleep")
    for path, message, body in (
        ("/sleep", "sleeps already, at level 1", {}),
        (UPDATE, "wakes it with other weights", {"path": "step2"}),
    ):
        assert message in control(server, path, 409, **body)
    assert "goes with a path" in control(server, "/wake_up?weight_version=9", 400)
    assert "is another model" in control(server, "/wake_up?path=other", 400)
    status = {"is_sleeping": True, "is_paused": False} | named
    assert control(server, "/is_sleeping") == status
    assert control(server, "/wake_up") == status | {"is_sleeping": False}
    assert server.post(TEXT, prompt="a", max_tokens=3).status_code == 200


# --- pauses ---------------------------------------------------------------------------------------


def test_a_pause_keeps_answers_where_they_are(bounded, steered):
    server, client = steered, steered.service.client
    bounded.halt_after(50)
    with ThreadPoolExecutor() as pool, streamed(server, max_tokens=100) as chunks:
        before = [next(chunks) for _ in range(3)]
        assert control(server, "/pause?mode=keep")["is_paused"]
        control(server, "/pause?mode=keep")  # once more is no error
        bounded.go_on()
        num_steps = bounded.num_steps
        late = pool.submit(server.post, TEXT, prompt="b", max_tokens=5)
        wait_until(lambda: client.num_sequences == 2)
        scored = pool.submit(server.post, TEXT, prompt="ab", max_tokens=0, echo=True, logprobs=1)
        wait_until(lambda: client.num_sequences == 3)
        assert server.http.get("/ready").status_code == 200
        assert bounded.num_steps == num_steps and not (late.done() or scored.done())
        assert not control(server, "/resume")["is_paused"]
        assert ids_of([*before, *chunks]) == reply(100)
    assert late.result().json()["choices"][0]["finish_reason"] == "length"
    assert scored.result().json()["choices"][0]["logprobs"]["tokens"] == ["a", "b"]


CHAT = {"messages": [{"role": "user", "content": "a"}]}
ABORTED = [
    (TEXT, {"prompt": "a", "n": 2}, lambda body: body["choices"][1]["finish_reason"] == "abort"),
    ("/v1/chat/completions", CHAT, lambda body: body["choices"][0]["finish_reason"] == "abort"),
    ("/v1/responses", {"input": "a"}, lambda body: body["status"] == "incomplete" and
     body["incomplete_details"] == {"reason": "abort"}),
    ("/v1/messages", CHAT, lambda body: body["stop_reason"] == "pause_turn"),
    ("/infill", {"input_prefix": "a", "input_suffix": "b"}, lambda b: b["stop_type"] == "limit"),
]  # fmt: skip


def test_a_pause_ends_answers_and_others_wait(bounded, steered):
    server = steered
    with ThreadPoolExecutor() as pool:
        for path, body, is_aborted in ABORTED:
            bounded.halt_after(50)
            limit = {"max_output_tokens" if "responses" in path else "max_tokens": 100}
            asked = pool.submit(server.http.post, path, json=body | limit | {"temperature": 0})
            wait_until(lambda: bounded.running and bounded.running[0].num_told > 3)
            control(server, "/pause")
            bounded.go_on()
            assert is_aborted(asked.result().json())
            late = pool.submit(server.post, TEXT, prompt="b", max_tokens=5)
            wait_until(lambda: server.service.client.num_sequences == 1)
            control(server, "/resume")
            assert late.result().json()["choices"][0]["finish_reason"] == "length"
    assert not bounded.running
    bounded.halt_after(50)
    with streamed(server, max_tokens=100) as chunks:
        before = [next(chunks) for _ in range(3)]
        control(server, "/pause?mode=abort")
        bounded.go_on()
        later_chunks = list(chunks)
    control(server, "/resume")
    assert later_chunks[-1]["choices"][0]["finish_reason"] == "abort"
    ids = ids_of([*before, *later_chunks])
    assert 3 <= len(ids) <= 50 and ids == reply(len(ids))


def test_a_pause_ends_no_scores(bounded, steered):
    num_requests, ask = 2 * MAX_SEQS, {"max_tokens": 0, "echo": True, "logprobs": 1}
    with ThreadPoolExecutor(num_requests) as pool:
        bounded.halt_after(0)
        asked = [pool.submit(steered.post, TEXT, prompt="abc", **ask) for _ in range(num_requests)]
        wait_until(lambda: steered.service.client.num_sequences == num_requests)
        control(steered, "/pause")
        bounded.go_on()
        control(steered, "/resume")
        assert {each.result().status_code for each in asked} == {200}


# --- sleep ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
def test_answers_wait_while_the_engine_sleeps(bounded, steered, level):
    server, first = steered, version_of(steered)
    bounded.halt_after(50)
    with streamed(server, max_tokens=100) as chunks:
        before = [next(chunks) for _ in range(3)]
        assert control(server, f"/sleep?level={level}")["is_sleeping"]
        assert bounded.sleeps is (level == 1)
        bounded.go_on()
        for response in (server.http.get("/ready"), server.post(TEXT, prompt="a")):
            assert response.status_code == 503
            message = response.json()["error"]["message"]
            assert message == f"the engine sleeps (level {level}): POST /wake_up ends that"
        assert server.http.get("/health").status_code == 200
        last = first + level - 1
        assert control(server, "/wake_up")["weight_version"] == last
        later_chunks = list(chunks)
    assert ids_of([*before, *later_chunks]) == reply(100)
    assert {version for _, _, version in versions_of([*before, *later_chunks])} == {first, last}


def test_other_weights_come_with_the_wake(bounded, steered):
    first, num_read = version_of(steered), len(bounded.read)
    for level in (1, 2):
        version = first + 10 * level
        control(steered, f"/sleep?level={level}")
        woken = control(steered, f"/wake_up?path=step{level}&weight_version={version}")
        assert woken == {"is_sleeping": False, "is_paused": False, "weight_version": version}
    control(steered, "/sleep?level=2")
    assert control(steered, "/wake_up")["weight_version"] == first + 21  # the last path, once more
    assert bounded.read[num_read:] == ["step1", "step2", "step2"]


# --- weights --------------------------------------------------------------------------------------


def test_weights_change_beside_streams_and_each_token_names_its_own(bounded, steered):
    def read():
        with streamed(steered, max_tokens=200) as chunks:
            return list(chunks)

    first = version_of(steered)
    with ThreadPoolExecutor(9) as pool:
        bounded.halt_after(60)
        reading = [pool.submit(read) for _ in range(8)]
        for n in range(3):
            wait_until(lambda: bounded.num_steps > bounded.most - 30)
            bounded.may_read.clear()
            update = pool.submit(control, steered, UPDATE, path=f"step{n}")
            wait_until(lambda: bounded.num_steps >= bounded.most)  # beside the reading
            assert not update.done()
            bounded.may_read.set()
            assert update.result()["weight_version"] == first + n + 1
            bounded.halt_after(60)
        bounded.go_on()
        streams = [each.result() for each in reading]
    whole = steered.post(TEXT, prompt="a", max_tokens=3, return_token_ids=True).json()
    assert whole["choices"][0]["weight_versions"] == [[0, 3, first + 3]]
    seen = set()
    for chunks in streams:
        assert ids_of(chunks) == reply(200)
        ranges = versions_of(chunks)
        assert [(begin, end) for begin, end, _ in ranges] == [(n, n + 1) for n in range(200)]
        versions = [version for _, _, version in ranges]
        assert versions == sorted(versions)
        seen |= set(versions)
    assert seen == {first, first + 1, first + 2, first + 3}


BODIES = [
    (TEXT, {"prompt": [97]}, lambda body: body["choices"][0], [97]),
    ("/v1/chat/completions", CHAT | {"input_ids": [98, 99]}, lambda body: body["choices"][0] |
     {"prompt_token_ids": body["prompt_token_ids"]}, [98, 99]),
    ("/v1/responses", {"input": "a", "input_ids": [98, 99]}, lambda body: body, [98, 99]),
    ("/v1/messages", CHAT | {"input_ids": [98, 99]}, lambda body: body, [98, 99]),
]  # fmt: skip


@pytest.mark.parametrize("path, body, shown, prompt", BODIES, ids=[each[0] for each in BODIES])
def test_token_ids_go_in_and_come_out_everywhere(engine, server, path, body, shown, prompt):
    limit = {"max_output_tokens" if "responses" in path else "max_tokens": 6}
    asked = body | limit | {"temperature": 0}
    whole = shown(server.http.post(path, json=asked | {"return_token_ids": True}).json())
    assert engine.prompts[-1] == prompt == whole["prompt_token_ids"]
    assert (whole["token_ids"], whole["weight_versions"]) == (reply(6), [[0, 6, 0]])
    without = server.http.post(path, json=asked).text
    assert "weight_versions" not in without and '"prompt_token_ids":[' not in without
    wrong = server.http.post(path, json=asked | {"input_ids": [98, 10**6]})
    assert wrong.status_code == 400 and wrong.json()["error"]["message"].startswith("input_ids")


def test_streams_end_with_token_ids(server):
    for path, body, name in (
        ("/v1/responses", {"input": "a", "max_output_tokens": 6}, "response"),
        ("/v1/messages", CHAT | {"max_tokens": 6}, ""),
    ):
        asked = body | ASKED | {"stream": True}
        lines = server.http.post(path, json=asked).text.splitlines()
        data = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        (last,) = [each for each in data if "token_ids" in each.get(name, each)]
        last = last.get(name, last)
        assert (last["token_ids"], last["weight_versions"]) == (reply(6), [[0, 6, 0]])
        assert last["prompt_token_ids"]
    gap = {"input_prefix": "a", "input_suffix": "b", "max_tokens": 6, "temperature": 0}
    response = server.http.post("/infill", json=gap | {"stream": True}).text
    parts = [json.loads(line[6:]) for line in response.splitlines() if line.startswith("data: ")]
    assert [id for part in parts for id in part["tokens"]] == reply(6)
    ranges = [(begin, end) for part in parts for begin, end, _ in part["weight_versions"]]
    assert ranges[0][0] == 0 and ranges[-1][1] == 6
    whole = server.http.post("/infill", json=gap | {"return_token_ids": True}).json()
    assert (whole["tokens"], whole["weight_versions"]) == (reply(6), [[0, 6, 0]])


# --- after a restart ------------------------------------------------------------------------------


class Mortal(Bounded):
    """Ends as soon as it should."""

    is_to_end = False

    def heartbeat(self):
        if self.is_to_end:
            raise RuntimeError("it ends")
        return super().heartbeat()


@contextlib.contextmanager
def successive(first, second):
    """A server whose second engine comes when the first ends, which happens before its answers."""
    coming = iter([first, second])
    first.halt_after(50)
    with controlled(Thread(lambda: next(coming))) as server:
        yield server


def test_a_restarted_engine_has_the_weights_of_the_last():
    first, second = Mortal(), Mortal()
    with successive(first, second) as server, streamed(server, max_tokens=100) as chunks:
        control(server, UPDATE, path="step1", weight_version=7)
        before = [next(chunks) for _ in range(3)]
        first.is_to_end = True
        wait_until(lambda: second.weight_version == 7)
        later_chunks = list(chunks)
        assert second.read == ["step1"]
    assert ids_of([*before, *later_chunks]) == reply(100)
    assert later_chunks[-1]["choices"][0]["weight_versions"] == [[99, 100, 7]]


def test_a_restarted_engine_is_paused_and_sleeps_as_the_last():
    first, second = Mortal(), Mortal()
    with successive(first, second) as server, streamed(server, max_tokens=100) as chunks:
        before = [next(chunks) for _ in range(3)]
        control(server, "/pause?mode=keep")
        control(server, "/sleep")
        first.is_to_end = True
        wait_until(lambda: server.service.client.num_restarts == 1)
        wait_until(lambda: server.http.get("/health").json()["status"] == "ready")
        status = {"is_sleeping": True, "is_paused": True, "weight_version": 0}
        assert control(server, "/is_sleeping") == status
        wait_until(lambda: second.sleeps)
        assert not second.running
        control(server, "/wake_up")
        assert not second.num_steps
        control(server, "/resume")
        later_chunks = list(chunks)
    assert ids_of([*before, *later_chunks]) == reply(100)


def test_weights_that_have_gone_hold_requests_until_others_come():
    class Poor(Mortal):
        def read_weights(self, path):
            if path == "step1":
                raise InputError("step1 is gone")
            return super().read_weights(path)

    first, second = Mortal(), Poor()
    with successive(first, second) as server, streamed(server, max_tokens=100) as chunks:
        control(server, UPDATE, path="step1")
        before = [next(chunks) for _ in range(3)]
        first.is_to_end = True
        expected = "the weights of version 1 cannot be read again: step1 is gone; POST "
        wait_until(lambda: expected in server.http.get("/ready").text)
        assert server.post(TEXT, prompt="a").status_code == 503 and not second.num_steps
        answer = control(server, UPDATE, 400, path="step2", weight_version=1)
        assert "weight_version must be above 1, not 1" in answer
        assert control(server, UPDATE, path="step2")["weight_version"] == 2
        later_chunks = list(chunks)
        server.wait_ready()
    assert ids_of([*before, *later_chunks]) == reply(100)


@pytest.mark.parametrize("path", ["/sleep", "/wake_up"])
def test_memory_that_is_not_there_is_one_line(path):
    class Full(FakeEngine):
        def sleep(self, keeps_weights: bool) -> None:
            if path == "/sleep":
                raise RuntimeError("RESOURCE_EXHAUSTED: 3 GB")
            super().sleep(keeps_weights)

        def wake(self, new, version) -> None:
            raise RuntimeError("RESOURCE_EXHAUSTED: 3 GB")

    with controlled(Full()) as server:
        if path == "/wake_up":
            control(server, "/sleep")
        assert "RESOURCE_EXHAUSTED: 3 GB" in control(server, path, 400)
        is_sleeping = control(server, "/is_sleeping")["is_sleeping"]
        assert is_sleeping == (path == "/wake_up") and not server.service.client.num_restarts


def test_a_head_that_stays_keeps_its_weights():
    with controlled(FakeEngine(classifier=head("no", "yes"))) as server:
        why = "the weights of a model that labels or scores texts stay"
        assert why in control(server, UPDATE, 400, path="step1")


def test_an_update_that_the_engine_ends_in_changes_nothing():
    first, second = Mortal(), Mortal()
    with successive(first, second) as server, ThreadPoolExecutor() as pool:
        first.may_read.clear()
        update = pool.submit(control, server, UPDATE, 503, path="step1")
        wait_until(lambda: server.service.client.control._answers)
        first.is_to_end = True
        assert "the engine ended, and nothing was changed" in update.result()
        first.may_read.set()
        wait_until(lambda: server.service.client.num_restarts)
        server.wait_ready()
        assert control(server, "/is_sleeping")["weight_version"] == 0
        assert server.post(TEXT, prompt="a", max_tokens=1).status_code == 200
    assert not second.read
