"""Which weights a name stands for."""

from pathlib import Path

from configs import presets
from inference.checkpoints import manifest, provenance
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
