"""Mistral's and Llama 4's published configurations, and their text in models that read images."""

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
from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.kinds.rope import Llama3, Rope, Yarn
from configs.kinds.temperature import Temperature
from configs.model import LayerSpec, ModelConfig
from inference.checkpoints import resolve
from inference.checkpoints.hf import config_export, config_json
from inference.planner import weights
from layers import decoder, params
from layers import rope as rope_math
from tests.inference.checkpoints import published, test_gguf, test_gguf_mixtures

GOLDEN = Path(__file__).parents[2] / "golden"
_YARN = {
    "beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
    "mscale_all_dim": 1.0, "rope_type": "yarn", "type": "yarn",
}  # fmt: skip
_HEADS = {
    "head_dim": 128, "hidden_act": "silu", "num_attention_heads": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "sliding_window": None, "vocab_size": 131072,
}  # fmt: skip
# Architecture, and what describes the text; its number of parameters.
PUBLISHED: dict[str, tuple[str, dict[str, Any], int]] = {
    "ministral3-8b": ("Mistral3ForConditionalGeneration", _HEADS | {
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 262144,
        "model_type": "ministral3", "num_hidden_layers": 34, "rope_parameters": _YARN | {
            "factor": 16.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0,
        },
        "tie_word_embeddings": False,
    }, 8_489_553_920),
    "devstral-small-2": ("Mistral3ForConditionalGeneration", _HEADS | {
        "hidden_size": 5120, "intermediate_size": 32768, "max_position_embeddings": 393216,
        "model_type": "ministral3", "num_hidden_layers": 40, "rope_parameters": _YARN | {
            "factor": 48.0, "original_max_position_embeddings": 8192, "rope_theta": 100000000.0,
        },
    }, 23_572_403_200),
    "mistral-small-3.1": ("Mistral3ForConditionalGeneration", _HEADS | {
        "hidden_size": 5120, "intermediate_size": 32768, "max_position_embeddings": 131072,
        "model_type": "mistral", "num_hidden_layers": 40, "rope_theta": 1000000000.0,
    }, 23_572_403_200),
    "llama4-scout": ("Llama4ForConditionalGeneration", {
        "attention_bias": False, "attention_chunk_size": 8192, "attn_temperature_tuning": 4,
        "attn_scale": 0.1, "floor_scale": 8192, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 5120, "interleave_moe_layer_step": 1, "intermediate_size": 8192,
        "intermediate_size_mlp": 16384, "max_position_embeddings": 10485760,
        "model_type": "llama4_text", "no_rope_layers": [], "num_attention_heads": 40,
        "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8,
        "num_local_experts": 16, "rms_norm_eps": 1e-05, "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "rope_theta": 500000.0, "use_qk_norm": True, "vocab_size": 202048,
    }, 107_769_861_120),
}  # fmt: skip


def parse(name: str, **changes: Any) -> ModelConfig:
    architecture, text, _ = PUBLISHED[name]
    whole = {"architectures": [architecture], "text_config": text | changes, "vision_config": {}}
    return config_json.parse(config_json.text_part(whole), Path("/models") / name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(name):
    config, (_, text, count) = parse(name), PUBLISHED[name]
    assert weights.num_parameters(config) == count
    if name in presets.NAMES:
        assert config == presets.get(name).config
    raw = config_export.of_model(config)
    unlike = {"attn_temperature_tuning", "intermediate_size_mlp", "no_rope_layers", "rope_scaling"}
    both = raw.keys() & text.keys() - unlike
    assert {key: raw[key] for key in both} == {key: text[key] for key in both}


def test_what_the_layers_of_devstral_and_scout_are():
    devstral = parse("devstral-small-2").layers[0].mixer
    assert devstral.rope == Rope(1e8, Yarn(48.0, 8192, attention_factor=1.0))
    assert devstral.temperature == Temperature(0.1, 8192) and devstral.window is None
    plain = _YARN | {"llama_4_scaling_beta": 0.0, "mscale_all_dim": 0.0}
    plain |= {"factor": 64.0, "original_max_position_embeddings": 4096}
    large = parse("devstral-small-2", rope_parameters=plain).layers[0].mixer  # Devstral 2
    assert large.temperature is None and large.rope.scaling.attention_factor is None
    scout = parse("llama4-scout")
    near, far = scout.layers[0].mixer, scout.layers[3].mixer
    assert (near.window, near.chunked, near.qk_norm, near.temperature) == (
        8192,
        True,
        "plain",
        None,
    )
    assert near.rope == Rope(5e5, Llama3(16.0, 1.0, 1.0, 8192), neighbours=True)
    assert (far.rope, far.window, far.qk_norm) == (None, None, None)
    assert far.temperature == Temperature(0.1, 8192, offset=1)


BAD = {
    "another text": (
        "devstral-small-2", {"model_type": "pixtral"}, "valid: mistral, ministral3, mistral4"
    ),
    "kinds": ("ministral3-8b", {"layer_types": ["full_attention"] * 34}, "layer_types=.* is not"),
    "length": (
        "ministral3-8b",
        {"rope_parameters": _YARN | {"factor": 2.0, "original_max_position_embeddings": 0}},
        "original_max_position_embeddings must be an integer",
    ),
    "tuning": ("llama4-scout", {"attn_temperature_tuning": "yes"}, "must be true or false, not"),
    "layers": ("llama4-scout", {"no_rope_layers": [2] * 48}, "lists 1 for a layer that rotates"),
    "chunks": (
        "llama4-scout",
        {"attention_chunk_size": None, "layer_types": ["chunked_attention"] * 48},
        "goes with an attention_chunk_size",
    ),
    "windows": ("llama4-scout", {"layer_types": ["sliding_attention"] * 48}, "valid: full_atten"),
    "yarn": (
        "llama4-scout", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "default, linear or"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_served_is_named(case):
    name, changes, cause = BAD[case]
    with pytest.raises(InputError, match=cause) as caught:
        parse(name, **changes)
    assert "\n" not in str(caught.value)


def _loaded(directory: Path) -> dict[str, np.ndarray]:
    resolved = resolve.resolve(str(directory))
    tree = resolved.open(None).load_params(decoder.param_infos(resolved.config), None)
    return {path: np.asarray(leaf) for path, leaf in params.flatten(tree).items()}


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
@pytest.mark.parametrize("name, architecture", [
    ("ministral3-gqa-yarn", "Mistral3ForConditionalGeneration"),
    ("mistral-gqa-window", "Mistral3ForConditionalGeneration"),
    ("mistral4-mha-groups-yarn", "Mistral3ForConditionalGeneration"),
    ("llama4-gqa-chunks", "Llama4ForConditionalGeneration"),
])  # fmt: skip
def test_the_text_of_a_model_that_reads_images(name, architecture, prefix, tmp_path, caplog):
    """Published files wrap the text with its head, transformers 5 what is below the head."""
    text = json.loads((GOLDEN / name / "config.json").read_text())
    del text["architectures"]
    whole = {"architectures": [architecture], "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    is_older = prefix == "language_model."
    tensors = {
        prefix + name if is_older else name.replace("model.", prefix, 1): tensor
        for name, tensor in load_file(GOLDEN / name / "model.safetensors").items()
    }
    tensors["multi_modal_projector.linear_1.weight"] = np.ones(3)
    save_file(tensors, tmp_path / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        text_weights, expected = _loaded(tmp_path), _loaded(GOLDEN / name)
    assert "images and sounds are not served: 1 tensors for them" in caplog.text
    assert text_weights.keys() == expected.keys()
    assert all(np.array_equal(text_weights[path], expected[path]) for path in expected)


def test_fp8_with_a_scale_a_tensor_as_devstral_is_published(tmp_path):
    """Codes keep the names of the whole, and are kept as they are."""

    def encode(module: str, matrix: np.ndarray):
        if ".layers." not in module:
            return None
        scale = np.asarray(np.abs(matrix).max() / 448, ml_dtypes.bfloat16)
        codes = (matrix / np.float32(scale)).clip(-448, 448).astype(published.E4M3)
        numbers = codes.astype(np.float32) * np.float32(scale)
        return {"weight": codes, "weight_scale_inv": scale, "activation_scale": scale}, numbers

    text = json.loads((GOLDEN / "ministral3-gqa-yarn" / "config.json").read_text())
    del text["architectures"]
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    tensors = {
        f"language_model.{name}": tensor.astype(np.float32)
        for name, tensor in load_file(GOLDEN / "ministral3-gqa-yarn" / "model.safetensors").items()
    }
    described = {
        "quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None,
        "dequantize": False,
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    }  # fmt: skip
    stored, plain = published.write(tmp_path, whole, tensors, encode, described)
    checkpoint = resolve.resolve(str(stored)).open(None)
    assert set(dict(checkpoint.config.formats).values()) == {("fp8",)}
    source, expected = checkpoint.contents().source, resolve.resolve(str(plain)).open(None)
    for name, shape in expected.contents().source.shapes.items():
        numbers = expected.contents().source.read(name, 0, shape[0])
        np.testing.assert_array_equal(source.read(name, 0, shape[0]), numbers, name)


OWN = GOLDEN / "mistral_large3-mha-own-names"


def _own_params(config: ModelConfig) -> dict[str, Any]:
    """What Mistral's own file says of the tiny checkpoint."""
    latent, experts = config.layers[0].mixer, config.layers[-1].ffn
    yarn, heated = latent.rope.scaling, latent.temperature
    return {
        "dim": config.width, "hidden_dim": config.layers[0].ffn.width, "head_dim": 14,
        "n_heads": latent.num_heads, "n_kv_heads": latent.num_heads,
        "n_layers": config.num_layers, "norm_eps": config.norm_eps, "tied_embeddings": False,
        "vocab_size": config.vocab_size, "rope_theta": latent.rope.theta,
        "max_position_embeddings": config.max_context, "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.rank, "qk_nope_head_dim": latent.nope_width,
        "qk_rope_head_dim": latent.rope_width, "v_head_dim": latent.value_width,
        "moe": {
            "expert_hidden_dim": experts.width, "first_k_dense_replace": 1,
            "num_expert_groups": 1, "num_expert_groups_per_tok": 1,
            "num_experts": experts.num_experts, "num_experts_per_tok": experts.top_k,
            "num_shared_experts": 1, "routed_scale": 1.0, "route_every_n": 1,
            "renorm_strategy": "WEIGHTS", "use_load_balancing_bias": False,
        },
        "yarn": {
            "alpha": yarn.beta_slow, "beta": yarn.beta_fast, "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_context,
        },
        "llama_4_scaling": {
            "beta": heated.scale, "original_max_position_embeddings": heated.length,
        },
    }  # fmt: skip


def _own_directory(folder: Path, **changes: Any) -> Path:
    config = config_json.read_model(OWN)
    (folder / "params.json").write_text(json.dumps(_own_params(config) | changes))
    shutil.copy(OWN / "model.safetensors", folder / "consolidated.safetensors")
    return folder


def test_a_directory_with_params_json_alone(tmp_path):
    directory = _own_directory(tmp_path)
    config = resolve.resolve(str(directory)).config
    assert dataclasses.replace(config, name=OWN.name) == config_json.read_model(OWN)
    own_weights, expected = _loaded(directory), _loaded(OWN)
    assert all(np.array_equal(own_weights[path], expected[path]) for path in expected)


def test_fp8_in_mistrals_own_files(tmp_path):
    """Experts, feed-forwards and the way out are kept as they are."""
    directory, tensors, numbers = _own_directory(
        tmp_path, quantization={"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
    ), {}, {}  # fmt: skip
    for name, matrix in load_file(OWN / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if matrix.ndim != 2 or module.endswith((".gate", "output", "tok_embeddings")):
            tensors[name] = matrix
            continue
        matrix = matrix.astype(np.float32)
        scale = np.asarray(np.abs(matrix).max() / 448, ml_dtypes.bfloat16)
        tensors[name] = (matrix / np.float32(scale)).clip(-448, 448).astype(published.E4M3)
        tensors |= {f"{module}.qscale_weight": scale, f"{module}.qscale_act": scale}
        numbers[name] = tensors[name].astype(np.float32) * np.float32(scale)
    save_file(tensors, directory / "consolidated.safetensors")
    checkpoint = resolve.resolve(str(directory)).open(None)
    formats = dict(checkpoint.config.formats)
    assert set(formats.values()) == {("fp8",)}
    assert formats.keys() >= {"layers/1/ffn/experts/gate_up", "layers/1/mixer/out"}
    source = checkpoint.contents().source
    for name in (name for name in numbers if "wkv_b" not in name):
        np.testing.assert_array_equal(source.read(name, 0, len(numbers[name])), numbers[name], name)
    assert _loaded(directory).keys() == _loaded(OWN).keys()


def test_scores_are_not_scaled_without_apply_scale(tmp_path):
    stated = _own_params(config_json.read_model(OWN))["yarn"] | {"apply_scale": False}
    latent = resolve.resolve(str(_own_directory(tmp_path, yarn=stated))).config.layers[0].mixer
    assert latent.scale is None and latent.rope.scaling.attention_factor == 1.0


@pytest.mark.parametrize(("changes", "cause"), [
    ({"moe": None}, "of params.json alone Mistral Large 3 is read"),
    ({"quantization": {"qformat_weight": "nvfp4"}}, "qformat_weight='nvfp4' is not .*: fp8_e4m3"),
    ({"sliding_window": 9}, "sliding_window=9 is not supported; leave it out"),
    ({"llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 9}}, "=9 differs from"),
])  # fmt: skip
def test_what_params_json_may_not_say(changes, cause, tmp_path):
    with pytest.raises(InputError, match=cause) as caught:
        resolve.resolve(str(_own_directory(tmp_path, **changes)))
    assert "params.json: " in str(caught.value) and "\n" not in str(caught.value)


def _llama4(num_experts: int, rope: Rope) -> ModelConfig:
    """As llama.cpp takes it, whose chunks, periods and temperature are constants."""
    near = Attention(
        4, 2, 8, dataclasses.replace(rope, neighbours=True), window=8192, chunked=True,
        qk_norm="plain" if num_experts < 128 else None,
    )  # fmt: skip
    far = Attention(4, 2, 8, None, temperature=Temperature(0.1, 8192, offset=1))
    router = Router("sigmoid", is_normalized=False)
    experts = Experts(num_experts, 1, 12, router, shared_width=12, weighs_inputs=True)
    kinds = zip((near, near, near, far) * 2, (Gated(20), experts) * 4, strict=True)
    pattern = tuple(LayerSpec(*kind) for kind in kinds)[:4]
    return ModelConfig("llama4", "llama4", 29, 32, 8, 256, pattern)


def _llama4_file(path: Path, config: ModelConfig, **changes: int) -> tuple[Path, dict]:
    experts, leaves = config.layers[1].ffn, test_gguf.random_params(config)
    tensors, rope = test_gguf_mixtures.tensors_of(config, leaves), config.layers[0].mixer.rope
    plain = rope_math.inverse_frequencies(Rope(rope.theta), 8)
    if rope.scaling is not None:
        tensors["rope_freqs.weight"] = plain / rope_math.inverse_frequencies(rope, 8)
    numbers = {
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 8,
        "attention.value_length": 8, "block_count": 8, "context_length": 256,
        "embedding_length": 32, "expert_count": experts.num_experts,
        "expert_feed_forward_length": 12, "expert_used_count": 1, "feed_forward_length": 20,
        "interleave_moe_layer_step": 2, "rope.dimension_count": 8, "vocab_size": 29,
    } | changes  # fmt: skip
    writer = gguf.GGUFWriter(path, "llama4")
    for key, number in numbers.items():
        writer.add_uint32(f"llama4.{key}", number)
    writer.add_float32("llama4.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama4.rope.freq_base", rope.theta)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, leaves


@pytest.mark.parametrize("case", [
    (3, Rope(5e5, Llama3(16.0, 1.0, 1.0, 8192))),  # Scout's kind
    (128, Rope(5e5)),  # Maverick's
])  # fmt: skip
def test_llama_cpps_llama4_is_read(case, tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    config = _llama4(*case)
    path, leaves = _llama4_file(tmp_path / "llama4.gguf", config)
    resolved = resolve.resolve(str(path))
    assert resolved.config.layers == config.layers
    for name, values in test_gguf.load(path).items():
        rounded = leaves[name].astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(values, np.float32), rounded, name)


def test_llama_cpps_llama4_without_chunks_is_refused(tmp_path):
    path, _ = _llama4_file(
        tmp_path / "a.gguf", _llama4(3, Rope()), **{"attention.sliding_window": 0}
    )
    with pytest.raises(InputError, match="sliding_window=0 is not supported: no chunks"):
        resolve.resolve(str(path))
