"""`python -m scripts.batch`: results by id, resumed, repaired and never lost."""

import json
import signal
import subprocess
import sys
import threading
import time

import pytest
from absl import flags

from inference.server.client import launch
from inference.server.client.launch import Thread
from inference.server.web.access import Keys
from scripts import batch
from tests import compiling
from tests.inference.batches.test_batches import CHAT, line
from tests.inference.server.fake_engine import FakeEngine
from tests.inference.server.parrot import TEMPLATES, Parrot
from tests.inference.server.running import running, wait_until
from tests.inference.server.test_tools import CALLS
from tests.scripts import apps


@pytest.fixture(scope="module")
def server():
    with running(FakeEngine()) as one:
        yield one


@pytest.fixture
def run(monkeypatch, capfd, tmp_path, server):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    source, target = tmp_path / "requests.jsonl", tmp_path / "results.jsonl"

    def call(text, *args, url=server.url):
        if text is not None:
            source.write_text(text)
        own = [f"--input={source}", f"--output={target}", *([f"--url={url}"] if url else [])]
        ran = apps.call(batch, monkeypatch, capfd, *own, *args)
        found = target.read_text().splitlines() if not ran.status else []
        return ran, [json.loads(each) for each in found]

    return call


def ids(found):
    return [each["custom_id"] for each in found]


def test_a_batch(run, tmp_path):
    chat = line("a", CHAT, prompt=None, messages=[{"role": "user", "content": "x"}])
    texts = [line("b"), chat, "{torn", line("c", max_tokens=-1), line("d", "/v1/nothing")]
    text = "\n".join(texts)
    ran, found = run(text)
    assert ran.status == 0 and ran.out == ""
    assert ran.err.endswith("results.jsonl, 2 refused, 1 without an answer\n")
    assert ids(found) == ["b", "a", None, "c", "d"]
    assert all(set(each) == {"id", "custom_id", "response", "error"} for each in found)
    assert len({each["id"] for each in found}) == 5
    assert [each["response"] and each["response"]["status_code"] for each in found] == [
        200, 200, None, 400, 404,
    ]  # fmt: skip
    assert found[0]["response"]["body"]["choices"][0]["text"] and found[0]["error"] is None
    assert found[0]["response"]["request_id"]
    assert found[2]["error"]["message"].startswith("line 3: ")
    assert not (tmp_path / "results.jsonl.partial").exists()

    ran, again = run(None, "--url=http://127.0.0.1:1")  # which nobody asks
    assert "4 of 4 results are there already" in ran.err and [
        again[n] == found[n] for n in range(5)
    ] == [True, True, False, True, True]
    ran, more = run(line("e") + "\n" + line("b"))
    assert ids(more) == ["a", "c", "d", "e", "b"], "what is there is kept"
    assert more[4] == found[0]
    ran, new = run(None, "--overwrite")
    assert ids(new) == ["e", "b"] and new[1]["id"] != found[0]["id"]


def test_what_failed_for_a_while_is_asked_again(run, tmp_path):
    target = tmp_path / "results.jsonl"
    bad = {"id": "1", "custom_id": "a", "response": {"status_code": 503, "body": {}}, "error": None}
    good = {
        "id": "2",
        "custom_id": "b",
        "response": {"status_code": 200, "body": {}},
        "error": None,
    }
    target.write_text(json.dumps(bad) + "\n" + json.dumps(good) + '\n{"id": "3", "cust')
    ran, found = run("\n".join(map(line, "abc")))
    assert "1 of 3 results are there already" in ran.err
    assert ids(found) == ["a", "b", "c"] and found[1] == good
    assert found[0]["response"]["status_code"] == 200


def test_a_wrong_key_leaves_no_result(run, monkeypatch, tmp_path):
    key = "k" * 20
    with running(FakeEngine(), keys=Keys([key])) as closed:
        ran, _ = run("\n".join(map(line, "ab")), url=closed.url)
        assert "the server refuses the key" in ran.error and "status 401" in ran.error
        assert not (tmp_path / "results.jsonl").exists()
        monkeypatch.setenv("OPENAI_API_KEY", key)
        ran, found = run(None, url=closed.url)
    assert [each["response"]["status_code"] for each in found] == [200, 200]


REFUSED = {
    "nothing": ([], None, "no line holds a request"),
    "no target": (["--output="], "x", "--output"),
    "several sizes": (["--concurrency=1,2"], "x", "--concurrency is one number"),
    "no size": (["--concurrency=0"], "x", "--concurrency takes whole numbers"),
    "an engine's flag": (["--weights=int4"], "x", "batch --url does not read --weights"),
    "another's flag": (
        ["--pooling=mean"],
        "x",
        "--url does not read --pooling: it goes with batch",
    ),
    "no url": (["--url=nonsense"], "x", "--url=nonsense is no URL"),
    "nobody there": (["--url=http://127.0.0.1:1"], "x", "no connection to 127.0.0.1:1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(run, case):
    args, text, message = REFUSED[case]
    ran, found = run(line(text) if text else "\n", *args)
    assert message in ran.error and not found


def test_the_output_is_no_other_file(run, tmp_path):
    (tmp_path / "results.jsonl").write_text("a user's own text\nof two lines\n")
    ran, _ = run(line("a"))
    assert "results.jsonl line 1 is no result of a batch" in ran.error
    assert (tmp_path / "results.jsonl").read_text().startswith("a user's own"), "it is untouched"


def test_an_engine_of_its_own(run, monkeypatch):
    commands = []

    def started(command):
        commands.append(command)
        return Thread(FakeEngine)

    monkeypatch.setattr(launch, "Subprocess", started)
    args = ("--model=some", "--set=engine.max_seqs=4", "--served_model_name=mine")
    ran, found = run(line("a", model="mine") + "\n" + line("b", model="other"), *args, url=None)
    assert ran.status == 0, ran.err
    assert [each["response"]["status_code"] for each in found] == [200, 404]
    (command,) = commands
    assert command[1:3] == ["-m", "scripts.serve"]
    assert command[3:] == ["--nowarm_up", "--model=some", "--set=engine.max_seqs=4"]


def test_an_engine_of_its_own_answers_as_the_server_does(run, monkeypatch):
    engine, commands = Parrot(TEMPLATES["smollm2"]), []
    engine.says = CALLS["hermes"]

    def started(command):
        commands.append(command)
        return Thread(lambda: engine)

    monkeypatch.setattr(launch, "Subprocess", started)
    tools = [{"type": "function", "function": {"name": "now"}}]
    body = {"prompt": None, "messages": [{"role": "user", "content": "x"}], "tools": tools}
    body["max_tokens"] = 400
    args = ("--model=some", "--tool_call_parser=hermes", "--pooling=mean")
    ran, (found,) = run(line("a", CHAT, **body), *args, url=None)
    assert ran.status == 0, ran.err
    (call,) = found["response"]["body"]["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "now"
    assert commands[0][3:] == ["--nowarm_up", "--model=some", "--pooling=mean"]


def test_help_lists_no_flag_that_is_refused():
    known = {flag.name for flag in flags.FLAGS.get_key_flags_for_module(batch)}
    known -= set(batch.UNREAD)
    assert known <= {name for names in batch._READ.values() for name in names}


def test_ctrl_c_loses_nothing(tmp_path, monkeypatch):
    source, target = tmp_path / "requests.jsonl", tmp_path / "results.jsonl"
    partial = tmp_path / "results.jsonl.partial"
    names = [f"r{n}" for n in range(24)]
    source.write_text("\n".join(line(name, max_tokens=8) for name in names))
    engine, is_held = FakeEngine(step_s=0.005), threading.Event()

    def step():  # of which no answer goes on
        is_held.set()
        time.sleep(0.005)
        return []

    with running(engine) as one:
        command = [sys.executable, "-m", "scripts.batch", f"--input={source}",
                   f"--output={target}", f"--url={one.url}", "--concurrency=2"]  # fmt: skip
        environment = compiling.environment(tmp_path / "cache")
        how = {"cwd": apps.ROOT, "env": environment, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **how) as process, monkeypatch.context() as patch:
            while not (partial.exists() and partial.read_bytes().count(b"\n") > 4):
                assert process.poll() is None
                time.sleep(0.01)
            patch.setattr(engine, "step", step)
            wait_until(lambda: is_held.is_set() and len(engine.running) == 2, 60)
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=60)
        assert process.returncode == 1 and said.count("\n") == 1
        assert "the same command goes on from there" in said
        assert not target.exists()
        had = partial.read_bytes()
        num_had = had.count(b"\n") - 1
        assert 4 <= num_had < 24
        partial.write_bytes(had + b'{"key": "torn')
        asked = len(engine.prompts)
        assert asked == num_had + 2, "those that were under way"
        done = subprocess.run(command, **how, timeout=120)
    assert done.returncode == 0 and f"{num_had} of 24 results are there already" in done.stderr
    assert len(engine.prompts) == asked + 24 - num_had
    found = [json.loads(each) for each in target.read_text().splitlines()]
    assert ids(found) == names and all(each["error"] is None for each in found)
    assert not partial.exists()
