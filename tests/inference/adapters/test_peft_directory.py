"""Adapters that are not sound, or not of the model, are refused in one line, and change nothing."""

import json

import ml_dtypes
import numpy as np
import pytest

from configs import adapters
from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.prefill import Prefill
from configs.settings.adapters import AdapterConfig
from inference.adapters import peft_directory
from inference.adapters.table import AdapterTable
from tests import fakes
from tests.inference.adapters import peft_files

pytestmark = pytest.mark.quick_code

_MODEL = fakes.llama()
_ROOM = AdapterConfig(rank=8)
_Q = "base_model.model.model.layers.0.self_attn.q_proj"
_ENDINGS = ".lora_A.weight", ".lora_B.weight"
_DOWN, _UP = f"{_Q}{_ENDINGS[0]}", f"{_Q}{_ENDINGS[1]}"


def _matrix(*shape, value=0.5):
    return np.full(shape, value, np.float32)


@pytest.mark.parametrize("changes, reason", [
    ({"peft_type": "IA3"}, "peft_type is LORA, not 'IA3'"),
    ({"use_dora": True}, "use_dora=True is not supported: merge such an adapter"),
    ({"bias": "all"}, "bias='all' is not supported"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"target_parameters": ["experts.gate_up_proj"], "alpha_pattern": {"x": 2}},
     "alpha_pattern with target_parameters is not supported"),
    ({"a_newer_field": 3}, "a_newer_field=3 is not supported"),
    ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights='pissa_niter_16' is not"),
    ({"lora_alpha": 0}, "lora_alpha is a number above 0, at most 1048576, not 0"),
    ({"lora_alpha": float("inf")}, "lora_alpha is a number above 0, at most 1048576, not inf"),
    ({"lora_alpha": 10**400}, "lora_alpha is a number above 0, at most 1048576, not"),
    ({"lora_alpha": None}, "lora_alpha is a number above 0, at most 1048576, not None"),
    ({"alpha_pattern": {"(": 2}}, "alpha_pattern: '(' is no pattern of a module's name; give"),
    ({"alpha_pattern": {"[z-a]": 2}}, "alpha_pattern: '[z-a]' is no pattern of a module's name"),
    ({"alpha_pattern": {"(.*)*x": 2}}, "alpha_pattern: '(.*)*x' is no pattern of"),
    ({"alpha_pattern": {"(a|a)+x": 2}}, "alpha_pattern: '(a|a)+x' is no pattern of"),
    ({"alpha_pattern": {".*.*.*.*x": 2}}, "at most 3 of '.*', '\\d+', '[01]+' and '(q|v)', in 256"),
    ({"alpha_pattern": {"(a|a)" * 4: 2}}, "is no pattern of a module's name"),
    ({"alpha_pattern": {"x" * 257: 2}}, "is no pattern of a module's name"),
    ({"alpha_pattern": {"q_proj": "2"}}, "alpha_pattern of 'q_proj' is a number above 0"),
    ({"alpha_pattern": [2]}, "alpha_pattern is an object"),
])  # fmt: skip
def test_settings_that_would_be_ignored_are_refused(tmp_path, changes, reason):
    peft_files.write(tmp_path, _MODEL, **changes)
    with pytest.raises(InputError, match=r"adapter_config\.json: .*") as error:
        peft_directory.read(tmp_path, _MODEL, _ROOM)
    assert reason in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("tensors, reason", [
    ({_DOWN: _matrix(4, 23)}, r"q_proj' has factors \[4, 23\] and \[32, 4\]; it is \[32, 24\], so"),
    ({_UP: _matrix(32, 3)}, r"has factors \[4, 24\] and \[32, 3\]"),
    ({_UP: _matrix(32, 4, value=np.nan)}, "lora_B.weight' has values that are not finite"),
    ({_DOWN: _matrix(4, 24, value=np.inf)}, "lora_A.weight' has values that are not finite"),
    ({_DOWN: np.array(3, np.float32)}, r"has factors \[\] and \[32, 4\]; it is"),
    ({_DOWN: _matrix(4, 24, 1)}, r"factors \[4, 24, 1\] and \[32, 4\]; it is"),
    ({_DOWN: _matrix(0, 24), _UP: _matrix(32, 0)}, "it is"),
    ({f"{_Q}.lora_magnitude_vector": _matrix(24)}, "is no factor of LoRA, and would be lost"),
    ({"base_model.model.lm_head.weight": _matrix(131, 24)}, "is no factor of LoRA"),
    ({f"{_Q[:-6]}x_proj.lora_A.weight": _matrix(4, 24)}, "x_proj.lora_B.weight' is missing"),
    ({f"{_Q[:-6]}x_proj{end}": _matrix(4, 4) for end in _ENDINGS},
     r"adapts 'model.layers.0.self_attn.x_proj', which tiny-llama has not, .* do end in down_proj"),
    ({f"{_Q[:-16]}mlp.experts.0.up_proj{end}": _matrix(4, 4) for end in _ENDINGS},
     "adapts 'model.layers.0.mlp.experts.0.up_proj', and adapters of such routed experts are not"),
    ({f"{_Q[:-16]}mlp.experts.base_layer{end}": _matrix(4, 4) for end in _ENDINGS},
     "of such routed experts are not supported: merge such"),
    ({_DOWN: _matrix(9, 24), _UP: _matrix(32, 9)}, "has rank 9, .* at most 8: set engine.adapters"),
])  # fmt: skip
def test_tensors_of_another_model_or_kind_are_refused(tmp_path, tensors, reason):
    peft_files.write(tmp_path, _MODEL, tensors=tensors)
    with pytest.raises(InputError, match=reason) as error:
        peft_directory.read(tmp_path, _MODEL, _ROOM)
    assert "\n" not in str(error.value)


_EMBEDDING = "base_model.model.model.embed_tokens"
_LOOKED_UP = {f"{_EMBEDDING}.lora_embedding_A": _matrix(4, 131),
              f"{_EMBEDDING}.lora_embedding_B": _matrix(24, 4)}  # fmt: skip


@pytest.mark.parametrize("extras, tensors, reason", [
    ("latents", {}, r"have no room: set engine\.adapters\.extras=\('latents', 'vocab'\)"),
    ("vocab", {f"{_EMBEDDING}.base_layer.weight": _matrix(140, 24)}, "is no factor of LoRA, and"),
    ("vocab", {f"{_EMBEDDING}.lora_embedding_B": _matrix(23, 4)}, r"it is \[24, 131\]"),
    ("vocab", {f"{_EMBEDDING}.lora_embedding_A": _matrix(4, 131, value=np.nan)}, "not finite"),
])  # fmt: skip
def test_tables_need_room_and_their_own_shapes(tmp_path, extras, tensors, reason):
    copy = {f"{_EMBEDDING}.base_layer.weight": _matrix(131, 24)}
    peft_files.write(tmp_path, _MODEL, tensors=copy | _LOOKED_UP | tensors)
    with pytest.raises(InputError, match=reason):
        peft_directory.read(tmp_path, _MODEL, AdapterConfig(rank=8, extras=(extras,)))


_EXPERTS = "base_model.model.model.layers.1.mlp.experts"


@pytest.mark.parametrize("down, up, reason", [
    ((16, 24), (40, 16), None), ((16, 20), (24, 16), None),
    ((16, 24), (41, 16), "adapts 'model.layers.1.mlp.experts', and adapters of such routed exp"),
    ((12, 24), (40, 12), "of such routed experts are not supported"),
    ((16, 24), (40, 8), "of such routed experts are not supported"),
    ((0, 24), (40, 0), "it is"),
])  # fmt: skip
def test_factors_of_fused_experts_fit_a_stack(tmp_path, down, up, reason):
    """Of 8 experts; the columns of B are the experts' in turn."""
    model = fakes.deepseek()
    generator = np.random.default_rng(0)
    factors = {
        f"{_EXPERTS}{end}": generator.standard_normal(shape).astype(np.float32)
        for end, shape in zip(_ENDINGS, (down, up), strict=True)
    }
    peft_files.write(tmp_path, model, modules="o_proj", tensors=factors, lora_alpha=2)
    room = AdapterConfig(rank=4, extras=("experts",))
    if reason is not None:
        with pytest.raises(InputError, match=reason):
            peft_directory.read(tmp_path, model, room)
        return
    adapter = peft_directory.read(tmp_path, model, room)
    path = f"layers/1/ffn/experts/{'gate_up' if down[1] == 24 else 'down'}"
    info = adapters.adaptable(model, ["experts"])[path]
    down_ERD, up_EFR = adapter.filled(path, info, 16, np.dtype(np.float32))
    A, B = factors.values()
    expected_EFD = np.einsum("fre,erd->efd", B.reshape(len(B), -1, 8), A.reshape(8, -1, A.shape[1]))
    np.testing.assert_allclose(up_EFR @ down_ERD, expected_EFD, rtol=1e-5, atol=1e-5)


def test_factors_that_both_uses_of_a_table_share_are_refused(tmp_path):
    model = fakes.llama(tied=True)
    peft_files.write(tmp_path, model, tensors=_LOOKED_UP, ensure_weight_tying=True)
    with pytest.raises(InputError, match="ensure_weight_tying=True, with which embedding and head"):
        peft_directory.read(tmp_path, model, AdapterConfig(rank=8, extras=("vocab",)))
    peft_files.write(tmp_path, model, ensure_weight_tying=True)
    assert peft_directory.read(tmp_path, model, _ROOM).rank == 4


def test_rooms_are_those_that_headers_say(tmp_path):
    peft_files.write(tmp_path, _MODEL, rank=5, tensors=_LOOKED_UP)
    assert peft_directory.room(tmp_path, _MODEL) == AdapterConfig(rank=5, extras=("vocab",))
    with pytest.raises(InputError, match=r"engine\.adapters\.extras='x': must be of vocab, lat"):
        AdapterConfig(extras=("x",))


def test_directories_without_an_adapter_are_named(tmp_path):
    with pytest.raises(InputError, match="no adapter of the peft package"):
        peft_directory.read(tmp_path / "absent", _MODEL, _ROOM)
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(InputError, match=r"adapter_model\.bin is a pickle, which is never loaded"):
        peft_directory.read(tmp_path, _MODEL, _ROOM)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(InputError, match=r"adapter_config\.json"):
        peft_directory.read(tmp_path, _MODEL, _ROOM)
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "lora_alpha": 1})
    )
    with pytest.raises(InputError, match=r"adapter_model\.safetensors"):
        peft_directory.read(tmp_path, _MODEL, _ROOM)


def test_scales_follow_rank_pattern_and_rslora(tmp_path):
    names = ("q_proj", "k_proj")
    size = {"rank": 4, "seed": 3, "modules": names}
    plain = peft_files.write(tmp_path / "plain", _MODEL, **size, lora_alpha=4)
    stable = peft_files.write(tmp_path / "rs", _MODEL, **size, lora_alpha=4, use_rslora=True)
    other = peft_files.write(
        tmp_path / "other", _MODEL, **size, lora_alpha=4, alpha_pattern={"k_proj": 12}
    )
    ups = {
        where.name: [up for _, up in peft_directory.read(where, _MODEL, _ROOM).factors.values()]
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
    ({r"layers\.[01]\..*\.(?:q|v)_proj$": 64},
     {"0.self_attn.q_proj": 64, "1.self_attn.v_proj": 64, "2.self_attn.q_proj": 8}),
])  # fmt: skip
def test_patterns_match_as_those_of_peft(pattern, alphas):
    settings = {"lora_alpha": 8, "alpha_pattern": pattern}
    assert all(map(peft_directory._is_pattern, pattern))
    for ending, alpha in alphas.items():
        assert peft_directory._scale(f"model.layers.{ending}", 1, settings) == alpha


def test_factors_may_be_of_another_type(tmp_path):
    """The scale is applied in float32: 3,000 times 64 is more than float16 holds."""
    down = _matrix(4, 24).astype(ml_dtypes.bfloat16)
    up = _matrix(32, 4, value=3000).astype(np.float16)
    peft_files.write(tmp_path, _MODEL, tensors={_DOWN: down, _UP: up}, lora_alpha=256)
    adapter = peft_directory.read(tmp_path, _MODEL, _ROOM)
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
