"""Who waits for whom, and who is told at once that there is no use in waiting."""

import contextlib
import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from inference.outputs import RequestOutput
from inference.request import SamplingParams
from inference.server import service
from inference.server.client.fair_queue import FairQueue
from inference.server.client.pending_request import PendingRequest
from inference.server.client.turnover import Turnover
from inference.server.service import Limits
from inference.server.web.access import Keys
from tests.inference.server.fake_engine import MAX_SEQS, FakeEngine
from tests.inference.server.running import running, wait_until
from tests.inference.server.test_connections import connect, request

TEXT = "/v1/completions"
NAMES = "greedy", "modest", "third"
KEYS = {name: name.ljust(20, "-") for name in NAMES}


def post(server, name: str, timeout: str | None = None, **asked):
    headers = {"authorization": f"Bearer {KEYS[name]}"}
    headers |= {} if timeout is None else {"x-request-timeout": timeout}
    asked = {"temperature": 0, "max_tokens": 10} | asked
    return server.http.post(TEXT, json=asked, headers=headers)


@pytest.fixture
def engine():
    return FakeEngine(step_s=0.01)


@pytest.fixture
def keyed(engine):
    with running(engine, keys=Keys(KEYS.values()), waits=False) as server:
        wait_until(lambda: server.http.get("/ready").status_code == 200)
        yield server


def asked(client: str, priority: int = 0, num_tokens: int = 1) -> PendingRequest:
    params = SamplingParams(max_new_tokens=9, priority=priority)
    return PendingRequest(lambda _: None, [1] * num_tokens, params, None, True, client)


def order(queue: FairQueue, tokens: dict[str, int]) -> str:
    """Who goes one after the other, each served so many tokens at once."""
    found = ""
    while queue:
        client = queue.pop().client
        queue.served(client, tokens.get(client, 5))
        found += client
    return found


def filled(*clients: str, num_tokens: int = 1) -> FairQueue:
    queue = FairQueue()
    for client in clients:
        queue.add(asked(client, num_tokens=num_tokens))
    return queue


def test_clients_take_turns():
    assert order(filled(*"aaaabbc"), {}) == "abcabaa"
    assert order(filled(*"aaaaabbbbb"), {"a": 10}) == "abbabbabaa"[:10]
    assert order(filled("a"), {}) == "a"


def test_one_who_comes_back_has_saved_nothing_up():
    queue = filled(*"ab")
    order(queue, {})
    for _ in range(20):
        queue.add(asked("a"))
        order(queue, {})
    for client in "aaabbb":
        queue.add(asked(client))
    assert order(queue, {})[:4] in ("abab", "baba")


def test_a_priority_goes_first_among_those_of_one_client():
    queue = filled(*"aaa")
    for client, priority in (("a", -1), ("b", 1), ("b", -1), ("a", -2)):
        queue.add(asked(client, priority))
    assert queue.num_ahead("c", 9) == queue.num_ahead("c", -9) == 2  # one turn of each other
    assert queue.num_ahead("a", -2) == 1 + 2 and queue.num_ahead("a", 0) == 5 + 2
    assert queue.num_ahead("b", 0) == 1 + 2 and queue.num_ahead("b", -2) == 0 + 1
    found = []
    while queue:
        found.append(queue.pop())
        queue.served(found[-1].client, 5)
    assert "".join(one.client for one in found) == "ababaaa"
    for client, priorities in (("a", [-2, -1, 0, 0, 0]), ("b", [-1, 1])):
        assert [one.priority for one in found if one.client == client] == priorities


def test_whoever_comes_new_begins_where_those_are_that_wait():
    queue = filled("b")
    for _ in range(50):
        queue.add(asked("a", 1))
        queue.served(queue.pop().client, 100)
    queue.add(asked("a", 1))
    for client in "bbbccc":
        queue.add(asked(client))
    assert "c" in order(queue, {})[:3]


def test_a_priority_is_told_to_the_engine_where_there_are_no_keys():
    for client, told in (("", 3), ("a", 0)):
        (add,) = asked(client, 3).messages(itertools.count(1))
        assert add.params.priority == told


def test_prompts_count_too():
    queue = filled(*"aaa", num_tokens=100)
    for _ in range(3):
        queue.add(asked("b"))
    assert order(queue, {"a": 0, "b": 0}) == "abbbaa"


@pytest.mark.parametrize("num_answer_tokens, expected", [(12, "ababab"), (9, "abbaba")])
def test_a_token_of_an_answer_counts_as_two_of_a_prompt(num_answer_tokens, expected):
    """Each of a's requests counts 20, each of b's twice its answer and 1."""
    queue = filled(*"aaa", num_tokens=20)
    for _ in range(3):
        queue.add(asked("b"))
    assert order(queue, {"a": 0, "b": num_answer_tokens}) == expected


def test_the_time_in_the_queue_is_told_as_such():
    found = []
    one = PendingRequest(found.append, [1], SamplingParams(max_new_tokens=9), None, True)
    one.since -= 5
    (add,) = one.messages(itertools.count(1))
    one.take(RequestOutput(add.id, [7], "", None, queued_s=0.25))
    assert found[0].queued_s == pytest.approx(5.25, abs=0.5)


def test_what_leaves_the_queue_is_gone():
    queue = filled(*"ab")
    (first, second) = queue
    queue.discard(first)
    assert first not in queue and second in queue and len(queue) == 1
    assert queue.pop() is second and not queue and second not in queue


def test_the_turnover_is_that_of_the_seconds_in_which_all_slots_are_taken():
    now = [0.0]
    turnover = Turnover(lambda: now[0])

    def pass_by(seconds: float, num_done: float, num_told: float | None = None) -> None:
        now[0] += seconds
        turnover.add(num_done, num_told)
        turnover.look(is_full=True)

    turnover.add(8, 8)
    turnover.look(is_full=False)
    assert turnover.wait_s(10) == 0  # there was room
    turnover.add(8, 8)
    turnover.look(is_full=True)
    assert turnover.wait_s(10) == 0
    for _ in range(40):
        pass_by(0.125, 0.125, 0.03125)
        pass_by(0, 0.125)  # what tells nothing before its end
    assert turnover.wait_s(6) == pytest.approx(3)
    assert turnover.wait_s(0) == 0 == turnover.wait_s(-3)
    assert turnover.remaining(0) == 1 and turnover.remaining(0.125) == 0.5  # they end at a quarter
    assert turnover.remaining(0.25) == 0 == turnover.remaining(1)
    turnover.look(is_full=False)
    now[0] += 1000
    assert turnover.wait_s(6) == pytest.approx(3)
    turnover.look(is_full=True)
    now[0] += 5  # in which nothing got done
    assert turnover.wait_s(6) == pytest.approx(6)
    for _ in range(1000):
        pass_by(0.1, 1)
    assert turnover.wait_s(10) == pytest.approx(1, rel=0.2)  # what was long ago counts little
    for _ in range(20):
        pass_by(100, 1)  # slower than any window
    assert turnover.wait_s(10) == pytest.approx(1000, rel=0.2)


def test_a_token_is_its_share_of_what_it_takes_to_the_end():
    params = SamplingParams(max_new_tokens=8, temperature=1, n=2)
    one = PendingRequest(lambda _: None, [1], params, None, True)
    (add,) = one.messages(itertools.count(1))
    assert one.num_left == one.num_sequences == 2 and one.progress == 0
    assert one.take(RequestOutput(add.id, [7, 7], "", None)) == (0.25, 0.25)
    assert one.num_left == 1.75 and one.progress == 0.25
    # The rest of it is not needed.
    assert one.take(RequestOutput(add.id, [7], "", "stop")) == (0.75, 0.125)
    assert one.num_left == one.num_sequences == 1 and one.progress == 0
    assert one.take(RequestOutput(add.id, [7] * 8, "", "length", index=1)) == (1, 1)
    assert one.num_left == one.num_sequences == 0


@pytest.mark.parametrize("params", [
    SamplingParams(max_new_tokens=8, temperature=1, n=1, best_of=3),
    SamplingParams(max_new_tokens=8, beam_width=3), SamplingParams(max_new_tokens=0),
])  # fmt: skip
def test_what_is_told_at_the_end_alone_has_no_progress(params):
    one = PendingRequest(lambda _: None, [1], params, None, True)
    (add,) = one.messages(itertools.count(1))
    assert one.progress is None and one.num_left == one.num_sequences
    assert one.take(RequestOutput(add.id, [7] * params.max_new_tokens, "", "length")) == (1, None)


def test_answers_that_began_together_end_together():
    """The wait is that for the first of them; where none is ahead of the others it is the most."""

    class Halting(FakeEngine):
        def step(self):
            if max(each.num_told for each in self.running) == 90:
                self.gate.clear()
            return super().step()

    engine = Halting(step_s=0.01)
    with ThreadPoolExecutor(1) as threads, running(engine) as server:
        client = server.service.client
        server.post(
            TEXT, prompt=["a"] * 3 * MAX_SEQS, max_tokens=50
        )  # from which the speed is known
        engine.gate.clear()
        many = threads.submit(server.post, TEXT, prompt=["a"] * MAX_SEQS, max_tokens=100)
        wait_until(lambda: client.num_sequences == MAX_SEQS)
        at_first = client.expected_wait_s(1)
        engine.gate.set()
        wait_until(lambda: not engine.gate.is_set())
        wait_until(lambda: client.expected_wait_s(1) < 0.3 * at_first)
        assert not many.done()
        engine.gate.set()
        assert many.result(120).status_code == 200
        assert client.expected_wait_s(1) == 0


def test_a_greedy_client_does_not_hold_up_another(keyed, engine, monkeypatch):
    """One that has a hundred requests, of which all but four wait."""
    monkeypatch.setattr(service, "QUEUED_PER_SEQ", 100)
    engine.gate.clear()
    with ThreadPoolExecutor(3) as threads:
        greedy = [threads.submit(post, keyed, "greedy", prompt=["a"] * 50) for _ in range(2)]
        wait_until(lambda: keyed.service.client.num_sequences == 100)
        mine = threads.submit(post, keyed, "modest", prompt="mine")
        wait_until(lambda: keyed.service.client.num_sequences == 101)
        engine.gate.set()
        assert mine.result(120).status_code == 200
        assert keyed.service.client.num_sequences > 60  # of the others
        assert engine.prompts.index(list(b"mine")) <= MAX_SEQS + 1  # behind what was sent before
        assert all(found.result(120).status_code == 200 for found in greedy)


def test_a_priority_overtakes_those_that_wait(engine):
    with ThreadPoolExecutor(2) as threads, running(engine) as server:
        engine.gate.clear()
        many = threads.submit(server.post, TEXT, prompt=["a"] * 4 * MAX_SEQS, max_tokens=20)
        wait_until(lambda: server.service.client.num_sequences == 4 * MAX_SEQS)
        mine = threads.submit(server.post, TEXT, prompt="mine", priority=-1, max_tokens=1)
        wait_until(lambda: server.service.client.num_sequences == 4 * MAX_SEQS + 1)
        engine.gate.set()
        assert mine.result(120).status_code == many.result(120).status_code == 200
        assert engine.prompts.index(list(b"mine")) < 3 * MAX_SEQS
        assert server.http.get("/metrics").status_code == 200


def _ended(server, body):
    with contextlib.suppress(httpx2.HTTPError):  # the server ends before it is answered
        server.post(TEXT, **body)


def test_what_waits_here_is_told_as_waiting(engine):
    with running(engine) as server:
        many = {"prompt": ["a"] * 20, "max_tokens": 120}
        threading.Thread(target=lambda: _ended(server, many), daemon=True).start()
        told = 'vllm:num_requests_waiting{model_name="fake"} 16.0'
        wait_until(lambda: told in server.http.get("/metrics").text)


def test_a_client_has_its_share_of_the_queue(keyed, engine):
    most = 5 * MAX_SEQS
    engine.gate.clear()
    with ThreadPoolExecutor(3) as threads:
        half = {"prompt": ["a"] * (most // 2), "max_tokens": 30}
        first = threads.submit(post, keyed, "greedy", **half)
        wait_until(lambda: keyed.service.client.num_sequences == most // 2)
        refused = post(keyed, "greedy", prompt="a")
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        error = refused.json()["error"]
        assert error["type"] == "rate_limit_error" and error["code"] == "rate_limit_exceeded"
        others = [
            threads.submit(post, keyed, name, prompt=["a"] * n)
            for name, n in (("modest", 6), ("third", 4))
        ]
        wait_until(lambda: keyed.service.client.num_sequences == most)
        full = post(keyed, "third", prompt="a")
        assert full.status_code == 503 and int(full.headers["retry-after"]) >= 1
        engine.gate.set()
        assert [found.result(120).status_code for found in (first, *others)] == [200] * 3
        assert post(keyed, "greedy", prompt="a").status_code == 200
        text = keyed.http.get("/metrics", headers={"authorization": f"Bearer {KEYS['third']}"}).text
        assert 'reason="key_share"} 1.0' in text and 'reason="queue_full"} 1.0' in text


@pytest.mark.parametrize("limits, timeout, reason", [
    (Limits(queue_s=0.05), None, "queue_time"), (Limits(), "0.05", "deadline"),
])  # fmt: skip
def test_who_would_wait_too_long_is_told_at_once(engine, limits, timeout, reason):
    with ThreadPoolExecutor(1) as threads, running(engine, limits) as server:
        client = server.service.client
        known = {"prompt": ["a"] * 2 * MAX_SEQS, "max_tokens": 10}
        assert server.post(TEXT, **known).status_code == 200  # from which the speed is known
        engine.gate.clear()
        many = threads.submit(server.post, TEXT, prompt=["a"] * 4 * MAX_SEQS, max_tokens=20)
        wait_until(lambda: client.num_sequences == 4 * MAX_SEQS)
        assert client.expected_wait_s(1) > 0.2
        headers = {} if timeout is None else {"x-request-timeout": timeout}
        refused = server.http.post(TEXT, json={"prompt": "a"}, headers=headers)
        most_s = 1 + client.expected_wait_s(1)  # which grows while nothing is told
        assert refused.status_code == 503 and 1 <= int(refused.headers["retry-after"]) <= most_s
        assert "the request would begin in" in refused.json()["error"]["message"]
        assert f'reason="{reason}"}} 1.0' in server.http.get("/metrics").text
        engine.gate.set()
        assert many.result(120).status_code == 200
        assert server.post(TEXT, prompt="a", max_tokens=1).status_code == 200


def test_a_request_names_its_own_deadline():
    """And none later than the server permits."""
    bad = ("0", "0.0", "-1", "nan", "inf", "1e3", "", "1 s", "9" * 20, "٣")
    cases = [("0.1", 408), ("30", 200), ("999999999", 200), *((each, 400) for each in bad)]
    with running(FakeEngine(step_s=0.02)) as server:
        for timeout, status in cases:
            headers = {"x-request-timeout": timeout.encode()}
            found = server.http.post(TEXT, json={"prompt": "a", "max_tokens": 16}, headers=headers)
            assert found.status_code == status, timeout
            if status == 400:
                error = found.json()["error"]
                assert error["param"] == "x-request-timeout"
                assert "x-request-timeout" in error["message"]
        server.service.limits = Limits(request_s=1)
        long = {"prompt": "a", "max_tokens": 400}
        late = server.http.post(TEXT, json=long, headers={"x-request-timeout": "60"})
        assert late.status_code == 408


def test_who_leaves_the_queue_makes_room(engine):
    with running(engine) as server:
        client = server.service.client
        engine.gate.clear()
        many = {"prompt": ["a"] * MAX_SEQS, "max_tokens": 30}
        threading.Thread(target=lambda: _ended(server, many), daemon=True).start()
        wait_until(lambda: client.num_sequences == MAX_SEQS)
        for _ in range(3):
            with connect(server) as connection:
                connection.sendall(request(json.dumps({"prompt": ["b"] * 9}).encode()))
                wait_until(lambda: client.num_sequences == MAX_SEQS + 9)
            wait_until(lambda: client.num_sequences == MAX_SEQS)
        engine.gate.set()
        wait_until(lambda: not client.num_sequences)
        assert not client._sent and not client._num_sent and not len(client._waiting)
