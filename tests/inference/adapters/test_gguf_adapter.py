"""Adapters in `.gguf` files are those of the directories that they were made of."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from configs.errors import InputError
from configs.kinds.recurrent.delta_net import DeltaNet
from configs.settings.adapters import AdapterConfig
from inference.adapters import adapter_file, peft_directory
from inference.checkpoints import resolve
from tests import fakes
from tests.inference.adapters import peft_files

pytestmark = pytest.mark.quick_code

_ROOM = AdapterConfig(rank=8, extras=("vocab",))
_NAMES = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip
_HEAD = 8  # elements, of `fakes.llama`


def _stored(path, architecture="llama", tensors=(), **metadata):
    """A file as llama.cpp's convert_lora_to_gguf.py writes it."""
    writer = gguf.GGUFWriter(path, architecture)
    keys = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0}
    for key, value in (keys | metadata).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_string
        add(key, value)
    for name, values in dict(tensors).items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(directory, is_interleaved=True):
    """A directory's factors, named, ordered and transposed as llama.cpp has them."""
    tensors = {}
    for name, values in load_file(directory / peft_directory.WEIGHTS).items():
        part = "lora_b" if "_B" in name else "lora_a"
        words = name.removeprefix("base_model.model.").split(".")
        if "embed_tokens" in words:
            tensors[f"token_embd.weight.{part}"] = values.T if part == "lora_a" else values
        elif "lm_head" in words:
            tensors[f"output.weight.{part}"] = values
        else:
            module = _NAMES[words[4]]
            if is_interleaved and module in ("attn_q", "attn_k") and part == "lora_b":
                halves = values.reshape(-1, 2, _HEAD // 2, values.shape[1])
                values = halves.swapaxes(1, 2).reshape(values.shape)
            tensors[f"blk.{words[2]}.{module}.weight.{part}"] = values
    return tensors


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_factors_are_those_of_the_directory(tmp_path, name):
    model = getattr(fakes, name)()
    directory = peft_files.write(tmp_path / "peft", model, extras=["vocab"], lora_alpha=8)
    tensors = _tensors(directory, is_interleaved=name == "llama")
    path = _stored(tmp_path / "one.gguf", {"gemma": "gemma3"}.get(name, name), tensors)
    expected = peft_directory.read(directory, model, _ROOM)
    adapter = adapter_file.read(path, model, _ROOM)
    assert adapter.factors.keys() == expected.factors.keys()
    for place, factors in adapter.factors.items():
        for matrix, other in zip(factors, expected.factors[place], strict=True):
            np.testing.assert_array_equal(matrix, other)
    assert adapter_file.room(path, model) == AdapterConfig(rank=4, extras=("vocab",))
    assert dict(adapter_file.listed(tmp_path)) == {"one": path, "peft": directory}
    assert adapter.rank == 4 and adapter.digest != expected.digest


@pytest.mark.long
def test_an_engine_takes_files_of_both_kinds(tmp_path):
    model = fakes.llama()
    directory = peft_files.write(tmp_path / "one", model, lora_alpha=8)
    _stored(tmp_path / "other.gguf", tensors=_tensors(directory))
    sizes = dict(max_seqs=2, decode_rows=(2,), page_tokens=8, cache_bytes=1 << 20)
    engine = fakes.engine(model, None, "one", False, slots=2, rank=8, **sizes)
    for name, where in adapter_file.listed(tmp_path).items():
        engine.adapters.load(name, where)
    [prompt] = fakes.prompts([9], model.vocab_size)
    kinds = [fakes.greedy(6, adapter=name) for name in ("one", "other")]
    one, other = engine.generate([prompt] * 2, kinds)
    assert one.token_ids == other.token_ids and one.logprobs == other.logprobs


_Q = "blk.0.attn_q.weight"


@pytest.mark.parametrize("changes, tensors, reason", [
    ({"general.type": "model"}, {}, "is no LoRA adapter: general.type='model', adapter"),
    ({"adapter.type": "control_vector"}, {}, "adapter.type='control_vector'"),
    ({"adapter.alora.invocation_tokens": "x"}, {}, "adapter.alora.invocation_tokens is not supp"),
    ({"adapter.lora.alpha": 0.0}, {}, "adapter.lora.alpha is a number above 0, at most"),
    ({"adapter.lora.alpha": float("nan")}, {}, "adapter.lora.alpha is a number above 0"),
    ({"architecture": "gemma3"}, {}, "is an adapter of architecture 'gemma3'; tiny-llama is of"),
    ({"architecture": "none"}, {}, "is an adapter of architecture 'none'"),
    ({}, {f"{_Q}.lora_a": np.ones((4, 23), np.float32)}, r"factors \[4, 23\] and \[32, 4\]; it"),
    ({}, {f"{_Q}.lora_b": np.ones((32, 5), np.float32)}, r"factors \[4, 24\] and \[32, 5\]; it"),
    ({}, {f"{_Q}.lora_b": np.full((32, 4), np.nan, np.float32)}, "values that are not finite"),
    ({}, {f"{_Q}.lora_b": np.ones((31, 4), np.float32)}, r"factors \[4, 24\] and \[31, 4\]; it"),
    ({}, {f"{_Q}.lora_a": np.ones((300, 24), np.float32),
          f"{_Q}.lora_b": np.ones((32, 300), np.float32)}, "rank 300, of which .* at most 256"),
    ({}, {"blk.9.attn_q.weight.lora_a": np.ones((4, 24), np.float32)}, "lora_b' is missing"),
    ({}, {f"blk.9.attn_q.weight.{part}": np.ones((4, 4), np.float32)
          for part in ("lora_a", "lora_b")}, "adapts 'blk.9.attn_q', which tiny-llama has not"),
    ({}, {"blk.0.attn_norm.weight": np.ones(24, np.float32)}, "is no factor of LoRA, and would"),
    ({}, None, "adapts nothing"),
])  # fmt: skip
def test_what_is_not_sound_is_one_line(tmp_path, changes, tensors, reason):
    model = fakes.llama()
    directory = peft_files.write(tmp_path / "peft", model)
    every = {} if tensors is None else _tensors(directory) | tensors
    path = _stored(tmp_path / "one.gguf", **{"architecture": "llama", "tensors": every} | changes)
    with pytest.raises(InputError, match=reason) as error:
        adapter_file.read(path, model, _ROOM)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("tensor", ["ssm_out", "attn_gate"])
def test_factors_of_other_shapes_are_refused_before_their_heads_are_ordered(tmp_path, tensor):
    golden = Path(__file__).parents[2] / "golden" / "qwen3_5-gqa-sections"
    model = resolve.resolve(str(golden)).config
    layer = next(n for n, spec in enumerate(model.layers) if isinstance(spec.mixer, DeltaNet))
    weight = f"blk.{layer}.{tensor}.weight"
    tensors = {f"{weight}.lora_a": np.ones((2, 3)), f"{weight}.lora_b": np.ones((5, 2))}
    floats = {name: values.astype(np.float32) for name, values in tensors.items()}
    path = _stored(tmp_path / "one.gguf", "qwen35", floats)
    with pytest.raises(InputError, match=r"has factors \[2, 3\] and \[5, 2\]; it is"):
        adapter_file.read(path, model, _ROOM)


def test_a_file_that_is_none_is_named(tmp_path):
    (tmp_path / "one.gguf").write_bytes(b"GGUFx")
    with pytest.raises(InputError, match=r"one\.gguf: not a valid GGUF file"):
        adapter_file.read(tmp_path / "one.gguf", fakes.llama(), _ROOM)
