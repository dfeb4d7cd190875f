"""`generate` on files of requests: sampling by the line, and runs that go on where they stopped."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from inference.checkpoints import tokenizer_files
from inference.files.resumable_results import ResumableResults
from scripts import common, generate
from scripts.reports import batch_progress
from tests import compiling
from tests.scripts import apps

pytestmark = pytest.mark.quick_code

_SETTINGS = (
    f"--model={apps.TINY}",
    "--set=model.dtype=float32",
    "--set=engine.shapes.prefill_chunks=(4,)",
    "--set=engine.shapes.decode_rows=(4,)",
    "--set=engine.max_seqs=3",
    "--set=engine.requests.penalties=true",
)


def write_lines(path, lines):
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


def read_lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# Lines.


_BAD = {
    "unknown": ({"prompt": "A", "temprature": 1}, "'temprature' is not one of prompt, messages"),
    "text for a number": ({"prompt": "A", "temperature": "1"}, "a number from 0 to 100, not '1'"),
    "true for a number": ({"prompt": "A", "top_k": True}, "from 0 to 2147483647, not True"),
    "fraction": ({"prompt": "A", "max_new_tokens": 1.5}, "max_new_tokens is a whole number"),
    "nothing": ({"prompt": "A", "max_new_tokens": 0}, "max_new_tokens is at least 1, not 0"),
    "null": ({"prompt": "A", "top_p": None}, "top_p is a number above 0 and at most 1, not None"),
    "range": ({"prompt": "A", "top_p": 1.5}, "top_p is a number above 0 and at most 1, not 1.5"),
    "NaN": ({"prompt": "A", "temperature": float("nan")}, "temperature is a number from 0 to 100"),
    "switch": ({"prompt": "A", "ignore_eos": 1}, "ignore_eos is true or false, not 1"),
    "stop": ({"prompt": "A", "stop": ["a", 1]}, "stop is a list of strings"),
    "half a pair to stop at": ({"prompt": "A", "stop": "\ud83d"}, "'\\ud83d' can never match"),
    "empty stop": ({"prompt": "A", "stop": ""}, "at least one character"),
    "ids": ({"prompt": "A", "stop_token_ids": 5}, "stop_token_ids is a list of token ids, not 5"),
    "id in ids": ({"prompt": "A", "banned_token_ids": ["5"]}, "banned_token_ids is a list of"),
    "former name": ({"prompt": "A", "presence": 1}, "'presence' is called 'presence_penalty' now"),
    "bias": ({"prompt": "A", "logit_bias": [[5, 1]]}, 'logit_bias is {"token id": number, ...}'),
    "biased word": ({"prompt": "A", "logit_bias": {"a": 1}}, 'logit_bias is {"token id"'),
    "endless bias": ({"prompt": "A", "logit_bias": {"5": float("inf")}}, "number from -1000000"),
    "id": ({"prompt": "A", "id": [1]}, "'id' is a text or a whole number, not [1]"),
    "the same id": ({"prompt": "A", "id": "x"}, "id 'x' is that of line 1 as well"),
    "tools": ({"messages": [{"role": "user", "content": ""}], "tools": {}}, "list of objects"),
    "tools of a prompt": ({"prompt": "A", "tools": []}, "'tools' goes with messages"),
    "half a pair in an id": ({"prompt": "A", "id": "\ud83d"}, "'id' is not valid text: charact"),
    "biased 05": ({"prompt": "A", "logit_bias": {"05": 1}}, 'logit_bias is {"token id"'),
    "biased 5_0": ({"prompt": "A", "logit_bias": {" 5_0 ": 1}}, 'logit_bias is {"token id"'),
    "long bias": ({"prompt": "A", "logit_bias": {"5": 10**400}}, "not a number of 1329 bits"),
    "template": ({"messages": [{"role": "a", "content": ""}], "template": 1}, "name of a chat"),
    "template of a prompt": ({"prompt": "A", "template": "x"}, "'template' goes with messages"),
    "no content": ({"messages": [{"role": "user", "content": None}]}, "'messages' is not one of"),
}  # fmt: skip


@pytest.mark.parametrize("case", _BAD)
def test_bad_lines_are_named_before_any_work(case, tmp_path, monkeypatch, capfd):
    line, message = _BAD[case]
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "A", "id": "x"}, line])
    ran = apps.call(generate, monkeypatch, capfd, "--model=nowhere", f"--input={source}")
    assert "in.jsonl line 2: " in ran.error and message in ran.error


_UNSERVED = {
    "stop_token_ids": ([320], "token id 320 is not in the vocabulary of 320"),
    "allowed_token_ids": ([5, -1], "token id -1 is not in the vocabulary of 320"),
    "banned_token_ids": ([10**20], f"token id {10**20} is not in the vocabulary of 320"),
    "logit_bias": ({str(token): 1 for token in range(310)}, "logit biases, not 310"),
}


@pytest.mark.parametrize("field", _UNSERVED)
def test_what_the_engine_cannot_serve_is_named_before_weights_are_read(
    field, tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(common, "load_engine", lambda *args: common.fail("too late"))
    value, message = _UNSERVED[field]
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "A"}, {"prompt": "A", field: value}])
    ran = apps.call(generate, monkeypatch, capfd, f"--model={apps.TINY}", f"--input={source}")
    assert "in.jsonl line 2: " in ran.error and message in ran.err


def templated(tmp_path, templates):
    """The tiny model with other chat templates."""
    model = shutil.copytree(apps.TINY, tmp_path / "model")
    path = model / "tokenizer_config.json"
    named = [{"name": name, "template": text} for name, text in templates.items()]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": named}))
    return model


@pytest.fixture
def encoded(monkeypatch, capfd, tmp_path):
    """Texts of the prompts that a file's requests become."""

    def call(model, lines, *flags):
        texts = []

        def stop(requests, ids, *model):
            decode = tokenizer_files.load_tokenizer(apps.TINY, 320).decode
            texts.extend(decode(tokens, skip_special=False) for tokens in ids)
            common.fail("far enough")

        monkeypatch.setattr(generate, "_check", stop)
        source = write_lines(tmp_path / "in.jsonl", lines)
        ran = apps.call(
            generate, monkeypatch, capfd, f"--model={model}", f"--input={source}", *flags
        )
        return texts, ran.error

    return call


def test_a_line_chooses_its_template(encoded, tmp_path):
    model = templated(tmp_path, {"default": "D", "tool_use": "T", "rag": "R"})
    said = {"messages": [{"role": "user", "content": "A"}]}
    lines = [said, said | {"tools": [{}]}, said | {"template": "rag"},
             said | {"template": "default", "tools": [{}]}]  # fmt: skip
    assert encoded(model, lines)[0] == ["D", "T", "R", "D"]
    assert encoded(model, lines, "--template=rag")[0] == ["R", "R", "R", "D"]
    refused = encoded(model, lines, "--template=none")[1]
    assert "line 1: no chat template 'none'; valid: default, tool_use, rag" in refused
    refused = encoded(model, [said, {"prompt": "A"}], "--template=rag")[1]
    assert "--template is for messages" in refused


def test_a_template_for_tools_alone_serves_lines_with_tools(encoded, tmp_path):
    model = templated(tmp_path, {"tool_use": "T"})
    said = {"messages": [{"role": "user", "content": "A"}]}
    assert encoded(model, [said | {"tools": [{}]}])[0] == ["T"]
    refused = encoded(model, [said | {"tools": [{}]}, said])[1]
    assert "in.jsonl line 2: this checkpoint has no chat template but tool_use" in refused


# Runs.


@pytest.fixture
def run(monkeypatch, capfd, load_once):
    return lambda *args: apps.call(generate, monkeypatch, capfd, *_SETTINGS, *args)


def test_a_line_samples_as_the_flags_would(run, tmp_path):
    lines = [
        {"prompt": "The ridge", "id": "greedy"},
        {"prompt": "The ridge", "id": "drawn", "temperature": 1.5, "seed": 4, "max_new_tokens": 9},
        {
            "prompt": "The ridge",
            "temperature": 1.5,
            "top_k": 5,
            "repetition_penalty": 1.7,
            "seed": 5,
        },
    ]
    source, target = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    ran = run(f"--input={source}", f"--output={target}", "--max_new_tokens=6", "--ignore_eos")
    assert ran.status == 0, ran.err
    results = read_lines(target)
    assert [result.get("id") for result in results] == ["greedy", "drawn", None]
    for line, result in zip(lines, results, strict=True):
        flags = [
            f"--{name}={value}" for name, value in line.items() if name not in ("prompt", "id")
        ]
        ran = run("--json", "--prompt=The ridge", "--ignore_eos", "--max_new_tokens=6", *flags)
        (alone,) = json.loads(ran.out)["results"]
        assert result["token_ids"] == alone["token_ids"]
    assert len(results[1]["token_ids"]) == 9 and len(results[2]["token_ids"]) == 6


def cut_off(monkeypatch, after: int):
    """A run that is interrupted with its second result still on the way."""
    add = ResumableResults.add

    def add_some(kept, key, result):
        if len(kept.results) == after:
            raise KeyboardInterrupt
        add(kept, key, result)

    monkeypatch.setattr(ResumableResults, "add", add_some)


def test_a_run_goes_on_where_it_was_interrupted(run, tmp_path, monkeypatch):
    lines = [{"prompt": "A token " * (1 + n % 5), "max_new_tokens": 3 + n % 4} for n in range(9)]
    source, target = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    args = (f"--input={source}", f"--output={target}")
    assert run(*args).status == 0
    undisturbed = target.read_text()
    target.write_text("before")
    kept = tmp_path / "out.jsonl.partial"
    for more in ([], ["--temperature=1"]):
        refused = run(*args, *more)
        assert refused.status == 1 and "give --overwrite to replace them" in refused.error
        assert target.read_text() == "before" and not kept.exists()
    with monkeypatch.context() as patch:
        cut_off(patch, 4)
        error = run(*args, "--overwrite")
    assert error.status == 1 and target.read_text() == "before"
    assert error.err.endswith(
        f"error: interrupted: 4 of 9 results are in {kept}; the same command without --overwrite "
        "goes on from there\n"
    )
    lines_kept = kept.read_text()
    assert len(read_lines(kept)) == 5

    for change in (
        ["--max_new_tokens=5", "--temperature=1"],
        ["--logprobs=1"],
        ["--deterministic"],
    ):
        refused = run(*args, *change)
        assert refused.status == 1 and kept.read_text() == lines_kept
        other = "--temperature=1" in change
        differs = "none of them for these requests" if other else "whose configuration differ"
        assert f"holds 4 results of another run, {differs}" in refused.err
        assert "--overwrite to start over" in refused.err

    asked = []
    as_completed = generate_engine().as_completed

    def counted(engine, given, *rest):
        asked.append(len(given))
        return as_completed(engine, given, *rest)

    monkeypatch.setattr(generate_engine(), "as_completed", counted)
    ran = run(*args)
    assert ran.status == 0 and f"4 of 9 results are in {kept} already" in ran.err
    assert asked == [5] and target.read_text() == undisturbed
    assert not kept.exists()

    with monkeypatch.context() as patch:
        cut_off(patch, 2)
        run(*args, "--overwrite")
    assert len(read_lines(kept)) == 3
    assert run(*args, "--overwrite", "--max_new_tokens=5").status == 0 and asked[-1] == 9
    with monkeypatch.context() as patch:
        cut_off(patch, 0)
        assert run(*args, "--overwrite").err.endswith(
            "error: interrupted before the first result\n"
        )
    assert not kept.exists()


def test_lines_may_come_go_and_move(run, tmp_path, monkeypatch):
    """Each answer belongs to what its line asks, not to the line's place."""
    lines = [{"prompt": "A token " * (1 + n % 4), "max_new_tokens": 3 + n // 4} for n in range(7)]
    lines[2]["id"], lines[3]["id"] = "two", "three"
    lines[6] = lines[5]  # two equal lines have an answer each
    source, target = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    args = (f"--input={source}", f"--output={target}")
    asked = []
    as_completed = generate_engine().as_completed

    def counted(engine, given, *rest):
        asked.append(len(given))
        return as_completed(engine, given, *rest)

    monkeypatch.setattr(generate_engine(), "as_completed", counted)
    with monkeypatch.context() as patch:
        cut_off(patch, 6)
        run(*args)
    kept = {json.dumps(line["result"]) for line in read_lines(tmp_path / "out.jsonl.partial")[1:]}
    assert len(read_lines(tmp_path / "out.jsonl.partial")) == 7
    changed = [{"prompt": "new"}, *reversed(lines[1:]), lines[2] | {"id": "2"}]
    changed[5] = changed[5] | {"max_new_tokens": 9}  # the same id, another request
    write_lines(source, changed)
    ran = run(*args)
    assert ran.status == 0, ran.err
    assert asked[0] == 7 and asked[1] in (3, 4)  # whether the first one had been the last to end
    results = read_lines(target)
    assert sum(json.dumps(result) in kept for result in results) >= 4
    write_lines(source, changed)
    run(*args, "--overwrite")
    assert read_lines(target) == results and asked[2] == len(changed)


def test_other_weights_under_the_same_name_are_another_run(run, tmp_path, monkeypatch):
    model = shutil.copytree(apps.TINY, tmp_path / "model")
    lines = [{"prompt": f"A {n}", "max_new_tokens": 3} for n in range(3)]
    source = write_lines(tmp_path / "in.jsonl", lines)
    args = (f"--model={model}", f"--input={source}", f"--output={tmp_path / 'out.jsonl'}")
    with monkeypatch.context() as patch:
        cut_off(patch, 1)
        run(*args)
    weights = model / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    ran = run(*args)
    assert ran.status == 1 and "1 results of another run, whose weights differ" in ran.err
    assert run(*args, "--overwrite").status == 0


def generate_engine():
    from inference.engine import Engine

    return Engine


# Progress.


def test_progress_tells_rate_and_time_left():
    bars, lines, now = [], [], [100.0]
    counted = batch_progress.BatchProgress(
        [10, 10, 10], lambda *bar: bars.append(bar), lines.append, lambda: now[0]
    )
    counted.add_tokens(3)  # after compiling, say: the rate begins here
    assert bars[-1] == (3, 30, "generating", "0 of 3 answers") and not lines
    now[0] += 2
    counted.add_tokens(4)
    assert bars[-1] == (7, 30, "generating", "0 of 3 answers, 2.0 tokens/s")
    counted.add_answer(1, 4)  # ended early: six tokens will never come
    now[0] += 28
    counted.add_tokens(8)
    assert bars[-1][:2] == (15, 24)
    assert lines == ["1 of 3 answers, 0.4 tokens/s, at most 22 s left"]
    now[0] += 1
    counted.add_tokens(1)
    assert len(lines) == 1
    for seconds, text in ((119, "119 s"), (130, "2 min"), (9000, "2.5 h")):
        assert batch_progress._duration(seconds) == text


# Ended from outside, as a process.


def start(args, cache):
    return subprocess.Popen(
        [sys.executable, "-m", "scripts.generate", *_SETTINGS, *args], cwd=apps.ROOT,
        env=compiling.environment(cache), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def wait_for_lines(path, count, process):
    deadline = time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.001)


_LONG = (pytest.mark.long, pytest.mark.timeout(1200))


@pytest.mark.parametrize("times, num_lines", [(1, 20), pytest.param(10, 240, marks=_LONG)])
def test_killed_and_interrupted_runs_lose_no_line(tmp_path, times, num_lines):
    lines = [{"prompt": f"Token {n}", "max_new_tokens": 150 + n % 7} for n in range(num_lines)]
    source, target = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    kept, cache = tmp_path / "out.jsonl.partial", tmp_path / "cache"
    args = [f"--input={source}", f"--output={target}", "--ignore_eos"]
    seen: list[dict] = []
    ends = (signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGKILL)
    for end in itertools.islice(itertools.cycle(ends), 2 * times):
        process, count = start(args, cache), len(seen) + 4
        wait_for_lines(kept, count, process)
        process.send_signal(end)
        out, err = process.communicate(timeout=60)
        now = read_lines(kept)  # each of its lines is whole
        assert now[: len(seen)] == seen and len(now) >= count
        seen = now
        assert out == "" and not target.exists()
        if end is not signal.SIGKILL:
            assert process.returncode == 1 and "Traceback" not in err
            held = f"{len(now) - 1} of {num_lines} results are in {kept}"
            line = f"error: interrupted: {held}; the same "
            assert err.splitlines()[-1].startswith(line)
        else:
            assert process.returncode == -signal.SIGKILL
    process = start(args, cache)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    results = read_lines(target)
    assert not kept.exists() and len(results) == num_lines
    for n, result in enumerate(results):
        assert len(result["token_ids"]) == 150 + n % 7
    assert all(line["result"] in results for line in seen[1:])
