"""Prompts that other processes compute, here in threads: the tokens are those of one engine,
whoever ends when.
"""

import contextlib
import itertools
import json
import random
import socket
import threading
import time
import types
from unittest.mock import Mock

import jax
import numpy as np
import pytest

from configs.errors import InputError
from configs.hardware import catalog
from configs.mesh import ONE_CHIP, Mesh
from configs.prefill import TOGETHER, Prefill
from inference.engine import Engine
from inference.planner.deployment import Deployment
from inference.prefill import server
from inference.prefill.leaders import Leaders
from inference.prefill.peer import Event, Peer
from inference.prefill.server import PromptServer
from inference.request import SamplingParams
from inference.scheduling.sequence import Status
from sharding import links
from tests import fakes
from tests.inference.server.running import wait_until
from tests.inference.test_disaggregation import _SIZES, _VOCAB, CASES, _assert_same, _make, _serve

pytestmark = pytest.mark.quick_code

_FACTS = {"checkpoint": "abc"}


class Listening:
    """A port, and what has connected to it."""

    def __init__(self, port: int = 0):
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port = self._socket.getsockname()[1]
        self.connections: list[socket.socket] = []

    def accept(self):
        pair = self._socket.accept()
        self.connections.append(pair[0])
        return pair

    def fileno(self):
        return self._socket.fileno()

    def close(self):
        for closing in (self._socket, *self.connections):
            with contextlib.suppress(OSError):
                closing.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Process:
    """One that computes prompts, until it is killed."""

    def __init__(self, model, port: int = 0, mesh=ONE_CHIP, facts=None, **settings):
        sizes = _SIZES | {"free_padding": False} | settings
        engine = fakes.engine(model, None, "all", mesh=mesh, **sizes)
        self.leaders = Leaders(engine.scheduler, engine.model_runner)
        self._listening = Listening(port)
        self.port = self._listening.port
        self.server = PromptServer(self.leaders, facts or _FACTS, self._listening)
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._has_ended.is_set():
            self.server.turn(0.01)
            self.leaders.scheduler.check_integrity()

    def kill(self):
        self._has_ended.set()
        self._thread.join()
        self._listening.close()


@contextlib.contextmanager
def processes(count: int, model, **settings):
    running = [Process(model, **settings) for _ in range(count)]
    try:
        yield running
    finally:
        for process in running:
            process.kill()


@contextlib.contextmanager
def connected(ports, model, mesh=ONE_CHIP, facts=None, prefill=None, **settings):
    hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
    engine = _make(model, Prefill(hosts=hosts, **prefill or {}), mesh, **settings)
    engine._prefill.start(facts or _FACTS)
    try:
        wait_until(lambda: all(peer.is_connected for peer in engine._prefill.peers))
        yield engine
    finally:
        engine._prefill.end()


@pytest.mark.parametrize("model, mesh", CASES, ids=str)
def test_tokens_are_those_of_one_engine(model, mesh):
    tiny, count, aborts = getattr(fakes, model)(), 30, range(0, 30, 7)
    together = _make(tiny, TOGETHER, mesh)
    expected = _serve(together, count, aborts)
    with (
        processes(2, tiny, mesh=Mesh(model=mesh.model)) as running,
        connected([process.port for process in running], tiny, mesh) as engine,
    ):
        _assert_same(_serve(engine, count, aborts), expected, aborts)
        computed = [p.leaders.scheduler.counters.num_prefilled_tokens for p in running]
        assert min(computed) > 0  # both had some
        # Here: scored prompts, and answers of a request for which there was no slot when it began.
        num_here = engine.scheduler.counters.num_prefilled_tokens
        assert num_here < 0.8 * together.scheduler.counters.num_prefilled_tokens
        assert engine._prefill.figures.received_bytes >= engine._prefill.sent_bytes > 0
        wait_until(lambda: not any(p.leaders.scheduler.has_work for p in running))
        assert not (engine._prefill._prompts or engine._prefill._pending or engine._prefill._led)
        assert not any(peer._stored for peer in engine._prefill.peers)


def test_a_process_that_ends_and_comes_back_loses_nothing():
    """One of two, then both: their prompts are computed by the other, then here."""
    tiny, count = fakes.llama(), 24
    expected = _serve(_make(tiny, TOGETHER), count)
    with (
        processes(2, tiny) as running,
        connected([process.port for process in running], tiny) as engine,
    ):
        step, steps, remote = engine.step, itertools.count(), engine._prefill

        def disturbed():
            number = next(steps)
            if number in (4, 9):  # with prompts that it has
                running[number == 9].kill()
            if number == 14:
                running[0] = Process(tiny, running[0].port)
                wait_until(lambda: remote.peers[0].is_connected)
            return step()

        engine.step = disturbed
        _assert_same(_serve(engine, count), expected, ())
        assert next(steps) > 15
        assert running[0].leaders.scheduler.counters.num_prefilled_tokens


@pytest.mark.parametrize(
    "kind, mesh",
    [
        ("llama", ONE_CHIP),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (("deepseek", Mesh(model=2)), ("llama", Mesh(model=4)))
        ),
    ],
    ids=str,
)
def test_pages_that_the_decoding_side_has_do_not_come_again(kind, mesh):
    """Nor do the copies of latents that each chip has; copies of two heads on four chips do."""
    tiny = getattr(fakes, kind)()
    [prompt] = fakes.prompts([8 * 8 + 1], _VOCAB, seed=3)
    with (
        processes(1, tiny, mesh=mesh) as running,
        connected([running[0].port], tiny, mesh) as engine,
    ):
        engine.generate([prompt], fakes.greedy(2))
        first = engine._prefill.figures.received_bytes
        engine.generate([[*prompt[:40], *prompt[:33]]], fakes.greedy(2))
        second = engine._prefill.figures.received_bytes - first
        assert first == 8 * engine._prefill._page_bytes[0]
        assert second == 4 * engine._prefill._page_bytes[0]
        assert engine._prefill.sent_bytes == first + second
        assert first == Deployment(tiny, catalog.get("h100"), mesh=mesh).sent_cache_bytes(64)
        assert first == 64 * sum(tiny.page_bytes(1)) * (2 if mesh.model == 4 else 1)
        assert running[0].leaders.scheduler.counters.num_cached_tokens == 40


def test_a_prefix_that_leaves_the_cache_meanwhile_is_computed_here():
    tiny = fakes.llama()
    [prompt] = fakes.prompts([70], _VOCAB, seed=4)
    expected = _make(tiny, TOGETHER).generate([prompt], fakes.greedy(6))[0].token_ids
    with processes(1, tiny) as running, connected([running[0].port], tiny) as engine:
        engine.generate([prompt[:41]], fakes.greedy(2))
        id = engine.add_request(prompt, fakes.greedy(6))
        group, remote = engine._requests[id].group, engine._prefill
        remote.launch()
        [wanted] = remote._prompts
        assert wanted.num_unsent_tokens == 40
        engine.scheduler.start_over(engine._requests.sequences)  # nothing is cached
        fakes.drain(engine)
        assert group.completion().token_ids == expected
        assert engine.scheduler.counters.num_prefilled_tokens >= 69


def test_a_process_that_computes_something_else_is_refused_by_what_differs():
    tiny = fakes.llama()
    with (
        processes(1, tiny, facts={"checkpoint": "abd"}) as running,
        pytest.raises(InputError) as error,
        connected([running[0].port], tiny),
    ):
        pass
    assert str(error.value) == (
        f"prefill.hosts=127.0.0.1:{running[0].port}: the prefill process has another checkpoint "
        "than this engine: abd, not abc"
    )


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"[]\n", b'{"a": 1}\n'])
def test_what_is_no_prefill_process_is_refused(answer):
    with socket.create_server(("127.0.0.1", 0)) as other:

        def greet():
            connection = other.accept()[0]
            connection.recv(1)
            connection.sendall(answer)

        threading.Thread(target=greet).start()
        port = other.getsockname()[1]
        message = f":{port}: what answers at .* computes no prompts"
        with pytest.raises(InputError, match=message), connected([port], fakes.llama()):
            pass


def test_what_is_no_engine_ends_no_process():
    tiny, greeting = fakes.llama(), json.dumps({"facts": _FACTS}).encode() + b"\n"
    lines = [b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b"null\n"]
    lines += [b'{"facts": %s}\n' % facts for facts in (b"3", b"[]", b'"x"', b"null")]
    prompt = {"prefill": 1, "tokens": [1, 2], "salt": None, "priority": 0, "cached": 0}
    changes = {"tokens": [5]}, {"tokens": [1, _VOCAB]}, {"cached": 2}, {"salt": 3}, {"prefill": "a"}
    later = [{"prefill": 1}, {"abort": []}, {"pages": 1}, *(prompt | c for c in changes)]
    lines += [greeting + json.dumps(message).encode() + b"\n" for message in later]
    lines.append(greeting + 2 * (json.dumps(prompt).encode() + b"\n"))  # the number again
    with processes(1, tiny) as running:
        for line in lines:
            with socket.create_connection(("127.0.0.1", running[0].port)) as connection:
                connection.sendall(line)
                connection.settimeout(60)
                received = b" "
                with contextlib.suppress(ConnectionResetError):
                    while received:  # until it is closed there
                        received = connection.recv(4096)
        with connected([running[0].port], tiny) as engine:
            engine.generate(fakes.prompts([20], _VOCAB), fakes.greedy(1))
            assert engine._prefill.sent_bytes


@pytest.mark.long
def test_scored_prompts_are_computed_here():
    tiny, prompts = fakes.llama(), fakes.prompts([20, 60], _VOCAB, seed=9)
    expected = _make(tiny, TOGETHER).score(prompts)
    with processes(1, tiny) as running, connected([running[0].port], tiny) as engine:
        for results, score in zip(engine.score(prompts), expected, strict=True):
            np.testing.assert_allclose(results.logprobs, score.logprobs, atol=1e-4)
        assert not engine._prefill.figures.received_bytes


@pytest.mark.long
def test_a_prompt_that_never_fits_into_the_process_is_computed_here():
    tiny, prompts = fakes.llama(), fakes.prompts([20, 150], _VOCAB, seed=9)
    expected = _make(tiny, TOGETHER).generate(prompts, fakes.greedy(4))
    with (
        processes(1, tiny, cache_bytes=20_000) as running,
        connected([running[0].port], tiny) as engine,
    ):
        results = engine.generate(prompts, fakes.greedy(4))
        assert [a.token_ids for a in results] == [a.token_ids for a in expected]
        assert 0 < running[0].leaders.scheduler.counters.num_prefilled_tokens < 30


def test_a_fault_in_a_prompt_ends_no_other():
    tiny, prompts = fakes.llama(), fakes.prompts([40, 50, 30], _VOCAB, seed=2)
    expected = _make(tiny, TOGETHER).generate(prompts, fakes.greedy(4))
    with processes(1, tiny) as running, connected([running[0].port], tiny) as engine:
        scheduler = running[0].leaders.scheduler
        allocate, calls = scheduler.shards[0].pages.allocate, itertools.count()

        def fail_once(sequence, num_tokens):
            if next(calls) == 1:
                raise ValueError("a fault")
            return allocate(sequence, num_tokens)

        scheduler.shards[0].pages.allocate = fail_once
        results = engine.generate(prompts, fakes.greedy(4))
        assert next(calls) > 1
        assert [a.token_ids for a in results] == [a.token_ids for a in expected]


def test_weights_do_not_change_on_one_side():
    tiny = fakes.llama()
    with processes(1, tiny) as running, connected([running[0].port], tiny) as engine:
        with pytest.raises(InputError, match=r"update_params: goes without prefill.hosts \(127"):
            engine.update_params(fakes.real_params(tiny))
        with pytest.raises(InputError, match="sleep without weights: goes without prefill.hosts"):
            engine.sleep(keeps_weights=False)
        engine.sleep()
        with pytest.raises(InputError, match="wake with other weights: goes without"):
            engine.wake(fakes.real_params(tiny))
        engine.wake()
        assert engine.generate(fakes.prompts([20], _VOCAB), fakes.greedy(1))


def test_a_process_that_hangs_ends_unless_it_compiles(monkeypatch):
    executables = types.SimpleNamespace(is_compiling=True)
    compiles = iter([True, True, False])
    closing = PromptServer.__new__(PromptServer)
    closing._leaders = types.SimpleNamespace(
        model_runner=types.SimpleNamespace(executables=executables)
    )
    closing._turned_at = time.monotonic() - 1e4  # hangs since then

    def look(_):
        executables.is_compiling = next(compiles)
        closing._turned_at = time.monotonic() - 1e4

    monkeypatch.setattr(server, "time", types.SimpleNamespace(monotonic=time.monotonic, sleep=look))
    monkeypatch.setattr(server, "os", types.SimpleNamespace(_exit=Mock(side_effect=SystemExit)))
    with pytest.raises(SystemExit):
        closing._end_if_hung()
    assert not list(compiles)  # it looked until nothing compiled


# --- which process gets a prompt ------------------------------------------------------------------


class FakePeer:
    """A process that answers when a test says so."""

    def __init__(self, name):
        self.name, self.is_connected = name, True
        self.prompts: dict[int, int] = {}  # tokens to compute, by number
        self.received = 0, 0.0

    def prefill(self, number, tokens, salt, priority, num_cached):
        self.prompts[number] = len(tokens) - 1 - num_cached

    def forget(self, number):
        self.prompts.pop(number, None)

    @property
    def load(self):
        return sum(self.prompts.values())


@pytest.mark.parametrize("seed", range(4))
def test_prompts_go_to_the_process_with_the_fewest_tokens_and_none_is_lost(seed):
    rng = random.Random(seed)
    hosts = "a:1,b:1,c:1"
    engine = _make(fakes.llama(), Prefill(hosts=hosts, host_bytes=60_000))
    remote = engine._prefill
    remote.peers = fake = [FakePeer(name) for name in "abc"]
    limit, added = remote._most_bytes, []
    for _ in range(300):
        action = rng.random()
        if action < 0.4:
            [prompt] = fakes.prompts([rng.randint(1, 60)], _VOCAB, seed=rng.randint(0, 99))
            params = SamplingParams(max_new_tokens=4, priority=rng.randint(0, 2))
            id = engine.add_request(prompt, params)
            added.append(engine._requests[id].group.sequences[0])
        elif action < 0.5:
            peer = rng.choice(fake)
            peer.is_connected = not peer.is_connected
            if not peer.is_connected:
                remote._events.put(Event(peer, None))
        elif action < 0.6 and any(peer.prompts for peer in fake):
            peer = rng.choice([peer for peer in fake if peer.prompts])
            number = rng.choice(list(peer.prompts))
            remote._events.put(Event(peer, number, is_done=False))  # it could not
            del peer.prompts[number]
        elif action < 0.7 and added:
            engine.abort(rng.choice(added).id)
        before = {peer.name: peer.load for peer in fake if peer.is_connected}
        num_pending = len(remote._pending)
        remote.launch()
        waiting = [s for s in added if s.status is not Status.FINISHED and s.leader is not None]
        at_peers = [n for peer in fake if peer.is_connected for n in peer.prompts]
        assert len(waiting) == len(remote._pending) + len(at_peers) == len(remote._led)
        assert sorted(at_peers) == sorted(remote._by_number)
        held_bytes = sum(prompt.num_bytes for prompt in remote._prompts.values())
        assert held_bytes <= limit or len(remote._prompts) == 1
        assert remote._pending == sorted(remote._pending, key=lambda s: (s.params.priority, s.id))
        if not any(peer.is_connected for peer in fake):
            assert not waiting  # all are computed here
        if num_pending == 0 and len(before) > 1 and action < 0.4 and len(remote._pending) == 0:
            grown = [p.name for p in fake if p.is_connected and p.load > before.get(p.name, 0)]
            assert all(before[name] == min(before.values()) for name in grown)


def test_a_prompt_with_which_two_processes_end_is_computed_here():
    engine = _make(fakes.llama(), Prefill(hosts="a:1,b:1"))
    remote = engine._prefill
    remote.peers = fake = [FakePeer(name) for name in "ab"]
    prompts = fakes.prompts([20, 30], _VOCAB, seed=5)
    ids = [engine.add_request(prompt, fakes.greedy(2)) for prompt in prompts]
    first, second = (engine._requests[id].group.sequences[0] for id in ids)
    remote.launch()
    for is_last in (False, True):  # and are there again at once
        peer = remote._prompts[first.leader].peer
        peer.prompts.clear()
        remote._events.put(Event(peer, None))
        remote.launch()
        assert (first.leader is None) == is_last
    assert [*remote._led.values()] == [second]
    assert not remote._lost
    assert [len(peer.prompts) for peer in fake] == [0, 1]


def test_a_process_forgets_an_aborted_prompt_at_once():
    engine = _make(fakes.llama(), Prefill(hosts="a:1"))
    engine._prefill.peers = [peer] = [FakePeer("a")]
    ids = [engine.add_request([1, 2, 3], fakes.greedy(2)) for _ in range(2)]
    engine._prefill.launch()
    assert len(peer.prompts) == 2
    engine.abort(ids[0])  # and no step
    assert len(peer.prompts) == len(engine._prefill._led) == 1


def test_several_hosts_that_decode_are_refused_before_weights_are_read(monkeypatch):
    config = _make(fakes.llama(), Prefill(hosts="a:1")).config
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(InputError, match=r"prefill.hosts=a:1: goes with one host that decodes"):
        Engine(config, Mock(side_effect=AssertionError("read")))


# --- connections ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_process_that_does_not_answer_yet_is_no_error(is_silent, monkeypatch):
    """As one that still starts, or ends."""
    monkeypatch.setattr(links, "HEARTBEAT_TIMEOUT_S", 0.05 if is_silent else 60)
    with socket.create_server(("127.0.0.1", 0)) as other:
        thread = threading.Thread(target=lambda: other.accept()[0].close())
        if not is_silent:
            thread.start()
        assert Peer(other.getsockname(), Mock(), Mock())._connect(_FACTS) is None
        if not is_silent:
            thread.join()


def test_whatever_ends_a_connection_it_is_lost_once_and_connected_again(caplog):
    tiny = fakes.llama()
    [prompt] = fakes.prompts([40], _VOCAB, seed=6)
    with processes(1, tiny) as running, connected([running[0].port], tiny) as engine:
        [peer] = engine._prefill.peers
        room = peer._room
        peer._room = Mock(side_effect=MemoryError("no room"))
        engine.generate([prompt], fakes.greedy(1))
        peer._room = room
        assert "cannot be read (MemoryError('no room'))" in caplog.text
        wait_until(lambda: peer.is_connected)
        engine.generate([prompt[::-1]], fakes.greedy(1))
        assert engine._prefill.sent_bytes


def test_a_process_accepts_connections_after_it_could_not(caplog):
    tiny = fakes.llama()
    with processes(1, tiny) as running:
        listening = running[0]._listening
        accept, failures = listening.accept, itertools.count()

        def fail_twice():
            if next(failures) < 2:
                raise OSError(24, "Too many open files")
            return accept()

        listening.accept = fail_twice
        with connected([running[0].port], tiny), connected([running[0].port], tiny):
            pass
        assert caplog.text.count("no engine can connect now: [Errno 24]") == 1


def test_what_one_call_sends_is_short_so_that_its_timeout_measures_silence():
    data, sizes = bytes(range(256)) * (5 << 12) + b"end", []
    link = links.Link.__new__(links.Link)
    link._sending = threading.Lock()
    link.connection = types.SimpleNamespace(sendall=lambda part: sizes.append(bytes(part)))
    link.send({"a": 1}, memoryview(data))
    assert b"".join(sizes) == b'{"a": 1}\n' + data
    assert max(map(len, sizes)) <= 1 << 20
