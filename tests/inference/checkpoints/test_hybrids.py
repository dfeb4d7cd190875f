"""Families with Mamba-2 layers: spellings of their configurations, and what they are not."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from configs import presets
from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.combined import NoMixer, Parallel
from configs.kinds.recurrent.mamba import Mamba2
from configs.kinds.rope import Rope
from inference.checkpoints import resolve
from inference.checkpoints.hf import config_export, config_json
from layers import decoder

GOLDEN = Path(__file__).parents[2] / "golden"
BAMBA, GRANITE = "bamba-mqa-groups-bias-limit", "granitemoehybrid-mqa-rope-experts"
FALCON, NEMOTRON = "falcon_h1-gqa-multipliers-gate-norm", "nemotron_h-gqa-latent-experts"

# The keys of the published file that say something about the mathematics, as they stand there.
PUBLISHED = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False,
    "attention_multiplier": 0.0078125, "embedding_multiplier": 12, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 768,
    "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4, "logits_scaling": 16,
    "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64,
    "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128,
    "mamba_proj_bias": False, "max_position_embeddings": 131072, "num_attention_heads": 32,
    "num_experts_per_tok": 10, "num_hidden_layers": 40, "num_key_value_heads": 8,
    "num_local_experts": 72, "position_embedding_type": "nope", "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000,
    "shared_intermediate_size": 1536, "tie_word_embeddings": True, "vocab_size": 100352,
}  # fmt: skip


def parse(case: str, **changes):
    """A tiny checkpoint's configuration with some keys changed; those that are `...` are left
    out.
    """
    raw = json.loads((GOLDEN / case / "config.json").read_text()) | changes
    raw = {key: value for key, value in raw.items() if value is not ...}
    return config_json.parse(raw, Path("/models/tiny"))


BAD = {
    "layers": (
        BAMBA, {"attn_layer_indices": [64]}, "attn_layer_indices names layer 64 of .; valid: 0 to",
    ),
    "no layers": (BAMBA, {"attn_layer_indices": "1"}, "attn_layer_indices lists numbers of layers"),
    "share": (BAMBA, {"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25 is not"),
    "heads": (BAMBA, {"mamba_d_head": 9}, "mamba_n_heads x mamba_d_head is 36, and .* be equal"),
    "groups": (BAMBA, {"mamba_n_groups": 3}, "num_heads=4 is not a multiple of num_groups=3"),
    "limits": (BAMBA, {"time_step_limit": [0.7, 0.1]}, "step_limits are at least 0 and rise"),
    "a limit": (BAMBA, {"time_step_limit": [0.7]}, "time_step_limit lists two numbers"),
    "kind": (GRANITE, {"layer_types": ["mamba", "ssm"]}, "layer type 'ssm' is not"),
    "kinds": (GRANITE, {"layer_types": ["mamba"]}, "layer_types must list .* 2 layers"),
    "positions": (GRANITE, {"position_embedding_type": "alibi"}, "embedding_type='alibi' is not"),
    "logits": (GRANITE, {"logits_scaling": 0}, "logits_scaling must be positive and finite, not 0"),
    "residual": (GRANITE, {"residual_multiplier": "1"}, "residual_multiplier must be a number"),
    "scales": (FALCON, {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers lists 5 numbers, not 4"),
    "a scale": (FALCON, {"mlp_multipliers": [1.0, -1.0]}, "mlp_multipliers must be positive"),
    "no ffn": (FALCON, {"mamba_use_mlp": False}, "mamba_use_mlp=False is not supported"),
    "letter": (NEMOTRON, {"hybrid_override_pattern": "MX"}, "has a letter of M.*not 'MX'"),
    "word": (NEMOTRON, {"layers_block_type": ["mamba", "moa"]}, "layer type 'moa' is not"),
    "count": (NEMOTRON, {"num_hidden_layers": 4}, "num_hidden_layers=4, and the pattern has 5"),
    "tied": (NEMOTRON, {"tie_word_embeddings": True}, "tie_word_embeddings=True is not"),
    "window": (NEMOTRON, {"sliding_window": 64}, "sliding_window=64 is not supported"),
    "gate": (NEMOTRON, {"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu' is not supported"),
    "activation": (BAMBA, {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; valid: s"),
    "activations": (GRANITE, {"hidden_act": "relu"}, "hidden_act='relu' is not supported"),
    "its activation": (FALCON, {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    "norms": (
        GRANITE, {"normalization_function": "layernorm"},
        "normalization_function='layernorm' is not supported; valid: 'rmsnorm'",
    ),
    "steps": (NEMOTRON, {"time_step_limit": [0.0, 0.1]}, "time_step_limit=.* valid: .0, Infinity"),
    "other steps": (NEMOTRON, {"time_step_limit": ..., "mamba_dt_limit": [1, 2]}, "time_step_limi"),
    "state": (
        NEMOTRON, {"mamba_ssm_cache_dtype": "float16"},
        "mamba_ssm_cache_dtype='float16' is not supported; valid: 'float32'",
    ),
    "scan": (NEMOTRON, {"mamba_hidden_act": "relu"}, "mamba_hidden_act='relu' is not supported"),
    "head": (NEMOTRON, {"attention_head_dim": 7}, "attention_head_dim=7 is not supported"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_supported_is_named(case):
    name, changes, cause = BAD[case]
    with pytest.raises(InputError, match=cause) as caught:
        parse(name, **changes)
    assert "\n" not in str(caught.value)


def test_the_preset_is_what_was_published():
    preset = presets.get("granite4-h-small").config
    assert config_json.parse(PUBLISHED, Path("/models/granite4-h-small")) == preset
    raw = config_export.of_model(preset)
    both = raw.keys() & PUBLISHED.keys()
    assert len(both) > 25 and {key: raw[key] for key in both} == {k: PUBLISHED[k] for k in both}


def test_bamba_in_other_spellings():
    plain = parse(BAMBA)
    assert parse(BAMBA, mamba_d_head="auto") == plain
    assert parse(BAMBA, partial_rotary_factor=0.5) == plain
    (attention,) = plain.mixers(Attention)
    assert attention.rope == Rope(share=0.5)
    whole = {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 1.0}
    config = parse(BAMBA, rope_parameters=whole)
    assert config.mixers(Attention)[0].rope == Rope(5e4)
    raw = config_export.of_model(config)
    assert config_json.parse(raw, Path("/models/tiny")).layers == config.layers
    nowhere = parse(BAMBA, attn_layer_indices=None)
    assert {type(layer.mixer) for layer in nowhere.layers} == {Mamba2}
    raw = config_export.of_model(nowhere)
    assert config_json.parse(raw, Path("/models/tiny")).layers == nowhere.layers


def test_granite_in_other_spellings():
    plain = parse(GRANITE)
    newer = ["linear_attention", "full_attention"]
    assert parse(GRANITE, layer_types=newer) == plain
    assert parse(GRANITE, layer_types=..., layers_block_type=["mamba", "attention"]) == plain
    assert plain.logit_scale == 1 / 1.4 and plain.residual_scale == 0.8
    for spelled in ("nope", None):
        assert parse(GRANITE, position_embedding_type=spelled).mixers(Attention)[0].rope is None
    assert not parse(GRANITE, layer_types=...).mixers(Attention)


def test_falcon_in_other_spellings():
    plain = parse(FALCON)
    (mixer,) = {layer.mixer for layer in plain.layers}
    assert isinstance(mixer, Parallel) and mixer.in_scales == (1.2, 1.25)
    wider = parse(FALCON, mamba_d_ssm=None, mamba_d_head="auto")
    assert [state.inner_width for state in wider.mixers(Mamba2)] == [40]
    assert parse(FALCON, ssm_multipliers=[1] * 5).mixers(Mamba2)[0].part_scales == ()
    assert parse(FALCON, mlp_multipliers=None).layers[0].ffn.gate_scale == 1.0


def test_nemotron_in_other_spellings():
    plain = parse(NEMOTRON)
    words = ["mamba", "moe", "attention", "mlp", "mamba"]
    newer = [{"mamba": "linear_attention", "attention": "full_attention"}.get(w, w) for w in words]
    for spelled in (words, newer):
        listed = {"layers_block_type": spelled, "hybrid_override_pattern": "-"}  # which is not read
        assert parse(NEMOTRON, **listed) == plain
        assert parse(NEMOTRON, layer_types=spelled, hybrid_override_pattern=...) == plain
    renamed = {"mamba_n_groups": 2, "n_groups": 4, "mamba_d_conv": 4, "conv_kernel": 9}
    assert parse(NEMOTRON, **renamed, mamba_dt_min=0.001, time_step_min=0.5) == plain
    assert [isinstance(layer.mixer, NoMixer) for layer in plain.layers] == [
        layer.ffn is not None for layer in plain.layers
    ]
    assert parse(NEMOTRON, attention_head_dim=6, auto_map={"AutoConfig": "x"}) == plain


def test_a_layer_of_two_parts_is_no_nemotron():
    config = parse(NEMOTRON)
    both = dataclasses.replace(config.layers[0], ffn=config.layers[3].ffn)
    odd = dataclasses.replace(config, pattern=(both, *config.layers[1:]))
    with pytest.raises(InputError, match="a layer of nemotron_h is a mixer or a feed-forward"):
        config_export.of_model(odd)


def load(directory: Path) -> None:
    found = resolve.resolve(str(directory))
    found.open(None).load_params(decoder.param_infos(found.config), None)


@pytest.mark.parametrize(
    "case, tensor",
    [
        (BAMBA, "model.layers.0.mamba.norm.weight"), (BAMBA, "model.layers.0.mamba.in_proj.bias"),
        (GRANITE, "model.layers.1.block_sparse_moe.input_linear.weight"),
        (FALCON, "model.layers.1.self_attn.q_proj.bias"), (FALCON, "model.layers.0.mamba.A_log"),
        (NEMOTRON, "backbone.layers.1.mixer.fc2_latent_proj.bias"),
        (NEMOTRON, "backbone.layers.3.norm.weight"),
    ],
)  # fmt: skip
def test_tensors_that_are_missing_left_over_or_misshapen_are_named(case, tensor, tmp_path):
    directory = Path(shutil.copytree(GOLDEN / case, tmp_path / "changed"))
    tensors = load_file(directory / "model.safetensors")
    value = tensors.pop(tensor)
    for rest, cause in (
        ({}, f"{tensor}.* is missing"),
        ({tensor: value, f"{tensor}.more": value}, f"no place for: {tensor}.more"),
        ({tensor: np.concatenate([value, value])}, f"{tensor}. is .*expected"),
    ):
        save_file(tensors | rest, directory / "model.safetensors")
        with pytest.raises(InputError, match=cause):
            load(directory)


def test_layers_that_predict_a_second_token_are_left_out(tmp_path):
    directory = Path(shutil.copytree(GOLDEN / NEMOTRON, tmp_path / "predicting"))
    tensors = load_file(directory / "model.safetensors")
    tensors["mtp.layers.0.norm.weight"] = tensors["backbone.norm_f.weight"]
    save_file(tensors, directory / "model.safetensors")
    load(directory)
