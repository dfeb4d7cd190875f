"""Values of other types, one at a time, in every file that describes a checkpoint."""

import copy
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.errors import InputError
from inference.checkpoints import resolve, safetensors_file
from inference.checkpoints.hf.quantized import methods
from inference.checkpoints.native import config_file

GOLDEN = Path(__file__).parents[2] / "golden"
TINY = GOLDEN / "llama-tokenizer"
VALUES: tuple[Any, ...] = (
    *(None, [], {}, 1, 1.5, -1, True, "", "\0", 10**30, math.nan, [[1]], {"a": 1}),
)
_LISTED = 2  # entries of a list that are changed


def changed(value: Any) -> Iterator[Any]:
    """Every form of a JSON value in which one part, or all of it, is another."""
    yield from VALUES
    parts: list[Any] = []
    if isinstance(value, dict):
        parts = list(value)
    elif isinstance(value, list):
        parts = list(range(min(len(value), _LISTED)))
    for part in parts:
        for other in changed(value[part]):
            whole = copy.copy(value)
            whole[part] = other
            yield whole


def is_sound_or_refused(read: Any, *args: Any) -> None:
    try:
        read(*args)
    except InputError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000


FILES: dict[str, Any] = {
    "config.json": resolve.resolve,
    "generation_config.json": lambda folder: resolve.resolve(folder).open(None).eos_ids,
    "model.safetensors.index.json": lambda folder: safetensors_file.open_directory(Path(folder)),
}
INDEX = {"weight_map": {"model.norm.weight": "model.safetensors"}}


@pytest.mark.parametrize("name", FILES)
def test_a_directory(name, tmp_path):
    folder = Path(shutil.copytree(TINY, tmp_path / "model"))
    path = folder / name
    for value in changed(json.loads(path.read_text()) if path.exists() else INDEX):
        path.write_text(json.dumps(value))
        is_sound_or_refused(FILES[name], str(folder))


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_tokenizer(name, tmp_path):
    folder = Path(shutil.copytree(TINY, tmp_path / "model"))
    before = {
        "bos_token": {"content": "<|a|>", "lstrip": False}, "additional_special_tokens": ["<|b|>"],
        "added_tokens_decoder": {"0": {"content": "<|a|>"}}, "extra_special_tokens": {"x": "<|x|>"},
        "chat_template": [{"name": "default", "template": "x"}], "split_special_tokens": False,
    }  # fmt: skip
    checkpoint = resolve.resolve(str(folder)).open(None)
    for value in changed(before):
        (folder / name).write_text(json.dumps(value))
        is_sound_or_refused(checkpoint.load_tokenizer)


def test_what_says_how_weights_are_stored():
    for folder in sorted((GOLDEN / "quantized").iterdir()):
        said = json.loads((folder / "config.json").read_text())["quantization_config"]
        for value in changed(said):
            if value is not None:  # as if nothing were said
                is_sound_or_refused(methods.read, value)


def test_a_native_configuration():
    described = config_file.to_json(resolve.resolve(str(TINY)).config)
    for value in changed(json.loads(json.dumps(described))):
        is_sound_or_refused(config_file.from_json, value, "config.json")
