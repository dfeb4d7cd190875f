"""The text of models that read images or sounds too, as their makers publish them."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from configs import presets
from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.rope import Linear, Rope
from inference.checkpoints import mapped, resolve
from inference.checkpoints.hf import config_json
from inference.planner import weights
from layers import decoder, params
from layers.ragged import contiguous
from tests import compiling

GOLDEN = Path(__file__).parents[2] / "golden"
GEMMA3, KIMI = "gemma3-gqa-linear-rope", "deepseek_v3-mha-groups-yarn"
# The keys of published files that say something of their text.
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma3-4b": {
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999,
        "eoi_token_index": 256000, "eos_token_id": [1, 106], "image_token_index": 262144,
        "initializer_range": 0.02, "mm_tokens_per_image": 256, "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
            "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
        "vision_config": {"hidden_size": 1152, "vision_use_head": False},
    },
    "gemma4-12b": {
        "architectures": ["Gemma4UnifiedForConditionalGeneration"], "audio_token_id": 258881,
        "model_type": "gemma4_unified", "image_token_id": 258880, "text_config": {
            "attention_bias": False, "attention_k_eq_v": True, "enable_moe_block": False,
            "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3840,
            "hidden_size_per_layer_input": 0, "intermediate_size": 15360,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8,
            "max_position_embeddings": 262144, "model_type": "gemma4_unified_text",
            "moe_intermediate_size": None, "num_attention_heads": 16, "num_experts": None,
            "num_global_key_value_heads": 1, "num_hidden_layers": 48, "num_key_value_heads": 8,
            "num_kv_shared_layers": 0, "rms_norm_eps": 1e-06, "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.25, "rope_theta": 1000000.0,
                    "rope_type": "proportional",
                },
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
            "sliding_window": 1024, "tie_word_embeddings": True, "top_k_experts": None,
            "use_bidirectional_attention": "vision", "use_double_wide_mlp": False,
            "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
        },
        "vision_config": {"mm_embed_dim": 3840},
    },
}  # fmt: skip

# Kimi K2.5; its experts are in int4, which is said in its text_config.
KIMI_K25: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"], "auto_map": {"AutoConfig": "x.y"},
    "model_type": "kimi_k25", "tie_word_embeddings": False, "text_config": {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "ep_size": 1,
        "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 7168,
        "intermediate_size": 18432, "is_encoder_decoder": False, "kv_lora_rank": 512,
        "max_position_embeddings": 262144, "model_type": "kimi_k2", "moe_intermediate_size": 2048,
        "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8,
        "num_hidden_layers": 61, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "quantization_config": {
            "config_groups": {"group_0": {
                "input_activations": None, "output_activations": None, "targets": ["Linear"],
                "weights": {
                    "actorder": None, "block_structure": None, "dynamic": False,
                    "group_size": 32, "num_bits": 4, "observer": "minmax", "observer_kwargs": {},
                    "strategy": "group", "symmetric": True, "type": "int",
                },
            }},
            "format": "pack-quantized",
            "ignore": [
                "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
                "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            ],
            "kv_cache_scheme": None, "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        },
        "rms_norm_eps": 1e-05, "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid",
        "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 163840,
    },
    "vision_config": {"mm_projector_type": "patchmerger", "vt_num_hidden_layers": 27},
}  # fmt: skip


def parse(raw: dict[str, Any], name: str = "whole", **changes: Any):
    """The text of a published configuration, with some keys of it changed; None drops one."""
    text = raw["text_config"] | changes
    return config_json.parse(
        config_json.text_part(raw | {"text_config": text}), Path("/models") / name
    )


def whole(
    folder: Path, checkpoint: str, architecture: str, prefixes: dict[str, str], *others: str
) -> Path:
    """A tiny checkpoint as the text of a whole, with tensors of another part.

    Args:
        prefixes: how names begin, and how they do in the whole.
    """
    folder.mkdir()
    text = mapped.read_json(GOLDEN / checkpoint / "config.json")
    raw = {"architectures": [architecture], "text_config": text, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = {}
    for name, tensor in load_file(GOLDEN / checkpoint / "model.safetensors").items():
        old = next(prefix for prefix in prefixes if name.startswith(prefix))
        tensors[prefixes[old] + name.removeprefix(old)] = tensor
    tensors |= {other: np.ones((2, 3), np.float32) for other in others}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load(directory: Path) -> dict[str, np.ndarray]:
    """The parameters of a directory, those of few bits as numbers."""
    found = resolve.resolve(str(directory))
    declared = decoder.param_infos(dataclasses.replace(found.config, formats=()))
    loaded = found.open(None).load_params(declared, None)
    return {path: np.asarray(leaf) for path, leaf in params.flatten(loaded).items()}


OLDER = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
NEWER = {"model.": "model.language_model.", "lm_head.": "lm_head."}
# How files of each family name their tensors: by transformers 5, and before.
LAYOUTS = {
    "gemma3, older": (
        GEMMA3, "Gemma3ForConditionalGeneration", OLDER,
        "vision_tower.vision_model.head.weight", "multi_modal_projector.mm_soft_emb_norm.weight",
    ),
    "gemma3, newer, untied": (
        "gemma3-mqa", "Gemma3ForConditionalGeneration", NEWER,
        "model.vision_tower.vision_model.head.weight",
    ),
    "kimi k2.5": (
        KIMI, "KimiK25ForConditionalGeneration", OLDER,
        "mm_projector.proj.0.weight", "vision_tower.patch_embed.proj.weight",
    ),
    "qwen3-vl": (
        "qwen3-gqa-tied", "Qwen3VLForConditionalGeneration", NEWER,
        "model.visual.patch_embed.proj.weight",
    ),
    "step 3.7": (
        "step3p5-mqa-tied-float32", "Step3p7ForConditionalGeneration", {"model.": "model."},
        "vision_model.conv1.weight", "vit_large_projector.weight",
    ),
    "gemma 4 12B": (
        "gemma4_unified-mha-mqa", "Gemma4UnifiedForConditionalGeneration", NEWER,
        "model.vision_embedder.patch_dense.weight", "model.embed_audio.embedding_projection.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LAYOUTS)
def test_the_text_of_a_whole_is_read(case, tmp_path, caplog):
    checkpoint, architecture, prefixes, *others = LAYOUTS[case]
    folder = whole(tmp_path / "whole", checkpoint, architecture, prefixes, *others)
    with caplog.at_level(logging.WARNING):
        found, expected = load(folder), load(GOLDEN / checkpoint)
    assert found.keys() == expected.keys()
    for path, value in found.items():
        np.testing.assert_array_equal(value, expected[path], path)
    lines = [line for line in caplog.messages if "images and sounds are not served" in line]
    assert len(lines) == 1 and f"{len(others)} tensors for them, from {min(others)} on" in lines[0]


@pytest.mark.parametrize("name", sorted(path.name for path in (GOLDEN / "wholes").iterdir()))
def test_logits_of_a_text_are_those_of_the_whole(name):
    """Files that transformers wrote, which state less of their text than published ones."""
    checkpoint = resolve.resolve(str(GOLDEN / "wholes" / name)).open(None)
    model = dataclasses.replace(checkpoint.config, dtype="float32")
    loaded = checkpoint.load_params(decoder.param_infos(model), None)
    with np.load(GOLDEN / "wholes" / name / "expected.npz") as arrays:
        tokens, expected = arrays["tokens"], arrays["logits"]

    def forward(loaded, tokens):
        hidden_TD, _ = decoder.forward(loaded, model, tokens, contiguous(1, len(tokens)))
        return decoder.logits(loaded, model, hidden_TD)

    found = np.asarray(compiling.call(forward, loaded, tokens))
    assert np.abs(found - expected).max() <= 1e-4


@pytest.mark.parametrize("case", LAYOUTS)
def test_what_has_no_place_is_named(case, tmp_path):
    checkpoint, architecture, prefixes, *_ = LAYOUTS[case]
    odd = f"{prefixes['model.']}layers.0.self_attn.odd.weight"
    folder = whole(tmp_path / "whole", checkpoint, architecture, prefixes, odd)
    with pytest.raises(InputError, match="no place for: '?model.layers.0.self_attn.odd.weight"):
        load(folder)


def test_kimi_k25_is_read_with_its_experts_in_int4(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(KIMI_K25))
    config = config_json.read_model(tmp_path)
    assert config.family == "deepseek_v3" and config.num_layers == 61 and not config.tied
    formats = {path.partition("/ffn/")[2]: kinds for path, kinds in config.formats}
    assert formats == {"experts/gate_up": ("int4_g32",), "experts/down": ("int4_g32",)}
    assert len(config.formats) == 2 * 60  # all layers but the first
    assert weights.num_parameters(config) == pytest.approx(1.0265e12, rel=1e-3)


def test_the_text_of_a_whole_in_few_bits_is_read(tmp_path):
    """Matrices in FP8, by the names that they have in the whole."""
    folder = whole(tmp_path / "whole", KIMI, "KimiK25ForConditionalGeneration", OLDER)
    raw = mapped.read_json(folder / "config.json")
    raw["text_config"]["quantization_config"] = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "_proj" in name]:
        tensors[name] = (tensors[name].astype(np.float32) / 2).astype(ml_dtypes.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = np.full((1, 1), 2.0, np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    found, expected = load(folder), load(GOLDEN / KIMI)
    assert found.keys() == expected.keys()
    halves = (expected["layers/0/ffn/down"].astype(np.float32) / 2).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(found["layers/0/ffn/down"], 2 * halves.astype(np.float32))
    for path, value in found.items():
        np.testing.assert_allclose(value, expected[path].astype(value.dtype), rtol=0.07, atol=2e-3)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_what_was_published(name):
    assert parse(PUBLISHED[name], name) == presets.get(name).config


@pytest.mark.parametrize("changes, cause", [
    ({"enable_moe_block": True}, "enable_moe_block=True is not supported; valid: False"),
    ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input=256 is not supported"),
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not supported"),
])  # fmt: skip
def test_what_gemma_4_12b_has_not_is_named(changes, cause):
    with pytest.raises(InputError, match=cause):
        parse(PUBLISHED["gemma4-12b"], **changes)


def test_larger_gemma_3():
    """27B, published with one more key than 12B; 416,866,032 of 27,432,406,640 numbers see."""
    raw = PUBLISHED["gemma3-4b"]
    model = parse(
        raw, hidden_size=5376, intermediate_size=21504, head_dim=128, num_attention_heads=32,
        num_hidden_layers=62, num_key_value_heads=16, query_pre_attn_scalar=168,
    )  # fmt: skip
    near, far = model.layers[0].mixer, model.layers[5].mixer
    scale = 168**-0.5
    assert near == Attention(32, 16, 128, Rope(1e4), 1024, qk_norm="head", scale=scale)
    assert far == Attention(32, 16, 128, Rope(1e6, Linear(8.0)), qk_norm="head", scale=scale)
    projector = 1152 * 5376 + 1152
    assert weights.num_parameters(model) == 27_432_406_640 - 416_866_032 - projector
