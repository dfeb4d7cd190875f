"""Every block type that the library dequantizes, and files cut into parts."""

import dataclasses
import shutil
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from inference.checkpoints import convert, resolve
from inference.checkpoints.gguf import gguf_file, gguf_tokenizer
from inference.checkpoints.gguf.export import gguf_export
from layers import decoder, params
from layers.ragged import contiguous
from tests import compiling
from tests.inference.checkpoints import test_gguf as tiny

WIDE = ModelConfig(
    name="wide", family="llama", vocab_size=8, width=256, num_layers=1, max_context=64,
    pattern=(LayerSpec(Attention(4, 2, 64, Rope(500.0)), Gated(256)),),
)  # fmt: skip
QUANTIZED = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0",
             "MXFP4")  # fmt: skip
NAME = "blk.0.ffn_down.weight"

# Where each type that the library cannot write keeps its float16 scales: bytes of a block.
SCALES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ1_S": (0,),
    "IQ4_NL": (0,), "IQ4_XS": (0,), "IQ1_M": (), "NVFP4": (),
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))


def dequantizable() -> set[str]:
    found = set()
    for kind in gguf.GGMLQuantizationType:
        try:
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            continue
        found.add(kind.name)
    return found


def blocks(kind: gguf.GGMLQuantizationType, rows: int, columns: int) -> np.ndarray:
    """Random blocks whose scales are small numbers."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(int(kind))
    data = generator.integers(0, 256, (rows * columns // elements, size), np.uint8)
    for offset in SCALES[kind.name]:
        scale = generator.uniform(0.001, 0.01, len(data)).astype(np.float16)
        data[:, offset : offset + 2] = scale.view(np.uint8).reshape(-1, 2)
    if kind.name == "IQ1_M":  # its scale is spread over the upper bits of four numbers
        data[:, 48:].view(np.uint16)[:] &= 0x0FFF
        data[:, 50:].view(np.uint16)[:, 0] |= 0x1000
        data[:, 54:].view(np.uint16)[:, 0] |= 0x2000
    if kind.name == "NVFP4":
        data[:, :4] = 0x30
    return data.reshape(rows, -1)


def test_the_list_is_the_librarys():
    assert {*QUANTIZED, *SCALES} == dequantizable()


@pytest.mark.parametrize("name", [*QUANTIZED, *SCALES])
def test_rows_are_what_the_library_makes_of_them(name, tmp_path):
    kind = gguf.GGMLQuantizationType[name]
    if name in QUANTIZED:
        values = np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32)
        data = gguf.quantize(values, kind)
    else:
        data = blocks(kind, 256, 256)
    whole = gguf.dequantize(data, kind).reshape(256, 256)
    assert np.isfinite(whole).all() and len(np.unique(whole)) > 2
    expected = whole.astype(ml_dtypes.bfloat16)

    writer = gguf.GGUFWriter(tmp_path / "wide.gguf", "llama")
    for key, value in tiny.metadata_of(WIDE).items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"llama.{key}", value)
    tensors = tiny.tensors_of(WIDE, tiny.random_params(WIDE))
    for tensor, stored in tensors.items():
        if tensor == NAME:
            writer.add_tensor(tensor, data, raw_shape=data.shape, raw_dtype=kind)
        else:
            writer.add_tensor(tensor, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    source = gguf_file.tensors(gguf_file.open_gguf(tmp_path / "wide.gguf"), WIDE)
    np.testing.assert_array_equal(source.read(NAME, 0, 256), expected)
    np.testing.assert_array_equal(source.read(NAME, 5, 17), expected[5:17])
    loaded = tiny.load(tmp_path / "wide.gguf", "bfloat16")
    np.testing.assert_array_equal(loaded["layers/0/ffn/down"], expected)


# --- parts ----------------------------------------------------------------------------------------


def write_parts(folder: Path, count: int = 3, config: ModelConfig = tiny.LLAMA) -> Path:
    """A model cut as llama.cpp cuts it; returns the first part."""
    tensors = tiny.tensors_of(config, tiny.random_params(config))
    writer = gguf.GGUFWriter(
        folder / "tiny.gguf", "llama", split_max_tensors=-(-len(tensors) // count)
    )
    for key, value in tiny.metadata_of(config).items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"llama.{key}", value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(folder.glob("tiny-*.gguf"))
    assert [part.name for part in parts] == [
        f"tiny-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)
    ]
    return parts[0]


def test_parts_are_read_as_one(tmp_path):
    config = tiny.LLAMA
    whole = tiny.write_gguf(
        tmp_path / "whole.gguf", config, tiny.tensors_of(config, tiny.random_params(config))
    )
    first = write_parts(tmp_path)
    expected, found = tiny.load(whole), tiny.load(first)
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value)


def test_a_changed_part_is_converted_again(tmp_path):
    first = write_parts(tmp_path)
    before = tiny.load(first)
    path = tmp_path / "tiny-00003-of-00003.gguf"
    entry = list(gguf_file.open_gguf(first).tensors.values())[-1]  # in the last part
    data = bytearray(path.read_bytes())
    data[entry.position : entry.position + 4] = np.float32(7).tobytes()
    path.write_bytes(data)
    after = tiny.load(first)
    assert any(not np.array_equal(before[p], after[p]) for p in before)


def copy(source: Path, target: str) -> None:
    shutil.copy(source, source.with_name(target))


def edit(path: Path, key: bytes, value: int, size: int) -> None:
    """Overwrites a number in the metadata, which follows its key and type."""
    data = bytearray(path.read_bytes())
    position = data.index(key) + len(key) + 4
    data[position : position + size] = value.to_bytes(size, "little")
    path.write_bytes(data)


DAMAGE = {
    "missing": (lambda f: (f / "tiny-00002-of-00003.gguf").unlink(), "part 2 of 3 is missing"),
    "swapped": (
        lambda f: copy(f / "tiny-00003-of-00003.gguf", "tiny-00002-of-00003.gguf"),
        "says it is part 2 .from 0. of 3; expected 1 of 3",
    ),
    "another first": (
        lambda f: copy(f / "tiny-00001-of-00003.gguf", "tiny-00002-of-00003.gguf"),
        "says it is part 0 .from 0. of 3; expected 1 of 3",
    ),
    "repeated": (
        lambda f: (
            copy(f / "tiny-00001-of-00003.gguf", "tiny-00002-of-00003.gguf"),
            edit(f / "tiny-00002-of-00003.gguf", b"split.no", 1, 2),
        ),
        "belongs in the first part",
    ),
    "other total": (
        lambda f: edit(f / "tiny-00001-of-00003.gguf", b"split.tensors.count", 5, 4),
        "split.tensors.count=5",
    ),
    "other count": (
        lambda f: edit(f / "tiny-00001-of-00003.gguf", b"split.count", 2, 2),
        "one part of 2 of a split GGUF, whose names end in -00001-of-00002.gguf",
    ),
    "empty part": (lambda f: (f / "tiny-00003-of-00003.gguf").write_bytes(b""), "is empty"),
    "no part": (lambda f: (f / "tiny-00003-of-00003.gguf").write_bytes(b"PK" * 9), "not a valid"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_parts_that_do_not_fit_are_named(case, tmp_path):
    first = write_parts(tmp_path)
    damage, expected = DAMAGE[case]
    damage(tmp_path)
    with pytest.raises(InputError, match=expected) as caught:
        resolve.resolve(str(first))
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_another_part_than_the_first_says_which_to_open(tmp_path):
    write_parts(tmp_path)
    with pytest.raises(InputError, match="part 2 of 3; open the first, tiny-00001-of-00003.gguf"):
        resolve.resolve(str(tmp_path / "tiny-00002-of-00003.gguf"))


# --- the same weights by another way --------------------------------------------------------------


@pytest.mark.quick_code
@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_a_gguf_and_what_is_made_of_it_give_the_same_logits(family, tmp_path, monkeypatch):
    config = tiny.CONFIGS[family]
    path = tiny.write_gguf(
        tmp_path / "tiny.gguf", config, tiny.tensors_of(config, tiny.random_params(config))
    )
    assert_same_logits(path, config, tmp_path, monkeypatch)


def assert_same_logits(path: Path, config: ModelConfig, tmp_path: Path, monkeypatch) -> None:
    """To the last bit, by the same parameters and the same configuration."""
    checkpoint = resolve.resolve(str(path)).open(None)
    monkeypatch.setattr(gguf_tokenizer, "text_files", lambda *args: {})
    expected = checkpoint.load_params(decoder.param_infos(config), None)
    logits = logits_of(checkpoint.config, expected)
    assert np.isfinite(logits).all() and logits.std() > 0
    for to in convert.FORMATS:
        convert.convert(resolve.resolve(str(path)).open(None), tmp_path / to, to)
        found = resolve.resolve(str(tmp_path / to))
        assert unnamed(found.config) == unnamed(checkpoint.config) == unnamed(config)
        loaded = found.open(None).load_params(decoder.param_infos(config), None)
        for (name, one), two in zip(
            params.flatten(expected).items(), params.flatten(loaded).values(), strict=True
        ):
            assert one.tobytes() == two.tobytes(), name
        if to == "hf":
            assert logits_of(found.config, loaded).tobytes() == logits.tobytes()


def assert_written_again(
    path: Path, tmp_path: Path, rounded: tuple[str, ...] = (), dtype: str | None = "float32"
) -> None:
    """What we write of a file is that file: its tensors, and its metadata where both have a key,
    without blocks that predict further tokens.

    Args:
        rounded: endings of tensors whose numbers may differ by a rounding.
    """
    gguf_export.write(resolve.resolve(str(path)).open(None), tmp_path / "again.gguf", dtype)
    expected, found = numbers(path), numbers(tmp_path / "again.gguf")
    assert expected.keys() == found.keys()
    for name, values in expected.items():
        tolerance = 1e-6 if name.endswith(rounded) else 0
        np.testing.assert_allclose(found[name], values.reshape(found[name].shape), 0, tolerance)
    fields = [
        {key: field.contents() for key, field in gguf.GGUFReader(file).fields.items()}
        for file in (path, tmp_path / "again.gguf")
    ]
    for key in fields[0].keys() & fields[1].keys():
        one, two = fields[0][key], fields[1][key]
        if isinstance(one, list):  # of further blocks, too, or one number for all
            one = one[: len(two)] if isinstance(two, list) else one[0]
        is_free = key.endswith((".feed_forward_length", ".block_count", ".name"))
        assert one == two or is_free or key.startswith("GGUF."), key


def numbers(path: Path) -> dict[str, np.ndarray]:
    """Of each tensor; gates and ups of experts apart."""
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if "gate_up_exps" not in tensor.name:
            found[tensor.name] = values
            continue
        for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
            found[tensor.name.replace("gate_up", part)] = half
    return found


def unnamed(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, name="", pattern=config.layers)


def logits_of(config: ModelConfig, loaded: params.Params) -> np.ndarray:
    tokens = np.arange(20, dtype=np.int32) * 7 % config.vocab_size

    def forward(loaded):
        hidden, _ = decoder.forward(loaded, config, tokens, contiguous(1, len(tokens)))
        return decoder.logits(loaded, config, hidden)

    return np.asarray(compiling.call(forward, loaded))
