"""From the first answer to the last: loading, draining, engines that fail."""

import contextlib
import dataclasses
import re
import threading
import time

import httpx2
import msgspec
import pytest

from configs.errors import InputError
from inference.server.client.engine_client import EngineFailed
from inference.server.client.launch import Thread
from inference.server.engine_process import loop
from inference.server.frames import Heartbeat, TextFacts
from inference.server.service import Limits, Service
from inference.server.web import report, serving
from tests.inference.server import events
from tests.inference.server.fake_engine import CRASHES, HANGS, MAX_SEQS, FakeEngine, reply
from tests.inference.server.running import running, wait_until

TEXT = "/v1/completions"


def test_while_it_loads_it_says_so():
    may_load, may_serve = threading.Event(), threading.Event()

    class Slow(FakeEngine):
        def warm_up(self):
            may_serve.wait(60)

    def load():
        may_load.wait(60)
        return Slow()

    with running(Thread(load), waits=False) as server:
        for event, state in ((may_load, "loading"), (may_serve, "warming up")):
            wait_until(lambda state=state: server.http.get("/health").json()["status"] == state)
            assert server.http.get("/health").status_code == 200
            for response in (server.http.get("/ready"), server.post(TEXT, prompt="a")):
                assert response.status_code == 503 and response.headers["retry-after"] == "1"
                assert response.json()["error"]["code"] == "unavailable"
            assert server.http.get("/metrics").status_code == 200
            listed = server.http.get("/v1/models").status_code
            assert listed == (503 if state == "loading" else 200)
            event.set()
        server.wait_ready()
        assert server.post(TEXT, prompt="a").status_code == 200


def test_a_first_signal_lets_answers_end():
    engine, found = FakeEngine(step_s=0.01), {}
    with running(engine) as server:
        engine.gate.clear()

        def ask(n):
            found[n] = server.post(TEXT, prompt="a", max_tokens=50, stream=n % 2 == 0)

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(MAX_SEQS)]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.service.client.num_sequences == MAX_SEQS)
        server.stop()
        for response in (server.http.get("/ready"), server.post(TEXT, prompt="a")):
            assert response.status_code == 503 and response.headers["retry-after"] == "1"
        assert server.http.get("/health").status_code == 200
        engine.gate.set()
        for thread in threads:
            thread.join(60)
        server.join()
    assert server.said[0] == f"SIGTERM: draining {MAX_SEQS} requests, 10 s at most"
    assert not any("cut off" in line for line in server.said)
    assert len(found) == MAX_SEQS
    for n, response in found.items():
        assert response.status_code == 200
        answer = events.read(response.text)[-1] if n % 2 == 0 else response.json()
        assert answer["choices"][0]["finish_reason"] == "length"
    assert server.error is None


def test_a_second_signal_ends_at_once():
    with running(FakeEngine(step_s=0.05)) as server:
        thread = threading.Thread(target=lambda: _ignored(server))
        thread.start()
        wait_until(lambda: server.service.client.num_sequences)
        server.stop()
        server.stop()
        server.join()
        thread.join(60)
    assert server.said[-1] == "cut off: 1 request"


def _ignored(server):
    try:
        server.post(TEXT, prompt="a", max_tokens=400)
    except Exception as error:
        return error


def test_a_request_that_ends_engines_is_found_and_no_other_is_lost():
    engines, found = [], []

    def load():
        engines.append(FakeEngine(step_s=0.01))
        return engines[-1]

    with running(Thread(load)) as server:

        def ask():
            asked = {"prompt": "a", "max_tokens": 80, "stream": True}
            found.append(events.read(server.post(TEXT, **asked).text))

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_until(lambda: engines[0].num_steps > 20)
        crash = server.post(TEXT, prompt=[CRASHES])
        assert crash.status_code == 500 and crash.headers["x-should-retry"] == "false"
        assert "/some" not in crash.text and "0x" not in crash.text
        for thread in threads:
            thread.join(60)
        assert len(engines) == 3  # the second for the request that was to blame
        for stream in found:
            text = "".join(choice["text"] for choice in events.choices(stream))
            assert text == bytes(reply(80)).decode(errors="replace")
        server.wait_ready()
        assert server.post(TEXT, prompt="a", max_tokens=3).status_code == 200
        restarts = 'ridgeline:engine_restarts_total{model_name="fake"} 2.0'
        assert restarts in server.http.get("/metrics").text


def test_ends_that_a_request_caused_are_none_of_the_five():
    engines = []

    def load():
        engines.append(FakeEngine())
        return engines[-1]

    with running(Thread(load)) as server:
        for _ in range(4):  # or it is the engine that is to blame, and not they
            assert server.post(TEXT, prompt=[CRASHES]).status_code == 500
            server.wait_ready()
            assert server.post(TEXT, prompt="a", max_tokens=3).status_code == 200
        assert len(engines) == 1 + 4 * 2


class Failing(Thread):
    """Whose first engines fail at their first step, and end with these statuses."""

    def __init__(self, *statuses):
        self.engines = []
        self._statuses = statuses
        super().__init__(self._make)

    def _make(self):
        self.engines.append(FakeEngine())
        if len(self.engines) <= len(self._statuses):
            self.engines[-1].step = lambda: 1 / 0
        return self.engines[-1]

    async def end(self, grace_s):
        status = await super().end(grace_s)
        return self._statuses[len(self.engines) - 1] if status else 0


@pytest.mark.parametrize("statuses, status", [((1, 1), 500), ((1, -9), 200), ((-9, -9), 200)])
def test_a_request_is_not_blamed_where_somebody_killed_the_engine(statuses, status):
    launcher = Failing(*statuses)
    with running(launcher) as server:
        answer = server.post(TEXT, prompt="a", max_tokens=3)
        assert answer.status_code == status
        wait_until(lambda: len(launcher.engines) == 3)


def test_a_request_that_gets_engines_killed_does_not_end_the_server():
    launcher = Failing(*[-9] * 9)
    with running(launcher) as server:
        answer = server.post(TEXT, prompt="a", max_tokens=3)
        assert answer.status_code == 500 and answer.headers["x-should-retry"] == "false"
        server.wait_ready()
        assert len(launcher.engines) == 5


def test_requests_that_come_while_another_is_tried_wait():
    engines, may_compile, found = [], threading.Event(), {}
    may_compile.set()

    class Slow(FakeEngine):
        def prepare(self, params):
            may_compile.wait(60)

    def load():
        engines.append(Slow(step_s=0.02))
        return engines[-1]

    with running(Thread(load)) as server:

        def ask(prompt, **how):
            def post():
                found[str(prompt)] = server.post(TEXT, prompt=prompt, max_tokens=40, **how)

            threads.append(threading.Thread(target=post))
            threads[-1].start()

        threads = []
        ask("a", structured_outputs={"regex": "b{39}"})
        wait_until(lambda: engines[0].num_steps > 3)
        may_compile.clear()
        ask([CRASHES])
        wait_until(lambda: len(engines) == 2)
        server.wait_ready()
        ask("new")
        wait_until(lambda: server.service.client.num_sequences == 3)
        time.sleep(0.2)
        assert not engines[1].prompts
        may_compile.set()
        for thread in threads:
            thread.join(60)
    assert {prompt: answer.status_code for prompt, answer in found.items()} == {
        "a": 200, "new": 200, str([CRASHES]): 500,
    }  # fmt: skip
    assert len(engines) == 3 and list(b"new") not in engines[1].prompts


def test_the_other_answers_of_a_request_that_is_refused_are_ended():
    engines, adds = [], []

    class Picky(FakeEngine):
        def step(self):
            if len(engines) == 1 and self.num_steps == 3:
                raise RuntimeError
            return super().step()

        def add(self, tokens, params, output=()):
            if len(engines) == 2 and output:
                adds.append(tokens)
                if len(adds) == 2:
                    raise InputError("no more of these")
            return super().add(tokens, params, output)

    def load():
        engines.append(Picky(step_s=0.02))
        return engines[-1]

    with running(Thread(load)) as server:
        refused = server.post(TEXT, prompt="a", n=3, max_tokens=400)
        assert refused.status_code == 400 and len(adds) >= 2
        wait_until(lambda: not engines[1].running)
        assert not server.service.client.num_sequences and engines[1].aborted


def test_an_engine_that_fails_again_and_again_ends_the_server():
    with running() as server:
        for _ in range(3):
            with contextlib.suppress(httpx2.HTTPError):
                server.wait_ready()
                server.post(TEXT, prompt=[CRASHES])
        server.join()
    assert isinstance(server.error, EngineFailed)


def test_an_engine_that_cannot_be_loaded_ends_the_server():
    def load():
        raise ValueError("no such model")

    with running(Thread(load), waits=False) as server:
        server.join()
    assert isinstance(server.error, EngineFailed)


def test_a_step_that_hangs_is_seen_and_its_engine_ended():
    engines, found = [], []

    def load():
        engines.append(FakeEngine(step_s=0.02))
        return engines[-1]

    with running(Thread(load), Limits(heartbeat_s=1)) as server:
        other = threading.Thread(
            target=lambda: found.append(server.post(TEXT, prompt="a", max_tokens=90).json())
        )
        other.start()
        wait_until(lambda: engines[0].num_steps > 3)
        hangs = server.post(TEXT, prompt=[HANGS])
        assert hangs.status_code == 500 and hangs.headers["x-should-retry"] == "false"
        other.join(60)
        assert found[0]["choices"][0]["text"] == bytes(reply(90)).decode(errors="replace")
        assert len(engines) == 3  # the second for the request that was to blame
        server.wait_ready()
        for engine in engines:
            engine.may_go_on.set()


def test_an_engine_that_was_not_heard_of_is_not_ready(server, monkeypatch):
    monkeypatch.setattr(Service, "heartbeat_age_s", 31)
    for path in ("/health", "/ready"):
        assert server.http.get(path).status_code == 503


@pytest.mark.timing
def test_an_engine_that_compiles_is_not_taken_for_one_that_hangs(monkeypatch):
    monkeypatch.setattr(loop, "_HEARTBEAT_S", 0.1)

    class Compiles(FakeEngine):
        def step(self):
            self.is_compiling = self.num_steps == 0
            time.sleep(2.0 * self.is_compiling)
            return super().step()

    with running(Compiles(), Limits(heartbeat_s=1)) as server:
        assert server.post(TEXT, prompt="a", max_tokens=3).status_code == 200
        assert not server.service.client.num_restarts


def test_the_queue_is_bounded():
    engine = FakeEngine(step_s=0.02)
    with running(engine) as server:
        engine.gate.clear()
        asked = {"prompt": "a", "n": MAX_SEQS, "max_tokens": 400}
        threads = [
            threading.Thread(target=lambda: server.post(TEXT, **asked | {"max_tokens": 10}))
            for _ in range(5)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.service.client.num_sequences == 5 * MAX_SEQS)
        refused = server.post(TEXT, **asked)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        engine.gate.set()
        for thread in threads:
            thread.join(60)
        assert server.post(TEXT, prompt="a", max_tokens=1).status_code == 200
        assert 'reason="queue_full"} 1.0' in server.http.get("/metrics").text


@pytest.mark.parametrize("asked, numbers", [
    ({"prompt": ["a"] * 64}, (64, 20)), ({"prompt": ["a"] * 6, "n": 4}, (6, 4, 20)),
    ({"prompt": ["a"] * 6, "n": 1, "best_of": 4}, (6, 4, 20)),
    ({"prompt": ["aa"] * 64, "echo": True, "logprobs": 0, "max_tokens": 0}, (64, 20)),
])  # fmt: skip
def test_one_request_may_not_fill_the_queue(server, asked, numbers):
    """And never will: there is no use in another try."""
    refused = server.post(TEXT, **asked)
    assert refused.status_code == 400 and "retry-after" not in refused.headers
    error = refused.json()["error"]
    assert error["param"] == "prompt"
    assert [int(found) for found in re.findall(r"[0-9]+", error["message"])] == [*numbers]


def test_all_sequences_of_a_request_count():
    engine = FakeEngine()
    with running(engine) as server:
        engine.gate.clear()
        asked = {"prompt": "a", "best_of": 3, "n": 2, "max_tokens": 30}
        thread = threading.Thread(target=lambda: server.post(TEXT, **asked))
        thread.start()
        wait_until(lambda: server.service.client.num_sequences == 3)
        engine.gate.set()
        thread.join(60)
        assert not server.service.client.num_sequences


def test_an_answer_that_fails_is_not_asked_for_again(caplog):
    class Failing(FakeEngine):
        def step(self):
            return [dataclasses.replace(out, finish_reason="error") for out in super().step()]

    with running(Failing()) as server:
        failed = server.post(TEXT, prompt="a")
        assert failed.status_code == 500 and failed.headers["x-should-retry"] == "false"
        assert failed.json()["error"]["message"] == "the answer could not be generated"
        id = failed.headers["x-request-id"]
        line = f"request {id}: 500 model_error: the answer could not be generated"
        assert caplog.messages == [line]


def test_nothing_waits_for_the_tokenizer(monkeypatch):
    may_load, make = threading.Event(), TextFacts.tokenizer

    def slow(facts):
        may_load.wait(60)
        return make(facts)

    monkeypatch.setattr(TextFacts, "tokenizer", slow)
    with running(waits=False) as server:
        wait_until(lambda: server.http.get("/health").json()["status"] == "warming up")
        for response in (server.post(TEXT, prompt="a"), server.post("/tokenize", prompt="a")):
            assert response.status_code == 503
        may_load.set()
        server.wait_ready()
        assert server.post(TEXT, prompt="a").status_code == 200


def test_a_line_says_what_was_served(monkeypatch):
    monkeypatch.setattr(serving, "_REPORT_S", 0.2)
    with running(FakeEngine(step_s=0.01)) as server:
        wait_until(lambda: server.service.client.heartbeat.counters)
        threading.Event().wait(0.5)
        assert not server.said  # there was nothing
        server.post(TEXT, prompt="a", max_tokens=60)
        wait_until(lambda: server.said)
        names = [part.partition("=")[0] for part in server.said[0].split()]
        assert names[:5] == ["running", "waiting", "cache", "prompt_tok_s", "output_tok_s"]


def test_a_line_says_what_happened_between_two_heartbeats():
    old = Heartbeat(1, 0, 0.5, {"prompt_tokens": 100, "generated_tokens": 500, "preemptions": 2})
    counters = {"prompt_tokens": 140, "cached_tokens": 10, "generated_tokens": 520}
    now = Heartbeat(0, 1, 0.25, old.counters | counters)
    assert report.line(old, now, 10.0) == (
        "running=0 waiting=1 cache=25% prompt_tok_s=4.0 output_tok_s=2.0 cached=25%"
    )
    steps = {"decode_steps": 8, "decode_step_seconds": 0.1, "decode_step_bytes": 2e9}
    held = Heartbeat(2, 1, 0.25, old.counters | steps, 0, 1.25, 0.0625, 0.5)
    assert report.line(old, held, 10.0) == (
        "running=2 waiting=1 cache=25% prompt_tok_s=0.0 output_tok_s=0.0 step_ms=12.50 waste=6% "
        "shared=50% waited_s=1.2"
    )
    known = msgspec.structs.replace(
        held, read_bandwidth=4e10, counters=held.counters | {"predicted_decode_step_seconds": 0.08}
    )
    assert "step_ms=12.50 predicted_ms=10.00 roofline=50% waste" in report.line(old, known, 10.0)
    cached = msgspec.structs.replace(known, read_bandwidth=1.9e10)
    assert "predicted_ms=10.00 waste" in report.line(old, cached, 10.0)
    counters = {"drafts": 10, "accepted_drafts": 4, "generated_tokens": 505, "preemptions": 5}
    more = Heartbeat(0, 0, 0.0, old.counters | counters)
    assert report.line(old, more, 10.0) == (
        "running=0 waiting=0 cache=0% prompt_tok_s=0.0 output_tok_s=0.5 accepted=40% preemptions=3"
    )
