"""Directories of models for embeddings, which were saved without their head."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from configs.errors import InputError
from inference.checkpoints import convert, mapped, resolve
from layers import decoder, params

QWEN3 = Path(__file__).parents[2] / "golden" / "qwen3-mha-untied-float32"


def headless(folder: Path, **changes: object) -> Path:
    """The checkpoint as `AutoModel` saves it: no head, and names without the model's prefix."""
    folder = Path(shutil.copytree(QWEN3, folder))
    tensors = load_file(QWEN3 / "model.safetensors")
    del tensors["lm_head.weight"]
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    raw = mapped.read_json(QWEN3 / "config.json") | changes
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def load(directory: Path) -> dict[str, np.ndarray]:
    found = resolve.resolve(str(directory))
    loaded = found.open(None).load_params(decoder.param_infos(found.config), None)
    return {path: np.asarray(leaf) for path, leaf in params.flatten(loaded).items()}


@pytest.mark.parametrize("name", ["Qwen3Model", "Qwen3ForCausalLM"])
def test_what_has_no_head_is_read(name, tmp_path, caplog):
    """By its architecture, or as sentence-transformers saves it; and it is written likewise."""
    folder = headless(tmp_path / "made", architectures=[name])
    if name != "Qwen3Model":
        (folder / "modules.json").write_text("[]")
    found, expected = load(folder), load(QWEN3)
    assert "what continues them does not" in caplog.text
    del expected["head/table"]
    assert found.keys() == expected.keys()
    for path, value in found.items():
        np.testing.assert_array_equal(value, expected[path], path)
    convert.convert(resolve.resolve(str(folder)).open(None), tmp_path / "copy", "hf")
    assert resolve.resolve(str(tmp_path / "copy")).config.tied
    assert load(tmp_path / "copy").keys() == found.keys()


def test_a_head_that_is_missing_elsewhere_is_named(tmp_path):
    with pytest.raises(InputError, match="tensor 'lm_head.weight' is missing"):
        load(headless(tmp_path / "made"))


def test_a_head_that_is_there_is_read(tmp_path, caplog):
    folder = Path(shutil.copytree(QWEN3, tmp_path / "made"))
    (folder / "modules.json").write_text("[]")
    assert load(folder).keys() == load(QWEN3).keys() and "head" not in caplog.text


@pytest.mark.parametrize("changes, cause", [
    ({"is_causal": False}, "is_causal=False is not supported; valid: True"),
    ({"architectures": ["Gemma3TextModel"]}, "is not here: attention to later tokens"),
])  # fmt: skip
def test_attention_in_both_directions_is_refused(changes, cause, tmp_path):
    with pytest.raises(InputError, match=cause):
        load(headless(tmp_path / "made", **changes))
