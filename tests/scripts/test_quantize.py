"""`python -m scripts.quantize`: what it writes, says and refuses."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from configs.errors import InputError
from inference.checkpoints import provenance, resolve, text_files
from layers import decoder, params
from scripts import prune, quantize
from tests.scripts import apps

pytestmark = pytest.mark.quick_code

_TEXT = "Where does the workload wait? It waits for memory, then for arithmetic.\n" * 120


@pytest.fixture
def run(monkeypatch, capfd, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(_TEXT)

    def call(*args, calibrate=text, output=tmp_path / "few"):
        given = [] if calibrate is None else [f"--calibrate={calibrate}"]
        if given and "--method=qat" not in args:
            given.append("--tokens=1024")
        return apps.call(
            quantize,
            monkeypatch,
            capfd,
            f"--model={apps.TINY}",
            f"--output={output}",
            *given,
            *args,
        )

    return call


def loaded(folder):
    config = resolve.resolve(str(folder)).config
    return dict(config.formats), config


def test_a_model_is_quantized(run, tmp_path):
    ran = run("--method=gptq", "--bits=4", "--skip=down,layers/0", "--json")
    assert ran.status == 0, ran.err
    found = json.loads(ran.out)
    formats, config = loaded(tmp_path / "few")
    assert set(formats) == {"embed/table", "layers/1/mixer/qkv", "layers/1/mixer/out",
                            "layers/1/ffn/gate_up"}  # fmt: skip
    assert formats["layers/1/mixer/out"] == ("int4_g32",) and formats["embed/table"] == ("int8",)
    assert found["bytes"] == params.num_bytes(config.parameters()) < found["bytes_before"]
    assert found["errors"].keys() == {"mixer/qkv", "mixer/out", "ffn/gate_up"}
    assert found["method"] == "gptq" and found["seconds"] > 0
    assert not (tmp_path / "few.quantizing").exists()
    again = run("--method=rtn", output=tmp_path / "again").err.splitlines()[-1]
    assert "layers/0/ffn/down has rows of 52, of which int4 has no whole groups" in again
    run_again = run(f"--model={tmp_path / 'few'}", output=tmp_path / "twice")
    assert run_again.status == 1
    assert "is quantized already, in int4_g32, int8" in run_again.err.splitlines()[-1]


def test_a_pruned_model_keeps_its_stages(run, monkeypatch, capfd, tmp_path):
    parent, child = resolve.resolve(str(apps.TINY)).open(None), tmp_path / "child"
    pruned = apps.call(
        prune, monkeypatch, capfd, f"--model={apps.TINY}", f"--text={tmp_path / 'text.txt'}",
        "--samples=2", "--sample_tokens=16", "--widths=layers=1", f"--output={child}",
    )  # fmt: skip
    assert pruned.status == 0, pruned.err
    assert run("--method=rtn", "--skip=down", f"--model={child}", calibrate=None).status == 0
    first, second = provenance.stages(text_files.read(tmp_path / "few"))
    assert (first["made_by"], second["made_by"]) == ("prune", "quantize")
    assert first["parent"] == provenance.weights_digest(parent)
    assert second["parent"] == provenance.weights_digest(resolve.resolve(str(child)).open(None))
    assert second["data"] is None and second["method"] == "rtn"


def test_a_model_reads_what_it_writes_itself(run, tmp_path):
    """Where a method reads and no text is named."""
    ran = run("--method=gptq", "--skip=down", "--tokens=512", "--json", calibrate=None)
    assert ran.status == 0, ran.err
    assert json.loads(ran.out)["errors"].keys() == {"mixer/qkv", "mixer/out", "ffn/gate_up"}
    assert loaded(tmp_path / "few")[0]["layers/0/mixer/out"] == ("int4_g32",)


def test_a_trained_model_is_rounded(run, tmp_path):
    ran = run(
        "--method=qat", "--bits=3", "--skip=down", "--set=training.steps=4",
        "--set=training.window=32", "--set=training.warmup_steps=1", "--json",
    )  # fmt: skip
    assert ran.status == 0, ran.err
    formats, config = loaded(tmp_path / "few")
    assert formats["layers/1/mixer/out"] == ("int3_g32",)
    plain = run("--method=rtn", "--bits=3", "--skip=down", calibrate=None, output=tmp_path / "rtn")
    assert plain.status == 0 and "MB of weights by rtn to int3" in plain.out
    trained, rounded = (
        params.flatten(resolve.resolve(str(tmp_path / name)).open(None).load_params(
            decoder.param_infos(dataclasses.replace(config, formats=())), None), lambda _: False)
        for name in ("few", "rtn")
    )  # fmt: skip
    assert not np.array_equal(trained["layers/0/mixer/out"], rounded["layers/0/mixer/out"])
    assert not list(tmp_path.glob("*.training"))


def test_what_another_training_left_does_not_go_on(run, tmp_path, monkeypatch):
    """Also where its steps are gone, and only finished layers are there."""

    def stopped(*args):
        raise InputError("stopped")

    def trained(steps):
        return run(
            "--method=qat", "--bits=3", "--skip=down", f"--set=training.steps={steps}",
            "--set=training.window=32", "--set=training.warmup_steps=1",
        )  # fmt: skip

    monkeypatch.setattr("inference.quantize.export.write", stopped)
    assert "stopped" in trained(2).err
    shutil.rmtree(tmp_path / "few.training")
    assert "few.quantizing holds what another run has finished: its training is" in trained(3).err


@pytest.mark.parametrize(
    "args, message",
    [
        (["--method=magic"], "no method 'magic'; valid: rtn, percentile"),
        (["--bits=5"], "integers have 8, 4 or 3 bits, not 5"),
        (["--group=48"], "groups have 128, 64, 32 numbers, not 48"),
        (["--group=64"], "rows of 32, of which int4_g64 has no whole groups: these are of 64"),
        (["--format=int5"], "no format 'int5'; valid:"),
        (["--format=int8", "--bits=4"], "--format says all that --bits does"),
        (["--format=llm_int8", "--method=awq"], "--method=awq does not go with --format=llm_int8"),
        (["--format=llm_int8"], "--method=rtn does not go with --format=llm_int8"),
        (["--method=llm_int8", "--format=int4"], "llm_int8 does not go with --format=int4: "),
        (["--method=qat", "--bits=8", "--tokens=2048"], "reads all of its text: leave --tokens"),
        (["--skip=layers/9"], "--skip=layers/9: no parameter"),
        (["--method=gptq", "--bits=8", "--tokens=1000000"], "asks for"),
        (["--tokens=3", "--bits=8"], "--tokens is at least"),
        (["--set=model.dtype=float32"], "leave --set and --mesh out"),
        (["--method=qat", "--bits=8", "--set=model.norm_eps=1"], "reads --set training.FIELD"),
        (["--method=qat", "--bits=8", "--rotate"], "leave --rotate out"),
        (["--weights=int8"], "quantize does not read --weights"),
        (["--model=gpt2", "--rotate"], "layer norms"),
        (["--calibrate=missing.txt", "--bits=8"], "cannot read missing.txt"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(run, args, message, tmp_path):
    ran = run(*args)
    assert ran.status == 1 and ran.out == "" and message in ran.err.splitlines()[-1]
    assert not (tmp_path / "few").exists()


def test_an_output_is_needed_and_must_be_new(run, tmp_path, monkeypatch, capfd):
    ran = apps.call(quantize, monkeypatch, capfd, f"--model={apps.TINY}")
    assert ran.status == 1 and "--output=DIR" in ran.err
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "file").write_text("")
    assert "exists already" in run("--bits=8").err
