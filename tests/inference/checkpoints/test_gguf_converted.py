"""GGUF files of families that are read, not written: made here from golden checkpoints as
llama.cpp's converter makes them, under the names of the package `gguf`.
"""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.rope import Llama3
from inference.checkpoints import resolve
from inference.checkpoints.gguf import gguf_tokenizer
from layers import decoder, params
from layers import rope as rope_math
from tests.inference.checkpoints.test_gguf_types import assert_written_again, logits_of, unnamed

GOLDEN = Path(__file__).parents[2] / "golden"
_ONE_SCALE = {"mscale": 0.8}  # llama.cpp knows no other than that of all dimensions
# Golden checkpoints, llama.cpp's architecture, and what is changed so that it has a place for them.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon-gqa-two-norms-untied": ("falcon", {}),
    "falcon-gqa-one-norm-tied-float32": ("falcon", {}),
    "kimi_linear-experts-groups": ("kimi-linear", {}),
    "mistral4-mha-groups-yarn": ("mistral4", {}),
    "glm_moe_dsa-mha-listed": ("glm-dsa", {}),
    "mimo_v2_flash-gqa-sinks": ("mimo2", {}),
    "apertus-gqa-rope3": ("apertus", {}),
    "phimoe-gqa-longrope-bias": (
        "phimoe",
        {
            "router_jitter_noise": 0.01,
            "rope_scaling": {"long_factor": [1.5, 2.2, 2.9, 3.6, 4.3, 5.0]},
        },
    ),
    "phimoe-mqa-window-tied-float32": ("phimoe", {}),
    "step3p5-gqa-limits": ("step35", {}),
    "youtu-mha-lite-yarn": ("deepseek2", {"rope_scaling": _ONE_SCALE}),
    "solar_open-gqa-yarn": ("glm4moe", {}),
    "mistral_large3-mha-own-names": ("deepseek2", {}),
}
EXPERT = re.compile(r"(.+?\d+)\.(?:\w+\.)?experts\.(\d+)\.(\w+)\.weight")
PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
CURVE = re.compile(r".+\.act_fn\.(\w+)")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))


def original(case: str, folder: Path) -> Path:
    """The golden checkpoint with the changes."""
    changes = CASES[case][1]
    raw = json.loads((GOLDEN / case / "config.json").read_text())
    raw |= {key: {**raw[key], **v} if isinstance(v, dict) else v for key, v in changes.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "model.safetensors").symlink_to(GOLDEN / case / "model.safetensors")
    return folder


def stored(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """transformers' tensors in float32, those of experts in stacks."""
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, values in load_file(folder / "model.safetensors").items():
        if match := EXPERT.fullmatch(name):
            projection = PROJECTIONS.get(match[3], match[3])
            stack = f"model.{match[1].removeprefix('model.')}.mlp.experts.{projection}.weight"
            stacks.setdefault(stack, {})[int(match[2])] = values.astype(np.float32)
        else:
            yield name, values.astype(np.float32)
    for name, parts in stacks.items():
        yield name, np.stack([parts[number] for number in sorted(parts)])


def converted(raw: dict, name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """What llama.cpp stores instead of a tensor, still under transformers' names."""
    if name.endswith(("kv_b_proj.weight", "wkv_b.weight")):
        heads = values.reshape(raw["num_attention_heads"], -1, raw["kv_lora_rank"])
        keys, of_values = np.split(heads, [raw["qk_nope_head_dim"]], axis=1)
        layer = name.removeprefix("model.").split(".")[1]
        yield f"model.layers.{layer}.self_attn.k_b_proj.weight", keys.swapaxes(1, 2)
        yield f"model.layers.{layer}.self_attn.v_b_proj.weight", of_values
    elif ".query_key_value." in name:
        heads, groups = raw["num_attention_heads"], raw["num_kv_heads"]
        rows = values.reshape(groups, heads // groups + 2, -1, *values.shape[1:])
        parts = (rows[:, :-2], rows[:, -2:-1], rows[:, -1:])
        yield name, np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])
    elif name.endswith("_conv1d.weight"):
        yield name, values.reshape(1, values.shape[0], 1, values.shape[-1])
    elif name.endswith(".A_log"):
        yield name, -np.exp(values)
    elif name.endswith(".dt_bias"):
        yield name.replace(".dt_bias", ".dt_proj.bias"), values
    elif raw["model_type"] == "step3p5" and name.endswith("norm.weight"):
        yield name, values + 1
    elif name.endswith("e_score_correction_bias"):
        yield name.replace("_bias", ".bias"), values
    elif name.endswith(("attention_sink_bias", "experts.gate_up_proj", "experts.down_proj")):
        yield f"{name}.weight", values
    elif name.endswith("router_bias"):
        yield f"{name}.bias", values
    else:
        yield name, values


def curves(folder: Path) -> dict[str, list[float]]:
    """Constants of Apertus' activations, of all layers."""
    found: dict[str, dict[str, float]] = {}
    for name, values in stored(folder):
        if match := CURVE.fullmatch(name):
            found.setdefault(f"xielu.{match[1]}", {})[name] = float(values.reshape(()))
    return {key: [of[name] for name in sorted(of)] for key, of in found.items()}


def metadata_of(raw: dict) -> dict[str, Any]:
    """The keys that the converter writes for all families, and those of the family."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    near = rope.get("full_attention", rope)
    theta = raw.get("rope_theta", near.get("rope_theta"))
    own = {
        "block_count": raw["num_hidden_layers"],
        "context_length": raw.get("max_position_embeddings", raw.get("model_max_length")),
        "embedding_length": raw["hidden_size"],
        "feed_forward_length": raw.get("intermediate_size", raw.get("ffn_hidden_size")),
        "attention.head_count": raw["num_attention_heads"],
        "attention.head_count_kv": raw.get("num_key_value_heads", raw.get("num_kv_heads")),
        "attention.layer_norm_rms_epsilon": raw.get("rms_norm_eps"),
        "rope.freq_base": theta[0] if isinstance(theta, list) else theta,
        "expert_count": raw.get("n_routed_experts", raw.get("num_local_experts")),
        "expert_used_count": raw.get("num_experts_per_tok"),
        "expert_feed_forward_length": raw.get("moe_intermediate_size"),
        "expert_shared_count": raw.get("n_shared_experts"),
        "expert_weights_scale": raw.get("routed_scaling_factor"),
        "expert_weights_norm": raw.get("norm_topk_prob"),
        "leading_dense_block_count": raw.get("first_k_dense_replace"),
    }
    if raw.get("head_dim") and "kv_lora_rank" not in raw:
        own |= dict.fromkeys(("attention.key_length", "attention.value_length"), raw["head_dim"])
    if raw.get("n_group", 1) > 1:
        own |= {"expert_group_count": raw["n_group"], "expert_group_used_count": raw["topk_group"]}
    if near.get("rope_type") == "yarn":
        own |= {
            "rope.scaling.type": "yarn", "rope.scaling.factor": near["factor"],
            "rope.scaling.original_context_length": near["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": near.get("beta_fast"),
            "rope.scaling.yarn_beta_slow": near.get("beta_slow"),
        }  # fmt: skip
    if near.get("rope_type") == "llama3":
        own["rope.scaling.original_context_length"] = near["original_max_position_embeddings"]
    if "mscale_all_dim" in near:
        own["rope.scaling.yarn_log_multiplier"] = 0.1 * near["mscale_all_dim"]
    if "kv_lora_rank" in raw:
        rank, rotary = raw["kv_lora_rank"], raw["qk_rope_head_dim"]
        own |= {
            "attention.head_count_kv": 1, "attention.kv_lora_rank": rank,
            "attention.q_lora_rank": raw["q_lora_rank"], "rope.dimension_count": rotary,
            "attention.key_length": rank + rotary, "attention.value_length": rank,
            "attention.key_length_mla": raw["qk_nope_head_dim"] + rotary,
            "attention.value_length_mla": raw["v_head_dim"],
        }  # fmt: skip
    own |= OWN.get(raw["model_type"], lambda raw: {})(raw)
    return {key: value for key, value in own.items() if value is not None}


def of_kimi(raw: dict) -> dict[str, Any]:
    linear = raw["linear_attn_config"]
    layers = range(1, raw["num_hidden_layers"] + 1)
    return {
        "attention.head_count_kv": [int(n in linear["full_attn_layers"]) for n in layers],
        "ssm.conv_kernel": linear["short_conv_kernel_size"], "kda.head_dim": linear["head_dim"],
        "expert_count": raw["num_experts"], "expert_used_count": raw["num_experts_per_token"],
        "expert_shared_count": raw["num_shared_experts"], "expert_gating_func": 2,
        "expert_group_count": raw["num_expert_group"],
        "expert_group_used_count": raw["topk_group"],
    }  # fmt: skip


def of_mimo(raw: dict) -> dict[str, Any]:
    near, ropes = raw["hybrid_layer_pattern"], raw["rope_parameters"]
    heads = raw["num_key_value_heads"], raw["swa_num_key_value_heads"]
    return {
        "attention.head_count_kv": [heads[own] for own in near],
        "attention.sliding_window": raw["sliding_window"],
        "attention.sliding_window_pattern": near,
        "attention.value_length": raw["v_head_dim"],
        "attention.value_scale": raw["attention_value_scale"],
        "rope.dimension_count": raw["head_dim"] // 2,
        "rope.freq_base_swa": ropes["sliding_attention"]["rope_theta"],
    }


def of_step(raw: dict) -> dict[str, Any]:
    """With the layers that predict further tokens, which have entries of their own."""
    near = [kind == "sliding_attention" for kind in raw["layer_types"]]
    heads = raw["num_attention_heads"], raw["attention_other_setting"]["num_attention_heads"]
    return {
        "block_count": len(near), "nextn_predict_layers": raw["num_nextn_predict_layers"],
        "attention.head_count": [heads[own] for own in near],
        "attention.head_count_kv": [raw["num_attention_groups"]] * len(near),
        "attention.sliding_window": raw["sliding_window"],
        "attention.sliding_window_pattern": near, "rope.freq_base_swa": raw["rope_theta"][1],
        "expert_count": raw["moe_num_experts"], "expert_used_count": raw["moe_top_k"],
        "expert_shared_feed_forward_length": raw["share_expert_dim"],
        "expert_weights_scale": raw["moe_router_scaling_factor"], "expert_weights_norm": True,
        "leading_dense_block_count": 1, "moe_every_n_layers": 1,
        "swiglu_clamp_exp": raw["swiglu_limits"], "swiglu_clamp_shexp": raw["swiglu_limits_shared"],
    }  # fmt: skip


def of_mistral(raw: dict) -> dict[str, Any]:
    return {"attention.temperature_scale": raw["rope_parameters"]["llama_4_scaling_beta"]}


OWN = {
    "falcon": lambda raw: {"attention.layer_norm_epsilon": raw["layer_norm_epsilon"]},
    "kimi_linear": of_kimi,
    "mistral4": of_mistral, "mistral_large3": of_mistral,
    "glm_moe_dsa": lambda raw: {
        "leading_dense_block_count": 1, "attention.indexer.head_count": raw["index_n_heads"],
        "attention.indexer.key_length": raw["index_head_dim"],
        "attention.indexer.top_k": raw["index_topk"],
    },
    "mimo_v2_flash": of_mimo,
    "phimoe": lambda raw: {
        "attention.sliding_window": raw["sliding_window"] or 0,
        "rope.scaling.original_context_length": raw.get("original_max_position_embeddings"),
        "rope.scaling.attn_factor": (raw.get("rope_scaling") or {}).get("long_mscale"),
    },
    "step3p5": of_step,
    "youtu": lambda raw: {"leading_dense_block_count": raw["num_hidden_layers"],
                          "expert_feed_forward_length": raw["intermediate_size"],
                          "expert_shared_count": 0},
    "solar_open": lambda raw: {"expert_gating_func": 2},
}  # fmt: skip


def factors(raw: dict, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors of positions."""
    scaling = raw.get("rope_scaling") or {}
    for length in ("long", "short") if "long_factor" in scaling else ():
        yield f"rope_factors_{length}.weight", np.float32(scaling[f"{length}_factor"])
    ropes = [mixer.rope for mixer in config.mixers(Attention)]
    for rope in (rope for rope in ropes if isinstance(rope.scaling, Llama3)):
        width = config.layers[0].mixer.head_width
        plain = rope_math.inverse_frequencies(dataclasses.replace(rope, scaling=None), width)
        divisors = np.asarray(plain / rope_math.inverse_frequencies(rope, width), np.float32)
        yield (
            "rope_freqs.weight",
            np.pad(divisors, (0, width // 2 - len(divisors)), constant_values=1.0),
        )


def write(
    case: str, folder: Path, changes: dict[str, Any] | None = None, left_out: str = "nothing"
) -> Path:
    """A GGUF of a checkpoint without tensors whose names begin so; a change whose value is None
    drops that key.
    """
    name, raw = CASES[case][0], json.loads((folder / "config.json").read_text())
    file = folder / "model.gguf"
    writer = gguf.GGUFWriter(file, name)
    adds = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
    adds |= {str: writer.add_string, list: writer.add_array}
    metadata = {f"{name}.{key}": value for key, value in metadata_of(raw).items()}
    for key, value in (metadata | curves(folder) | (changes or {})).items():
        if value is not None:
            adds[type(value)](key, value)
    architecture = {own: key for key, own in gguf.MODEL_ARCH_NAMES.items()}[name]
    library = gguf.get_tensor_name_map(architecture, raw["num_hidden_layers"])
    for own, values in stored(folder):
        if CURVE.fullmatch(own):
            continue
        for renamed, tensor in converted(raw, own, values):
            found = library.get_name(renamed, try_suffixes=(".weight", ".bias"))
            assert found is not None, renamed
            if not found.startswith(left_out):
                writer.add_tensor(found, tensor)
    for own, values in factors(raw, resolve.resolve(str(folder)).config):
        writer.add_tensor(own, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.quick_code
@pytest.mark.parametrize("case", CASES)
def test_the_model_is_the_same(case, tmp_path, monkeypatch):
    """Up to the rounding of a rate and of its logarithm, and of norms from which 1 is taken."""
    monkeypatch.setattr(gguf_tokenizer, "text_files", lambda *args: {})
    folder = original(case, tmp_path / "hf")
    own = resolve.resolve(str(folder)).open(None)
    found = resolve.resolve(str(write(case, folder))).open(None)
    config = dataclasses.replace(own.config, dtype="float32", formats=())
    read = dataclasses.replace(found.config, dtype="float32", formats=())
    assert dataclasses.replace(unnamed(read), family=config.family) == unnamed(config)
    expected = own.exact().load_params(decoder.param_infos(config))
    values = found.exact().load_params(decoder.param_infos(read))
    flat = params.flatten(expected)
    assert params.flatten(values).keys() == flat.keys()
    for path, tensor in params.flatten(values).items():
        is_rounded = path.endswith("/rate") or config.norm_offset and "norm" in path
        np.testing.assert_allclose(tensor, flat[path], rtol=0, atol=3e-7 * bool(is_rounded))
    one, two = logits_of(read, values), logits_of(config, expected)
    assert np.isfinite(two).all() and two.std() > 0
    np.testing.assert_allclose(one, two, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", sorted(CASES.keys() - {"mistral_large3-mha-own-names"}))
def test_a_file_is_written_as_it_was(case, tmp_path):
    path = write(case, original(case, tmp_path / "hf"))
    assert_written_again(path, tmp_path, ("ssm_a", "norm.weight"))


BAD = {
    "curves": ("apertus-gqa-rope3", {"xielu.beta": [0.5]}, "xielu.beta must list 2 numbers"),
    "no curves": ("apertus-gqa-rope3", {"xielu.eps": None}, "xielu.eps must list 2 numbers"),
    "experts": ("phimoe-gqa-longrope-bias", {"phimoe.expert_used_count": 3}, "must be 2, not 3"),
    "windows": ("step3p5-gqa-limits", {"step35.attention.sliding_window_pattern": None},
                "sliding_window_pattern is missing"),
    "limits": ("step3p5-gqa-limits", {"step35.swiglu_clamp_exp": [0.5]}, "must list 4 numbers"),
    "a first choice": ("glm_moe_dsa-mha-listed",
                       {"glm-dsa.attention.indexer.types": [False, True, True]},
                       "starts with true, because no layer chooses before the first"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_named(case, tmp_path):
    own, changes, message = BAD[case]
    file = write(own, original(own, tmp_path / "hf"), changes)
    with pytest.raises(InputError) as caught:
        resolve.resolve(str(file)).open(None)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_layers_without_an_indexer_read_the_choice_before_them(tmp_path):
    """By what a file states, or, where it states nothing, by the tensors that it has."""
    case = "glm_moe_dsa-mha-listed"
    folder = original(case, tmp_path / "hf")
    types = {"glm-dsa.attention.indexer.types": [True, False, True]}
    for changes, left_out in ((types, "nothing"), ({}, "blk.1.indexer.")):
        read = resolve.resolve(str(write(case, folder, changes, left_out))).config
        assert [layer.mixer.choice_owner for layer in read.layers] == [None, 0, None]
