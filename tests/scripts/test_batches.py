"""`generate` on files of requests: sampling by the line, and runs that go on where they stopped."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from configs.errors import InputError
from inference.request import SamplingParams
from scripts import common, generate, meter, partial, prompts, sampling_flags
from tests import compiling
from tests.scripts import apps

pytestmark = pytest.mark.quick_code

_SETTINGS = (
    f"--model={apps.TINY}",
    "--set=model.dtype=float32",
    "--set=engine.prefill_tiles=(4,)",
    "--set=engine.decode_rows=(4,)",
    "--set=engine.max_seqs=3",
    "--set=engine.penalties=true",
)


def write_lines(path, lines):
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


def read_lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# Lines.


def test_every_field_of_a_line(tmp_path):
    assert set(sampling_flags._READERS) == set(sampling_flags.FIELDS)
    given = {
        "max_new_tokens": 7.0, "temperature": 1, "top_k": 3, "top_p": 0.5, "min_p": 0.1,
        "repetition": 1.5, "presence": -1, "frequency": 0.5, "logit_bias": {"5": -1.5},
        "allowed_ids": [5, 6], "banned_ids": [6], "min_tokens": 2, "stop": ["a", "b"],
        "stop_ids": [7], "ignore_eos": True, "seed": 2**63,
    }  # fmt: skip
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "tool", "content": ""},
    ]
    lines = [
        {"prompt": "A"} | given,
        {"prompt": "A", "stop": "x", "seed": None, "allowed_ids": None},
        {"messages": messages, "tools": [{}], "documents": [], "id": 7},
    ]
    base = SamplingParams(temperature=0.5, seed=3)
    read = prompts.from_file(str(write_lines(tmp_path / "in.jsonl", lines)), base)
    assert read[0].params == SamplingParams(
        **given | {"max_new_tokens": 7, "logit_bias": ((5, -1.5),), "allowed_ids": (5, 6),
                   "banned_ids": (6,), "stop": ("a", "b"), "stop_ids": (7,)}
    )  # fmt: skip
    assert read[1].params == SamplingParams(temperature=0.5, stop=("x",))
    assert (read[2].params, read[2].id, read[2].tools, read[2].documents) == (base, 7, [{}], [])
    assert read[2].messages == tuple(messages) and read[0].id is None


_BAD = {
    "unknown": ({"prompt": "A", "temprature": 1}, "'temprature' is not one of prompt, messages"),
    "text for a number": ({"prompt": "A", "temperature": "1"}, "temperature is a number, not '1'"),
    "true for a number": ({"prompt": "A", "top_k": True}, "top_k is a whole number, not True"),
    "fraction": ({"prompt": "A", "max_new_tokens": 1.5}, "max_new_tokens is a whole number"),
    "nothing": ({"prompt": "A", "max_new_tokens": 0}, "max_new_tokens is at least 1, not 0"),
    "null": ({"prompt": "A", "top_p": None}, "top_p is a number, not None"),
    "range": ({"prompt": "A", "top_p": 1.5}, "top_p is a number from 0 to 1, not 1.5"),
    "NaN": ({"prompt": "A", "temperature": float("nan")}, "temperature is a number from 0 to 100"),
    "switch": ({"prompt": "A", "ignore_eos": 1}, "ignore_eos is true or false, not 1"),
    "stop": ({"prompt": "A", "stop": ["a", 1]}, "stop is a text or a list of them"),
    "empty stop": ({"prompt": "A", "stop": ""}, "at least one character"),
    "ids": ({"prompt": "A", "stop_ids": 5}, "stop_ids is a list of token ids, not 5"),
    "id in ids": ({"prompt": "A", "banned_ids": ["5"]}, "each of banned_ids is a whole number"),
    "bias": ({"prompt": "A", "logit_bias": [[5, 1]]}, 'logit_bias is {"token id": number, ...}'),
    "biased word": ({"prompt": "A", "logit_bias": {"a": 1}}, 'logit_bias is {"token id"'),
    "endless bias": ({"prompt": "A", "logit_bias": {"5": float("inf")}}, "is a finite number"),
    "id": ({"prompt": "A", "id": [1]}, "'id' is a text or a whole number, not [1]"),
    "the same id": ({"prompt": "A", "id": "x"}, "id 'x' is that of line 1 as well"),
    "tools": ({"messages": [{"role": "user", "content": ""}], "tools": {}}, "list of objects"),
    "tools of a prompt": ({"prompt": "A", "tools": []}, "'tools' goes with messages"),
    "no content": ({"messages": [{"role": "user", "content": None}]}, "'messages' is not one of"),
}  # fmt: skip


@pytest.mark.parametrize("case", _BAD)
def test_bad_lines_are_named_before_any_work(case, tmp_path, monkeypatch, capfd):
    line, message = _BAD[case]
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "A", "id": "x"}, line])
    ran = apps.call(generate, monkeypatch, capfd, "--model=nowhere", f"--input={source}")
    assert "in.jsonl line 2: " in ran.error and message in ran.error


# Runs.


@pytest.fixture(scope="module")
def engines():
    return {}


@pytest.fixture
def run(monkeypatch, capfd, engines):
    load_engine = common.load_engine

    def load_once(checkpoint, config):
        if config not in engines:
            engines[config] = load_engine(checkpoint, config)
        return engines[config]

    monkeypatch.setattr(common, "load_engine", load_once)
    return lambda *args: apps.call(generate, monkeypatch, capfd, *_SETTINGS, *args)


def test_a_line_samples_as_the_flags_would(run, tmp_path):
    lines = [
        {"prompt": "The ridge", "id": "greedy"},
        {"prompt": "The ridge", "id": "drawn", "temperature": 1.5, "seed": 4, "max_new_tokens": 9},
        {"prompt": "The ridge", "temperature": 1.5, "top_k": 5, "repetition": 1.7, "seed": 5},
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
    add = partial.Partial.add

    def add_some(kept, index, result):
        if len(kept.results) == after:
            raise KeyboardInterrupt
        add(kept, index, result)

    monkeypatch.setattr(partial.Partial, "add", add_some)


def test_a_run_goes_on_where_it_was_interrupted(run, tmp_path, monkeypatch):
    lines = [{"prompt": "A token " * (1 + n % 5), "max_new_tokens": 3 + n % 4} for n in range(9)]
    source, target = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    args = (f"--input={source}", f"--output={target}")
    assert run(*args).status == 0
    undisturbed = target.read_text()
    target.write_text("before")
    kept = tmp_path / "out.jsonl.partial"
    with monkeypatch.context() as patch:
        cut_off(patch, 4)
        error = run(*args)
    assert error.status == 1 and target.read_text() == "before"
    assert error.err.endswith(
        f"error: interrupted: 4 of 9 results are in {kept}; the same command goes on from there\n"
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
        differs = "requests" if "--temperature=1" in change else "configuration"
        assert f"holds 4 results of another run, whose {differs} differ" in refused.err
        assert "--overwrite to start over" in refused.err
    write_lines(source, [*lines[:8], {"prompt": "other"}])
    assert "whose requests differ" in run(*args).err

    write_lines(source, lines)
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
        run(*args)
    assert len(read_lines(kept)) == 3
    assert run(*args, "--overwrite", "--max_new_tokens=5").status == 0 and asked[-1] == 9
    with monkeypatch.context() as patch:
        cut_off(patch, 0)
        assert run(*args).err.endswith("error: interrupted before the first result\n")
    assert not kept.exists()


def generate_engine():
    from inference.engine import Engine

    return Engine


# The file.

IDENTITY = {"configuration": "c", "requests": "r"}


def test_a_line_that_was_cut_off_anywhere_is_computed_again(tmp_path):
    target = tmp_path / "out"
    kept = partial.Partial(target, IDENTITY, False)
    for index in (3, 0, 7):
        kept.add(index, {"text": f"ünï {index}\u2028"})
    kept.close(False)
    whole = kept.path.read_bytes()
    lines = whole.count(b"\n")
    for size in range(len(whole) + 1):
        kept.path.write_bytes(whole[:size])
        again = partial.Partial(target, IDENTITY, False)
        complete = whole[:size].count(b"\n")
        assert list(again.results) == [3, 0, 7][: max(0, complete - 1)]
        again.add(9, {"text": "more"})
        again.close(False)
        last = kept.path.read_bytes().split(b"\n")
        assert json.loads(last[-2]) == {"index": 9, "result": {"text": "more"}} and not last[-1]
    assert complete == lines == 4


def test_two_runs_do_not_write_one_file(tmp_path):
    first = partial.Partial(tmp_path / "out", IDENTITY, False)
    with pytest.raises(InputError, match="another run is writing"):
        partial.Partial(tmp_path / "out", IDENTITY, True)
    first.close(True)
    assert not first.path.exists()
    partial.Partial(tmp_path / "out", IDENTITY, False).close(False)
    assert not first.path.exists()


@pytest.mark.parametrize("damage", [b"{\n", b"[]\n", b'"x"\n', b"\xff\n", b'{"index": 1}\n'])
def test_damage_is_named(tmp_path, damage):
    kept = partial.Partial(tmp_path / "out", IDENTITY, False)
    kept.add(0, {})
    kept.close(False)
    for data in (damage, kept.path.read_bytes() + damage):
        kept.path.write_bytes(data)
        with pytest.raises(InputError, match=r"--overwrite to start over") as caught:
            partial.Partial(tmp_path / "out", IDENTITY, False)
        assert "\n" not in str(caught.value)
    partial.Partial(tmp_path / "out", IDENTITY, True).close(False)


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    kept = partial.Partial(tmp_path / "out", IDENTITY, False)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(InputError, match=r"cannot write .*partial: No space left"):
        kept.add(0, {})


# Progress.


def test_the_meter_tells_rate_and_time_left():
    bars, lines, now = [], [], [100.0]
    counted = meter.Meter([10, 10, 10], lambda *bar: bars.append(bar), lines.append, lambda: now[0])
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
        assert meter._duration(seconds) == text


# Ended from outside, as a process.


def start(args, cache):
    return subprocess.Popen(
        [sys.executable, "-m", "scripts.generate", *_SETTINGS, *args], cwd=apps.ROOT,
        env=os.environ | compiling.ENVIRONMENT | {"RIDGELINE_CACHE": str(cache)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def wait_for_lines(path, count, process):
    deadline = time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.001)


_LONG = (pytest.mark.long, pytest.mark.timeout(1200))


@pytest.mark.parametrize("times, num_lines", [(1, 40), pytest.param(10, 240, marks=_LONG)])
def test_killed_and_interrupted_runs_lose_no_line(tmp_path, times, num_lines):
    lines = [{"prompt": f"Token {n}", "max_new_tokens": 150 + n % 7} for n in range(num_lines)]
    source, target = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    kept, cache = tmp_path / "out.jsonl.partial", tmp_path / "cache"
    args = [f"--input={source}", f"--output={target}", "--ignore_eos"]
    seen: list[dict] = []
    for end in [signal.SIGINT, signal.SIGKILL] * times:
        process, count = start(args, cache), len(seen) + 4
        wait_for_lines(kept, count, process)
        process.send_signal(end)
        out, err = process.communicate(timeout=60)
        now = read_lines(kept)  # each of its lines is whole
        assert now[: len(seen)] == seen and len(now) >= count
        seen = now
        assert out == "" and not target.exists()
        if end is signal.SIGINT:
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
    assert all(results[line["index"]] == line["result"] for line in seen[1:])
