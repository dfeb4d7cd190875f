"""Hugging Face directories: both spellings of the configuration, strict, one-line refusals."""

import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.rope import Linear, Llama3, Rope
from inference.checkpoints import end_tokens, mapped, names, resolve, safetensors_file
from inference.checkpoints.hf import config_json, hf_directory
from inference.files import json_lines
from layers import decoder, params

GOLDEN = Path(__file__).parents[2] / "golden"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
    "rope_theta": 500.0,
}
GEMMA3 = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 7,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "sliding_window": 16,
    "query_pre_attn_scalar": 8,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def parse(**changes):
    base = GEMMA3 if changes.pop("gemma", False) else LLAMA
    return config_json.parse(base | changes, Path("/models/tiny"))


def test_llama_defaults_and_spellings():
    config = parse()
    (heads,) = config.mixers(Attention)
    assert (config.name, heads.head_width, heads.num_kv_heads) == ("tiny", 8, 3)
    assert (config.tied, config.dtype, config.norm_eps) == (False, "bfloat16", 1e-6)
    assert config.layers[0].mixer.rope == Rope(500.0)
    expected = Rope(500.0, Llama3(8.0, 1.0, 4.0, 32))
    assert parse(rope_scaling=LLAMA3_ROPE).layers[0].mixer.rope == expected
    version_5 = parse(rope_theta=None, rope_parameters=LLAMA3_ROPE | {"rope_theta": 500.0})
    assert version_5.layers[0].mixer.rope == expected
    assert parse(is_decoder=False) == parse(is_decoder=True) == config
    linear = parse(rope_scaling={"type": "linear", "factor": 2})
    assert linear.layers[0].mixer.rope == Rope(500.0, Linear(2.0))


def test_gemma3_spellings():
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    per_kind = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    version_5 = parse(gemma=True, layer_types=kinds, rope_parameters=per_kind)
    version_4 = parse(
        gemma=True,
        sliding_window_pattern=3,
        rope_theta=1e6,
        rope_local_base_freq=100.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    assert version_5 == version_4
    both = parse(
        gemma=True, layer_types=kinds, rope_parameters=per_kind,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
    )  # fmt: skip
    assert both.layers[2].mixer.rope == Rope(1e6, Linear(4.0)) and both.layers[
        0
    ].mixer.rope == Rope(100.0)
    assert parse(gemma=True, _sliding_window_pattern=3) == parse(gemma=True)
    assert [spec.window for spec in version_4.cache_specs] == [16, 16, None, 16, 16, None, 16]
    assert version_4.layers[2].mixer.rope == Rope(1e6, Linear(8.0))
    assert version_4.layers[0].mixer.rope == Rope(100.0)
    assert version_4.tied and version_4.embedding_scale == 24**0.5
    assert version_4.layers[0].mixer.scale is None
    assert parse(gemma=True, query_pre_attn_scalar=16).layers[0].mixer.scale == 0.25
    assert len(parse(gemma=True).pattern) == 6


BAD_CONFIG = {
    "architecture": (
        {"architectures": ["FalcomForCausalLM"]},
        "the nearest names: .*ForCausalLM.*docs/families.md lists all",
    ),
    "no architecture": ({"architectures": None}, "architecture None"),
    "odd architecture": ({"architectures": [["x"]]}, "is not supported"),
    "attention bias": ({"attention_bias": "qkv"}, "attention_bias must be true or false"),
    "partial rotation": ({"partial_rotary_factor": -0.5}, "partial_rotary_factor must be positive"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config="),
    "soft cap": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
    "bidirectional": ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    "activation": ({"hidden_act": "relu"}, "hidden_act='relu' is not supported; valid: silu"),
    "rope type": ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "valid: default, linear"),
    "rope factor": ({"rope_scaling": {"type": "linear"}}, "factor must be a number"),
    "rope shape": ({"rope_scaling": [1]}, "rope_scaling must be an object"),
    "theta": ({"rope_theta": float("nan")}, "rope_theta must be positive and finite"),
    "width 0": ({"hidden_size": 0}, "hidden_size must be an integer from 1"),
    "width type": ({"hidden_size": "24"}, "hidden_size must be an integer"),
    "width size": ({"hidden_size": 1 << 40}, "hidden_size must be an integer"),
    "layers": ({"num_hidden_layers": 10**6}, "num_hidden_layers must be an integer from 1 to"),
    "missing": ({"vocab_size": None}, "vocab_size must be an integer"),
    "heads": ({"num_key_value_heads": 2}, "not a multiple"),
    "tied": ({"tie_word_embeddings": 1}, "true or false"),
    "layer kinds": (GEMMA3 | {"layer_types": ["full_attention"]}, "one kind for each of 7 layers"),
    "layer kind": (GEMMA3 | {"layer_types": ["conv"] * 7}, "layer type 'conv' is not supported"),
}


@pytest.mark.parametrize("case", BAD_CONFIG)
def test_bad_config_is_named(case):
    changes, expected = BAD_CONFIG[case]
    with pytest.raises(InputError, match=expected) as caught:
        parse(**changes)
    assert "\n" not in str(caught.value) and "/models/tiny" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1, "a": 2}', "[" * 10**5, "\xff"])
def test_config_that_is_no_json_object_is_refused(text, tmp_path):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=str(tmp_path)) as caught:
        resolve.resolve(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_end_tokens(tmp_path):
    path, other = tmp_path / "generation_config.json", tmp_path / "config.json"
    path.write_text('{"eos_token_id": [1, 2, 1], "temperature": 0.6}')
    other.write_text('{"eos_token_id": 7}')
    assert end_tokens.read_eos_ids(tmp_path, 32) == (1, 2, 7)
    for bad in ("32", '"x"', "[1, [2]]", "true", "[1, 2.5]", '{"a": 1}'):
        path.write_text(f'{{"eos_token_id": {bad}}}')
        with pytest.raises(InputError, match="generation_config.json: eos_token_id") as caught:
            end_tokens.read_eos_ids(tmp_path, 32)
        assert "\n" not in str(caught.value)
    path.write_text('{"eos_token_id": [1, 2, 3, 4, 5, 6, 7, 8, 1]}')
    assert end_tokens.read_eos_ids(tmp_path, 32) == (1, 2, 3, 4, 5, 6, 7, 8)
    path.write_text('{"eos_token_id": [1, 2, 3, 4, 5, 6, 7, 8, 9]}')
    with pytest.raises(InputError, match="9 eos_token_ids; at most 8"):
        end_tokens.read_eos_ids(tmp_path, 32)
    for text in ("{}", '{"eos_token_id": null}'):
        path.write_text(text)
        assert end_tokens.read_eos_ids(tmp_path, 32) == (7,)
    path.unlink()
    assert end_tokens.read_eos_ids(tmp_path, 32) == (7,)
    other.write_text('{"eos_token_id": 99}')
    with pytest.raises(InputError, match=r"/config.json: eos_token_id 99"):
        end_tokens.read_eos_ids(tmp_path, 32)


class CountedKey(str):
    """A key that counts in `work` how often any of them is hashed or compared."""

    work = 0

    def __hash__(self):
        CountedKey.work += 1
        return super().__hash__()

    def __eq__(self, other):
        CountedKey.work += 1
        return super().__eq__(other)


def test_comparing_many_keys_is_linear_work(monkeypatch):
    monkeypatch.setattr(CountedKey, "work", 0)
    pairs = [(CountedKey(number), 1) for number in (*range(2_000), 1_999)]
    with pytest.raises(ValueError, match="duplicate key '1999'"):
        json_lines.unique_keys(pairs)
    assert len(pairs) < CountedKey.work < 8 * len(pairs)
    keys = [f'"{number}": 1' for number in range(100_000)]
    with pytest.raises(InputError, match="header: .*duplicate key '99999'"):
        mapped.parse_json("{" + ", ".join([*keys, keys[-1]]) + "}", "header")


def load(directory: Path, dtype: str = "float32") -> tuple[dict, list]:
    resolved = resolve.resolve(str(directory))
    config = resolved.config.__class__(**vars_of(resolved.config) | {"dtype": dtype})
    seen: list[tuple[int, int, str]] = []
    infos = decoder.param_infos(config)
    loaded = resolved.open(None).load_params(infos, lambda *step: seen.append(step))
    assert jax.tree.map(lambda info: info.shape, infos, is_leaf=params.is_info) == jax.tree.map(
        lambda leaf: leaf.shape, loaded
    )
    return params.flatten(loaded), seen


def vars_of(config) -> dict:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def stored(directory: Path) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for path in directory.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


@pytest.mark.parametrize("case", ["llama-mha-sharded", "llama-mqa-float32", "gemma3-mqa"])
def test_every_value_lands_where_it_belongs(case):
    loaded, progress = load(GOLDEN / case)
    tensors = stored(GOLDEN / case)
    name_map = names.huggingface(resolve.resolve(str(GOLDEN / case)).config)
    for path, value in loaded.items():
        expected = np.concatenate([tensors[name] for name in name_map(path).names]).astype(
            np.float32
        )
        np.testing.assert_array_equal(value, expected)
    assert [done for done, _, _ in progress] == sorted(done for done, _, _ in progress)
    assert progress[-1][0] == progress[-1][1]


def test_bfloat16_rounds_a_float32_checkpoint():
    loaded, _ = load(GOLDEN / "llama-mqa-float32", "bfloat16")
    expected = stored(GOLDEN / "llama-mqa-float32")["model.embed_tokens.weight"]
    np.testing.assert_array_equal(loaded["embed/table"], expected.astype(ml_dtypes.bfloat16))


@pytest.fixture
def single(tmp_path) -> Path:
    return Path(shutil.copytree(GOLDEN / "llama-mqa-float32", tmp_path / "single"))


@pytest.fixture
def sharded(tmp_path) -> Path:
    return Path(shutil.copytree(GOLDEN / "llama-mha-sharded", tmp_path / "sharded"))


def refusal(directory: Path) -> str:
    with pytest.raises(InputError) as caught:
        load(directory)
    assert "\n" not in str(caught.value) and str(directory) in str(caught.value)
    return str(caught.value)


def rewrite(directory: Path, change) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_missing_left_over_and_misshapen_tensors_are_named(single):
    norm = "model.norm.weight"
    original = stored(single)
    rewrite(single, lambda t: t.pop(norm))
    assert "tensor 'model.norm.weight' is missing" in refusal(single)
    rewrite(single, lambda t: t.update({norm: original[norm][:-1]}))
    assert "'model.norm.weight' is" in refusal(single) and "expected" in refusal(single)
    rewrite(single, lambda t: t.update({norm: original[norm], "extra.a": original[norm]}))
    assert "no place for: extra.a" in refusal(single)
    rewrite(single, lambda t: t.update({f"extra.{c}": original[norm] for c in "bcde"}))
    assert "extra.a, extra.b, extra.c and 2 more" in refusal(single)
    gate, up = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "down"))
    rewrite(single, lambda t: t.update({gate: original[up], up: original[gate]}))
    assert "expected" in refusal(single)
    rewrite(single, lambda t: t.update({gate: original[gate].astype(np.int8)}))
    assert "has type I8; valid: F32" in refusal(single)


def test_tensors_that_repeat_the_configuration_are_ignored(single):
    rewrite(
        single,
        lambda t: t.update(
            {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
        ),
    )
    load(single)


@pytest.mark.parametrize("case", ["deepseek_v3-mha-groups-yarn", "glm4_moe-gqa-norm-bias"])
def test_layers_that_predict_a_second_token_are_left_out_where_announced(case, tmp_path):
    folder = Path(shutil.copytree(GOLDEN / case, tmp_path / "model"))
    raw = json.loads((folder / "config.json").read_text())
    expected, _ = load(folder)
    original, last = stored(folder), raw["num_hidden_layers"]

    def behind(number: int) -> dict[str, np.ndarray]:
        layer = {
            name.replace(f"layers.{last - 1}.", f"layers.{number}."): value
            for name, value in original.items()
            if f"layers.{last - 1}." in name
        }
        own = ("eh_proj", "enorm", "hnorm", "embed_tokens", "shared_head.head", "shared_head.norm")
        return layer | {
            f"model.layers.{number}.{part}.weight": np.ones(8, np.float32) for part in own
        }

    def announce(count) -> None:
        text = json.dumps(raw | {"num_nextn_predict_layers": count})
        (folder / "config.json").write_text(text)

    save_file(original | behind(last), folder / "model.safetensors")
    announce(1)
    found, _ = load(folder)
    assert found.keys() == expected.keys()
    for path, value in found.items():
        np.testing.assert_array_equal(value, expected[path], path)
    for count in (0, None):
        announce(count)
        assert f"no place for: model.layers.{last}." in refusal(folder)
    announce("1")
    assert "num_nextn_predict_layers must be an integer from 1" in refusal(folder)
    save_file(original | behind(last + 1), folder / "model.safetensors")
    announce(1)
    assert f"no place for: model.layers.{last + 1}." in refusal(folder)
    announce(2)
    load(folder)


def test_experts_that_are_missing_or_in_another_order_are_named(tmp_path):
    folder = Path(shutil.copytree(GOLDEN / "mixtral-gqa-float32", tmp_path / "mixtral"))
    one = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    missing = f"tensor {one!r} is missing; it holds layers/1/ffn/experts/down"
    rewrite(folder, lambda t: t.pop(one))
    assert missing in refusal(folder)
    fused = "model.layers.0.mlp.experts.gate_up_proj"

    def fuse(tensors: dict[str, np.ndarray]) -> None:
        names = "model.layers.0.block_sparse_moe.experts.{}.{}.weight".format
        gates, ups = ([tensors.pop(names(n, w)) for n in range(5)] for w in ("w1", "w3"))
        tensors[fused] = np.stack([np.concatenate(pair) for pair in zip(gates, ups, strict=True)])

    rewrite(folder, fuse)
    said = refusal(folder)
    assert "experts.0.w1.weight' is missing" in said
    assert f"there is {fused!r}, which has no place" in said
    folder = Path(shutil.copytree(GOLDEN / "gpt_oss-gqa-limit", tmp_path / "gpt_oss"))
    stack = "model.layers.2.mlp.experts.down_proj"
    rewrite(folder, lambda t: t.update({stack: t[stack].swapaxes(1, 2).copy()}))
    assert f"{stack!r} is [5, 40, 12]; expected [5, 12, 40]" in refusal(folder)
    rewrite(folder, lambda t: t.pop(stack))
    assert f"tensor {stack!r} is missing" in refusal(folder)


def test_a_head_is_tied_where_it_is_the_embedding(single):
    """As transformers 5 does, whatever the configuration says."""
    config = json.loads((single / "config.json").read_text())
    (single / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    values = stored(single)
    found, _ = load(single)
    np.testing.assert_array_equal(found["head/table"], values[head])
    np.testing.assert_array_equal(found["embed/table"], values[embedding])
    config_only = config_json.read_model(single)  # a hub's, before its weights are there
    with pytest.raises(InputError, match="lm_head.weight is not the embedding; name this"):
        hf_directory.open_directory(single, config_only)
    for change in (lambda t: t.update({head: t[embedding].copy()}), lambda t: t.pop(embedding)):
        rewrite(single, change)
        found, _ = load(single)
        assert "head/table" not in found
        np.testing.assert_array_equal(found["embed/table"], values[embedding])


@pytest.mark.parametrize("tenth", range(10))
def test_truncated_file_is_refused(single, tenth):
    path = single / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * tenth // 10])
    refusal(single)


@pytest.mark.parametrize(
    "header",
    [b"", b"{", b"[]", b'{"a": 1}', b'{"__metadata__": {"a": 1}}',
     b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
     b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
     b'{"a": {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]}}',
     b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}'],
)  # fmt: skip
@pytest.mark.parametrize("length", [None, 1 << 62])
def test_lying_header_is_refused(single, header, length):
    size = len(header) if length is None else length
    data = size.to_bytes(8, "little") + header + b"\0" * 4
    (single / "model.safetensors").write_bytes(data)
    refusal(single)


def reindex(directory: Path, change) -> None:
    path = directory / safetensors_file.INDEX
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def test_index_that_leaves_the_directory_or_lies_is_refused(sharded):
    path = sharded / safetensors_file.INDEX
    original = path.read_text()
    weight_map = json.loads(original)["weight_map"]
    first, shard = next(iter(weight_map.items()))
    other = next(s for s in weight_map.values() if s != shard)
    for target in (f"../{shard}", "/etc/passwd", "..", "", 7, "weights.bin"):
        reindex(sharded, lambda i, t=target: i["weight_map"].update({first: t}))
        assert "valid: a .safetensors file of this directory" in refusal(sharded)
    path.write_text(original)
    reindex(sharded, lambda i: i["weight_map"].update({first: other}))
    assert f"tensor {first!r} is" in refusal(sharded)
    path.write_text(original)
    reindex(sharded, lambda i: i["weight_map"].update({"phantom": shard}))
    assert f"tensor 'phantom' is not in {shard}" in refusal(sharded)
    for bad in ("{}", '{"weight_map": []}', '{"weight_map": {}}'):
        path.write_text(bad)
        assert "'weight_map' must be" in refusal(sharded)
    path.write_text(original)
    (sharded / shard).unlink()
    assert f"{shard}: No such file" in refusal(sharded)


def test_weights_alone_are_no_model(single):
    with pytest.raises(InputError, match=f"name the directory they are in, {single}"):
        resolve.resolve(str(single / "model.safetensors"))


def test_pickles_are_refused_and_explained(single, tmp_path):
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    assert "is a pickle" in refusal(single)
    (single / "pytorch_model.bin").unlink()
    assert "no weights; expected model.safetensors" in refusal(single)
    (tmp_path / "model.pt").write_bytes(b"\x80\x04")
    with pytest.raises(InputError, match="pickles can run code"):
        resolve.resolve(str(tmp_path / "model.pt"))


@pytest.mark.parametrize("model", ["no-such-model", "", "a\0b", "x" * 5000, "a/b/c", "../up/x"])
def test_unknown_model_lists_what_is_valid(model):
    with pytest.raises(InputError, match="valid: a preset .smollm2-135m"):
        resolve.resolve(model)
