"""Which weights a name stands for, and what made them."""

import dataclasses
from pathlib import Path

import pytest

from configs import presets
from configs.errors import InputError
from inference.checkpoints import convert, manifest, provenance, resolve
from inference.checkpoints.checkpoint import NewCheckpoint
from inference.checkpoints.hf import hub

TINY = Path(__file__).parents[2] / "golden" / "llama-tokenizer"


def test_what_tells_weights_apart(tmp_path, monkeypatch):
    snapshot = hub.Snapshot("owner/name", "c0ffee", tmp_path)
    monkeypatch.setattr(hub, "open_snapshot", lambda model: snapshot)
    assert provenance.identity("owner/name") == ["owner/name", "c0ffee"]
    assert provenance.identity("gpt2") == [
        "owner/name",
        "c0ffee",
    ]  # a preset whose weights are there
    assert provenance.identity("smollm2-135m") == [presets.get("smollm2-135m").weights.sha256]
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "m.gguf", "m-q4.gguf"):
        (tmp_path / name).write_text("x")
    first, second = provenance.identity(str(tmp_path / "m-00001-of-00002.gguf"))
    assert "m-00001-of" in first and "m-00002-of" in second
    (one,) = provenance.identity(str(tmp_path / "m.gguf"))
    (tmp_path / "m.gguf").write_text("xy")
    assert [one] != provenance.identity(str(tmp_path / "m.gguf"))
    before = provenance.identity(str(TINY))
    assert any("model.safetensors" in line for line in before)
    manifest.write(tmp_path)
    assert provenance.identity(str(tmp_path)) == [(tmp_path / manifest.NAME).read_text()]


def test_stages_outlive_conversions_in_their_order(tmp_path):
    stages = [
        {"made_by": "prune", "parent": "a" * 64, "data": "b" * 64, "widths": {"layers": 1}},
        {"made_by": "train", "parent": "c" * 64, "data": "d" * 64, "steps": 3},
    ]
    tiny = resolve.resolve(str(TINY)).open(None)
    before = tiny.contents()
    files = before.read_files()
    assert provenance.stages(files) == []
    for stage in stages:
        files = provenance.appended(files, stage)
    contents = dataclasses.replace(before, read_files=lambda: files)
    made = NewCheckpoint(config=tiny.config, eos_ids=tiny.eos_ids, new_contents=contents)
    convert.convert(made, tmp_path / "hf", "hf")
    convert.convert(resolve.resolve(str(tmp_path / "hf")).open(None), tmp_path / "native", "orbax")
    written = resolve.resolve(str(tmp_path / "native")).open(None)
    assert provenance.stages(written.contents().read_files()) == stages


@pytest.mark.parametrize("text", [b"[]", b'{"stages": {}}', b'{"stages": [1]}', b"{"])
def test_a_damaged_list_of_stages_is_named(text):
    with pytest.raises(InputError, match=r"^provenance\.json: .*"):
        provenance.appended({"provenance.json": text}, {"made_by": "prune"})
