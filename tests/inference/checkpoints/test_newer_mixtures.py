"""Newer mixtures: as they are published, in `.gguf` files, and what they are not."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from configs.errors import InputError
from configs.kinds.experts import Experts
from configs.model import ModelConfig
from inference.checkpoints import resolve
from inference.checkpoints.gguf import gguf_file, gguf_metadata
from inference.checkpoints.hf import config_export, config_json
from inference.planner import weights
from layers import decoder, params
from tests.inference.checkpoints import test_gguf_mixtures as mixtures

GOLDEN = Path(__file__).parents[2] / "golden"
_LAYERS = ["sliding_attention"] * 3 + ["full_attention"]
_QUARTER = {"hidden_act": "silu", "rms_norm_eps": 1e-06, "tie_word_embeddings": False}

# The keys of published files that say something about the mathematics, as they stand there, and
# billions of parameters.
PUBLISHED: dict[str, tuple[float, dict[str, Any]]] = {
    "LFM2-8B-A1B": (8.34, {
        "architectures": ["Lfm2MoeForCausalLM"], "conv_L_cache": 3, "conv_bias": False,
        "hidden_size": 2048, "intermediate_size": 7168, "max_position_embeddings": 128000,
        "layer_types": [
            "full_attention" if n in (2, 6, 10, 14, 18, 21) else "conv" for n in range(24)
        ],
        "moe_intermediate_size": 1792, "norm_eps": 1e-05, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_dense_layers": 2, "num_experts": 32,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
        "rope_theta": 1000000.0, "routed_scaling_factor": 1.0, "use_expert_bias": True,
        "vocab_size": 65536,
    }),
    "ERNIE-4.5-21B-A3B": (21.83, {
        "architectures": ["Ernie4_5_MoeForCausalLM"], "hidden_act": "silu", "hidden_size": 2560,
        "auto_map": {"AutoConfig": "configuration_ernie4_5_moe.Ernie4_5_MoeConfig"},
        "intermediate_size": 12288, "max_position_embeddings": 131072,
        "num_attention_heads": 20, "num_key_value_heads": 4, "num_hidden_layers": 28,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 500000, "vocab_size": 103424,
        "use_bias": False, "moe_num_experts": 64, "moe_k": 6, "moe_num_shared_experts": 2,
        "moe_intermediate_size": 1536, "moe_layer_start_index": 1, "moe_layer_end_index": 27,
        "moe_layer_interval": 1, "moe_use_aux_free": True, "tie_word_embeddings": True,
        "num_nextn_predict_layers": 1,
    }),
    "granite-3.1-1b-a400m": (1.33, {
        "architectures": ["GraniteMoeForCausalLM"], "attention_bias": False,
        "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "hidden_act": "silu",
        "hidden_size": 1024, "intermediate_size": 512, "logits_scaling": 6.0,
        "max_position_embeddings": 131072, "num_attention_heads": 16, "num_experts_per_tok": 8,
        "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
        "residual_multiplier": 0.22, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1500000.0, "tie_word_embeddings": True, "vocab_size": 49155,
    }),
    "Ling-mini-2.0": (16.26, _QUARTER | {
        "architectures": ["BailingMoeV2ForCausalLM"], "first_k_dense_replace": 1,
        "auto_map": {"AutoConfig": "configuration_bailing_moe_v2.BailingMoeV2Config"},
        "head_dim": 128, "hidden_size": 2048, "intermediate_size": 5120,
        "max_position_embeddings": 32768, "moe_intermediate_size": 512,
        "moe_router_enable_expert_bias": True, "moe_shared_expert_intermediate_size": 512,
        "n_group": 8, "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 256,
        "num_experts_per_tok": 8, "num_hidden_layers": 20, "num_key_value_heads": 4,
        "num_shared_experts": 1, "partial_rotary_factor": 0.5, "rope_scaling": None,
        "rope_theta": 600000, "routed_scaling_factor": 2.5, "score_function": "sigmoid",
        "topk_group": 4, "use_bias": False, "use_qk_norm": True, "use_qkv_bias": False,
        "vocab_size": 157184, "norm_head": False, "num_nextn_predict_layers": 0,
    }),
    "Solar-Open-100B": (102.6, _QUARTER | {
        "architectures": ["SolarOpenForCausalLM"], "attention_bias": False,
        "first_k_dense_replace": 0, "head_dim": 128, "hidden_size": 4096,
        "intermediate_size": 10240, "max_position_embeddings": 131072,
        "moe_intermediate_size": 1280, "n_group": 1, "n_routed_experts": 128,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 8,
        "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 2.0, "original_max_position_embeddings": 65536, "type": "yarn"
        },
        "rope_theta": 1000000, "routed_scaling_factor": 1.0, "topk_group": 1,
        "use_qk_norm": False, "vocab_size": 196608,
    }),
    "Hunyuan-A13B": (80.39, _QUARTER | {
        "architectures": ["HunYuanMoEV1ForCausalLM"], "attention_bias": False,
        "attention_head_dim": 128, "hidden_size": 4096, "intermediate_size": 3072,
        "auto_map": {"AutoConfig": "configuration_hunyuan.HunYuanConfig"},
        "max_position_embeddings": 32768, "mlp_bias": False, "moe_intermediate_size": [3072] * 32,
        "moe_layer_num_skipped": 0, "moe_topk": [8] * 32, "num_attention_heads": 32,
        "num_experts": 64, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_shared_expert": [1] * 32, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "type": "dynamic",
        },
        "rope_theta": 10000.0, "routed_scaling_factor": 1.0, "tie_word_embeddings": True,
        "use_cla": False, "use_mixed_mlp_moe": True, "use_qk_norm": True, "vocab_size": 128167,
    }),
    "K-EXAONE-236B-A23B": (236.6, _QUARTER | {
        "architectures": ["ExaoneMoEForCausalLM"], "first_last_k_dense_replace": 1,
        "head_dim": 128, "hidden_size": 6144, "intermediate_size": 18432,
        "is_moe_layer": [False] + [True] * 47, "layer_types": _LAYERS * 12,
        "max_position_embeddings": 262144, "moe_intermediate_size": 2048, "n_group": 1,
        "norm_topk_prob": True, "num_attention_heads": 64, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 8,
        "num_shared_experts": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 1000000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "sliding_window": 128, "sliding_window_pattern": "LLLG", "topk_group": 1,
        "topk_method": "noaux_tc", "vocab_size": 153600, "num_nextn_predict_layers": 1,
    }),
    "Trinity-Nano": (6.12, _QUARTER | {
        "architectures": ["AfmoeForCausalLM"], "global_attn_every_n_layers": 4, "head_dim": 128,
        "auto_map": {"AutoConfig": "configuration_afmoe.AfmoeConfig"}, "hidden_size": 1024,
        "intermediate_size": 3072, "layer_types": _LAYERS * 14, "max_position_embeddings": 131072,
        "moe_intermediate_size": 256, "mup_enabled": True, "n_group": 1,
        "num_attention_heads": 8, "num_dense_layers": 2, "num_expert_groups": 1,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 56,
        "num_key_value_heads": 2, "num_limited_groups": 1, "num_shared_experts": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000, "route_norm": True,
        "route_scale": 2.826, "score_func": "sigmoid", "sliding_window": 2048, "topk_group": 1,
        "vocab_size": 200192,
    }),
    "MiMo-V2-Flash": (309.0, {
        "architectures": ["MiMoV2FlashForCausalLM"], "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True, "attention_bias": False,
        "attention_value_scale": 0.707, "head_dim": 192, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 16384, "layernorm_epsilon": 1e-05,
        "hybrid_layer_pattern": [int(n != 0 and (n + 1) % 6 != 0) for n in range(48)],
        "max_position_embeddings": 262144, "moe_intermediate_size": 2048,
        "moe_layer_freq": [0] + [1] * 47, "n_group": 1, "n_routed_experts": 256,
        "n_shared_experts": None, "norm_topk_prob": True, "num_attention_heads": 64,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "partial_rotary_factor": 0.334, "rope_theta": 5000000, "routed_scaling_factor": None,
        "scoring_func": "sigmoid", "sliding_window": 128, "sliding_window_size": 128,
        "swa_head_dim": 192, "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8,
        "swa_rope_theta": 10000, "swa_v_head_dim": 128, "tie_word_embeddings": False,
        "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 152576,
    }),
    "Mellum2-12B-A2.5B": (12.1, _QUARTER | {
        "architectures": ["MellumForCausalLM"], "attention_bias": False, "head_dim": 128,
        "hidden_size": 2304, "intermediate_size": 7168, "layer_types": _LAYERS * 7,
        "max_position_embeddings": 131072, "max_window_layers": 0,
        "mlp_layer_types": ["sparse"] * 28, "moe_intermediate_size": 896,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 64,
        "num_experts_per_tok": 8, "num_hidden_layers": 28, "num_key_value_heads": 4,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn", "rope_theta": 500000.0, "factor": 16.0,
                "original_max_position_embeddings": 8192, "beta_fast": 32.0, "beta_slow": 1.0,
                "attention_factor": 1.2772588722239782,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
        },
        "sliding_window": 1024, "use_sliding_window": True, "vocab_size": 98304,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_has_the_published_size(name):
    billions, raw = PUBLISHED[name]
    config = config_json.parse(raw, Path(f"/models/{name}"))
    assert weights.num_parameters(config) / 1e9 == pytest.approx(billions, rel=0.005)
    again = config_json.parse(config_export.of_model(config), Path(f"/models/{name}"))
    assert again == config


def parse(case: str, **changes: object) -> ModelConfig:
    raw = json.loads((GOLDEN / case / "config.json").read_text()) | changes
    return config_json.parse(raw, Path("/models/tiny"))


ERNIE, EXAONE = "ernie4_5_moe-gqa-dense-shared", "exaone_moe-gqa-window"
BAD = {
    "biases": (ERNIE, {"use_bias": True}, "use_bias=True is not supported; valid: False"),
    "scores": (ERNIE, {"moe_gate_act": "sigmoid"}, "moe_gate_act='sigmoid' is not supported"),
    "a sum": (ERNIE, {"moe_norm_min": 0.1}, "moe_norm_min is at most 1e-06"),
    "a kind": (EXAONE, {"is_moe_layer": [1] * 4}, "is_moe_layer lists true or false for each"),
    "kinds": (EXAONE, {"is_moe_layer": [True]}, "is_moe_layer must list one kind for each of 4"),
    "letters": (
        EXAONE, {"layer_types": None, "sliding_window_pattern": "LXG"},
        "sliding_window_pattern has letters L and G, or is a number, not 'LXG'",
    ),
    "a norm": (
        "bailing_moe_v2-gqa-partial-groups", {"norm_head": True}, "norm_head=True is not supported"
    ),
    "groups": (
        "bailing_moe_v2-gqa-partial-groups", {"n_group": 4}, "n_group=4 does not divide num_exper"
    ),
    "dense layers": (
        "solar_open-gqa-yarn", {"first_k_dense_replace": 1}, "first_k_dense_replace=1 is not"
    ),
    "another scale": ("hy_v3-gqa-dense", {"route_norm": False}, "route_norm=False is not support"),
    "a width": (
        "hunyuan_v1_moe-gqa-alpha", {"moe_intermediate_size": [12, 14]},
        r"moe_intermediate_size=.12, 14. is not supported; valid: 12",
    ),
    "gates": ("laguna-gqa-heads-yarn", {"gating": "per-token"}, "gating='per-token' is not supp"),
    "a cap": (
        "laguna-gqa-heads-yarn", {"moe_router_logit_softcapping": 30.0},
        "moe_router_logit_softcapping=30.0 is not supported; valid: 0",
    ),
    "heads": (
        "laguna-gqa-heads-yarn", {"num_attention_heads_per_layer": [4, 6, "6"]},
        "num_attention_heads_per_layer must be an integer",
    ),
    "layers": (
        "mimo_v2_flash-gqa-sinks", {"moe_layer_freq": [0, 1, 2, 1]}, "moe_layer_freq lists 0 or 1"
    ),
    "sinks": (
        "mimo_v2_flash-gqa-sinks", {"add_full_attention_sink_bias": True},
        "add_full_attention_sink_bias=True is not supported; valid: False",
    ),
    "unnormed": ("afmoe-gqa-window-scaled", {"route_norm": False}, "route_norm=False is not supp"),
    "shared caches": ("hunyuan_v1_moe-gqa-alpha", {"use_cla": True}, "use_cla=True is not"),
    "queries without a latent": (
        "axk1-mha-groups-yarn", {"q_lora_rank": None}, "q_lora_rank is an integer: queries of A.X",
    ),
    "limits of a dense layer": (
        "step3p5-gqa-limits", {"swiglu_limits": [7.0, 0, 0, 0]},
        "swiglu_limits of layer 0, which has no experts, must be 0",
    ),
    "layers of experts": (
        "step3p5-gqa-limits", {"moe_layers_enum": "1,x"},
        "moe_layers_enum lists numbers of layers in a text, not '1,x'",
    ),
    "other heads": (
        "step3p5-gqa-limits", {"attention_other_setting": {"num_attention_groups": 3}},
        "attention_other_setting: num_attention_groups=3 is not supported; valid: 2",
    ),
    "three experts": (
        "phimoe-gqa-longrope-bias", {"num_experts_per_tok": 3}, "num_experts_per_tok=3 is not supp",
    ),
    "two scales": (
        "phimoe-gqa-longrope-bias",
        {"rope_scaling": {
            "rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0],
            "short_mscale": 1.0, "long_mscale": 1.5,
        }},
        "rope_scaling: long_mscale=1.5 differs from short_mscale=1; both must agree",
    ),
    "experts": (
        "granitemoe-gqa-scales", {"num_experts_per_tok": 9},
        "num_experts_per_tok=9 is more than num_local_experts=5",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_supported_is_named(case):
    name, changes, cause = BAD[case]
    with pytest.raises(InputError, match=cause) as caught:
        parse(name, **changes)
    assert "\n" not in str(caught.value)


def test_layers_with_windows_in_other_spellings():
    listed = parse(EXAONE).layers
    for pattern, kinds in (("LLGG", "ssff"), (2, "sfsf"), ("LLL", "sssf")):
        layers = parse(EXAONE, layer_types=None, sliding_window_pattern=pattern).layers
        assert [layer.mixer for layer in layers] == [
            listed[0 if kind == "s" else 3].mixer for kind in kinds
        ]
    assert parse(EXAONE, is_moe_layer=None, first_k_dense_replace=1).layers == listed
    nowhere = parse(EXAONE, sliding_window=None, layer_types=None)
    assert {layer.mixer.rope for layer in nowhere.layers} == {listed[0].mixer.rope}


def test_heads_without_keys_are_named():
    """Layers with a window have twice the KV heads of others, in transformers."""
    config = parse("mimo_v2_flash-gqa-sinks", swa_num_key_value_heads=1)
    with pytest.raises(InputError, match="with a window have 1 KV heads, .* twice the 1 of the o"):
        config_export.of_model(config)


def test_layers_of_experts_without_keys_are_named():
    config = parse(ERNIE)
    one, two = config.layers[0], config.layers[1]
    config = dataclasses.replace(config, num_layers=4, pattern=(two, two, one, two))
    with pytest.raises(InputError, match=r"experts in layers \[0, 1, 3\] have no keys"):
        config_export.of_model(config)


# In `.gguf` files: the checkpoint, llama.cpp's architecture, and what the metadata say in addition.
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    ERNIE: ("ernie4_5-moe", {
        "interleave_moe_layer_step": 1, "leading_dense_block_count": 1, "expert_shared_count": 2,
        "rope.freq_base": 5e5,
    }),
    "granitemoe-gqa-scales": ("granitemoe", {
        "attention.scale": 0.4, "embedding_scale": 1.5, "residual_scale": 0.6, "logit_scale": 0.5,
        "feed_forward_length": 12,
    }),
    "granitemoeshared-gqa-scales": ("granitemoe", {
        "attention.scale": 0.4, "embedding_scale": 1.5, "residual_scale": 0.6, "logit_scale": 0.5,
        "feed_forward_length": 12, "expert_shared_feed_forward_length": 20,
    }),
    "bailing_moe_v2-gqa-partial-groups": ("bailingmoe2", {
        "leading_dense_block_count": 1, "expert_shared_count": 1, "expert_weights_scale": 2.5,
        "expert_shared_feed_forward_length": 12, "expert_weights_norm": True,
        "expert_gating_func": 2, "expert_group_count": 3, "expert_group_used_count": 2,
        "rope.dimension_count": 8, "rope.scaling.type": "none",
    }),
    "hunyuan_v1_moe-mqa-tied-float32": ("hunyuan-moe", {
        "expert_shared_count": 1, "expert_shared_feed_forward_length": 12, "rope.freq_base": 1e4,
    }),
    "afmoe-gqa-window-scaled": ("afmoe", {
        "leading_dense_block_count": 1, "expert_shared_count": 1, "expert_weights_scale": 1.5,
        "expert_weights_norm": True, "attention.sliding_window": 24, "rope.freq_base": 1e4,
    }),
    EXAONE: ("exaone-moe", {
        "leading_dense_block_count": 1, "expert_shared_count": 1, "expert_weights_scale": 2.5,
        "expert_weights_norm": True, "expert_gating_func": 2, "attention.sliding_window": 24,
        "attention.sliding_window_pattern": [True, True, False, False], "rope.freq_base": 1e4,
    }),
}  # fmt: skip
_INTERLEAVED = ("granitemoe", "granitemoeshared")


def _tensors(config: ModelConfig, leaves: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What llama.cpp's converter writes."""
    tensors = mixtures.tensors_of(config, leaves)
    for layer, spec in enumerate(config.layers):
        attention = spec.mixer
        if attention.head_gate is not None:
            tensors[f"blk.{layer}.attn_gate.weight"] = leaves[f"layers/{layer}/mixer/gate"]
        query, key = (f"blk.{layer}.attn_{part}.weight" for part in "qk")
        if config.family in _INTERLEAVED:
            for name in (query, key):
                tensors[name] = mixtures.tiny.interleave(tensors[name], attention.head_width)
        if config.family == "bailing_moe_v2":
            parts = [tensors.pop(f"blk.{layer}.attn_{part}.weight") for part in "qkv"]
            tensors[f"blk.{layer}.attn_qkv.weight"] = np.concatenate(parts)
    return tensors


def _write(file: Path, name: str, metadata: dict, tensors: dict[str, np.ndarray]) -> None:
    writer = gguf.GGUFWriter(file, name)
    adds = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
    adds |= {str: writer.add_string, list: writer.add_array}
    for key, value in metadata.items():
        adds[type(value)](f"{name}.{key}", value)
    for tensor, values in tensors.items():
        writer.add_tensor(tensor, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("case", FILES)
def test_a_gguf_file_gives_the_same_model(case, tmp_path, monkeypatch):
    """Its tensors are those that the package lists for the architecture."""
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    checkpoint = resolve.resolve(str(GOLDEN / case)).open(None)
    config = dataclasses.replace(checkpoint.config, dtype="float32")
    leaves = params.flatten(checkpoint.exact().load_params(decoder.param_infos(config)))
    leaves = {path: np.asarray(values, np.float32) for path, values in leaves.items()}
    (name, own), heads = FILES[case], config.layers[0].mixer
    experts = next(layer.ffn for layer in config.layers if isinstance(layer.ffn, Experts))
    metadata = {
        "block_count": config.num_layers, "context_length": config.max_context,
        "embedding_length": config.width, "feed_forward_length": 28,
        "attention.head_count": heads.num_heads, "attention.head_count_kv": heads.num_kv_heads,
        "attention.key_length": heads.head_width, "attention.value_length": heads.head_width,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "expert_count": experts.num_experts, "expert_used_count": experts.top_k,
        "expert_feed_forward_length": experts.width,
    } | own  # fmt: skip
    tensors = _tensors(config, leaves)
    architecture = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[name]
    listed = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[architecture]}
    for tensor in tensors:
        parts = tensor.rpartition(".")[0].split(".")
        stem = ".".join(["blk", "{bid}", *parts[2:]]) if parts[0] == "blk" else parts[0]
        assert stem in listed, tensor
    file = tmp_path / "tiny.gguf"
    _write(file, name, metadata, tensors)
    found = gguf_metadata.read_config(gguf_file.open_gguf(file))
    assert (found.family, found.layers) == (config.family, config.layers)
    scales = ("norm_eps", "embedding_scale", "residual_scale", "logit_scale", "tied")
    assert all(getattr(found, field) == getattr(config, field) for field in scales)
    loaded = resolve.resolve(str(file)).open(None).exact()
    infos = decoder.param_infos(dataclasses.replace(found, dtype="float32"))
    for path, values in params.flatten(loaded.load_params(infos)).items():
        np.testing.assert_array_equal(np.asarray(values, np.float32), leaves[path], path)
