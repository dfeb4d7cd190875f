"""Requests of batches run in slots that no other request needs, and give them back."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from inference.request import SamplingParams
from inference.server.batches.stored_files import StorageLimits
from inference.server.client.fair_queue import FairQueue
from inference.server.client.pending_request import PendingRequest
from inference.server.service import QUEUED_PER_SEQ
from inference.server.web.access import Keys
from tests.inference.server.fake_engine import MAX_SEQS, FakeEngine, reply
from tests.inference.server.openai.test_batches_client import TEXT, line
from tests.inference.server.running import running, wait_until

KEYS = "key-0123456789abcdef", "key-fedcba9876543210"
NUM_TOKENS = 300
LONG = {"max_tokens": NUM_TOKENS, "temperature": 0}


class Recorder(FakeEngine):
    """Notes the ends of requests."""

    def __init__(self):
        super().__init__()
        self.ends: list[bytes] = []  # prompts, in the order of their ends
        self.num_at_once: list[int] = []

    def step(self):
        by_id = {sequence.id: bytes(sequence.prompt) for sequence in self.running}
        self.num_at_once.append(len(self.running))
        outputs = super().step()
        self.ends += [by_id[output.id] for output in outputs if output.finish_reason]
        return outputs


@pytest.fixture
def engine():
    return Recorder()


@pytest.fixture
def server(engine):
    with running(engine, keys=Keys(KEYS)) as one:
        yield one


def post(server, path: str, key: str = KEYS[0], **how):
    return server.http.post(path, headers={"authorization": f"Bearer {key}"}, **how)


def started(server, lines: list[str], key: str = KEYS[0]) -> str:
    form = {"files": {"file": ("x", "\n".join(lines).encode())}, "data": {"purpose": "batch"}}
    file_id = post(server, "/v1/files", key, **form).json()["id"]
    fields = {"input_file_id": file_id, "endpoint": TEXT, "completion_window": "24h"}
    return post(server, "/v1/batches", key, json=fields).json()["id"]


def ended(server, id: str, key: str = KEYS[0]) -> dict:
    """The records of a batch, by their ids, once it has ended."""

    def get(path):
        return server.http.get(path, headers={"authorization": f"Bearer {key}"})

    wait_until(lambda: get(f"/v1/batches/{id}").json()["status"] == "completed")
    output_id = get(f"/v1/batches/{id}").json()["output_file_id"]
    lines = get(f"/v1/files/{output_id}/content").text.splitlines()
    return {record["custom_id"]: record for record in map(json.loads, lines)}


def text_of(record: dict) -> str:
    return record["response"]["body"]["choices"][0]["text"]


def closed_with(engine, num_running: int) -> None:
    """Stops the engine before a step with so many requests."""
    wait_until(lambda: len(engine.running) == num_running)
    engine.gate.clear()


class Crowded(Recorder):
    """A request starts only where no other runs, as if it needed all pages."""

    def step(self):
        everything, self.running = self.running, self.running[:1]
        outputs = super().step()
        self.running += everything[1:]
        return outputs

    def heartbeat(self):
        beat = super().heartbeat()
        beat.num_waiting, beat.num_deferred = max(0, len(self.running) - 1), 0
        return beat


def test_other_requests_take_pages_back():
    engine = Crowded()
    with running(engine, keys=Keys(KEYS)) as server, ThreadPoolExecutor(1) as threads:
        engine.step_s = 0.01
        batch = started(server, [line("r", prompt="long", **LONG)])
        wait_until(lambda: engine.running)
        body = {"prompt": "now", "max_tokens": 3}
        other = threads.submit(post, server, TEXT, KEYS[1], json=body)
        assert other.result().status_code == 200
        engine.step_s = 0.0
        record = ended(server, batch)["r"]
    assert engine.ends == [b"now", b"long"] and len(engine.aborted) == 1
    assert text_of(record) == bytes(reply(NUM_TOKENS)).decode(errors="replace")


@pytest.mark.parametrize("num_others", [1, MAX_SEQS])
def test_other_requests_take_slots_back(server, engine, num_others):
    """The batch's answers continue from their tokens, and each has all of them once."""
    batch = started(server, [line(f"r{n}", prompt=f"long {n}", **LONG) for n in range(6)])
    closed_with(engine, MAX_SEQS)
    with ThreadPoolExecutor(num_others) as threads:
        answers = [
            threads.submit(
                post, server, TEXT, KEYS[1], json={"prompt": f"now {n}", "max_tokens": 3}
            )
            for n in range(num_others)
        ]
        client = server.service.client
        wait_until(lambda: client.num_sequences == num_others)
        engine.gate.set()
        assert [answer.result().status_code for answer in answers] == [200] * num_others
    records = ended(server, batch)
    assert sorted(engine.ends[:num_others]) == [b"now %d" % n for n in range(num_others)]
    assert len(engine.ends) == 6 + num_others and max(engine.num_at_once) == MAX_SEQS
    assert len(engine.aborted) == num_others, "only as many as are needed"
    whole = bytes(reply(NUM_TOKENS)).decode(errors="replace")
    assert {text_of(record) for record in records.values()} == {whole}


def test_a_batch_starts_one_request_in_four_slots_beside_others(server, engine):
    engine.gate.clear()
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(post, server, TEXT, json={"prompt": "now"} | LONG)
        wait_until(lambda: server.service.client.num_sequences == 1)
        batch = started(server, [line(f"r{n}", max_tokens=3) for n in range(8)])
        engine.gate.set()
        assert other.result().status_code == 200
    ended(server, batch)
    num_beside = max(engine.num_at_once[:NUM_TOKENS])  # while the other runs
    assert num_beside == 2 and len(engine.ends) == 9 and engine.ends.index(b"now") > 0


def test_the_queue_is_as_long_beside_a_batch(server, engine):
    engine.gate.clear()
    num_places = MAX_SEQS * (1 + QUEUED_PER_SEQ)
    batch = started(server, [line(f"r{n}", **LONG) for n in range(num_places)])
    wait_until(lambda: len(server.service.client._background) == 1)
    body = {"prompt": "now", "n": MAX_SEQS, "max_tokens": 1}
    with ThreadPoolExecutor(2) as threads:
        answers = [threads.submit(post, server, TEXT, json=body) for _ in range(2)]
        wait_until(lambda: server.service.client.num_sequences == 2 * MAX_SEQS)
        engine.gate.set()
        assert [answer.result().status_code for answer in answers] == [200, 200]
    assert len(ended(server, batch)) == num_places


def test_a_request_waits_for_as_many_slots_as_it_has_sequences(server, engine):
    lines = [line("narrow", max_tokens=9), line("wide", n=MAX_SEQS, max_tokens=4)]
    records = ended(server, started(server, lines))
    assert len(records["wide"]["response"]["body"]["choices"]) == MAX_SEQS
    assert max(engine.num_at_once) == MAX_SEQS


def test_a_wide_request_runs_beside_others_and_blocks_no_other(server, engine):
    engine.gate.clear()
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(post, server, TEXT, KEYS[1], json={"prompt": "now"} | LONG)
        wait_until(lambda: server.service.client.num_sequences == 1)
        wide = line("wide", prompt="wide", n=MAX_SEQS - 1, max_tokens=4)
        batch = started(server, [wide, line("narrow", prompt="narrow", max_tokens=4)])
        wait_until(lambda: server.service.client._background)
        engine.gate.set()
        assert other.result().status_code == 200
    ended(server, batch)
    assert engine.ends == [b"wide"] * (MAX_SEQS - 1) + [b"narrow", b"now"]


def test_no_key_takes_all_places_for_files():
    form = {"files": {"file": ("x", line("r").encode())}, "data": {"purpose": "batch"}}
    with running(FakeEngine(), keys=Keys(KEYS), storage=StorageLimits(files=5)) as server:

        def uploaded(key):
            return post(server, "/v1/files", key, **form)

        assert [uploaded(KEYS[0]).status_code for _ in range(4)] == [200, 200, 200, 507]
        assert "3 files, which is its share" in uploaded(KEYS[0]).json()["error"]["message"]
        assert uploaded(KEYS[1]).status_code == 200


def test_batches_of_keys_take_turns(server, engine):
    engine.gate.clear()
    first = started(server, [line(f"r{n}", prompt="first", max_tokens=20) for n in range(40)])
    wait_until(lambda: len(server.service.client._background) == 1)
    second = started(server, [line("r", prompt="second", max_tokens=20)], KEYS[1])
    wait_until(lambda: len(server.service.client._background._waiting) == 2)
    engine.gate.set()
    ended(server, second, KEYS[1])
    ended(server, first)
    assert engine.ends.index(b"second") < 12


def test_a_request_that_ends_engines_fails_alone(server, engine):
    crash = line("crash", prompt=[259])
    records = started(server, [line("a", max_tokens=3), crash, line("b", max_tokens=3)])

    def batch():
        key = {"authorization": f"Bearer {KEYS[0]}"}
        return server.http.get(f"/v1/batches/{records}", headers=key).json()

    wait_until(lambda: batch()["status"] == "completed")
    counts = batch()["request_counts"]
    assert (counts["completed"], counts["failed"]) == (2, 1)


def test_a_request_that_is_put_back_goes_first_and_is_charged_once():
    queue = FairQueue()
    params = SamplingParams(max_new_tokens=1)
    requests = [PendingRequest(print, [0] * 9, params, None, True, "a", True) for _ in range(2)]
    for request in requests:
        queue.add(request)
    assert queue.next is requests[0] and queue.pop() is requests[0]
    queue.put_back(requests[0])
    assert queue._served["a"] == 0 and queue.pop() is requests[0] and queue.pop() is requests[1]
