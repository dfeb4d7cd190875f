"""Engines get the room that the adapters take with which they start."""

import pytest

from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.settings.adapters import AdapterConfig
from scripts.flags import adapter_flags
from tests import fakes
from tests.inference.adapters import peft_files


def test_room_is_what_all_adapters_take(tmp_path):
    model = fakes.deepseek()
    peft_files.write(tmp_path / "one", model, rank=3)
    peft_files.write(tmp_path / "other", model, rank=9, extras=["vocab"])
    peft_files.write(tmp_path / "third", model, rank=2, modules="kv_b_proj", extras=["latents"])
    adapters = adapter_flags.directories(str(tmp_path))
    assert adapters == {name: tmp_path / name for name in ("one", "other", "third")}
    room = adapter_flags.with_room(Config(model), adapters).engine.adapters
    assert room == AdapterConfig(slots=3, rank=16, extras=("latents", "vocab"))
    roomy = EngineConfig.of(rank=64)  # for adapters that are loaded later
    room = adapter_flags.with_room(Config(model, roomy), adapters).engine.adapters
    assert room == AdapterConfig(slots=3, rank=64, extras=("latents", "vocab"))
    larger = EngineConfig.of(slots=5, rank=64, extras=("experts",))
    room = adapter_flags.with_room(Config(model, larger), adapters).engine.adapters
    assert room == AdapterConfig(5, 64, ("experts", "latents", "vocab"))


def test_a_folder_without_adapters_is_named(tmp_path):
    with pytest.raises(InputError, match=r"--adapters=.*: has no folder of an adapter, with adap"):
        adapter_flags.directories(str(tmp_path))


def test_two_adapters_of_one_name_are_both_named(tmp_path):
    peft_files.write(tmp_path / "poet", fakes.llama(), rank=2)
    (tmp_path / "poet.gguf").touch()
    expected = "--adapters=.*: poet and poet.gguf are both adapters with the name poet; rename one$"
    with pytest.raises(InputError, match=expected):
        adapter_flags.directories(str(tmp_path))
