"""`python -m scripts.prune`: what it writes, says and rejects."""

import errno
import json
import shutil

import pytest

from inference.checkpoints import provenance, resolve, safetensors_file, text_files
from inference.checkpoints.gguf.export import gguf_export
from scripts import prune
from scripts.modes import train_heads
from tests.inference.quantize import models
from tests.scripts import apps

pytestmark = pytest.mark.quick_code

_TEXT = "Where does the workload wait? It waits for memory, then for arithmetic.\n" * 60


@pytest.fixture
def run(monkeypatch, capfd, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(_TEXT)

    def call(*args, text=text, output=tmp_path / "child"):
        source = [] if text is None else [f"--text={text}"]
        sizes = ["--samples=4", "--sample_tokens=32"]
        named = [f"--model={apps.TINY}", f"--output={output}"]
        return apps.call(prune, monkeypatch, capfd, *named, *source, *sizes, *args)

    return call


def test_a_model_is_pruned_to_widths(run, tmp_path):
    ran = run("--widths=layers=1,ffn_width=40,kv_heads=1", "--json")
    assert ran.status == 0, ran.err
    result = json.loads(ran.out)
    config = resolve.resolve(str(tmp_path / "child")).config
    assert config.num_layers == 1 and config.layers[0].ffn.width == 40
    assert config.layers[0].mixer.num_kv_heads == 1
    assert result["parameters"] < result["parameters_before"] and result["candidates"] == []
    (record,) = provenance.stages(text_files.read(tmp_path / "child"))
    assert record["made_by"] == "prune" and len(record["data"]) == 64
    assert record["layers"] == result["layers"] and len(record["parent"]) == 64
    assert len(record["removed"]["ffn_width"][str(record["layers"][0])]) == 12
    assert not (tmp_path / "child.pruning").exists()


def test_a_budget_is_met_by_the_shape_that_loses_least(run, tmp_path):
    ran = run("--target_params=0.7", "--json")
    assert ran.status == 0, ran.err
    result = json.loads(ran.out)
    losses = [candidate["loss"] for candidate in result["candidates"]]
    assert losses == sorted(losses) and len(losses) > 1
    assert result["widths"] == result["candidates"][0]["widths"]
    assert 0.68 <= result["parameters"] / result["parameters_before"] <= 0.7
    assert any(candidate["is_best"] for candidate in result["candidates"])


@pytest.mark.long
def test_samples_are_the_models_own_and_written_once(run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run("--widths=ffn_width=40", text=None, output=tmp_path / "written").status == 0
    monkeypatch.setattr(train_heads, "generator", None)
    assert run("--widths=ffn_width=40", text=None, output=tmp_path / "again").status == 0
    first, again = (text_files.read(tmp_path / name) for name in ("written", "again"))
    assert provenance.stages(first) == provenance.stages(again)


def test_openings_leave_room_for_samples(run):
    ran = run("--widths=layers=1", "--sample_tokens=2", text=None)
    assert ran.status == 1 and "--sample_tokens=2: must be above the" in ran.err.splitlines()[-1]


def test_samples_are_lines(run, tmp_path):
    lines = tmp_path / "data.jsonl"
    lines.write_text(
        "".join(
            json.dumps({"text": f"{_TEXT[:400]}\u2028"}, ensure_ascii=False) + "\n"
            for _ in range(8)
        )
        + "\n"
    )
    assert run("--widths=ffn_width=40", text=lines, output=tmp_path / "lines").status == 0
    lines.write_text('{"text": 3}\n')
    error = run("--widths=ffn_width=40", text=lines, output=tmp_path / "none").err
    assert "line 1 is no object with" in error.splitlines()[-1]
    lines.write_text('{"text": "of words"}\n{"messages": [{"role": "user"}]}\n')
    error = run("--widths=ffn_width=40", text=lines, output=tmp_path / "none").err
    assert f"--text={lines}: line 2: " in error.splitlines()[-1]
    for empty in ("", " \n\n", '{"text": ""}\n'):
        lines.write_text(empty)
        error = run("--widths=ffn_width=40", text=lines, output=tmp_path / "none").err
        assert f"--text={lines}: no text in it" in error.splitlines()[-1]
    assert not (tmp_path / "none").exists() and not (tmp_path / "none.pruning").exists()


@pytest.mark.parametrize(
    "args, message",
    [
        ([], "--widths, --target_params or --target_latency_ms says how small"),
        (["--widths=layers"], "--widths=layers: must be an axis and a number"),
        (
            ["--widths=experts=2"],
            "--widths=experts=2: llama-tokenizer has none of it; it has layers=2",
        ),
        (["--widths=layers=0"], "--widths=layers=0: must be at least 1"),
        (["--widths=kv_heads=0"], "--widths=kv_heads=0: must be at least 1"),
        (["--widths=ffn_width=53"], "--widths=ffn_width=53: llama-tokenizer has 52; give fewer"),
        (["--target_params=1.5"], "--target_params=1.5: must be a share between 0 and 1"),
        (["--target_params=0.01"], "the smallest is --target_params=0."),
        (["--target_latency_ms=9e3", "--hardware=h100"], "9000: llama-tokenizer meets it as it is"),
        (["--target_params=0.5", "--hardware=h9"], "no hardware 'h9'"),
        (["--widths=layers=2,layers=1"], "--widths=layers=1: layers is given twice"),
        (["--target_params=0.5", "--target_latency_ms=1"], "give one of them"),
        (["--target_latency_ms=-1"], "must be a finite number above 0"),
        (["--widths=layers=1", "--aggregate=max,l2"], "must be two of mean and l2"),
        (["--widths=layers=1", "--samples=100000"], "needs more; give more text"),
        (["--widths=layers=1", "--samples=0"], "must be at least 1 sample"),
        (["--widths=layers=1", "--seed=3"], "--seed goes with --random"),
        (["--widths=layers=1", "--set=model.dtype=float32"], "leave --set and --mesh out"),
        (["--widths=layers=1", "--weights=int8"], "prune does not read --weights"),
        (["--widths=layers=1", "--text=missing.txt"], "cannot read missing.txt"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(run, args, message, tmp_path):
    ran = run(*args)
    assert ran.status == 1 and ran.out == "" and message in ran.err.splitlines()[-1]
    assert not (tmp_path / "child").exists()
    is_early = "the smallest" not in message  # before anything is scored
    assert is_early != (tmp_path / "child.pruning").exists()


def test_a_full_disk_is_said_in_one_line_and_the_scores_stay(run, tmp_path, monkeypatch):
    from inference.checkpoints.hf import weights_export

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(weights_export, "write", full)
        ran = run("--widths=ffn_width=40")
    assert ran.status == 1 and "No space left on device" in ran.err.splitlines()[-1]
    assert not (tmp_path / "child").exists() and (tmp_path / "child.pruning").exists()
    assert run("--widths=ffn_width=40").status == 0


@pytest.mark.parametrize("dtype", ["q8_0", "float32"])
def test_a_gguf_parent_is_pruned_as_the_numbers_that_it_holds(run, tmp_path, dtype):
    models.written(models.llama(), tmp_path / "wide")
    file = tmp_path / "wide.gguf"
    gguf_export.write(resolve.resolve(str(tmp_path / "wide")).open(None), file, dtype)
    ran = run(f"--model={file}", "--widths=layers=1")
    assert ran.status == 0, ran.err
    config = resolve.resolve(str(tmp_path / "child")).config
    assert config.num_layers == 1 and not config.formats


def test_a_damaged_list_of_stages_is_rejected_before_scores_are_made(run, tmp_path):
    parent = shutil.copytree(apps.TINY, tmp_path / "parent")
    (parent / "provenance.json").write_text('{"stages": 3}')
    ran = run(f"--model={parent}", "--widths=layers=1")
    assert ran.status == 1 and "provenance.json: must list objects" in ran.err.splitlines()[-1]
    assert not (tmp_path / "child.pruning").exists()


def test_a_disk_that_is_full_while_units_are_scored_is_named(run, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(safetensors_file, "write_header", full)
    ran = run("--widths=ffn_width=40")
    assert ran.status == 1 and "No space left on device" in ran.err.splitlines()[-1]
    assert "cannot write" in ran.err.splitlines()[-1] and not (tmp_path / "child").exists()
