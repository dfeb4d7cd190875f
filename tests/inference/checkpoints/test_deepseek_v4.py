"""DeepSeek-V4 as published: its names, FP8 in blocks and experts in FP4, with powers as scales."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from configs import presets
from configs.errors import InputError
from inference.checkpoints import resolve
from inference.checkpoints.hf import config_export, config_json
from layers import decoder
from tests.inference.checkpoints import published, test_block_fp8

pytestmark = pytest.mark.quick_code
FLASH: dict[str, object] = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "vocab_size": 37,
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 16, "qk_rope_head_dim": 8, "q_lora_rank": 24, "o_groups": 2, "o_lora_rank": 12,
    "sliding_window": 6, "index_n_heads": 4, "index_head_dim": 8, "index_topk": 2, "hc_mult": 2,
    "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "compress_ratios": [0, 4, 4, 0], "num_hash_layers": 1, "num_nextn_predict_layers": 1,
    "max_position_embeddings": 256, "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip
# What the published file says about the mathematics.
PUBLISHED: dict[str, object] = {
    "architectures": ["DeepseekV4ForCausalLM"], "attention_bias": False, "expert_dtype": "fp4",
    "hc_eps": 1e-06, "hc_mult": 4, "hc_sinkhorn_iters": 20, "head_dim": 512,
    "hidden_act": "silu", "hidden_size": 4096, "index_head_dim": 128, "index_n_heads": 64,
    "index_topk": 512, "max_position_embeddings": 1048576, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 64, "num_experts_per_tok": 6, "num_hidden_layers": 43,
    "num_hash_layers": 3, "num_key_value_heads": 1, "num_nextn_predict_layers": 1,
    "o_groups": 8, "o_lora_rank": 1024, "q_lora_rank": 1024, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus",
    "sliding_window": 128, "swiglu_limit": 10.0, "tie_word_embeddings": False,
    "topk_method": "noaux_tc", "vocab_size": 129280, "rope_theta": 10000,
    "compress_rope_theta": 160000, "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 16, "type": "yarn",
        "original_max_position_embeddings": 65536,
    },
}  # fmt: skip
KEYS = test_block_fp8.KEYS | {"scale_fmt": "ue8m0"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))


def encode(module, values):
    if ".experts." in module:
        groups = np.abs(values).reshape(len(values), -1, 32).max(2)
        scale = np.exp2(np.ceil(np.log2(groups / 6))).astype(ml_dtypes.float8_e8m0fnu)
        numbers = np.asarray(scale, np.float32).repeat(32, axis=1)
        codes = (values / numbers).astype(ml_dtypes.float4_e2m1fn)
        raw = codes.view(np.uint8)
        packed = (raw[:, ::2] | raw[:, 1::2] << 4).view(np.int8)
        return {"weight": packed, "scale": scale}, codes.astype(np.float32) * numbers
    if ".attn.w" not in module and ".shared_experts." not in module:
        return None
    encoded = test_block_fp8.blocks(ml_dtypes.float8_e8m0fnu)(f"{module}_proj", values)
    tensors, numbers = encoded
    return {"weight": tensors["weight"], "scale": tensors["weight_scale_inv"]}, numbers


def written(tmp_path, **changes):
    tensors = {}
    for name, values in published.drawn(FLASH, tmp_path).items():
        name = name.removeprefix("model.").replace("embed_tokens", "embed")
        name = name.replace("lm_head", "head").replace("hc_head.hc", "hc_head")
        if name.endswith("tid2eid"):
            rows = np.random.default_rng(1).permuted(np.tile(np.arange(5), (37, 1)), axis=1)
            values = rows[:, :2].astype(np.int64)
        tensors[name] = values
    extra = {"mtp.0.norm.weight": np.ones(64, np.float32)}
    raw = FLASH | {"expert_dtype": "fp4"} | changes
    return published.write(tmp_path, raw, tensors | extra, encode, KEYS)


def test_scores_are_those_of_the_numbers(tmp_path):
    stored, plain = written(tmp_path)
    formats = dict(resolve.resolve(str(stored)).open(None).config.formats)
    assert formats["layers/1/ffn/experts/gate_up"] == ("mxfp4",)
    assert formats["layers/1/mixer/q_up"] == ("fp8_block",)
    assert not any("pooled" in path or "router" in path for path in formats)
    found, expected = (published.scores(path, linear="reference") for path in (stored, plain))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_preset_is_what_the_published_file_says():
    preset = presets.get("deepseek-v4-flash").config
    found = config_json.parse(PUBLISHED, Path("/models/deepseek-v4-flash"))
    assert found == preset
    assert (
        config_json.parse(config_export.of_model(preset), Path("/models/deepseek-v4-flash"))
        == preset
    )


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"compress_ratios": [4, 0, 5]}, "compress_ratios lists 5; valid: 0, 4, 128"),
        ({"compress_ratios": [4]}, "compress_ratios must list a number for each of 3 layers"),
        ({"n_shared_experts": 2}, "n_shared_experts=2 is not supported; valid: 1"),
        ({"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types lists 'hash_moe' or 'moe'"),
        ({"layer_types": ["all"] * 3}, "layer_types lists sliding_attention, "),
        ({"hc_mult": 65}, "hyper_connections num_streams is at most 64, not 65"),
    ],
)
def test_what_is_not_served_is_named(changes, cause):
    with pytest.raises(InputError, match=cause):
        config_json.parse(FLASH | changes, Path("/models/v4"))


def test_another_type_of_experts_is_named(tmp_path):
    with pytest.raises(InputError, match="expert_dtype='fp3' is not supported; valid: fp4, fp8"):
        resolve.resolve(str(written(tmp_path, expert_dtype="fp3")[0]))


@pytest.mark.parametrize("power, shown", [(254, "1.70141e\\+38"), (255, "nan")])
def test_an_expert_whose_scale_is_beyond_float32_is_named(power, shown, tmp_path):
    stored, _ = written(tmp_path)
    name = "layers.1.ffn.experts.0.w1"

    def change(tensors):
        tensors[f"{name}.scale"].view(np.uint8)[2, 1] = power
        tensors[f"{name}.weight"].view(np.uint8)[2, 16:] = 0x77

    published.edited(stored, change)
    opened = resolve.resolve(str(stored)).open(None)
    with pytest.raises(
        InputError, match=f"multiplies a group by {shown}, .*; valid: 5.671e"
    ) as caught:
        opened.load_params(decoder.param_infos(opened.config), None)
    assert "\n" not in str(caught.value)
