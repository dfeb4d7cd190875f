"""One replica, and which one is preferred."""

import asyncio
import json
import os
import threading

import pytest

from configs.errors import InputError
from inference.server.client.engine_client import EngineFailed
from inference.server.client.launch import Thread
from inference.server.replicas import affinity
from inference.server.replicas.affinity import Affinity, prefixes
from inference.server.replicas.forwarded import HttpRequest
from inference.server.replicas.replica import Replica, Unhealthy, take_cores
from inference.server.replicas.replica_config import ReplicaConfig
from inference.server.service import Limits, Service
from tests.inference.server.fake_engine import FakeEngine

HEADERS = ((b"content-type", b"application/json"),)


def run(engine: FakeEngine, work):
    async def main():
        replica = Replica(Service(Thread(lambda: engine)), "one")
        await replica.start()
        try:
            await work(replica)
        finally:
            engine.may_go_on.set()
            await replica.close()

    asyncio.run(main())


def completion(**asked) -> HttpRequest:
    body = json.dumps({"temperature": 0} | asked).encode()
    return HttpRequest("POST", "/v1/completions", b"", HEADERS, body)


def test_it_is_unhealthy_when_its_engine_hangs(monkeypatch):
    """Until that is ended and started again."""

    async def work(replica):
        replica.check()
        monkeypatch.setattr(Service, "heartbeat_age_s", 31)
        with pytest.raises(Unhealthy, match="not heard of"):
            replica.check()

    run(FakeEngine(), work)


def test_whoever_stops_reading_ends_the_request():
    engine = FakeEngine(step_s=0.01)

    async def work(replica):
        parts = replica.answer(completion(prompt="a", max_tokens=400, stream=True))
        first, second = await anext(parts), await anext(parts)
        assert first.replica == "one" and first.status == 200
        assert first.body.startswith(b"data: ") and second.startswith(b"data: ")
        await parts.aclose()
        for _ in range(6000):
            await asyncio.sleep(0.01)
            if not engine.running:
                break
        assert engine.aborted and not engine.running

    run(engine, work)


def test_an_engine_that_does_not_start_ends_the_start():
    def load():
        raise InputError("no such model")

    async def main():
        replica = Replica(Service(Thread(load), Limits()), "one")
        with pytest.raises(EngineFailed):
            await replica.start()
        with pytest.raises(Unhealthy):
            replica.check()

    asyncio.run(main())


# --- what a Serve configuration says --------------------------------------------------------------


def test_its_arguments_are_the_flags_of_an_engine_too():
    args = {"flags": ["--model=m"], "max_num_seqs": 8, "served_model_name": "n", "min_replicas": 2}
    built = ReplicaConfig.from_args(args, num_keys=3)
    assert built.command[1:] == [
        "-m", "scripts.serve", "--model=m", "--max_num_seqs=8", "--served_model_name=n",
    ]  # fmt: skip
    assert (built.min_replicas, built.num_keys, built.max_num_seqs) == (2, 3, 8)
    usual = ReplicaConfig.from_args({}, num_keys=0)
    assert usual.command[3:] == [f"--max_num_seqs={usual.max_num_seqs}"]


@pytest.mark.parametrize("args, expected", [
    ({"num_seqs": 8}, "unknown argument 'num_seqs'; valid: api_key_file, flags, .*max_num_seqs"),
    ({"command": ["x"]}, "unknown argument 'command'"),
    ({"flags": ["--max_num_seqs=8"]}, "flags have --max_num_seqs: give it as an argument"),
])  # fmt: skip
def test_arguments_that_nobody_knows_are_refused(args, expected):
    with pytest.raises(InputError, match=expected):
        ReplicaConfig.from_args(args, num_keys=0)


# --- which one is preferred -----------------------------------------------------------------------


def chat(*contents: str) -> bytes:
    messages = [{"role": "user", "content": content} for content in contents]
    return json.dumps({"model": "m", "temperature": 0.5, "messages": messages}).encode()


def test_prompts_share_the_digests_of_what_they_share():
    system = "x" * 1500
    first, second = prefixes(chat(system, "a" * 900), ""), prefixes(chat(system, "b" * 900), "")
    assert len(first) == len(second) == 4  # 256, 512, 1024 and 2048 bytes
    assert first[:3] == second[:3] and first[3] != second[3]
    assert not set(first) & set(prefixes(chat(system, "a" * 900), "other"))
    assert prefixes(json.dumps({"prompt": "x" * 300}).encode(), "")
    assert len(prefixes(chat("x" * 10**6), "")) == 9
    gaps = ({"input_prefix": "x" * 300, "prompt": line, "input_suffix": "y"} for line in "ab")
    one, other = (prefixes(json.dumps(gap).encode(), "") for gap in gaps)
    assert one == other and len(one) == 1


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"prompt": "short"}', b'{"other": 1}', b"\xff", b"[" * 100_000]
)
def test_where_there_is_no_long_prompt_there_is_no_digest(body):
    assert prefixes(body, "") == []


def test_the_longest_beginning_decides_unless_its_replica_is_busy():
    known = Affinity()
    known.note([b"1", b"2"], "a")
    known.note([b"1"], "b")
    assert known.preferred([b"1", b"2", b"3"], {"a": 0, "b": 0}) == "a"
    assert known.preferred([b"1", b"4"], {"a": 0, "b": 0}) == "b"
    assert known.preferred([b"5"], {"a": 0, "b": 0}) is None
    assert known.preferred([], {"a": 0, "b": 0}) is None
    assert known.preferred([b"1", b"2"], {"a": 4, "b": 0}) == "a"
    assert known.preferred([b"1", b"2"], {"a": 5, "b": 0}) is None
    assert known.preferred([b"1", b"2"], {"b": 0, "c": 0}) == "b"  # the other one has gone
    assert known.preferred([b"1", b"2"], {"c": 0}) is None


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(affinity, "_MAX_PREFIXES", 3)
    known = Affinity()
    for name in (b"1", b"2", b"3", b"1", b"4"):
        known.note([name], "a")
    assert [bool(known.preferred([n], {"a": 0})) for n in (b"1", b"2", b"3", b"4")] == [1, 0, 1, 1]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads have no cores")
@pytest.mark.parametrize("rank, num_replicas, cores", [
    (0, 1, {2, 3, 5, 7, 11}), (0, 2, {2, 3}), (1, 2, {5, 7}), (2, 2, {2, 3}), (5, 3, {5}),
    (4, 5, {11}), (0, 6, None),
])  # fmt: skip
def test_each_replica_has_cores_of_its_own(rank, num_replicas, cores, monkeypatch):
    """In every thread; all of them, where there are fewer than replicas."""
    chosen, may_end = {}, threading.Event()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {11, 3, 2, 7, 5})
    monkeypatch.setattr(os, "sched_setaffinity", lambda id, cores: chosen.update({id: set(cores)}))
    thread = threading.Thread(target=may_end.wait)
    thread.start()
    try:
        take_cores(rank, num_replicas)
    finally:
        may_end.set()
        thread.join()
    for id in (threading.get_native_id(), thread.native_id):
        assert chosen.get(id) == cores
