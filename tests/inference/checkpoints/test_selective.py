"""Mamba, FalconMamba, Jamba and Mamba-2: what their files may say, and what is refused by name."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.recurrent.selective import Mamba
from inference.checkpoints import mapped, resolve
from inference.checkpoints.hf import config_export, config_json
from layers import decoder

GOLDEN = Path(__file__).parents[2] / "golden"
MAMBA, FALCON, JAMBA = (
    "mamba-rank-untied-float32",
    "falcon_mamba-rank-untied-float32",
    "jamba-mqa-dense-tied-float32",
)
MAMBA2 = "mamba2-groups-bias-limit"
# The keys of published files that say something about the mathematics.
FALCON_7B = {
    "architectures": ["FalconMambaForCausalLM"], "conv_kernel": 4, "expand": 16,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 8192,
    "layer_norm_epsilon": 1e-05, "num_hidden_layers": 64, "residual_in_fp32": True,
    "state_size": 16, "tie_word_embeddings": False, "time_step_rank": 256, "use_bias": False,
    "use_conv_bias": True, "vocab_size": 65024,
}  # fmt: skip
JAMBA_52B = {
    "architectures": ["JambaForCausalLM"], "attn_layer_offset": 4, "attn_layer_period": 8,
    "expert_layer_offset": 1, "expert_layer_period": 2, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_state": 16,
    "mamba_dt_rank": 256, "mamba_expand": 2, "mamba_inner_layernorms": True,
    "mamba_proj_bias": False, "num_attention_heads": 32, "num_experts": 16,
    "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "sliding_window": None, "tie_word_embeddings": False,
    "vocab_size": 65536,
}  # fmt: skip


def parse(raw: dict, **changes):
    """A model by its keys, some of them changed; None drops one."""
    own = {key: value for key, value in (raw | changes).items() if value is not None}
    return config_json.parse(own, Path("/models/tiny"))


def tiny(checkpoint: str, **changes):
    return parse(mapped.read_json(GOLDEN / checkpoint / "config.json"), **changes)


def test_published_files():
    falcon, jamba = parse(FALCON_7B), parse(JAMBA_52B)
    (own,) = falcon.mixers(Mamba)
    assert own == Mamba(8192, 16, 256, norms="plain", norm_eps=1e-6)
    assert not falcon.tied and falcon.layers[63].ffn is None
    assert [n for n, each in enumerate(jamba.layers) if isinstance(each.mixer, Attention)] == [
        4, 12, 20, 28,
    ]  # fmt: skip
    assert [each.ffn.name for each in jamba.layers] == ["gated", "experts"] * 16
    assert len(jamba.pattern) == 8 and jamba.mixers(Attention)[0].rope is None


def test_what_files_leave_out():
    auto = tiny(MAMBA, time_step_rank="auto", intermediate_size=None, tie_word_embeddings=None)
    assert auto == tiny(MAMBA, time_step_rank=1, intermediate_size=36, tie_word_embeddings=True)
    assert tiny(FALCON, mixer_rms_eps=None) == tiny(FALCON, mixer_rms_eps=1e-6)
    bare = parse({"architectures": ["JambaForCausalLM"]})
    published = parse(JAMBA_52B)
    assert (bare.layers, bare.vocab_size) == (published.layers, published.vocab_size)
    every = config_json.parse(JAMBA_52B | {"num_key_value_heads": None}, Path("/models/m"))
    assert every.mixers(Attention)[0].num_kv_heads == 32


BAD = {
    "activation": (MAMBA, {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    "layer norms": (MAMBA, {"rms_norm": False}, "rms_norm=False is not supported"),
    "rank": (MAMBA, {"time_step_rank": "half"}, "time_step_rank must be an integer from 1"),
    "no width": (MAMBA, {"expand": 0.01, "intermediate_size": None}, "intermediate_size must be"),
    "eps": (FALCON, {"mixer_rms_eps": 0}, "mixer_rms_eps must be positive"),
    "window": (JAMBA, {"sliding_window": 16}, "sliding_window=16 is not supported"),
    "no norms": (JAMBA, {"mamba_inner_layernorms": False}, "mamba_inner_layernorms=False is not"),
    "bias": (JAMBA, {"attention_bias": True}, "attention_bias=True is not supported"),
    "offset": (JAMBA, {"attn_layer_offset": 2}, "attn_layer_offset=2 is not below attn_layer_peri"),
    "no period": (JAMBA, {"attn_layer_period": 0}, "attn_layer_period must be an integer from 1"),
    "before 0": (JAMBA, {"attn_layer_offset": -1}, "attn_layer_offset must be an integer from"),
    "its offset": (
        JAMBA,
        {"expert_layer_offset": 2},
        "expert_layer_offset=2 is not below expert_layer_perio",
    ),
    "its activation": (JAMBA, {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; valid:"),
    "its window": (JAMBA, {"sliding_window": 9}, "sliding_window=9 is not supported; leave it out"),
    "width": (
        MAMBA2,
        {"expand": 3},
        "expand x hidden_size is .*, and num_heads x head_dim .*: they have to be equal",
    ),
    "norm": (MAMBA2, {"rms_norm": False}, "rms_norm=False is not supported; valid: True"),
    "silu": (MAMBA2, {"hidden_act": "relu"}, "hidden_act='relu' is not supported; valid: 'silu'"),
    "few experts": (JAMBA, {"num_experts": 2, "num_experts_per_tok": 3}, "is more than num_exper"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_changes_the_model_is_named(case):
    checkpoint, changes, cause = BAD[case]
    with pytest.raises(InputError, match=cause) as caught:
        tiny(checkpoint, **changes)
    assert "\n" not in str(caught.value)


TENSORS = {
    "norm of one without": (
        FALCON, "backbone.layers.1.mixer.dt_layernorm.weight", (4,),
        "no place for: backbone.layers.1.mixer.dt_layernorm.weight",
    ),
    "bias of one without": (
        MAMBA, "backbone.layers.0.mixer.in_proj.bias", (72,), "no place for: .*in_proj.bias",
    ),
    "no norm": (JAMBA, "model.layers.1.mamba.b_layernorm.weight", None, "b_layernorm.* is missing"),
    "no taps": (JAMBA, "model.layers.1.mamba.conv1d.weight", None, "conv1d.weight' is missing"),
    "flat taps": (
        MAMBA, "backbone.layers.0.mixer.conv1d.weight", (36, 3), r"expected \[36, 1, 3\]",
    ),
    "decays of channels": (
        MAMBA, "backbone.layers.0.mixer.A_log", (36,), r"A_log.*expected \[36, 3\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit_are_named(case, tmp_path):
    checkpoint, name, shape, cause = TENSORS[case]
    tensors = load_file(GOLDEN / checkpoint / "model.safetensors")
    tensors.pop(name, None)
    if shape is not None:
        tensors[name] = np.zeros(shape, np.float32)
    shutil.copy(GOLDEN / checkpoint / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=cause):
        found = resolve.resolve(str(tmp_path)).open(None)
        found.load_params(decoder.param_infos(found.config), None)


def test_an_older_name_of_the_embedding_is_read(tmp_path):
    tensors = load_file(GOLDEN / MAMBA / "model.safetensors")
    tensors["backbone.embedding.weight"] = tensors.pop("backbone.embeddings.weight")
    shutil.copy(GOLDEN / MAMBA / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    found = resolve.resolve(str(tmp_path)).open(None)
    model = dataclasses.replace(found.config, dtype="float32")
    params = found.load_params(decoder.param_infos(model), None)
    np.testing.assert_array_equal(params["embed"]["table"], tensors["backbone.embedding.weight"])


@pytest.mark.parametrize("changes", [
    {}, {"attn_layer_period": 50, "attn_layer_offset": 40}, {"num_experts": 1},
    {"attn_layer_period": 1, "attn_layer_offset": 0}, {"expert_layer_period": 40},
])  # fmt: skip
def test_layers_by_period_are_written_as_such(changes):
    config = parse(JAMBA_52B, **changes | {"num_experts_per_tok": 1})
    raw = json.loads(json.dumps(config_export.of_model(config)))
    assert parse(raw).layers == config.layers
