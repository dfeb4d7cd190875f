"""GGUF files of Qwen3-Next and Qwen3.5 as llama.cpp's converter writes them, by hand."""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from configs.errors import InputError
from inference.checkpoints import resolve
from inference.checkpoints.gguf.export import gguf_export
from layers import decoder, params
from tests.inference.checkpoints.test_gguf_states import exact
from tests.inference.checkpoints.test_gguf_types import assert_written_again, logits_of

GOLDEN = Path(__file__).parents[2] / "golden"
CASES = (
    "qwen3_next-gqa-shared-experts", "qwen3_next-mha-listed-tied-float32",
    "qwen3_5-gqa-sections", "qwen3_5-mha-tied-float32",
    "qwen3_5_moe-gqa-stacked", "qwen3_5_moe-mqa-tied-float32",
)  # fmt: skip
ARCHITECTURES = {
    "qwen3_next": "qwen3next", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe"
}  # fmt: skip
NAMES = {
    "lm_head": "output", "model.embed_tokens": "token_embd", "model.norm": "output_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
    "self_attn.o_proj": "attn_output", "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))


class Converter:
    """What llama.cpp's converter makes of a directory's tensors, which are float32 here."""

    def __init__(self, folder: Path):
        self.raw = json.loads((folder / "config.json").read_text())
        stored = load_file(folder / "model.safetensors")
        self.stored = {name: np.asarray(values, np.float32) for name, values in stored.items()}
        self.is_next = self.raw["model_type"] == "qwen3_next"
        self.keys = self.raw["linear_num_key_heads"]
        self.heads = self.raw["linear_num_value_heads"]
        self.key_width = self.raw["linear_key_head_dim"]
        self.value_width = self.raw["linear_value_head_dim"]

    def in_turns(self, values: np.ndarray, axis: int = 0) -> np.ndarray:
        """Value heads in the order of Qwen3.5's files: the first of each key head, the second."""
        if self.is_next:
            return values
        share = self.heads // self.keys
        heads = np.split(values, self.heads, axis)
        order = [key * share + turn for turn in range(share) for key in range(self.keys)]
        return np.concatenate([heads[head] for head in order], axis)

    def channels(self, rows: np.ndarray) -> np.ndarray:
        """Rows of queries, keys and values."""
        first = 2 * self.keys * self.key_width
        return np.concatenate([rows[:first], self.in_turns(rows[first:])])

    def tensors(self) -> dict[str, np.ndarray]:
        made = {}
        for name, values in self.stored.items():
            layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
            prefix, tensor = (f"blk.{layer[1]}.", layer[2]) if layer else ("", name)
            for stem, part in self.renamed(tensor, values):
                made[prefix + stem] = np.ascontiguousarray(part)
        for name in [name for name in made if re.search(r"_exps\.0\.", name)]:
            numbered = [name.replace("_exps.0.", f"_exps.{number}.") for number in range(9)]
            stack = [made.pop(number) for number in numbered if number in made]
            made[name.replace("_exps.0.", "_exps.")] = np.stack(stack)
        return made

    def renamed(self, name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        stem, _, ending = name.rpartition(".")
        expert = re.fullmatch(r"mlp\.experts\.(\d+)\.(\w+)_proj", stem)
        if name.endswith("norm.weight") and stem != "linear_attn.norm":
            values = values + np.float32(1)
        if expert:
            yield f"ffn_{expert[2]}_exps.{expert[1]}.weight", values
        elif name == "mlp.experts.gate_up_proj":
            half = values.shape[1] // 2
            yield "ffn_gate_exps.weight", values[:, :half]
            yield "ffn_up_exps.weight", values[:, half:]
        elif name == "mlp.experts.down_proj":
            yield "ffn_down_exps.weight", values
        elif name == "linear_attn.A_log":
            yield "ssm_a", self.in_turns(-np.exp(values))
        elif name == "linear_attn.dt_bias":
            yield "ssm_dt.bias", self.in_turns(values)
        elif stem == "linear_attn.conv1d":
            yield "ssm_conv1d.weight", self.channels(values[:, 0])
        elif stem == "linear_attn.in_proj_qkv":
            yield "attn_qkv.weight", self.channels(values)
        elif stem == "linear_attn.in_proj_qkvz":
            rest = self.heads // self.keys * self.value_width
            cuts = np.cumsum([self.key_width, self.key_width, rest])
            groups = values.reshape(self.keys, -1, values.shape[1])
            parts = [part.reshape(-1, values.shape[1]) for part in np.split(groups, cuts, 1)]
            yield "attn_qkv.weight", np.concatenate(parts[:3])
            yield "attn_gate.weight", parts[3]
        elif stem in ("linear_attn.in_proj_z", "linear_attn.in_proj_a", "linear_attn.in_proj_b"):
            yield f"{NAMES[stem]}.weight", self.in_turns(values)
        elif stem == "linear_attn.out_proj":
            yield "ssm_out.weight", self.in_turns(values, 1)
        else:
            yield (
                f"{NAMES[stem]}.{ending}",
                values[0] if stem == "mlp.shared_expert_gate" else values,
            )

    def metadata(self) -> dict[str, int | float | bool | list[int]]:
        raw = self.raw
        head, interval = raw["head_dim"], raw.get("full_attention_interval", 4)
        rope = raw.get("rope_parameters") or raw
        values = {
            "block_count": raw["num_hidden_layers"], "embedding_length": raw["hidden_size"],
            "context_length": raw["max_position_embeddings"],
            "attention.head_count": raw["num_attention_heads"],
            "attention.head_count_kv": raw["num_key_value_heads"],
            "attention.key_length": head, "attention.value_length": head,
            "attention.layer_norm_rms_epsilon": raw["rms_norm_eps"],
            "rope.freq_base": float(rope["rope_theta"]),
            "rope.dimension_count": int(head * rope["partial_rotary_factor"]),
            "rope.dimension_sections": [*rope.get("mrope_section", [11, 11, 10]), 0],
            "full_attention_interval": interval,
            "ssm.conv_kernel": raw["linear_conv_kernel_dim"],
            "ssm.state_size": self.key_width, "ssm.group_count": self.keys,
            "ssm.time_step_rank": self.heads, "ssm.inner_size": self.heads * self.value_width,
        }  # fmt: skip
        for key, published in (
            ("feed_forward_length", "intermediate_size"), ("expert_count", "num_experts"),
            ("expert_used_count", "num_experts_per_tok"), ("expert_weights_norm", "norm_topk_prob"),
            ("expert_feed_forward_length", "moe_intermediate_size"),
            ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
        ):  # fmt: skip
            if published in raw:
                values[key] = raw[published]
        return values

    def write(self, file: Path, kind: str = "F32", **changes) -> Path:
        """The file, with matrices of layers with the delta rule of a type, and keys or tensors
        changed.
        """
        writer = gguf.GGUFWriter(file, ARCHITECTURES[self.raw["model_type"]])
        adders = {
            bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
            list: writer.add_array,
        }  # fmt: skip
        for key, value in (self.metadata() | changes.pop("keys", {})).items():
            adders[type(value)](f"{writer.arch}.{key}", value)
        for name, values in (self.tensors() | changes).items():
            is_matrix = re.search(r"attn_qkv|attn_gate|ssm_(out|alpha|beta|ba)\.", name)
            own = gguf.GGMLQuantizationType[kind if is_matrix else "F32"]
            writer.add_tensor(name, gguf.quantize(values, own), raw_dtype=own)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file


def wide(folder: Path, family: str, value_width: int = 32) -> Converter:
    """A layer with the delta rule, of two key heads with three value heads each: the order in the
    file is not its own inverse.
    """
    case = (
        f"{family}-mha-listed-tied-float32"
        if family == "qwen3_next"
        else f"{family}-mha-tied-float32"
    )
    raw = json.loads((GOLDEN / case / "config.json").read_text())
    sizes = {"num_value_heads": 6, "num_key_heads": 2, "key_head_dim": 16}
    raw |= {f"linear_{key}": value for key, value in sizes.items()}
    raw |= {"linear_value_head_dim": value_width, "layer_types": ["linear_attention"]}
    raw |= {"num_hidden_layers": 1, "hidden_size": 64, "mlp_only_layers": [0]}
    D, F, V, values, keys = 64, raw["intermediate_size"], raw["vocab_size"], 6 * value_width, 32
    if family == "qwen3_next":
        projections = {"in_proj_qkvz": (2 * (keys + values), D), "in_proj_ba": (12, D)}
    else:
        projections = {"in_proj_qkv": (2 * keys + values, D), "in_proj_z": (values, D)}
        projections |= {"in_proj_a": (6, D), "in_proj_b": (6, D)}
    layer = {
        "input_layernorm": (D,), "post_attention_layernorm": (D,), "mlp.gate_proj": (F, D),
        "mlp.up_proj": (F, D), "mlp.down_proj": (D, F), "linear_attn.norm": (value_width,),
        "linear_attn.conv1d": (2 * keys + values, 1, 3), "linear_attn.out_proj": (D, values),
        **{f"linear_attn.{name}": shape for name, shape in projections.items()},
    }  # fmt: skip
    shapes = {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {f"model.layers.0.linear_attn.{name}": (6,) for name in ("A_log", "dt_bias")}
    shapes |= {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    draw = np.random.default_rng(0).normal
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    stored = {name: draw(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return Converter(folder)


def opened(path: Path):
    return resolve.resolve(str(path)).open(None)


def check_same(file: Path, folder: Path) -> None:
    """The file gives the directory's parameters: rates up to the rounding of an exponential, norms
    after 1 was added and taken away.
    """
    own, original = opened(file), opened(folder)
    assert own.config.family == original.config.family
    assert own.config.layers == original.config.layers
    (config, loaded), (_, expected) = exact(own), exact(original)
    flat = params.flatten(expected)
    assert params.flatten(loaded).keys() == flat.keys()
    for path, values in params.flatten(loaded).items():
        due = np.asarray(flat[path])
        if path.endswith("norm") and not path.endswith("out_norm"):
            due = due + np.float32(1) - np.float32(1)
        is_rate = path.endswith("/rate")
        np.testing.assert_allclose(values, due, rtol=0, atol=is_rate * 1e-6, err_msg=path)
    found, logits = logits_of(config, loaded), logits_of(config, expected)
    np.testing.assert_allclose(found, logits, rtol=0, atol=1e-5)


@pytest.mark.quick_code
@pytest.mark.parametrize("case", CASES)
def test_the_model_is_the_same(case, tmp_path):
    check_same(Converter(GOLDEN / case).write(tmp_path / "model.gguf"), GOLDEN / case)


@pytest.mark.parametrize("case", CASES[::2])
def test_a_file_is_written_as_it_was(case, tmp_path):
    file = Converter(GOLDEN / case).write(tmp_path / "model.gguf")
    assert_written_again(file, tmp_path, ("norm.weight", "ssm_a"))


@pytest.mark.parametrize("case", CASES[3::2])
def test_layers_that_attend_in_another_order_are_not_written(case, tmp_path):
    with pytest.raises(InputError, match=r"attends, and here layers \[") as caught:
        gguf_export.write(opened(GOLDEN / case), tmp_path / "model.gguf")
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_heads_in_turns_are_written(family, kind, tmp_path):
    """As numbers, and as blocks that are moved."""
    keys = {"full_attention_interval": 2}
    file = wide(tmp_path / "hf", family).write(tmp_path / "model.gguf", kind, keys=keys)
    dtype = "float32" if kind == "F32" else None
    assert_written_again(file, tmp_path, ("norm.weight", "ssm_a"), dtype)


@pytest.mark.quick_code
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_heads_in_turns_come_back(family, tmp_path):
    file = wide(tmp_path / "hf", family).write(tmp_path / "model.gguf")
    check_same(file, tmp_path / "hf")
    source = opened(file).tensors("float32")
    for name, shape in source.shapes.items():
        whole = source.read(name, 0, shape[0])
        np.testing.assert_array_equal(source.read(name, 1, 5), whole[1:5], name)
        if len(shape) == 2:
            some = slice(1, shape[1] - 1)
            np.testing.assert_array_equal(source.read(name, 2, 6, some), whole[2:6, some], name)


def blocks_of(values: np.ndarray) -> np.ndarray:
    return gguf.quantize(np.ascontiguousarray(values), gguf.GGMLQuantizationType.Q8_0)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_blocks_are_moved_as_they_are(family, tmp_path):
    """Each row, and each head's columns of what leaves, is whole blocks of 32 numbers."""
    converter = wide(tmp_path / "hf", family)
    own = opened(converter.write(tmp_path / "model.gguf", "Q8_0"))
    formats = own.formats()
    config = dataclasses.replace(own.config, dtype="float32", formats=tuple(formats.items()))
    loaded = params.flatten(own.exact().load_params(decoder.param_infos(config)))
    _, expected = exact(opened(tmp_path / "hf"))
    for path in ("in", "gates", "out"):
        path = f"layers/0/mixer/{path}"
        assert set(formats[path]) == {"q8_0"}
        parts = [np.asarray(v) for name, v in loaded.items() if f"{name}/".startswith(f"{path}/")]
        due = blocks_of(np.asarray(params.flatten(expected)[path]))
        np.testing.assert_array_equal(np.concatenate(parts), due, path)


def test_blocks_that_two_heads_share_are_dequantized(tmp_path):
    """Those of one parameter alone, into bfloat16."""
    converter = wide(tmp_path / "hf", "qwen3_5", value_width=16)
    own = opened(converter.write(tmp_path / "model.gguf", "Q8_0"))
    formats = own.formats()
    assert formats["layers/0/mixer/out"] == ("bfloat16",)
    assert formats["layers/0/mixer/in"] == ("q8_0",) * 3
    source, name = own.tensors("float32"), "blk.0.ssm_out.weight"
    assert name not in source.formats and "blk.0.attn_gate.weight" in source.formats
    stored = converter.tensors()[name]
    numbers = gguf.dequantize(blocks_of(stored), gguf.GGMLQuantizationType.Q8_0)
    heads = np.split(numbers, 6, 1)
    due = np.concatenate([heads[head] for head in (0, 2, 4, 1, 3, 5)], 1)
    np.testing.assert_array_equal(source.read(name, 0, 64), due)


def test_blocks_that_predict_a_second_token_are_left_out(tmp_path):
    case = GOLDEN / "qwen3_5_moe-mqa-tied-float32"
    converter, extra = Converter(case), np.zeros((16, 32), np.float32)
    keys = {"block_count": 3, "nextn_predict_layers": 1}
    names = ("nextn.eh_proj.weight", "attn_q.weight", "ffn_gate_inp.weight")
    tensors = {f"blk.2.{name}": extra for name in names}
    tensors["blk.2.ffn_gate_inp_shexp.weight"] = extra[0]
    file = converter.write(tmp_path / "model.gguf", keys=keys, **tensors)
    config = opened(file).config
    assert config.num_layers == 2 and config.layers == opened(case).config.layers
    exact(opened(file))


BAD = {
    "values": ({"keys": {"ssm.inner_size": 193}}, "inner_size=193 is no multiple of ssm.time_step"),
    "groups": ({"keys": {"ssm.group_count": 4}}, "num_heads=6 is not a multiple of num_key_heads"),
    "channels": (
        {"blk.0.attn_qkv.weight": np.ones((255, 64), np.float32)},
        r"'blk.0.attn_qkv.weight' is \[255, 64\]; expected \[256, 64\]",
    ),
    "way out": (
        {"blk.0.ssm_out.weight": np.ones((64, 96), np.float32)}, r"ssm_out.weight' is \[64, 96\]",
    ),
    "betas": ({"blk.0.ssm_beta.weight": np.ones((3, 64), np.float32)}, "ssm_beta.weight' is"),
    "fused": ({"blk.0.ssm_in.weight": np.ones((9, 64), np.float32)}, "no place for: blk.0.ssm_in"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_another_shape_is_refused_in_one_line(case, tmp_path):
    changes, cause = BAD[case]
    file = wide(tmp_path / "hf", "qwen3_5").write(tmp_path / "model.gguf", **changes)
    with pytest.raises(InputError, match=cause) as caught:
        exact(opened(file))
    assert "\n" not in str(caught.value)
