"""`python -m scripts.device`: its parts, its page, and what it says where there is no device."""

import dataclasses
import json
import sys
from types import SimpleNamespace

import pytest

from inference.benchmark.subprocesses import Outcome, Subprocess
from layers.kernels import autotune
from scripts import device
from scripts.reports import device_text
from tests import compiling
from tests.scripts import apps


@pytest.fixture
def run(monkeypatch, capfd, tmp_path):
    return lambda *args: apps.call(device, monkeypatch, capfd, f"--results={tmp_path}", *args)


def test_without_an_accelerator_nothing_is_measured(run, tmp_path):
    ran = run()
    assert ran.status == 0 and ran.out.startswith("no accelerator: JAX computes on this machine's")
    assert ran.out.count("\n") == 1 and not [*tmp_path.iterdir()]


def test_small_shapes_on_a_cpu(run, monkeypatch, tmp_path):
    for name, value in compiling.environment(tmp_path / "cache").items():
        monkeypatch.setenv(name, value)
    ran = run("--device=cpu", "--parts=kernels")
    assert ran.status == 0, ran
    (page,) = tmp_path.glob("cpu-*.md")
    found = json.loads(page.with_suffix(".json").read_text())
    assert ran.out.splitlines()[0].startswith("kernels: done") and str(page) in ran.out
    (part,) = found["parts"]
    assert part["result"]["rows"] and part["tail"] == "" and found["device"] == "cpu"
    assert "| kernels | done |" in page.read_text() and "  reference  " in page.read_text()
    assert "--parts lists some of ceilings, decode, attention" in run(
        "--device=cpu", "--parts=kernel"
    ).error  # fmt: skip
    assert json.loads(page.with_suffix(".json").read_text()) == found


def test_parts_are_added_to_the_devices_page(run, monkeypatch, tmp_path):
    seen = []

    def parts(kind, outcomes):
        for name in ("one", "two", "three"):
            seen.append((name, [(outcome.name, outcome.tail) for outcome in outcomes]))
            yield Subprocess(name, ("echo", name), 60)

    monkeypatch.setattr(device, "_parts", parts)
    assert run("--device=cpu").status == 0
    assert run("--device=cpu", "--parts=two").status == 0
    assert ("two", [("one", "one"), ("three", "three")]) in seen
    (page,) = tmp_path.glob("cpu-*.json")
    found = json.loads(page.read_text())
    assert [part["name"] for part in found["parts"]] == ["one", "two", "three"]

    page.write_text(json.dumps(found | {"jax": "another"}))
    assert run("--device=cpu", "--parts=three").status == 0
    assert [part["name"] for part in json.loads(page.read_text())["parts"]] == ["three"]
    page.write_text("{")
    assert ".json is damaged: remove it" in run("--device=cpu", "--parts=three").error


def test_what_is_not_done_is_resumed_on_a_later_day(run, monkeypatch, tmp_path):
    limits_s = {"one": 60, "two": 60, "three": 60, "four": 0}
    commands = {name: ("echo", name) for name in limits_s}

    def parts(kind, outcomes):
        for name, limit_s in limits_s.items():
            yield Subprocess(name, commands[name], limit_s)

    monkeypatch.setattr(device, "_parts", parts)
    commands["two"] = ("false",)
    assert run("--device=cpu", "--parts=one,two").status == 1
    (page,) = tmp_path.glob("cpu-*.json")
    found = json.loads(page.read_text())
    one, two = found["parts"]
    today = one.pop("date")  # as pages of one day had none
    assert today == two["date"] == found["date"]
    before = {"name": "four", "command": [], "status": "out of time"}
    old = tmp_path / "cpu-2026-01-02.json"
    old.write_text(json.dumps(found | {"date": "2026-01-02", "parts": [one, before, two]}))
    page.unlink()

    commands["two"] = ("echo", "mended")
    ran = run("--device=cpu", "--resume")
    assert [line.split(":")[0] for line in ran.out.splitlines()[:-1]] == ["two", "three", "four"]
    assert [*tmp_path.glob("cpu-*.json")] == [old]
    resumed = json.loads(old.read_text())
    assert resumed["date"] == "2026-01-02"
    dates = {part["name"]: (part["status"], part["date"]) for part in resumed["parts"]}
    assert dates == {
        "one": ("done", "2026-01-02"),
        "two": ("done", today),
        "three": ("done", today),
        "four": ("out of time", "2026-01-02"),  # no time was left, so what was measured stays
    }
    assert "| one | done | 0 | 2026-01-02 |" in old.with_suffix(".md").read_text()
    assert "four" in run("--device=cpu", "--resume", "--parts=one,four").out


def test_results_of_other_sources_are_not_done(run, monkeypatch, tmp_path):
    """Neither those without a digest, nor of older kernels; files that parts write change none."""
    ran = []

    def parts(kind, outcomes):
        for name in ("one", "two"):
            ran.append((name, [outcome.name for outcome in outcomes]))
            yield Subprocess(name, ("echo", name), 60)

    root = tmp_path / "tree"
    kernel = root / "layers" / "kernels" / "gpu.py"
    kernel.parent.mkdir(parents=True)
    kernel.write_text("old")
    monkeypatch.setattr(device, "_parts", parts)
    monkeypatch.setattr(device, "_ROOT", root)
    assert run("--device=cpu").status == 0
    kernel.with_name("tuning.json").write_text("measured")
    assert run("--device=cpu", "--resume").out.count("\n") == 1  # nothing but the page's name
    (page,) = tmp_path.glob("cpu-*.json")
    found = json.loads(page.read_text())
    del found["parts"][0]["sources"]
    page.write_text(json.dumps(found))
    assert [line[:9] for line in run("--device=cpu", "--resume").out.splitlines()[:-1]] == [
        "one: done"
    ]
    kernel.write_text("new")
    ran.clear()
    assert run("--device=cpu", "--parts=two").status == 0
    assert ("two", ["one"]) not in ran  # what an old kernel passed says nothing
    assert len(json.loads(page.read_text())["parts"]) == 2
    out = run("--device=cpu", "--resume").out.splitlines()
    assert [line.split(":")[0] for line in out[:-1]] == ["one"]


def test_what_a_part_runs():
    """Tests run what checks kernels, too."""
    sources = device._sources(list(device._parts(_H200, [])))
    assert sources["decode"] == sources["batches"] != sources["products"] == sources["engine"]


def test_what_was_found_is_kept_when_a_part_fails(run, monkeypatch, tmp_path):
    def parts(kind, outcomes):
        yield Subprocess("one", (sys.executable, "-c", "print('fine')"), 60)
        if outcomes:  # as it runs, not as names are asked for
            assert outcomes[0].status == "done"
            (page,) = tmp_path.glob("cpu-*.md")
            assert "fine" in page.read_text()
        yield Subprocess("two", (sys.executable, "-c", "raise SystemExit('bad')"), 60)
        yield Subprocess("three", ("true",), 60, missing="nothing to do it with")

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


_STEPS = [
    "llama3-8b", "llama3-8b-int4", "llama3-8b-fp8", "llama3-8b-int8", "llama3-8b-prefill",
    "mamba2-2.7b", "engine", "load", "llama2-13b", "llama2-13b-gqa", "qwen3-30b-a3b",
    "deepseek-v2-lite",
]  # fmt: skip
_CHOICES = ["choices-bfloat16", "choices-int4", "choices-fp8", "choices-int8", "without-graphs"]
_H200 = device._Machine("gpu", "NVIDIA H200", "0.11.2")
_V6E = device._Machine("tpu", "TPU v6 lite", "0.10.2")


@pytest.mark.parametrize("machine, page_tokens", [(_H200, 64), (_V6E, 128)])
def test_a_devices_parts_in_order_of_worth(machine, page_tokens):
    kind = machine.platform
    parts = {part.name: part for part in device._parts(machine, [])}
    names = list(parts)
    assert names[:3] == ["ceilings", "decode", "attention"]
    assert {"experts", "low-bit", "pages", "recurrence", "rows"} == {
        *names[3 : names.index("products")]
    }
    at = names.index("products")
    choices = _CHOICES if kind == "gpu" else []
    assert names[at + 1 :][:10] == [
        *_STEPS[:4], "torch-products", "torch", *choices, "kernels", "tune", *_STEPS[4:]
    ][:10]  # fmt: skip
    assert all(part.limit_s < 540 for part in parts.values())
    assert len({*names}) == len(names) and not any("," in name for name in names)
    assert "--tune" in parts["tune"].command and "--tune" not in parts["kernels"].command
    assert parts["kernels"].is_json and parts["tune"].is_json and parts["torch"].is_json
    known = {"gpu": (None, "torch is not installed"), "tpu": ("computes on GPUs",)}
    assert parts["torch"].missing in known[kind]
    assert parts["torch"].command[3:] == (
        parts["llama3-8b"].command[-1], parts["llama3-8b-prefill"].command[-1]
    )  # fmt: skip
    steps = [part for part in parts.values() if "scripts.bench" in part.command]
    assert [part.name for part in steps] == [*_STEPS[:4], *choices, *_STEPS[4:]]
    for part in steps:
        assert f"--set=engine.cache.page_tokens={page_tokens}" in part.command
        assert "--set=engine.kernels.attention=reference" in part.command
    assert "JAX_PLATFORMS=cpu" in parts["tokens-cpu"].command


def test_the_engine_runs_the_kernel_that_was_shown_right():
    def named(*statuses, is_repeatable=True):
        rows = [
            {"results": {"pallas_gpu": {"status": status, "is_repeatable": is_repeatable}}}
            for status in statuses
        ]
        outcome = Outcome("kernels", (), "out of time", result={"rows": rows})
        return {
            part.name
            for part in device._parts(_H200, [outcome])
            if "--set=engine.kernels.attention=pallas_gpu" in part.command
        }

    every = {*_STEPS, *_CHOICES, "tokens-kernel"}
    assert named("right", "not run", "out of time", "right") == every
    assert not named("right", "wrong") and not named("right", is_repeatable=False)
    assert not named("not run") and not named()
    decode = Outcome("decode", (), "done")
    assert device._kernel("gpu", [decode]) == "pallas_gpu" and not device._kernel("cpu", [decode])
    wrong = {"status": "wrong", "is_repeatable": True}
    kernels = Outcome("kernels", (), "done", result={"rows": [{"results": {"pallas_gpu": wrong}}]})
    assert device._kernel("gpu", [decode, kernels]) is None


def test_choices_and_hlo_of_steps_are_written(monkeypatch, tmp_path):
    """XLA adds its choices to the file that an engine on this device loads."""
    (part,) = (part for part in device._parts(_H200, []) if part.name == "choices-int4")
    path = device._choices_path(_H200)
    assert path.name == "nvidia-h200-jax-0.11.2.txt" and path.parent == autotune.FOLDER
    assert f"--xla_gpu_dump_autotune_results_to={path}" in part.command[1].split(" ")
    assert (
        part.command[1].startswith("XLA_FLAGS=--xla_dump_to=") and "--weights=int4" in part.command
    )
    monkeypatch.setattr(device, "_KERNELS", tmp_path)
    monkeypatch.setattr(device, "_ARTIFACTS", SimpleNamespace(value=str(tmp_path / "files")))
    (tmp_path / "autotune").mkdir()
    for path in (device._choices_path(_H200), tmp_path / "tuning.json"):
        path.write_text("measured")
    device._keep_files(_H200)
    names = sorted(path.name for path in (tmp_path / "files").iterdir())
    assert names == ["nvidia-h200-jax-0.11.2.txt", "tuning.json"]


def test_who_is_wrong_in_decoding_is_not_asked_again():
    outcomes = [Outcome("decode", (), "out of time")]
    parts = {part.name: part for part in device._parts(_H200, outcomes)}
    for name in ("attention", "low-bit", "tune", "batches"):
        assert parts[name].missing == "decoding is not right"
    kernels = parts["kernels"].command
    assert "--only=reference,cudnn,flash-attn3-jax,flash-attn3-contiguous" in kernels
    assert "--set=engine.kernels.attention=reference" in parts["llama3-8b"].command


def test_tokens_of_a_kernel_stand_beside_the_cpus(monkeypatch):
    monkeypatch.setattr(device.sources, "cached_path", lambda weights: "here")
    parts = {part.name: part for part in device._parts(_H200, [])}
    assert "bfloat16" not in " ".join(parts["tokens-kernel"].command)  # the model's own
    assert parts["tokens-cpu"].missing is None
    assert parts["tokens-kernel"].missing == "no kernel was shown right"
    monkeypatch.setattr(device.sources, "cached_path", lambda weights: None)
    without = {part.name: part for part in device._parts(_H200, [])}
    assert "weights of smollm2-135m are not" in without["tokens-kernel"].missing


def test_the_page_shows_every_kind_of_result():
    def part(name, result, status="done", tail=""):
        command = ("/somewhere/bin/python3", "-m", "scripts.x")
        return dataclasses.asdict(Outcome(name, command, status, 1.0, result, tail))

    hardware = {"name": "chip", "memory_bytes": 1e9, "read_bandwidth": 2e12}
    hardware |= {"rates": {"bfloat16": 5e14}}
    step = {"rows": 2, "context": 64, "needed_bytes": 2e9}
    prefill = {"rows": 1, "tokens": 512, "step_flops": 5e12, "predicted_s": 0.01}
    prefill |= {"measured_s": 0.0125, "ratio": 0.8, "rate_share": 0.8}
    slower = {"rows": 1, "tokens": 512, "measured_s": 0.025, "attention": "math"}
    figures = {"output_tok_s": 900.0, "ttft_p50_s": 0.5, "ttft_p99_s": 0.9, "itl_p50_s": 0.01}
    figures |= {"host_step_s": 1e-3}
    row = figures | {"concurrency": 64, "predicted": figures | {"output_tok_s": 1000.0}}
    load = {"rows": [row], "warm_up_s": 9.0}
    whole = {"sampled": row, "prefill_tok_s": 40000.0, "prefill_rate_share": 0.7}

    def answer(text, token_ids, logprobs, **top):
        tops = [dict(zip("1234", (-1.0, -1.05, -1.1, -5.0), strict=True)) for _ in token_ids]
        found = {"text": text, "token_ids": token_ids, "logprobs": logprobs}
        return found | {"top_logprobs": tops}

    answers = [answer("a\nb", [1, 2], [-1.0, -1.05]), answer("c", [3], [-1.1])]
    tie = [answers[0], answer("d", [1], [-1.0])]
    other = [answers[0], answer("e", [1], [-1.0]) | {"top_logprobs": [{"1": -1.0}]}]
    kernels = {"device": "chip", "jax": "0", "rows": []}
    rates = {"device": "chip", "jax": "0", "read_bandwidth": 2.1e12, "rates": {"8192": 6e14}}
    product = {"status": "right", "error": 1e-3, "seconds": 5e-5, "share": 0.8}
    product = {"matrix": "out", "case": "out, int4", "bytes": 1e8, "results": {"torch": product}}
    found = {"device": "chip", "date": "today", "jax": "0", "python": "3"}
    parts = [
        part("kernels", kernels | {"hardware": hardware}),
        part("ceilings", rates | {"hardware": hardware}),
        part("torch-products", {"peer": "torch 2", "copy_bandwidth": 2e12, "rows": [product]}),
        part("steps", {"decode_steps": [step], "hardware": hardware}),
        part("prefill", {"prefill_steps": [prefill], "hardware": hardware}),
        part("torch", {"peer": "torch 2", "decode_steps": [], "prefill_steps": [slower]}),
        part("load", load | whole),
        part("part of a load", load, "out of time"),
        part("tokens-cpu", {"results": answers}),
        part("tokens-reference", {"results": tie}),
        part("tokens-kernel", {"results": other}),
        part("late", None, "out of time", "\n".join(map(str, range(30)))),
    ]
    text = device_text.page(found | {"parts": parts})
    assert "    python -m scripts.x" in text and "somewhere" not in text
    assert "memory 2000 GB/s, bfloat16 products 500.0 TFLOP/s" in text
    assert "memory 2000 GB/s (2100 GB/s where nothing is written)" in text
    assert "bfloat16 products of 8192 x 8192: 600.0 TFLOP/s" in text
    assert "torch 2; measured: memory 2000 GB/s" in text
    assert "does not fit: 2.0 GB of 1.0 GB" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["out,", "int4", "torch", "50.0", "2000", "80%", "1.0e-03"] in rows
    assert ["1", "x", "512", "12.500", "10.000", "0.80", "5.00", "80%", "40960"] in rows
    assert ["prefill", "1", "x", "512", "25.000", "12.500", "2.00", "math"] in rows
    assert ["64", "sampled", "900.0", "0.500", "0.900", "10.00", "1.00"] in rows
    assert rows.count(["predicted", "1000.0", "0.500", "0.900", "10.00", "1.00"]) == 3
    assert "prefill 40000 tok/s, 70% of the product's rate" in text
    assert "    'a\\nb'\n" in text and "reference: 1 of 2 answers have the CPU's tokens" in text
    assert [each.agrees for each in device_text.tokens(parts)] == [True, False]
    assert "as rounding may." in text and "WRONG, more than 0.1." in text
    assert "| late | out of time | 1 |" in text and "    29\n" in text and "    14\n" not in text


REFUSED = {
    "another device": (["--device=gpu"], "--device is auto or cpu, not 'gpu'"),
    "no folder": (["--results=missing"], "--results=missing is no folder"),
    "a model": (["--model=llama3-8b"], "device does not read --model\n"),
    "another app's": (["--rate=3"], "device does not read --rate\n"),
    "JSON": (["--json"], "device does not read --json\n"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(run, case):
    args, message = REFUSED[case]
    assert message in run(*args).error
