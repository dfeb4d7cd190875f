"""Several processes that run one mesh: the same tokens, and none outlives another."""

import contextlib
import dataclasses
import importlib.metadata
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.mesh import Mesh
from inference import follower
from inference.adapters.table import AdapterTable, tell_hosts
from inference.checkpoints import resolve
from inference.request import SamplingParams
from sharding import hosts, links
from sharding import mesh as meshes
from tests import fakes
from tests.inference.adapters import peft_files
from tests.inference.server.running import wait_until

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tests" / "golden" / "llama-tokenizer"
_SETTINGS = [
    "--set=engine.max_seqs=6",
    "--set=engine.shapes.decode_rows=(6,)",
    "--set=engine.shapes.prefill_chunks=(2,)",
]


@pytest.fixture
def statuses(monkeypatch):
    """Those that this process would have ended with."""
    ends = []
    monkeypatch.setattr(hosts.os, "_exit", ends.append)
    return ends


@pytest.fixture
def pair(monkeypatch, statuses):
    """Hosts 0 and 1 in one process."""
    one, other = socket.socketpair(socket.AF_UNIX)
    monkeypatch.setattr(links.socket.socket, "setsockopt", lambda *_: None)
    first, second = hosts.Hosts(0, 2), hosts.Hosts(1, 2)
    first.add(1, links.Link(one))
    second.add(0, links.Link(other))
    yield first, second
    first._has_ended = second._has_ended = True
    for end in (one, other):
        end.shutdown(socket.SHUT_RDWR)
    for thread in threading.enumerate():
        if thread.name.endswith("(_listen)"):  # while what it calls ends no process
            thread.join()
    one.close()
    other.close()


def _await(holds):
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_orders_and_values_are_those_of_host_0(pair, statuses):
    first, second = pair
    first.tell("add_request", [1, 2], {"seed": 3})
    assert first.broadcast(5) == 5
    first.tell("step", False)
    assert second.next_order() == ("add_request", [[1, 2], {"seed": 3}])
    assert second.broadcast(7) == 5
    assert second.next_order() == ("step", [False])
    first.end()
    _await(lambda: statuses)
    assert statuses[0] == 0


def test_hosts_out_of_step_say_so(pair):
    first, second = pair
    first.tell("step", False)
    first.broadcast(5)
    expected = "host 1 is out of step with host 0: it waits for the next "
    with pytest.raises(RuntimeError, match=expected + "value, and gets {'order': 'step', 'argum"):
        second.broadcast(7)
    with pytest.raises(RuntimeError, match=expected + "order, and gets {'value': 5}"):
        second.next_order()


def test_a_follower_refuses_what_host_0_refuses_and_nothing_else(pair, monkeypatch):
    first, second = pair
    monkeypatch.setattr(hosts, "_current", second)
    engine = Mock(**{
        "add_request.side_effect": InputError("too long"), "fork.side_effect": InputError("ended"),
        "step.side_effect": InputError("no pages"),
    })  # fmt: skip
    first.tell("add_request", [1, 2], {"seed": 3}, [])
    first.tell("fork", 1, {"seed": 3})
    first.tell("abort", 1)
    first.tell("step", False)
    first.end()
    with pytest.raises(InputError, match="no pages"):
        follower.follow(engine)
    engine.abort.assert_called_once_with(1)


def test_a_follower_has_the_adapters_of_host_0_and_no_others(pair, monkeypatch, tmp_path):
    first, second = pair
    model = fakes.llama()
    here, other, there = (
        peft_files.write(tmp_path / str(seed), model, seed=seed) for seed in range(3)
    )
    table = AdapterTable(Config(model, EngineConfig.of(slots=1)))
    table.before_change = tell_hosts
    monkeypatch.setattr(hosts, "_current", first)
    table.load("stays", here)
    table.load("goes", other)
    table.unload("goes")
    table.load("differs", there)
    monkeypatch.setattr(hosts, "_current", second)
    peft_files.write(there, model, seed=3)
    engine = Mock(adapters=AdapterTable(table._config))
    with pytest.raises(InputError, match=f"{there}: is another adapter than on host 0; give all"):
        follower.follow(engine)
    assert engine.adapters.names == ("stays",)


def test_alone_nothing_is_said():
    alone = hosts.Hosts()
    alone.tell("step")
    alone.compare({"mesh": "model=2"})
    assert alone.broadcast("value") == "value" and alone.now() > 0
    alone.end("why")


@pytest.mark.parametrize("other, expected", [
    ({"a": "1", "b": "2"}, None),
    ({"a": "1", "b": "3"}, "host 1 has another b than host 0: 3, not 2"),
    ({"a": "1"}, "host 1 has another b than host 0: None, not 2"),
])  # fmt: skip
def test_hosts_that_differ_are_refused_in_the_same_words(pair, other, expected):
    first, second = pair
    second._send({"facts": other})  # as its `compare` does first
    if expected is None:
        first.compare({"a": "1", "b": "2"})
    else:
        with pytest.raises(InputError, match=f"{expected}; start all with the same flags"):
            first.compare({"a": "1", "b": "2"})
    assert second._inbox.get() == {"problem": expected}


def test_a_lost_host_is_named(pair, statuses, capfd):
    first, second = pair
    reports = []
    first._report = lambda *report: reports.append(report)
    second._links[0].connection.shutdown(socket.SHUT_RDWR)
    _await(lambda: len(statuses) == 2)
    assert statuses == [1, 1] and reports == [("host 1 is lost: its connection ended", True)]
    assert "error: host 1 is lost: its connection ended" in capfd.readouterr().err


def test_silence_is_a_loss(monkeypatch, pair, statuses, capfd):
    """Of a host that is there and says nothing: here one whose connection is half closed."""
    monkeypatch.setattr(links, "HEARTBEAT_TIMEOUT_S", 0.2)
    one, other = socket.socketpair(socket.AF_UNIX)
    hosts.Hosts(0, 2).add(3, links.Link(one))
    _await(lambda: statuses)
    other.close()
    assert statuses == [1] and "error: host 3 is lost: it was silent" in capfd.readouterr().err


def _accepting(port, count, patience_s=60, raises=None):
    """Host 0, a thread in which it waits for others, and what it reports."""
    reports = []
    first = hosts.Hosts(0, count, lambda *report: reports.append(report))

    def accept():
        if raises is None:
            first.accept("localhost", port, patience_s)
        else:
            with pytest.raises(InputError) as error:
                first.accept("localhost", port, patience_s)
            raises.append(str(error.value))
            first.end(raises[0])

    waiting = threading.Thread(target=accept)
    waiting.start()
    return first, waiting, reports


def test_a_late_host_and_strangers_delay_nothing_but_the_start(monkeypatch):
    """Host 1 hears from host 0 while that waits for host 2; who says nothing of use is ignored."""
    monkeypatch.setattr(links, "HEARTBEAT_TIMEOUT_S", 1.2)
    monkeypatch.setattr(links, "HEARTBEAT_S", 0.4)
    port = free_port()
    first, waiting, reports = _accepting(port, 3)
    one = links.connect("localhost", port, 3, 1, 60)
    strangers = [socket.create_connection(("localhost", port)) for _ in range(3)]
    for stranger, said in zip(strangers, (b"5\n", b"{}\n", b"GET / HTTP/1.1\n"), strict=True):
        stranger.sendall(said)
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        assert json.loads(one.lines.readline()) == {}
    links.connect("localhost", port, 3, 2, 60)
    waiting.join(timeout=60)
    assert sorted(first._links) == [1, 2]
    assert reports == [("waits for host 1, 2", False), ("waits for host 2", False)]
    first.end()


def test_a_host_that_ends_before_all_are_there_may_come_again():
    port = free_port()
    first, waiting, reports = _accepting(port, 3)
    for _ in range(2):
        one = links.connect("localhost", port, 3, 1, 60)
        with pytest.raises(InputError, match="host 1 is there twice: each has its own --host_i"):
            links.connect("localhost", port, 3, 1, 60)
        one.connection.shutdown(socket.SHUT_RDWR)
        _await(lambda: 1 not in first._links)
    links.connect("localhost", port, 3, 2, 60)
    links.connect("localhost", port, 3, 1, 60)
    waiting.join(timeout=60)
    assert sorted(first._links) == [1, 2] and reports[-1] == ("waits for host 1", False)
    first.end()


def test_those_who_came_hear_for_whom_host_0_waits_no_longer(statuses, capfd):
    port, raised = free_port(), []
    _, waiting, _ = _accepting(port, 4, patience_s=1.4, raises=raised)
    hosts.Hosts(1, 4).add(0, links.connect("localhost", port, 4, 1, 60))
    waiting.join(timeout=60)
    _await(lambda: statuses)
    assert raised == ["host 2, 3 did not come within 1 s"]
    assert statuses == [1] and capfd.readouterr().err == f"error: {raised[0]}\n"


@pytest.mark.parametrize("change, expected", [
    ({"count": 3}, "host 1 expects 3 hosts, not 2: give all the same --hosts"),
    ({"index": 5}, "host 5 is none of 2: --host_index is 1 to 1 there"),
    ({"versions": {"jax": "0.9.0"}}, "host 1 has jax 0.9.0, host 0 has {jax}: install the same "
     "on both"),
    ({"clock": 100.0}, "the clock of host 1 is 40 s behind host 0's: set both by a time server, "
     "to at most 30 s apart"),
    ({"clock": 240.0}, "the clock of host 1 is 100 s ahead of host 0's"),
    ({"clock": 160.0}, None),
])  # fmt: skip
def test_a_host_that_does_not_belong_is_refused_before_jax_meets_it(monkeypatch, change, expected):
    monkeypatch.setattr(links.time, "time", lambda: 140.0)
    problem = links.problem_of(links.greeting(2, 1) | change, 2)
    if expected is None:
        assert problem is None
    else:
        assert problem.startswith(expected.format(jax=importlib.metadata.version("jax")))


@pytest.mark.parametrize("offset", [0, 1])
def test_a_port_that_is_taken_is_named(monkeypatch, offset):
    monkeypatch.setattr(hosts, "_current", hosts.current())
    port = free_port()
    with socket.create_server(("localhost", port + offset)):
        expected = f"host 0 cannot listen at localhost:{port + offset}: Address already in use"
        with pytest.raises(InputError, match=expected):
            hosts.start(f"localhost:{port}", 2, 0)


def test_chips_that_hosts_cannot_share_are_refused(monkeypatch):
    monkeypatch.setattr(hosts, "_current", hosts.Hosts(0, 3))
    with pytest.raises(InputError, match="mesh model=4: 4 chips are not equal parts of 3 hosts"):
        meshes.provide(Mesh(model=4), 4)


def test_parameters_arrive_as_they_were_sent():
    params = SamplingParams(
        stop=("a", "b"), allowed_token_ids=(1, 2), logit_bias=((3, 0.5),), seed=2**63
    )
    assert SamplingParams(**json.loads(json.dumps(dataclasses.asdict(params)))) == params


# --- processes ------------------------------------------------------------------------------------


def free_port():
    """One that is free, and so is the next."""
    while True:
        with socket.socket() as one, socket.socket() as other, contextlib.suppress(OSError):
            one.bind(("localhost", 0))
            port = one.getsockname()[1]
            other.bind(("localhost", port + 1))
            return port


def _command(mesh, *arguments):
    return [sys.executable, "-m", "scripts.generate", f"--model={MODEL}", f"--mesh={mesh}",
            *_SETTINGS, *arguments]  # fmt: skip


def _start(count, mesh, *arguments, last=()):
    """The processes of all hosts; `last` are arguments of the last alone."""
    port = free_port()
    return [
        subprocess.Popen(
            _command(mesh, *arguments, f"--hosts={count}", f"--host_index={index}",
                     f"--coordinator=localhost:{port}", *(last if index == count - 1 else ())),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )
        for index in range(count)
    ]  # fmt: skip


def _mixed(path):
    """50 prompts: greedy, drawn, filtered, of two answers, and with a stop string."""
    rng, kinds = random.Random(0), [
        {}, {"temperature": 0.9}, {"temperature": 1.2, "top_p": 0.9, "top_k": 20},
        {"n": 2, "temperature": 0.8}, {"stop": ["e"]},
    ]  # fmt: skip
    words = ["the", "cat", "sat", "on", "a", "mat", "while", "rain", "fell", "over", "old", "hills"]
    lines = [
        {"prompt": " ".join(rng.choices(words, k=rng.randint(1, 30))), "seed": i,
         "max_new_tokens": rng.randint(1, 14)} | kinds[i % 5] for i in range(50)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"--input={path}"


@pytest.mark.long
def test_processes_answer_with_an_adapter_that_all_have(tmp_path):
    model = resolve.resolve(str(MODEL)).config
    adapter = peft_files.write(tmp_path / "adapter", model)
    asked = _mixed(tmp_path / "mixed.jsonl"), "--json", f"--adapter={adapter}"
    alone = subprocess.run(_command("model=2", *asked), capture_output=True, text=True, cwd=ROOT)
    started = _start(2, "model=2", *asked)
    ended = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], ended
    assert _tokens(ended[0][0]) == _tokens(alone.stdout)


def _tokens(text):
    return [
        [each["token_ids"] for each in result.get("choices", [result])]
        for result in json.loads(text)["results"]
    ]


@pytest.mark.long
@pytest.mark.parametrize("count, mesh, schema", [
    (2, "model=2", None), (2, "data=2", None), (4, "data=2,model=2", None),
    (2, "data=2", {"type": "array", "items": {"enum": ["rain", "hills", 7]}, "minItems": 2}),
])  # fmt: skip
def test_processes_give_the_tokens_of_one(count, mesh, schema, tmp_path):
    asked = _mixed(tmp_path / "mixed.jsonl"), "--json"
    if schema is not None:
        file = tmp_path / "schema.json"
        file.write_text(json.dumps(schema))
        asked += (f"--json_schema={file}",)
    alone = subprocess.run(_command(mesh, *asked), capture_output=True, text=True, cwd=ROOT)
    started = _start(count, mesh, *asked)
    ended = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0] * count, ended
    assert _tokens(ended[0][0]) == _tokens(alone.stdout)
    assert all(output == "" for output, _ in ended[1:])


@pytest.mark.long
def test_a_killed_host_ends_the_others(tmp_path):
    """20 of 20: within 30 s, by name, with status 1; at any time after the first answer."""
    rng, took = random.Random(1), []
    line = {"prompt": "Hello", "max_new_tokens": 200, "ignore_eos": True, "temperature": 1.0}
    (tmp_path / "long.jsonl").write_text((json.dumps(line) + "\n") * 2000)  # minutes of work
    for nth in range(20):
        count, mesh = ((2, "model=2"), (4, "data=2,model=2"))[nth % 2]
        files = f"--input={tmp_path / 'long.jsonl'}", f"--output={tmp_path / f'{nth}.jsonl'}"
        started = _start(count, mesh, *files)
        written = tmp_path / f"{nth}.jsonl.partial"
        victim = nth // 2 % count
        wait_until(
            lambda path=written: path.exists() and len(path.read_bytes().split(b"\n")) > 2, 300
        )
        time.sleep(rng.random() * 4)
        assert all(process.poll() is None for process in started), "they ended too soon"
        killed_at = time.monotonic()
        started[victim].send_signal(signal.SIGKILL)
        for index, process in enumerate(started):
            output, error = process.communicate(timeout=30)
            if index != victim:
                assert process.returncode == 1, (index, victim, error)
                assert f"error: host {victim} is lost" in error, (index, victim, error)
                assert "Traceback" not in error
        took.append(time.monotonic() - killed_at)
    print(f"20 of 20 ended, after {max(took):.2f} s at most")


def _copy(folder, name, change):
    """The model with one file changed."""
    other = folder / MODEL.name
    other.mkdir()
    for file in MODEL.iterdir():
        content = file.read_bytes()
        (other / file.name).write_bytes(change(content) if file.name == name else content)
    return f"--model={other}"


def _other_values(content):
    """The last quarter with its lowest bits turned."""
    start = len(content) * 3 // 4
    return content[:start] + bytes(byte ^ 1 for byte in content[start:])


@pytest.mark.long
def test_host_0_alone_writes(tmp_path):
    output = tmp_path / "answers.jsonl"
    started = _start(2, "model=2", _mixed(tmp_path / "mixed.jsonl"), f"--output={output}")
    ended = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], ended
    assert len(output.read_text().splitlines()) == 50


@pytest.mark.long
@pytest.mark.parametrize("case", ["engine", "model", "checkpoint", "files", "number"])
def test_a_host_that_differs_is_refused(case, tmp_path):
    """By all in the same line, before weights are read."""
    last, expected = {
        "engine": (lambda: "--set=engine.max_seqs=7", "another engine.max_seqs than host 0: 7"),
        "model": (
            lambda: _copy(tmp_path, "config.json", lambda x: x.replace(b"10000.0", b"20000.0")),
            "another model.pattern than host 0",
        ),
        "checkpoint": (lambda: _copy(tmp_path, "model.safetensors", _other_values),
                       "another checkpoint than host 0"),
        "files": (lambda: _copy(tmp_path, "tokenizer.json", lambda x: x + b"\n"),
                  "another tokenizer and other files than host 0"),
        "number": (lambda: "--hosts=3", "host 1 expects 3 hosts, not 2: give all the same"),
    }[case]  # fmt: skip
    started = _start(2, "model=2", "--prompt=Hello", last=[last()])
    errors = []
    for process in started:
        output, error = process.communicate(timeout=120)
        assert process.returncode == 1 and expected in error and not output
        where, line = error.splitlines()
        assert where.startswith(f"host {len(errors)} of ")
        errors.append(line)
    assert errors[0] == errors[1]
