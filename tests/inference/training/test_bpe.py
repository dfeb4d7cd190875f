"""Tokenizers that are trained on texts, and kept in the cache."""

from inference.checkpoints import text_files
from inference.training import bpe


def test_it_is_trained_again_where_it_is_damaged_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    folder = bpe.directory(["a b"], 300)
    calls, train = [], bpe._trained
    monkeypatch.setattr(bpe, "_trained", lambda *given: calls.append(1) or train(*given))
    (folder / ".tokenizer.json.0123456789ab").write_text("what a killed process left")
    assert bpe.directory(["a b"], 300) == folder and not calls
    config = folder / text_files.TOKENIZER_CONFIG
    config.write_text(config.read_text().replace("true", "false") + " ")
    assert bpe.directory(["a b"], 300) == folder and calls == [1]
    assert bpe.directory(["a b"], 300) == folder and calls == [1]
