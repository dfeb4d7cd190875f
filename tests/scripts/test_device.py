"""`python -m scripts.device`: its parts, its page, and what it says where there is no device."""

import dataclasses
import json
import sys

import pytest

from inference.benchmark.programs import Outcome, Program
from scripts import device, device_text
from tests.scripts import apps


@pytest.fixture
def run(monkeypatch, capfd, tmp_path):
    return lambda *args: apps.call(device, monkeypatch, capfd, f"--results={tmp_path}", *args)


def test_without_an_accelerator_nothing_is_measured(run, tmp_path):
    ran = run()
    assert ran.status == 0 and ran.out.startswith("no accelerator: JAX computes on this machine's")
    assert ran.out.count("\n") == 1 and not [*tmp_path.iterdir()]


def test_small_shapes_on_a_cpu(run, tmp_path):
    ran = run("--device=cpu", "--parts=kernels")
    assert ran.status == 0, ran
    (page,) = tmp_path.glob("cpu-*.md")
    found = json.loads(page.with_suffix(".json").read_text())
    assert ran.out.splitlines()[0].startswith("kernels: done") and str(page) in ran.out
    (part,) = found["parts"]
    assert part["result"]["rows"] and part["tail"] == "" and found["device"] == "cpu"
    assert "| kernels | done |" in page.read_text() and "  reference  " in page.read_text()


def test_what_was_found_is_kept_when_a_part_fails(run, monkeypatch, tmp_path):
    def parts(kind, outcomes):
        yield Program("one", (sys.executable, "-c", "print('fine')"), 60)
        assert outcomes[0].status == "done"
        (page,) = tmp_path.glob("cpu-*.md")
        assert "fine" in page.read_text()
        yield Program("two", (sys.executable, "-c", "raise SystemExit('bad')"), 60)
        yield Program("three", ("true",), 60, missing="nothing to do it with")

    monkeypatch.setattr(device, "_parts", parts)
    ran = run("--device=cpu")
    assert ran.status == 1
    (page,) = tmp_path.glob("cpu-*.md")
    text = page.read_text()
    for line in (
        "| one | done |",
        "| two | failed |",
        "| three | not run: nothing to do it with |",
    ):
        assert line in text
    assert "    bad\n" in text and f"    python -c 'print('{chr(39)}" not in text


@pytest.mark.parametrize("kind, page_tokens", [("gpu", 64), ("tpu", 128)])
def test_a_devices_parts_in_order_of_worth(kind, page_tokens):
    parts = list(device._parts(kind, []))
    names = [part.name for part in parts]
    assert names[:3] == ["decode is right", "device tests", "kernels"]
    assert names[3:7] == [
        "llama3-8b", "llama2-13b", "llama2-13b, K=8", "llama3-8b, the engine's part"
    ]  # fmt: skip
    assert names[7:] == [f"tokens on {kind}", "tokens on cpu"]
    assert "--tune" in parts[2].command and parts[2].is_json
    for part in parts[3:7]:
        assert f"--set=engine.page_tokens={page_tokens}" in part.command
        assert not any("engine.attention" in word for word in part.command)
    assert "JAX_PLATFORMS=cpu" in parts[-1].command


def test_the_engine_runs_the_kernel_that_was_shown_right():
    def named(*statuses):
        rows = [{"results": {"pallas_gpu": {"status": status}}} for status in statuses]
        outcome = Outcome("kernels", (), "done", result={"rows": rows})
        commands = [part.command for part in device._parts("gpu", [outcome])]
        return ["--set=engine.attention=pallas_gpu" in command for command in commands[3:7]]

    assert all(named("right", "not run", "right"))
    assert not any(named("right", "wrong"))
    assert not any(named("not run"))


def test_who_is_wrong_in_decoding_is_not_asked_again():
    outcomes = []
    parts = device._parts("gpu", outcomes)
    assert next(parts).name == "decode is right"
    outcomes.append(Outcome("decode is right", (), "out of time"))
    assert next(parts).missing == "decoding is not right"
    outcomes.append(Outcome("device tests", (), "not run"))
    kernels = next(parts)
    assert "--only=reference,cudnn,flash-attn3-jax" in kernels.command
    assert "--tune" not in kernels.command


def test_the_page_shows_every_kind_of_result():
    def part(name, result, status="done", tail=""):
        command = ("/somewhere/bin/python3", "-m", "scripts.x")
        return dataclasses.asdict(Outcome(name, command, status, 1.0, result, tail))

    hardware = {"name": "chip", "memory_bytes": 1e9, "read_bandwidth": 2e12}
    hardware |= {"rates": {"bfloat16": 5e14}}
    step = {"rows": 2, "context": 64, "needed_bytes": 2e9}
    answers = [{"text": "a\nb", "token_ids": [1, 2]}, {"text": "c", "token_ids": [3]}]
    other = [answers[0], {"text": "d", "token_ids": [4]}]
    kernels = {"device": "chip", "jax": "0", "rows": [], "paged_over_contiguous": {}}
    found = {"device": "chip", "date": "today", "jax": "0", "python": "3"}
    parts = [
        part("kernels", kernels | {"hardware": hardware}),
        part("steps", {"decode_steps": [step], "hardware": hardware}),
        part("tokens on gpu", {"results": answers}),
        part("tokens on cpu", {"results": other}),
        part("late", None, "out of time", "\n".join(map(str, range(30)))),
    ]
    text = device_text.page(found | {"parts": parts})
    assert "    python -m scripts.x" in text and "somewhere" not in text
    assert "memory 2000 GB/s, bfloat16 products 500.0 TFLOP/s" in text
    assert "does not fit: 2.0 GB of 1.0 GB" in text
    assert "    'a\\nb'\n" in text and "Answers with the CPU's tokens: 1 of 2." in text
    assert "| late | out of time | 1 |" in text and "    29\n" in text and "    14\n" not in text


REFUSED = {
    "another device": (["--device=gpu"], "--device is auto or cpu, not 'gpu'"),
    "no folder": (["--results=missing"], "--results=missing is no folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(run, case):
    args, message = REFUSED[case]
    assert message in run(*args).error
