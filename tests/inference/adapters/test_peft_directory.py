"""Adapters that are not sound, or not of the model, are refused in one line, and change nothing."""

import json

import ml_dtypes
import numpy as np
import pytest

from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.prefill import Prefill
from inference.adapters import peft_directory
from inference.adapters.table import AdapterTable
from tests import fakes
from tests.inference.adapters import peft_files

pytestmark = pytest.mark.quick_code

_MODEL = fakes.llama()
_Q = "base_model.model.model.layers.0.self_attn.q_proj"
_DOWN, _UP = f"{_Q}.lora_A.weight", f"{_Q}.lora_B.weight"


def _matrix(*shape, value=0.5):
    return np.full(shape, value, np.float32)


@pytest.mark.parametrize("changes, reason", [
    ({"peft_type": "IA3"}, "peft_type is LORA, not 'IA3'"),
    ({"use_dora": True}, "use_dora=True is not supported: merge such an adapter"),
    ({"bias": "all"}, "bias='all' is not supported"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
    ({"a_newer_field": 3}, "a_newer_field=3 is not supported"),
    ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights='pissa_niter_16' is not"),
    ({"lora_alpha": 0}, "lora_alpha is a number above 0, at most 1048576, not 0"),
    ({"lora_alpha": float("inf")}, "lora_alpha is a number above 0, at most 1048576, not inf"),
    ({"lora_alpha": 10**400}, "lora_alpha is a number above 0, at most 1048576, not"),
    ({"lora_alpha": None}, "lora_alpha is a number above 0, at most 1048576, not None"),
    ({"alpha_pattern": {"(": 2}}, "alpha_pattern: '(' is no regular expression"),
    ({"alpha_pattern": {"q_proj": "2"}}, "alpha_pattern of 'q_proj' is a number above 0"),
    ({"alpha_pattern": [2]}, "alpha_pattern is an object"),
])  # fmt: skip
def test_settings_that_would_be_ignored_are_refused(tmp_path, changes, reason):
    peft_files.write(tmp_path, _MODEL, **changes)
    with pytest.raises(InputError, match=r"adapter_config\.json: .*") as error:
        peft_directory.read(tmp_path, _MODEL, 8)
    assert reason in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("tensors, reason", [
    ({_DOWN: _matrix(4, 23)}, r"q_proj' has factors \[4, 23\] and \[32, 4\]; it is \[32, 24\], so"),
    ({_UP: _matrix(32, 3)}, r"has factors \[4, 24\] and \[32, 3\]"),
    ({_UP: _matrix(32, 4, value=np.nan)}, "lora_B.weight' has values that are not finite"),
    ({_DOWN: _matrix(4, 24, value=np.inf)}, "lora_A.weight' has values that are not finite"),
    ({_DOWN: np.array(3, np.float32)}, r"lora_A.weight' is a matrix, not \[\]"),
    ({_DOWN: _matrix(4, 24, 1)}, r"lora_A.weight' is a matrix, not \[4, 24, 1\]"),
    ({_DOWN: _matrix(0, 24), _UP: _matrix(32, 0)}, "it is"),
    ({f"{_Q}.lora_magnitude_vector": _matrix(24)}, "is no factor of LoRA, and would be lost"),
    ({"base_model.model.lm_head.weight": _matrix(131, 24)}, "is no factor of LoRA"),
    ({f"{_Q[:-6]}x_proj.lora_A.weight": _matrix(4, 24)}, "x_proj.lora_B.weight' is missing"),
    ({f"{_Q[:-6]}x_proj{end}": _matrix(4, 4) for end in (".lora_A.weight", ".lora_B.weight")},
     r"adapts 'model.layers.0.self_attn.x_proj', which tiny-llama has not, .* do end in down_proj"),
    ({_DOWN: _matrix(9, 24), _UP: _matrix(32, 9)}, "has rank 9, .* at most 8: set engine.adapters"),
])  # fmt: skip
def test_tensors_of_another_model_or_kind_are_refused(tmp_path, tensors, reason):
    peft_files.write(tmp_path, _MODEL, tensors=tensors)
    with pytest.raises(InputError, match=reason) as error:
        peft_directory.read(tmp_path, _MODEL, 8)
    assert "\n" not in str(error.value)


def test_directories_without_an_adapter_are_named(tmp_path):
    with pytest.raises(InputError, match="no adapter of the peft package"):
        peft_directory.read(tmp_path / "absent", _MODEL, 8)
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(InputError, match=r"adapter_model\.bin is a pickle, which is never loaded"):
        peft_directory.read(tmp_path, _MODEL, 8)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(InputError, match=r"adapter_config\.json"):
        peft_directory.read(tmp_path, _MODEL, 8)
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "lora_alpha": 1})
    )
    with pytest.raises(InputError, match=r"adapter_model\.safetensors"):
        peft_directory.read(tmp_path, _MODEL, 8)


def test_scales_follow_rank_pattern_and_rslora(tmp_path):
    names = ("q_proj", "k_proj")
    size = {"rank": 4, "seed": 3, "modules": names}
    plain = peft_files.write(tmp_path / "plain", _MODEL, **size, lora_alpha=4)
    stable = peft_files.write(tmp_path / "rs", _MODEL, **size, lora_alpha=4, use_rslora=True)
    other = peft_files.write(
        tmp_path / "other", _MODEL, **size, lora_alpha=4, alpha_pattern={"k_proj": 12}
    )
    ups = {
        where.name: [up for _, up in peft_directory.read(where, _MODEL, 8).factors.values()]
        for where in (plain, stable, other)
    }
    for place, base in enumerate(ups["plain"]):
        np.testing.assert_allclose(ups["rs"][place], 2 * base)
        ratio = ups["other"][place] / base
        assert np.allclose(ratio, 1) or np.allclose(ratio, 3)
    assert {
        round(float((a / b).mean())) for a, b in zip(ups["other"], ups["plain"], strict=True)
    } == {1, 3}


@pytest.mark.parametrize("pattern, alphas", [
    ({r"^model.layers.0.mlp.up_proj": 64}, {"0.mlp.up_proj": 64, "1.mlp.up_proj": 8}),
    ({r"layers\.\d+\.mlp\.up_proj": 64}, {"0.mlp.up_proj": 64, "0.mlp.gate_proj": 8}),
    ({"q_proj": 16, "layers.0.self_attn.q_proj": 64}, {"0.self_attn.q_proj": 16}),
    ({"proj": 64}, {"0.self_attn.q_proj": 8}),
])  # fmt: skip
def test_patterns_match_as_those_of_peft(pattern, alphas):
    settings = {"lora_alpha": 8, "alpha_pattern": pattern}
    for ending, alpha in alphas.items():
        assert peft_directory._scale(f"model.layers.{ending}", 1, settings) == alpha


def test_factors_may_be_of_another_type(tmp_path):
    """The scale is applied in float32: 3,000 times 64 is more than float16 holds."""
    down = _matrix(4, 24).astype(ml_dtypes.bfloat16)
    up = _matrix(32, 4, value=3000).astype(np.float16)
    peft_files.write(tmp_path, _MODEL, tensors={_DOWN: down, _UP: up}, lora_alpha=256)
    adapter = peft_directory.read(tmp_path, _MODEL, 8)
    assert adapter.rank == 4 and max(up.max() for _, up in adapter.factors.values()) == 192_000


@pytest.mark.parametrize("name", ["", "../x", "a b", "x" * 200, "-x", "a\x00"])
def test_names_that_are_no_names_are_refused(tmp_path, name):
    table = AdapterTable(Config(_MODEL, EngineConfig.of(slots=1)))
    with pytest.raises(InputError, match="an adapter is named by letters, digits"):
        table.load(name, peft_files.write(tmp_path, _MODEL))
    assert not table.names


def test_engines_without_room_say_so(tmp_path):
    with pytest.raises(InputError, match=r"engine\.adapters\.slots above 0"):
        AdapterTable(Config(_MODEL)).load("one", peft_files.write(tmp_path, _MODEL))
    with pytest.raises(InputError, match="adapters go with chips that do all, not with prefill"):
        Config(_MODEL, EngineConfig.of(slots=1), prefill=Prefill(chips=1))
