"""GGUF files of mixtures and of latent attention, as llama.cpp's converter writes them or wrote
them, and what is not served.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.kinds.latent import Latent
from configs.kinds.rope import Rope, Yarn
from configs.kinds.temperature import Temperature
from configs.model import LayerSpec, ModelConfig
from inference.checkpoints import resolve
from inference.checkpoints.gguf import gguf_file, gguf_metadata
from layers import params
from tests.inference.checkpoints import test_gguf as tiny
from tests.inference.checkpoints import test_gguf_types as types
from tests.inference.checkpoints import test_weight_formats as formats
from tests.layers import native

_HEADS = Attention(4, 2, 8, Rope(500.0))
_PLAIN, _UNNORMED = Router(), Router(is_normalized=False)
_SIGMOID = Router("sigmoid", scale=2.5, has_offsets=True, group_best=2)


def mixture(family: str, attention: Any, experts: Experts, **own: Any) -> ModelConfig:
    return dataclasses.replace(
        tiny.LLAMA, family=family, pattern=(LayerSpec(attention, experts),), **own
    )


_YARN = Yarn(8.0, 32, 16.0, 2.0)
_DEEP = Latent(4, 32, 8, 16, 12, 24, Rope(500.0, None, 1.0, True))
_SHARPER = 24**-0.5 * (0.1 * 0.707 * math.log(8.0) + 1) ** 2
_DEEP_YARN = dataclasses.replace(
    _DEEP, query_rank=None, scale=_SHARPER,
    rope=Rope(500.0, dataclasses.replace(_YARN, attention_factor=1.0), 1.0, True),
)  # fmt: skip
_SINKS = dataclasses.replace(
    _HEADS, rope=Rope(500.0, dataclasses.replace(_YARN, truncate=False)), biases=("qkv", "out"),
    has_sinks=True,
)  # fmt: skip
_LIMITED = Experts(
    5, 2, 32, Router(has_bias=True), activation="quick_gelu", has_bias=True, limit=7.0,
    up_offset=1.0,
)  # fmt: skip
_GROUPED = dataclasses.replace(_SIGMOID, num_groups=3, top_groups=2)
_OLMO = dataclasses.replace(_HEADS, rope=Rope(500.0, _YARN), qk_norm="all")
_NEAR = dataclasses.replace(_OLMO, rope=Rope(500.0), window=16)
_FFN = Gated(64)

CONFIGS = {
    "mixtral": mixture("mixtral", _HEADS, Experts(4, 2, 64)),
    "qwen2moe": mixture(
        "qwen2_moe", dataclasses.replace(_HEADS, biases=("qkv",)),
        Experts(5, 2, 32, _UNNORMED, shared_width=96, has_shared_gate=True),
    ),
    "qwen3moe": mixture(
        "qwen3_moe", dataclasses.replace(_HEADS, qk_norm="head"), Experts(5, 2, 32), tied=True
    ),
    "olmoe": mixture(
        "olmoe", dataclasses.replace(_HEADS, qk_norm="all"), Experts(5, 2, 64, _UNNORMED)
    ),
    "deepseek2": dataclasses.replace(
        tiny.LLAMA, family="deepseek_v3", num_layers=3,
        pattern=(LayerSpec(_DEEP, _FFN),)
        + (LayerSpec(_DEEP, Experts(6, 2, 32, _GROUPED, shared_width=32)),) * 2,
    ),
    "deepseek2-lite": mixture(
        "deepseek_v2", _DEEP_YARN, Experts(6, 2, 32, _UNNORMED, shared_width=64), max_context=256
    ),
    "glm4moe": dataclasses.replace(
        tiny.LLAMA, family="glm4_moe", num_layers=3,
        pattern=tuple(
            LayerSpec(
                dataclasses.replace(_HEADS, rope=Rope(500.0, share=0.5), biases=("qkv",)), ffn
            )
            for ffn in (_FFN, *[Experts(4, 2, 32, _SIGMOID, shared_width=32)] * 2)
        ),
    ),
    "dots1": dataclasses.replace(
        tiny.LLAMA, family="dots1", num_layers=3,
        pattern=tuple(
            LayerSpec(dataclasses.replace(_HEADS, qk_norm="head"), ffn)
            for ffn in (_FFN, *[Experts(4, 2, 32, _SIGMOID, shared_width=64)] * 2)
        ),
    ),
    "minimax-m2": mixture(
        "minimax_m2",
        dataclasses.replace(_HEADS, rope=Rope(500.0, share=0.5), qk_norm="all"),
        Experts(5, 2, 32, Router("sigmoid", has_offsets=True)),
    ),
    "gpt-oss": mixture("gpt_oss", _SINKS, _LIMITED, max_context=256),
    "olmo3": dataclasses.replace(
        tiny.OLMO2, family="olmo3", num_layers=5, max_context=256,
        pattern=(LayerSpec(_NEAR, _FFN), LayerSpec(_OLMO, _FFN)) + (LayerSpec(_NEAR, _FFN),) * 3,
    ),
}  # fmt: skip
_CHUNKED = dataclasses.replace(
    _HEADS, rope=Rope(500.0, neighbours=True), window=8192, chunked=True, qk_norm="plain"
)
_DISTANT = dataclasses.replace(_HEADS, rope=None, temperature=Temperature(0.1, 8192, offset=1))
_WEIGHING = Experts(
    5, 1, 32, Router("sigmoid", is_normalized=False), shared_width=32, weighs_inputs=True
)
CONFIGS["llama4"] = dataclasses.replace(
    tiny.LLAMA, family="llama4", num_layers=4,
    pattern=tuple(
        LayerSpec(mixer, ffn)
        for mixer, ffn in zip(
            [_CHUNKED] * 3 + [_DISTANT], [_FFN, _WEIGHING] * 2, strict=True
        )
    ),
)  # fmt: skip
CONFIGS["gpt-oss"] = dataclasses.replace(
    CONFIGS["gpt-oss"],
    pattern=(
        LayerSpec(dataclasses.replace(_SINKS, window=16), _LIMITED),
        LayerSpec(_SINKS, _LIMITED),
    ),
)


def architecture(case: str) -> str:
    return {"mixtral": "llama", "olmo3": "olmo2"}.get(case, case.removesuffix("-lite"))


def tensors_of(config: ModelConfig, leaves: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors llama.cpp's converter writes."""
    tensors = {"token_embd": leaves["embed/table"], "output_norm": leaves["final_norm"]}
    if not config.tied:
        tensors["output"] = leaves["head/table"]
    for i, spec in enumerate(config.layers):
        prefix = f"layers/{i}/"
        layer = {p.removeprefix(prefix): v for p, v in leaves.items() if p.startswith(prefix)}
        found = _mixer(config, spec.mixer, layer) | _feed_forward(spec.ffn, layer)
        ffn_norm = "post_attention_norm" if config.family in ("glm4_moe", "gpt_oss") else "ffn_norm"
        norms = {"mixer_norm": "attn_norm", "ffn_norm": ffn_norm}
        norms |= {"mixer_post_norm": "post_attention_norm", "ffn_post_norm": "post_ffw_norm"}
        found |= {own: layer[ours] for ours, own in norms.items() if ours in layer}
        tensors |= {f"blk.{i}.{name}": values for name, values in found.items()}
    bare = {n: n if n.endswith(".bias") else f"{n}.weight" for n in tensors}
    return {bare[name]: values for name, values in tensors.items()}


def _mixer(config: ModelConfig, kind: Any, layer: dict) -> dict:
    names = {
        "mixer/out": "attn_output", "mixer/sinks": "attn_sinks", "mixer/q": "attn_q",
        "mixer/out_bias": "attn_output.bias", "mixer/q_down": "attn_q_a",
        "mixer/q_up": "attn_q_b", "mixer/kv_down": "attn_kv_a_mqa", "mixer/k_up": "attn_k_b",
        "mixer/v_up": "attn_v_b", "mixer/kv_norm": "attn_kv_a_norm", "mixer/k_norm": "attn_k_norm",
        "mixer/q_norm": "attn_q_a_norm" if isinstance(kind, Latent) else "attn_q_norm",
    }  # fmt: skip
    found = {own: layer[ours] for ours, own in names.items() if ours in layer}
    if isinstance(kind, Attention):
        ends = np.cumsum([kind.num_heads, kind.num_kv_heads]) * kind.head_width
        query, key, value = np.split(layer["mixer/qkv"], ends)
        if config.family == "mixtral":
            query, key = (tiny.interleave(part, kind.head_width) for part in (query, key))
        found |= {"attn_q": query, "attn_k": key, "attn_v": value}
        if kind.biases:
            parts = zip("qkv", np.split(layer["mixer/qkv_bias"], ends), strict=True)
            found |= {f"attn_{part}.bias": bias for part, bias in parts}
    return found


def _feed_forward(ffn: Any, layer: dict) -> dict:
    if isinstance(ffn, Gated):
        gate, up = np.split(layer["ffn/gate_up"], 2)
        return {"ffn_gate": gate, "ffn_up": up, "ffn_down": layer["ffn/down"]}
    gate, up = np.split(layer["ffn/experts/gate_up"], 2, axis=1)
    found = {
        "ffn_gate_inp": layer["ffn/router"], "ffn_gate_exps": gate, "ffn_up_exps": up,
        "ffn_down_exps": layer["ffn/experts/down"],
    }  # fmt: skip
    if ffn.router.has_offsets:
        found["exp_probs_b.bias"] = layer["ffn/router_offsets"]
    if ffn.router.has_bias:
        found["ffn_gate_inp.bias"] = layer["ffn/router_bias"]
    if ffn.has_bias:
        bias = layer["ffn/experts/gate_up_bias"]
        found |= {"ffn_gate_exps.bias": bias[:, 0], "ffn_up_exps.bias": bias[:, 1]}
        found["ffn_down_exps.bias"] = layer["ffn/experts/down_bias"]
    if ffn.shared_width:
        gate, up = np.split(layer["ffn/shared/gate_up"], 2)
        found |= {"ffn_gate_shexp": gate, "ffn_up_shexp": up}
        found["ffn_down_shexp"] = layer["ffn/shared/down"]
    if ffn.has_shared_gate:
        found["ffn_gate_inp_shexp"] = layer["ffn/shared_gate"][0]
    return found


def metadata_of(config: ModelConfig) -> dict[str, Any]:
    kind, ffn = config.layers[-1].mixer, config.layers[-1].ffn
    values: dict[str, Any] = {
        "block_count": config.num_layers, "context_length": config.max_context,
        "embedding_length": config.width, "feed_forward_length": 64,
        "attention.head_count": kind.num_heads,
        "attention.layer_norm_rms_epsilon": config.norm_eps, "rope.freq_base": 500.0,
    }  # fmt: skip
    if isinstance(kind, Latent):
        key = kind.nope_width + kind.rope_width
        values |= {
            "attention.head_count_kv": 1, "attention.kv_lora_rank": kind.rank,
            "attention.key_length": kind.rank + kind.rope_width,
            "attention.value_length": kind.rank, "attention.key_length_mla": key,
            "attention.value_length_mla": kind.value_width,
            "rope.dimension_count": kind.rope_width,
        }  # fmt: skip
        if kind.query_rank:
            values["attention.q_lora_rank"] = kind.query_rank
        if kind.scale:
            values["rope.scaling.yarn_log_multiplier"] = 0.0707
    else:
        values |= {
            "attention.head_count_kv": kind.num_kv_heads, "attention.key_length": kind.head_width,
            "rope.dimension_count": int(kind.head_width * (kind.rope or Rope()).share),
        }  # fmt: skip
    ropes = (mixer.rope for mixer in config.mixers(type(kind)) if mixer.rope)
    rope = next((rope for rope in ropes if rope.scaling), None)
    if rope is not None:
        values |= {
            "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 32, "rope.scaling.yarn_beta_fast": 16.0,
            "rope.scaling.yarn_beta_slow": 2.0,
        }  # fmt: skip
    if isinstance(ffn, Experts):
        values |= {"expert_count": ffn.num_experts, "expert_used_count": ffn.top_k}
        if config.family != "mixtral":
            values["expert_feed_forward_length"] = ffn.width
    if config.family in ("deepseek_v2", "deepseek_v3", "glm4_moe", "dots1"):
        values |= {
            "expert_shared_count": ffn.shared_width // ffn.width,
            "leading_dense_block_count": int(isinstance(config.layers[0].ffn, Gated)),
            "expert_weights_scale": ffn.router.scale,
            "expert_weights_norm": ffn.router.is_normalized,
            "expert_gating_func": {"softmax": 1, "sigmoid": 2}[ffn.router.scores],
            "expert_group_count": ffn.router.num_groups,
            "expert_group_used_count": ffn.router.top_groups,
        }  # fmt: skip
    if config.family == "qwen2_moe":
        values["expert_shared_feed_forward_length"] = ffn.shared_width
    if config.family == "llama4":
        values |= {"interleave_moe_layer_step": 2, "attention.sliding_window": 8192}
    if config.family in ("gpt_oss", "olmo3"):
        values["attention.sliding_window"] = 16
    if config.family == "olmo3":
        pattern = [layer.mixer.window is not None for layer in config.layers]
        values["attention.sliding_window_pattern"] = pattern
    return values


def write_gguf(
    path: Path,
    case: str,
    tensors: dict[str, np.ndarray],
    changes: dict[str, Any] | None = None,
    kinds: dict[str, str] | None = None,
) -> Path:
    """A GGUF of the tensors; a change whose value is None drops that key, and tensors whose names
    end like one of `kinds` have such a type.
    """
    name = architecture(case)
    writer = gguf.GGUFWriter(path, name)
    adds = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
    adds |= {str: writer.add_string, list: writer.add_array}
    for key, value in (metadata_of(CONFIGS[case]) | (changes or {})).items():
        if value is not None:
            adds[type(value)](f"{name}.{key}", value)
    for own, tensor in tensors.items():
        kind = next((k for end, k in (kinds or {}).items() if own.endswith(end)), None)
        if kind is None:
            writer.add_tensor(own, tensor)
        else:
            quantization = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(own, gguf.quantize(tensor, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def usual(case: str) -> dict[str, np.ndarray]:
    return tensors_of(CONFIGS[case], tiny.random_params(CONFIGS[case]))


def older(case: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensors and the metadata that llama.cpp wrote before it split what makes keys and values
    of the latent vectors.
    """
    tensors, kind = usual(case), CONFIGS[case].layers[0].mixer
    for i in range(CONFIGS[case].num_layers):
        keys, values = (tensors.pop(f"blk.{i}.attn_{part}_b.weight") for part in "kv")
        both = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
        tensors[f"blk.{i}.attn_kv_b.weight"] = both.reshape(-1, kind.rank)
    return tensors, {
        "attention.key_length_mla": None, "attention.value_length_mla": None,
        "attention.key_length": kind.nope_width + kind.rope_width,
        "attention.value_length": kind.value_width,
        "attention.head_count_kv": kind.num_heads,
    }  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))


def assert_original(path: Path, config: ModelConfig) -> None:
    assert gguf_metadata.read_config(gguf_file.open_gguf(path)) == config
    original, loaded = tiny.random_params(config), tiny.load(path)
    assert loaded.keys() == original.keys()
    for name, value in loaded.items():
        expected = original[name].astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(value, np.float32), expected, name)


@pytest.mark.parametrize("case", CONFIGS)
def test_configuration_and_parameters_are_the_originals(case, tmp_path):
    assert_original(write_gguf(tmp_path / "tiny.gguf", case, usual(case)), CONFIGS[case])


@pytest.mark.parametrize("case", ["deepseek2", "deepseek2-lite"])
def test_older_files_hold_keys_and_values_in_one_tensor(case, tmp_path):
    assert_original(write_gguf(tmp_path / "tiny.gguf", case, *older(case)), CONFIGS[case])


def test_blocks_that_predict_a_second_token_are_not_read(tmp_path):
    tensors = usual("glm4moe")
    behind = {n.replace("blk.2", "blk.3"): t for n, t in tensors.items() if "blk.2" in n}
    behind["blk.3.nextn.enorm.weight"] = np.ones(32, np.float32)
    counts = {"block_count": 4, "nextn_predict_layers": 1}
    path = write_gguf(tmp_path / "tiny.gguf", "glm4moe", tensors | behind, counts)
    assert_original(path, CONFIGS["glm4moe"])


@pytest.mark.quick_code
@pytest.mark.parametrize("case", CONFIGS)
def test_a_gguf_and_what_is_made_of_it_give_the_same_logits(case, tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf", case, usual(case))
    types.assert_same_logits(path, CONFIGS[case], tmp_path, monkeypatch)


@pytest.mark.parametrize("case", CONFIGS)
def test_a_file_is_written_as_it_was(case, tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", case, rounded(usual(case)))
    types.assert_written_again(path, tmp_path)


def rounded(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Numbers that bfloat16 has."""
    return {n: t.astype(ml_dtypes.bfloat16).astype(np.float32) for n, t in tensors.items()}


BLOCKS = {"exps.weight": "Q8_0", "shexp.weight": "Q4_0", "attn_k_b.weight": "Q8_0"}


@pytest.mark.parametrize("case", ["mixtral", "qwen2moe", "glm4moe", "gpt-oss"])
def test_experts_keep_their_blocks(case, tmp_path):
    """Each expert's gates, then what they meet, in the bytes of the file."""
    tensors, config = usual(case), CONFIGS[case]
    path = write_gguf(tmp_path / "tiny.gguf", case, tensors, kinds=BLOCKS)
    checkpoint = resolve.resolve(str(path)).open(None)
    kept = checkpoint.formats()
    own = {p: f for p, f in kept.items() if "experts/" in p and not p.endswith("bias")}
    assert own and {name for found in own.values() for name in found} == {"q8_0"}
    model = dataclasses.replace(config, formats=tuple(kept.items()))
    infos = model.parameters()
    loaded = params.flatten(
        checkpoint.exact().load_params(infos, None, lambda path, info, v: np.asarray(v))
    )
    last = config.num_layers - 1
    gate, up, down = (
        gguf.quantize(tensors[f"blk.{last}.ffn_{part}_exps.weight"], gguf.GGMLQuantizationType.Q8_0)
        for part in ("gate", "up", "down")
    )
    expected = np.concatenate([gate, up], axis=1)
    np.testing.assert_array_equal(loaded[f"layers/{last}/ffn/experts/gate_up"], expected)
    np.testing.assert_array_equal(loaded[f"layers/{last}/ffn/experts/down"], down)


@pytest.mark.parametrize("kind", ["Q8_0", "MXFP4"])
def test_quantized_experts_are_dequantized_by_the_library(kind, tmp_path):
    tensors, quantization = usual("gpt-oss"), gguf.GGMLQuantizationType[kind]
    kinds = {"exps.weight": kind}
    path = write_gguf(tmp_path / "tiny.gguf", "gpt-oss", tensors, kinds=kinds)
    gate, up = (
        gguf.dequantize(
            gguf.quantize(tensors[f"blk.1.ffn_{part}_exps.weight"], quantization), quantization
        )
        for part in ("gate", "up")
    )
    found = np.asarray(tiny.load(path)["layers/1/ffn/experts/gate_up"], np.float32)
    expected = np.concatenate([gate, up], axis=1).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(found, expected)


REFUSED = {
    "experts": ("qwen3moe", {"expert_count": 4}, {}, "ffn_gate_exps.* expected 4 experts"),
    "a million": ("qwen3moe", {"expert_count": 1 << 20}, {}, "num_experts is at most 4096"),
    "scores": ("glm4moe", {"expert_gating_func": 3}, {}, "expert_gating_func=3 is not supported"),
    "a flag": ("glm4moe", {"expert_weights_norm": 1}, {}, "expert_weights_norm must be true or"),
    "a pattern": (
        "olmo3", {"attention.sliding_window_pattern": [True]}, {}, "must list 5 booleans"
    ),
    "no key": ("deepseek2", {"rope.dimension_count": 64}, {}, "dimension_count=64 leaves no key"),
    "groups": ("deepseek2", {"expert_group_count": 4}, {}, "num_groups=4 does not divide"),
    "yarn": ("qwen3moe", {"rope.scaling.type": "yarn"}, {}, "'yarn' is not supported; valid: none"),
    "two types": (
        "mixtral", {}, {"gate_exps.weight": "Q8_0", "up_exps.weight": "Q4_0"},
        "experts/gate_up is a stack of q4_0, q8_0, which no kernel .* engine.weights=bfloat16",
    ),
    "a type": ("gpt-oss", {}, {"exps.weight": "Q5_1"}, "has type Q5_1, which no kernel"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_served_is_named(case, tmp_path):
    own, changes, kinds, cause = REFUSED[case]
    path = write_gguf(tmp_path / "tiny.gguf", own, usual(own), changes, kinds)
    with pytest.raises(InputError, match=cause) as caught:
        resolve.resolve(str(path)).open(None).formats()
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_a_part_of_blocks_is_not_kept(tmp_path):
    tensors, changes = older("deepseek2")
    kinds = {"attn_kv_b.weight": "Q8_0"}
    path = write_gguf(tmp_path / "tiny.gguf", "deepseek2", tensors, changes, kinds)
    with pytest.raises(InputError, match="attn_kv_b.weight' is of several parameters"):
        resolve.resolve(str(path)).open(None).formats()
    assert tiny.load(path)
    tensors["blk.0.attn_kv_b.weight"] = tensors["blk.0.attn_kv_b.weight"][:-1]
    path = write_gguf(tmp_path / "tiny.gguf", "deepseek2", tensors, changes)
    with pytest.raises(InputError, match="attn_kv_b.weight' is .111, 32.; expected .112, 32."):
        tiny.load(path)


@pytest.mark.quick_code
@pytest.mark.parametrize("case", ["mixtral", "deepseek2", "gpt-oss"])
def test_a_file_runs_in_its_own_blocks(case, tmp_path, monkeypatch):
    """Beside the same numbers in float32; where rounding could choose other experts or other
    tokens, all are visited.
    """
    native.need()
    config, last = CONFIGS[case], CONFIGS[case].layers[-1]
    experts = dataclasses.replace(
        last.ffn, top_k=last.ffn.num_experts,
        router=dataclasses.replace(last.ffn.router, num_groups=1, top_groups=1),
    )  # fmt: skip
    mixer = last.mixer
    if isinstance(mixer, Latent):
        mixer = dataclasses.replace(mixer, nope_width=32, value_width=32, query_rank=32)
    pattern = (LayerSpec(mixer, experts),)
    config = dataclasses.replace(config, pattern=pattern)
    if isinstance(mixer, Attention) and mixer.has_sinks:
        sliding = dataclasses.replace(mixer, window=16)
        config = dataclasses.replace(config, pattern=(LayerSpec(sliding, experts), *pattern))
    monkeypatch.setitem(CONFIGS, case, config)
    kinds = {"exps.weight": "Q8_0", "_b.weight": "Q8_0", "output.weight": "Q8_0"}
    tensors = {n: t / 10 if "attn_q_b" in n else t for n, t in usual(case).items()}
    path = write_gguf(tmp_path / "tiny.gguf", case, tensors, kinds=kinds)
    exact, blocks = (
        formats.scores(formats.engine_of(path, weights=weights, dtype="float32"))
        for weights in ("float32", "file")
    )
    assert np.isfinite(exact).all() and exact.std() > 0
    np.testing.assert_allclose(blocks, exact, atol=0.02 * np.abs(exact).max())
