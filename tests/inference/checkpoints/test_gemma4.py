"""Gemma 4: published configurations, checkpoints of models that read images too, `.gguf` files."""

import dataclasses
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from configs import presets
from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.model import ModelConfig
from inference.checkpoints import convert, names, resolve
from inference.checkpoints.gguf import gguf_file, gguf_metadata
from inference.checkpoints.hf import config_export, config_json
from layers import decoder, params
from tests.inference.checkpoints import test_gguf as tiny
from tests.inference.checkpoints import test_gguf_types as types

GOLDEN = Path(__file__).parents[2] / "golden"
SHARING, EXPERTS = (
    GOLDEN / f"gemma4-{case}" for case in ("gqa-inputs-sharing", "mha-mqa-experts-float32")
)
# What all published files say alike of their text.
_TEXT = {
    "attention_bias": False, "final_logit_softcapping": 30.0, "global_head_dim": 512,
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "model_type": "gemma4_text",
    "rms_norm_eps": 1e-06, "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "tie_word_embeddings": True, "use_bidirectional_attention": None, "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}  # fmt: skip
_SLIDING, _FULL = ["sliding_attention"], ["full_attention"]
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma4-e2b": _TEXT | {
        "attention_k_eq_v": False, "hidden_size": 1536, "hidden_size_per_layer_input": 256,
        "intermediate_size": 6144, "layer_types": (_SLIDING * 4 + _FULL) * 7,
        "max_position_embeddings": 131072, "num_attention_heads": 8,
        "num_global_key_value_heads": None, "num_hidden_layers": 35, "num_key_value_heads": 1,
        "num_kv_shared_layers": 20, "sliding_window": 512, "use_double_wide_mlp": True,
    },
    "gemma4-e4b": _TEXT | {
        "attention_k_eq_v": False, "hidden_size": 2560, "hidden_size_per_layer_input": 256,
        "intermediate_size": 10240, "layer_types": (_SLIDING * 5 + _FULL) * 7,
        "max_position_embeddings": 131072, "num_attention_heads": 8,
        "num_global_key_value_heads": None, "num_hidden_layers": 42, "num_key_value_heads": 2,
        "num_kv_shared_layers": 18, "sliding_window": 512, "use_double_wide_mlp": False,
    },
    "gemma4-26b-a4b": _TEXT | {
        "attention_k_eq_v": True, "enable_moe_block": True, "hidden_size": 2816,
        "hidden_size_per_layer_input": 0, "intermediate_size": 2112,
        "layer_types": (_SLIDING * 5 + _FULL) * 5, "max_position_embeddings": 262144,
        "moe_intermediate_size": 704, "num_attention_heads": 16, "num_experts": 128,
        "num_global_key_value_heads": 2, "num_hidden_layers": 30, "num_key_value_heads": 8,
        "num_kv_shared_layers": 0, "sliding_window": 1024, "top_k_experts": 8,
        "use_double_wide_mlp": False,
    },
    "gemma4-31b": _TEXT | {
        "attention_k_eq_v": True, "hidden_size": 5376, "hidden_size_per_layer_input": 0,
        "intermediate_size": 21504, "layer_types": (_SLIDING * 5 + _FULL) * 10,
        "max_position_embeddings": 262144, "num_attention_heads": 32,
        "num_global_key_value_heads": 4, "num_hidden_layers": 60, "num_key_value_heads": 16,
        "num_kv_shared_layers": 0, "sliding_window": 1024, "use_double_wide_mlp": False,
    },
}  # fmt: skip


def whole(text: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a model that reads images too, of whose parts one reads text."""
    return {
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4",
        "dtype": "bfloat16", "image_token_id": 258880, "eos_token_id": [1, 16],
        "text_config": text, "vision_config": {"hidden_size": 768, "rope_theta": 100.0},
    }  # fmt: skip


def parse(name: str, **changes: Any) -> ModelConfig:
    raw = config_json.text_part(whole(PUBLISHED[name] | changes))
    return config_json.parse(raw, Path("/models") / name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_what_was_published(name):
    config = presets.get(name).config
    assert parse(name) == config
    raw = config_export.of_model(config)
    assert {key: raw[key] for key in PUBLISHED[name] if key in raw} == {
        key: value for key, value in PUBLISHED[name].items() if key in raw
    }
    assert raw.keys() >= PUBLISHED[name].keys() - {"head_dim"}


def test_upper_layers_read_the_last_of_their_kind():
    """Layers 13 and 14 of E2B are the last that make keys and values."""
    owners = [spec.owner for spec in presets.get("gemma4-e2b").config.cache_specs]
    assert owners == [None] * 15 + [13, 13, 13, 13, 14] * 4
    assert presets.get("gemma4-e2b").config.page_groups[1].layers == (4, 9, 14)


BAD = {
    "both ways": ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is"),
    "tokens": ({"vocab_size_per_layer_input": 9}, "vocab_size_per_layer_input=9 is not supported"),
    "nobody": (
        {"num_kv_shared_layers": 32}, "last 32 layers share earlier caches, .* has no window$",
    ),
    "layers": ({"num_kv_shared_layers": 36}, "num_kv_shared_layers must be an integer from 1 to"),
    "one layer": (
        {"per_layer_config": {"4": {"hidden_size": 9}}}, "per_layer_config: 4: 'hidden_size' is",
    ),
    "owners": (
        {"per_layer_config": {"34": {"head_dim": 64}}}, "reads layer 14's cache, which holds",
    ),
    "experts": (
        {"enable_moe_block": True, "num_experts": 3, "top_k_experts": 4},
        "top_k_experts=4 is more than num_experts=3",
    ),
    "share": (
        {"rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.5}}},
        "rope share is at most 1, not 1.5",
    ),
    "activation": ({"hidden_activation": "gelu"}, "valid: gelu_pytorch_tanh"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_served_is_named(case):
    changes, cause = BAD[case]
    with pytest.raises(InputError, match=cause) as caught:
        parse("gemma4-e2b", **changes)
    assert "\n" not in str(caught.value) and "/models/gemma4-e2b/" in str(caught.value)


def test_a_whole_without_text_is_refused(tmp_path):
    raw = {"architectures": ["Gemma4ForConditionalGeneration"], "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match="has a text_config, which is missing"):
        resolve.resolve(str(tmp_path))


def _whole_directory(folder: Path, **more: np.ndarray) -> Path:
    """The tiny checkpoint as a part of a larger one, with keys and values that no layer reads, as
    they are published.
    """
    folder.mkdir()
    raw = json.loads((SHARING / "config.json").read_text())
    del raw["architectures"]
    (folder / "config.json").write_text(json.dumps(whole(raw)))
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(SHARING / "model.safetensors").items()
    }
    unread = ("k_proj", "v_proj", "k_norm")
    tensors |= {f"model.language_model.layers.5.self_attn.{n}.weight": np.ones(3) for n in unread}
    tensors["model.vision_tower.encoder.layers.0.mlp.gate_proj.linear.weight"] = np.ones(3)
    tensors["model.embed_audio.embedding_projection.weight"] = np.ones(3)
    save_file(tensors | more, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def loaded(directory: Path) -> dict[str, np.ndarray]:
    resolved = resolve.resolve(str(directory))
    found = resolved.open(None).load_params(decoder.param_infos(resolved.config), None)
    return {path: np.asarray(leaf) for path, leaf in params.flatten(found).items()}


def test_the_text_of_a_model_that_reads_images(tmp_path, caplog):
    directory = _whole_directory(tmp_path / "whole")
    with caplog.at_level(logging.WARNING):
        found, expected = loaded(directory), loaded(SHARING)
    (line,) = {record.getMessage() for record in caplog.records}
    assert "images and sounds are not served: 2 tensors for them, from model." in line
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[path], expected[path]) for path in found)
    checkpoint = resolve.resolve(str(directory)).open(None)
    assert checkpoint.eos_ids == (1, 16)
    convert.convert(checkpoint, tmp_path / "text", "hf")
    stored = load_file(tmp_path / "text" / "model.safetensors")
    assert stored.keys() == load_file(SHARING / "model.safetensors").keys()
    raw = json.loads((tmp_path / "text" / "config.json").read_text())
    assert raw["architectures"] == ["Gemma4ForCausalLM"] and raw["model_type"] == "gemma4_text"


def test_what_has_no_place_is_named(tmp_path):
    odd = {"model.language_model.layers.2.self_attn.k_scale.weight": np.ones(3)}
    with pytest.raises(InputError, match="no place for: model.layers.2.self_attn.k_scale"):
        loaded(_whole_directory(tmp_path / "whole", **odd))


@pytest.mark.parametrize("name, found, expected", [
    ("gate_up_proj", [24, 6, 36], [6, 24, 36]), ("down_proj", [36, 6, 12], [6, 36, 12]),
])  # fmt: skip
def test_experts_that_are_fused_in_another_order_are_named(name, found, expected, tmp_path):
    """Their rows are as many in either."""
    folder = Path(shutil.copytree(EXPERTS, tmp_path / "odd"))
    tensors = load_file(folder / "model.safetensors")
    stack = f"model.layers.0.experts.{name}"
    tensors[stack] = np.ascontiguousarray(tensors[stack].swapaxes(0, 1))
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError) as caught:
        loaded(folder)
    assert f"is {found}; expected {expected} for layers/0/ffn/experts" in str(caught.value)


# --- gguf -----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))


def configuration(directory: Path) -> ModelConfig:
    config = config_json.read_model(directory)
    return dataclasses.replace(config, name="tiny", dtype="bfloat16", pattern=config.layers)


def tensors_of(config: ModelConfig) -> dict[str, np.ndarray]:
    """What llama.cpp's converter writes of random parameters."""
    tensors, declared = {}, params.flatten(decoder.param_infos(config))
    for path, values in tiny.random_params(config).items():
        own = names.gguf(config)(path).names
        if path.endswith("experts/gate_up"):  # one stack
            own = (f"blk.{path.split('/')[1]}.ffn_gate_up_exps.weight",)
        ends = np.cumsum(declared[path].stacked)[:-1] if len(own) > 1 else []
        tensors |= dict(zip(own, np.split(values, ends), strict=True))
    pairs = far(config).head_width // 2
    turning = round(far(config).rope.scaling.share * pairs)
    divisors = [1.0] * turning + [1e30] * (pairs - turning)
    return tensors | {"rope_freqs.weight": np.array(divisors, np.float32)}


def far(config: ModelConfig) -> Any:
    return next(m for m in config.mixers(Attention) if m.window is None and m.owner is None)


def metadata_of(config: ModelConfig) -> dict[str, Any]:
    slides = [config.stored_by(layer).window is not None for layer in range(config.num_layers)]
    near, ffn = config.layers[0].mixer, config.layers[0].ffn
    widths = [getattr(x.ffn, "shared_width", 0) or x.ffn.width for x in config.layers]
    values: dict[str, Any] = {
        "block_count": config.num_layers, "context_length": config.max_context,
        "embedding_length": config.width, "feed_forward_length": widths,
        "attention.head_count": near.num_heads,
        "attention.head_count_kv": [layer.mixer.num_kv_heads for layer in config.layers],
        "attention.key_length": far(config).head_width,
        "attention.value_length": far(config).head_width,
        "attention.key_length_swa": near.head_width, "attention.value_length_swa": near.head_width,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "attention.sliding_window": near.window, "attention.sliding_window_pattern": slides,
        "attention.shared_kv_layers": sum(x.mixer.owner is not None for x in config.layers),
        "embedding_length_per_layer_input": getattr(config.layer_inputs, "width", 0),
        "rope.freq_base": far(config).rope.theta, "rope.freq_base_swa": near.rope.theta,
        "rope.dimension_count": far(config).head_width,
        "rope.dimension_count_swa": near.head_width,
    }  # fmt: skip
    if config.logit_cap:
        values["final_logit_softcapping"] = config.logit_cap
    if ffn.experts:
        values |= {"expert_count": ffn.num_experts, "expert_used_count": ffn.top_k}
        values["expert_feed_forward_length"] = ffn.width
    return values


def write(path: Path, config: ModelConfig, tensors: dict[str, np.ndarray], **changes: Any) -> Path:
    writer = gguf.GGUFWriter(path, "gemma4")
    adds = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for key, value in (metadata_of(config) | changes).items():
        if value is not None:
            adds[type(value)](f"gemma4.{key}", value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("directory", [SHARING, EXPERTS], ids=lambda path: path.name)
def test_a_gguf_gives_what_it_was_made_from(directory, tmp_path):
    config = configuration(directory)
    tensors = tensors_of(config)
    if directory == SHARING:  # as files have them
        tensors |= {"blk.5.attn_k.weight": np.ones((20, 40), np.float32)}
    path = write(tmp_path / "tiny.gguf", config, tensors)
    found = gguf_metadata.read_config(gguf_file.open_gguf(path))
    assert dataclasses.replace(found, name="tiny") == config
    original = tiny.random_params(config)
    for name, value in tiny.load(path).items():
        expected = original[name].astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(value, np.float32), expected, name)


@pytest.mark.parametrize("directory", [SHARING, EXPERTS])
def test_a_gguf_is_written_as_it_was(directory, tmp_path):
    config = configuration(directory)
    tensors = {
        name: values if "rope" in name else values.astype(ml_dtypes.bfloat16).astype(np.float32)
        for name, values in tensors_of(config).items()
    }
    types.assert_written_again(write(tmp_path / "tiny.gguf", config, tensors), tmp_path)


@pytest.mark.quick_code
def test_a_gguf_and_what_is_made_of_it_give_the_same_logits(tmp_path, monkeypatch):
    config = configuration(EXPERTS)
    path = write(tmp_path / "tiny.gguf", config, tensors_of(config))
    types.assert_same_logits(path, config, tmp_path, monkeypatch)


REFUSED: dict[str, tuple[dict[str, Any], list[float] | None, str]] = {
    "no pattern": ({"attention.sliding_window_pattern": None}, None, "pattern is missing"),
    "counts": ({"attention.head_count_kv": [2, 1]}, None, "head_count_kv must be one int"),
    "none": ({"feed_forward_length": [0] * 6}, None, "feed_forward_length must list 1 to"),
    "values": ({"attention.value_length_swa": 4}, None, "value_length_swa differs from the head"),
    "pairs": ({}, [1.0] * 9, "'rope_freqs.weight' is .9.; expected .8."),
    "stretched": ({}, [2.0] * 8, "'rope_freqs.weight' is not supported: pairs that rotate come"),
    "the last": ({}, [1e30] * 7 + [1.0], "'rope_freqs.weight' is not supported: pairs that rotate"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_gguf_says_and_is_not_served_is_named(case, tmp_path):
    changes, divisors, cause = REFUSED[case]
    config = configuration(SHARING)
    tensors = tensors_of(config)
    if divisors is not None:
        tensors["rope_freqs.weight"] = np.array(divisors, np.float32)
    path = write(tmp_path / "tiny.gguf", config, tensors, **changes)
    with pytest.raises(InputError, match=cause) as caught:
        gguf_metadata.read_config(gguf_file.open_gguf(path))
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
