"""Checkpoints in the formats of others: the numbers and logits that their own packages compute."""

import dataclasses
import functools
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from configs.errors import InputError
from inference.checkpoints import convert, resolve, safetensors_file
from inference.checkpoints.hf import config_json
from inference.checkpoints.hf.quantized import tensors as few_bits
from inference.checkpoints.hf.quantized import words
from inference.checkpoints.hf.quantized.schemes import Scheme
from layers import decoder, params, quantized
from layers.ragged import contiguous
from tests import compiling

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "quantized"
GOLDEN_PYTHON = Path(os.environ.get("GOLDEN_PYTHON", ROOT / ".venv-golden" / "bin" / "python"))
FORMATS = {
    "ct-int4-g32": "int4_g32",
    "ct-int4-g64-asym": "int4_asym_g64",
    "ct-int3-channel": "int3_g64",  # and in the one of rows of 128
    "ct-int8-packed": "int8",
    "ct-w8a8": "w8a8",
    "ct-fp8-channel": "fp8",
    "ct-w8a8-fp8-tensor": "w8a8_fp8",
    "gptq-int4-g32": "int4_g32",
    "gptq-int4-g64-asym-v2": "int4_asym_g64",
    "gptq-int3-g32-asym": "int3_asym_g32",
    "gptq-int4-order": None,
    "gptq-int8-rows": "int8",
    "awq-g32": "int4_asym_g32",
    "fp8-blocks": None,
}
FIRST = "model.layers.0.self_attn.q_proj"


def test_every_golden_is_here():
    assert set(FORMATS) == {path.name for path in GOLDEN.iterdir()}


def checkpoint(folder: Path):
    return resolve.resolve(str(folder)).open(None)


def dense(config):
    return dataclasses.replace(config, formats=(), dtype="float32")


def expected(case: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / case / "expected.npz") as arrays:
        return dict(arrays)


@functools.cache
def forward(config):
    """One program for all cases, which are of the same model."""

    def run(loaded, tokens):
        hidden, _ = decoder.forward(loaded, config, tokens, contiguous(1, len(tokens)))
        return decoder.logits(loaded, config, hidden)

    return compiling.jit(run)


def assert_logits(config, loaded, case: str) -> None:
    arrays = expected(case)
    for i in range(2):
        tokens = arrays[f"tokens_{i}"]
        padded = np.resize(tokens, 75)  # what is behind a token does not change it
        found = forward(dataclasses.replace(config, name="tiny"))(loaded, padded)
        found = np.asarray(found)[: len(tokens)]
        np.testing.assert_allclose(found, arrays[f"logits_{i}"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", FORMATS)
def test_formats_follow_from_the_configuration(case):
    config = config_json.read_model(GOLDEN / case)
    kinds = {name for _, own in config.formats for name in own} - {"int3"}
    assert kinds == ({FORMATS[case]} if FORMATS[case] else set())
    assert len(config.formats) == (8 if FORMATS[case] else 0)  # of two layers' matrices
    declared = params.flatten(dense(config).parameters())
    plain = {path: (info.format,) for path, info in declared.items()}
    assert checkpoint(GOLDEN / case).formats() == plain | dict(config.formats)


@pytest.mark.parametrize("case", FORMATS)
def test_numbers_are_those_of_the_package(case):
    source = checkpoint(GOLDEN / case).contents().source
    name, numbers = f"{FIRST}.weight", expected(case)[f"weight/{FIRST}"]
    shape = source.shapes[name]
    np.testing.assert_array_equal(source.read(name, 0, shape[0]), numbers)
    np.testing.assert_array_equal(source.read(name, 3, 21, slice(5, 40)), numbers[3:21, 5:40])
    if FORMATS[case]:
        blocks = source.read_blocks(name)
        found = quantized.dequantize(source.formats[name], blocks, shape[1])
        np.testing.assert_array_equal(found, numbers)


def test_each_matrix_is_looked_at_once(monkeypatch):
    """DeepSeek-V3 has 45,000 of them, which took most of the time before it was accepted."""
    layout, formats = few_bits.LAYOUTS["fp8"], few_bits.formats
    modules, models = [], []

    def shape(module):
        modules.append(module.name)
        return layout.shape(module)

    def find_formats(config, *described):
        models.append(config)
        return formats(config, *described)

    monkeypatch.setitem(few_bits.LAYOUTS, "fp8", layout._replace(shape=shape))
    monkeypatch.setattr(few_bits, "formats", find_formats)
    checkpoint(GOLDEN / "fp8-blocks")
    assert FIRST in modules and len(modules) == len(set(modules))
    assert len(models) == 1


def test_three_bits_as_older_packages_lay_them(tmp_path):
    """Ten integers a word, of compressed-tensors before 0.18."""
    case = "ct-int3-channel"

    def edit(tensors):
        for name in [name for name in tensors if name.endswith("weight_packed")]:
            width = int(tensors[name.replace("packed", "shape")][1])
            q_FD = words.unpack(tensors[name], 3, width).astype(np.uint32)
            q_FWN = np.pad(q_FD, ((0, 0), (0, -width % 10))).reshape(len(q_FD), -1, 10)
            packed_FW = (q_FWN << np.arange(10, dtype=np.uint32) * 3).sum(-1, dtype=np.uint32)
            tensors[name] = packed_FW.view(np.int32)

    found, source = (
        checkpoint(folder).contents().source
        for folder in (changed(tmp_path, case, edit), GOLDEN / case)
    )
    assert found.shapes == source.shapes
    for name, (rows, *_) in source.shapes.items():
        np.testing.assert_array_equal(found.read(name, 0, rows), source.read(name, 0, rows))


@pytest.mark.parametrize("case", FORMATS)
def test_logits_are_the_references(case):
    own = checkpoint(GOLDEN / case)
    config = dense(own.config)
    assert_logits(config, own.load_params(decoder.param_infos(config)), case)


@pytest.mark.parametrize("case", [case for case, format in FORMATS.items() if format])
def test_logits_of_the_blocks_are_the_references(case):
    own = checkpoint(GOLDEN / case)
    config = dataclasses.replace(own.config, dtype="float32")
    declared = params.flatten(decoder.param_infos(config))
    loaded = params.flatten(own.load_params(decoder.param_infos(config)), lambda _: False)
    numbers = {
        path: quantized.dequantize(info.format, np.asarray(loaded[path]), info.shape[-1])
        for path, info in declared.items()
        if info.format not in ("bfloat16", "float32")
    }
    assert len(numbers) == len(config.formats)
    plain = decoder.param_infos(dense(config))
    assert_logits(dense(config), params.unflatten(plain, loaded | numbers), case)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_words_are_unpacked_as_they_were_packed(bits):
    integers = np.random.default_rng(bits).integers(0, 1 << bits, (5, 77), np.uint8)
    packed = words.pack(integers, bits)
    assert packed.shape == (5, words.num_words(77, bits))
    np.testing.assert_array_equal(words.unpack(packed, bits, 77), integers)


# --- written --------------------------------------------------------------------------------------


def blocks_of(folder: Path) -> dict[str, tuple[str, bytes]]:
    source = checkpoint(folder).contents().source
    return {name: (own, source.read_blocks(name).tobytes()) for name, own in source.formats.items()}


@pytest.mark.parametrize("case", [case for case, format in FORMATS.items() if format])
def test_what_is_written_has_the_same_blocks(case, tmp_path):
    convert.convert(checkpoint(GOLDEN / case), tmp_path / "hf", "hf")
    assert blocks_of(tmp_path / "hf") == blocks_of(GOLDEN / case)
    config = checkpoint(tmp_path / "hf").config
    assert config.formats == checkpoint(GOLDEN / case).config.formats


def test_numbers_are_written_where_they_are_asked_for(tmp_path):
    case = "ct-int4-g32"
    convert.convert(checkpoint(GOLDEN / case), tmp_path / "hf", "hf", dtype="float32")
    own = checkpoint(tmp_path / "hf")
    assert not own.config.formats and "quant" not in (tmp_path / "hf" / "config.json").read_text()
    config = dense(own.config)
    assert_logits(config, own.load_params(decoder.param_infos(config)), case)


def with_formats(formats: dict[str, tuple[str, ...]]):
    """A golden checkpoint whose parameters are to be in other formats."""
    own = checkpoint(GOLDEN / "fp8-blocks")
    return dataclasses.replace(
        own, config=dataclasses.replace(own.config, formats=tuple(formats.items()))
    )


def test_tables_are_written_as_numbers(tmp_path):
    """And formats of several kinds beside each other; the head's too, where it is asked for."""
    formats = {
        "embed/table": ("int8",),
        "head/table": ("w8a8",),
        "layers/0/mixer/qkv": ("int4_asym_g64", "float32", "int3_g32"),
        "layers/1/ffn/down": ("fp8",),
    }
    convert.convert(with_formats(formats), tmp_path / "hf", "hf", packs_head=True)
    found = checkpoint(tmp_path / "hf")
    assert found.formats() == checkpoint(GOLDEN / "fp8-blocks").formats() | {
        path: own for path, own in formats.items() if path != "embed/table"
    }
    described = json.loads((tmp_path / "hf" / "config.json").read_text())["quantization_config"]
    assert described["format"] == "mixed-precision" and len(described["config_groups"]) == 4


def test_a_format_without_a_counterpart_is_named(tmp_path):
    with pytest.raises(InputError, match="layers/0/ffn/down is stored as mxfp4, which") as caught:
        convert.convert(with_formats({"layers/0/ffn/down": ("mxfp4",)}), tmp_path / "hf", "hf")
    assert "\n" not in str(caught.value) and not (tmp_path / "hf").exists()


@pytest.mark.long
@pytest.mark.skipif(
    not GOLDEN_PYTHON.exists(), reason="transformers is missing: make golden, or GOLDEN_PYTHON="
)
def test_transformers_reads_what_is_written(tmp_path):
    probe = [str(GOLDEN_PYTHON), "-c", "import compressed_tensors, accelerate"]
    if subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("the golden environment lacks compressed-tensors or accelerate")
    for case in FORMATS:
        convert.convert(checkpoint(GOLDEN / case), tmp_path / case, "hf")
    command = [str(GOLDEN_PYTHON), "tests/golden/compare_exports.py", str(tmp_path), "quantized"]
    worst = json.loads(subprocess.check_output(command, cwd=ROOT, text=True))
    assert worst.keys() == FORMATS.keys() and max(worst.values()) <= 1e-4, worst


# --- what is wrong, by name -----------------------------------------------------------------------


def changed(tmp_path: Path, case: str, edit=None, **changes) -> Path:
    """A golden directory with other keys of its quantization_config, and edited tensors."""
    folder = tmp_path / case
    folder.mkdir()
    raw = json.loads((GOLDEN / case / "config.json").read_text())
    raw["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(raw))
    source = safetensors_file.open_directory(GOLDEN / case, ("",))
    tensors = {
        name: np.array(source.read(name, 0, (shape or [1])[0])).reshape(shape)
        for name, shape in source.shapes.items()
    }
    if edit is not None:
        edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def group(**changes):
    """`config_groups` of int4 in groups of 32, changed."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    own = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"config_groups": {"group_0": own | changes}}


TOKEN = {"num_bits": 8, "dynamic": True, "strategy": "token", "type": "int"}
KEYS = {
    "method": ("ct-int4-g32", {"quant_method": "hqq"}, "quant_method='hqq' is not served; valid:"),
    "no method": ("ct-int4-g32", {"quant_method": [1]}, "quant_method=[1] is not served"),
    "format": (
        "ct-int4-g32", {"format": "marlin-24"} | group(),
        "config_groups: group_0: format='marlin-24' is not served; valid: pack-quantized",
    ),
    "no text as a format": (
        "ct-int4-g32", group(format=[1]), "group_0: format=[1] is not served; valid: pack",
    ),
    "no groups": ("ct-int4-g32", {"config_groups": {}}, "config_groups is missing"),
    "no weights": ("ct-int4-g32", group(weights=None), "group_0: weights is missing"),
    "two bits": (
        "ct-int4-g32", group(weights={"num_bits": 2}), "int of 2 bits as pack-quantized",
    ),
    "static": (
        "ct-w8a8", group(weights={"num_bits": 8}, input_activations=TOKEN | {"dynamic": False}),
        "input_activations: dynamic=False is not supported",
    ),
    "static by default": (
        "ct-w8a8", group(weights={"num_bits": 8}, input_activations={"num_bits": 8}),
        "input_activations: dynamic=None is not supported",
    ),
    "groups of activations": (
        "ct-w8a8", group(weights={"num_bits": 8}, input_activations=TOKEN | {"strategy": "group"}),
        "input_activations: strategy='group' is not supported",
    ),
    "status": ("ct-w8a8", {"quantization_status": "frozen"}, "quantization_status='frozen'"),
    "cache": ("ct-w8a8", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme="),
    "sparse": ("ct-w8a8", {"sparsity_config": {"format": "bitmask"}}, "format='bitmask'"),
    "slow pattern": ("ct-w8a8", {"ignore": ["re:(a+)+$"]}, "ignore: '(a+)+$' is no plain"),
    "no pattern": ("ct-w8a8", {"ignore": ["re:(a"]}, "is no regular expression"),
    "no list": ("ct-w8a8", {"ignore": "lm_head"}, "ignore must list names of modules"),
    "gptq bits": ("gptq-int4-g32", {"bits": 2}, "bits=2 is not served; valid: 3, 4, 8"),
    "gptq marlin": ("gptq-int4-g32", {"checkpoint_format": "marlin"}, "valid: gptq, gptq_v2"),
    "gptq dynamic": ("gptq-int4-g32", {"dynamic": {"+:x": {"bits": 8}}}, "dynamic='+:x'"),
    "awq version": ("awq-g32", {"version": "gemv"}, "version='gemv' is not supported; valid: gemm"),
    "awq bits": ("awq-g32", {"bits": 8}, "bits=8 is not served; valid: 4"),
    "fp8 static": ("fp8-blocks", {"activation_scheme": "static"}, "activation_scheme='static'"),
    "fp8 block": ("fp8-blocks", {"weight_block_size": [128]}, "must list rows and columns"),
}  # fmt: skip


@pytest.mark.parametrize("case", KEYS)
def test_a_key_that_is_not_served_is_named(case, tmp_path):
    golden, changes, message = KEYS[case]
    with pytest.raises(InputError) as caught:
        resolve.resolve(str(changed(tmp_path, golden, **changes)))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def without(ending):
    return lambda tensors: tensors.pop(f"{FIRST}.{ending}")


def replaced(ending, change):
    def edit(tensors):
        name = f"{FIRST}.{ending}"
        tensors[name] = np.ascontiguousarray(change(tensors[name]))

    return edit


TENSORS = {
    "no scales": ("ct-int4-g32", without("weight_scale"), "q_proj.weight_scale' is missing"),
    "scales": (
        "ct-int4-g32", replaced("weight_scale", lambda own: own[:, :1]),
        "weight_scale' is [64, 1]; expected [64, 2] for int4 in groups of 32",
    ),
    "integers as scales": (
        "ct-int4-g32", replaced("weight_scale", lambda own: own.astype(np.int32)),
        "weight_scale' is int32; expected numbers",
    ),
    "shape": (
        "ct-int4-g32", replaced("weight_shape", lambda own: own + 8),
        "weight_shape is [72, 72], which [64, 8] words of 4 bits are not",
    ),
    "no zero points": (
        "ct-int4-g64-asym", without("weight_zero_point"), "weight_zero_point' is missing",
    ),
    "no scale of fp8": ("ct-fp8-channel", without("weight_scale"), "is float8_e4m3fn, and"),
    "other integers": (
        "ct-w8a8", replaced("weight", lambda own: own.astype(np.int32)), "is int32; expected int8",
    ),
    "gptq scales": (
        "gptq-int4-g32", replaced("scales", lambda own: own.T), "is [64, 2]; expected [2, 64]",
    ),
    "gptq zeros": (
        "gptq-int4-g32", replaced("qzeros", lambda own: own + 2),
        "qzeros hold 9; expected 7, because config.json says sym=true and checkpoint_format=gptq, "
        "which stores zero points less 1; it should say sym=false",
    ),
    "gptq zeros as they are": (
        "gptq-int4-g32", replaced("qzeros", lambda own: own + 0x11111111),
        "qzeros hold 8; expected 7, because config.json says sym=true and checkpoint_format=gptq, "
        "which stores zero points less 1; it should say checkpoint_format=gptq_v2, if they are "
        "stored as they are",
    ),
    "order": (
        "gptq-int4-g32", replaced("g_idx", lambda own: own[::-1]), "an order of their own, of",
    ),
    "no such group": (
        "gptq-int4-order", replaced("g_idx", lambda own: own + 1), "names a group that is not",
    ),
    "no such group of rows": (
        "gptq-int8-rows", replaced("g_idx", lambda own: own + 1), "names a group that is not",
    ),
    "dense": (
        "awq-g32",
        lambda tensors: [without(part)(tensors) for part in ("qweight", "qzeros", "scales")]
        and tensors.update({f"{FIRST}.weight": np.zeros((64, 64), np.float32)}),
        "q_proj.weight' is stored as bfloat16; by its quantization_config it is int4_asym_g32",
    ),
    "fp8 scales": (
        "fp8-blocks", replaced("weight_scale_inv", lambda own: own[:1]), "expected [2, 1] for fp8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_a_tensor_that_does_not_fit_is_named(case, tmp_path):
    golden, edit, message = TENSORS[case]
    with pytest.raises(InputError) as caught:
        own = checkpoint(changed(tmp_path, golden, edit))
        own.load_params(decoder.param_infos(dense(own.config)))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_biases_of_zeros_are_left_out(tmp_path):
    """AutoGPTQ has written them for models that have none."""
    case, name = "gptq-int4-g32", "model.layers.1.mlp.up_proj.bias"
    folder = changed(tmp_path, case, lambda own: own.update({name: np.zeros(128, np.float16)}))
    own = checkpoint(folder)
    own.load_params(decoder.param_infos(own.config))
    (tmp_path / "other").mkdir()
    folder = changed(
        tmp_path / "other", case, lambda own: own.update({name: np.ones(128, np.float16)})
    )
    own = checkpoint(folder)
    with pytest.raises(InputError, match="no place for: model.layers.1.mlp.up_proj.bias"):
        own.load_params(decoder.param_infos(own.config))


def test_fp8_with_a_scale_a_tensor(tmp_path):
    """What compressed-tensors stores, as transformers' own method says it."""
    case = "ct-w8a8-fp8-tensor"
    folder = changed(tmp_path, case)
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(raw))
    assert blocks_of(folder) == blocks_of(GOLDEN / case)
    assert checkpoint(folder).config.formats == checkpoint(GOLDEN / case).config.formats


def test_blocks_of_fp8_are_read_as_others_say_them(tmp_path, caplog):
    """transformers' own method and compressed-tensors, whose activations are rounded by groups."""
    case = "fp8-blocks"
    numbers = checkpoint(GOLDEN / case).contents().source
    assert "fp8 in groups of 64 x 32 rows have no format that is multiplied as it is" in caplog.text
    assert caplog.text.count("dequantized, and activations stay as they are") == 1
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 64]}
    inputs = TOKEN | {"type": "float", "strategy": "group", "group_size": 64}
    groups = group(weights=weights, input_activations=inputs, format="float-quantized")

    def edit(tensors):
        for name in [name for name in tensors if name.endswith("_inv")]:
            tensors[name.removesuffix("_inv")] = tensors.pop(name)

    folder = changed(
        tmp_path, case, edit, quant_method="compressed-tensors", ignore=["lm_head"], **groups
    )
    caplog.clear()
    source = checkpoint(folder).contents().source
    assert caplog.text.count("dequantized, and activations stay as they are") == 1
    for name, shape in numbers.shapes.items():
        np.testing.assert_array_equal(source.read(name, 0, shape[0]),
                                      numbers.read(name, 0, shape[0]))  # fmt: skip


def test_activations_of_four_bits_stay_and_that_is_said(tmp_path, caplog):
    folder = changed(tmp_path, "ct-int4-g32", **group(input_activations=TOKEN))
    assert checkpoint(folder).config.formats == checkpoint(GOLDEN / "ct-int4-g32").config.formats
    assert "int4 in groups of 32 are served as int4_g32: activations stay as they" in caplog.text


@pytest.mark.parametrize("case", ["gptq-int8-rows", "gptq-int4-g32"])
def test_an_order_that_means_nothing_costs_no_format(case, tmp_path):
    """A row is one group, or groups are static: their elements follow one another."""
    for number, where in enumerate(({"static_groups": True}, {"meta": {"static_groups": True}})):
        said = {} if case == "gptq-int8-rows" else where
        (tmp_path / str(number)).mkdir()
        folder = changed(tmp_path / str(number), case, desc_act=True, **said)
        assert blocks_of(folder) == blocks_of(GOLDEN / case)
        assert checkpoint(folder).config.formats == checkpoint(GOLDEN / case).config.formats


@pytest.mark.parametrize("case", ["ct-w8a8", "ct-int4-g32"])
def test_a_head_of_few_bits_is_no_embedding(case, tmp_path):
    """Of a model that says it is, as transformers has it; one of the embedding's numbers is."""
    own = checkpoint(GOLDEN / case)
    formats = dict(own.config.formats) | {"head/table": (FORMATS[case],)}
    config = dataclasses.replace(own.config, formats=tuple(formats.items()))
    own = dataclasses.replace(own, config=config)
    convert.convert(own, tmp_path / "plain", "hf")  # what any reader has a place for
    plain = checkpoint(tmp_path / "plain")
    assert dict(plain.config.formats) == {
        path: kept for path, kept in formats.items() if path != "head/table"
    }
    assert plain.contents().source.dtypes["lm_head.weight"] == "float32"
    convert.convert(own, tmp_path / "hf", "hf", packs_head=True)
    (tmp_path / "hf" / "ridgeline.sha256").unlink()
    raw = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": True}))
    found = checkpoint(tmp_path / "hf")
    assert not found.config.tied and dict(found.config.formats) == formats
    head = params.flatten(found.load_params(decoder.param_infos(found.config)))["head/table"]
    source = found.contents().source
    np.testing.assert_array_equal(head, source.read_blocks("lm_head.weight"))
    numbers = source.read("lm_head.weight", 0, source.shapes["lm_head.weight"][0])
    stored = safetensors_file.open_directory(tmp_path / "hf", ("",))
    tensors = {name: stored.read(name, 0, shape[0]) for name, shape in stored.shapes.items()}
    tensors["model.embed_tokens.weight"] = numbers
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    found = checkpoint(tmp_path / "hf")
    assert found.config.tied and "head/table" not in dict(found.config.formats)
    assert "lm_head.weight" not in found.contents().source.shapes


def test_experts_are_modules_of_their_own(tmp_path):
    """Written and read: each expert's matrices have scales, and a stack one format."""
    golden = GOLDEN.parent / "mixtral-gqa-float32"
    paths = [
        f"layers/{layer}/ffn/experts/{part}" for layer in (0, 1) for part in ("gate_up", "down")
    ]
    formats = tuple((path, ("int8",)) for path in paths)
    own = checkpoint(golden)
    own = dataclasses.replace(own, config=dataclasses.replace(own.config, formats=formats))
    convert.convert(own, tmp_path / "hf", "hf")
    found = checkpoint(tmp_path / "hf")
    assert dict(found.config.formats) == dict(formats)
    infos = decoder.param_infos(found.config)
    one, two = (params.flatten(each.load_params(infos)) for each in (found, own))
    for path in paths:
        assert np.asarray(one[path]).dtype == np.uint8
        np.testing.assert_array_equal(one[path], two[path])
    described = json.loads((tmp_path / "hf" / "config.json").read_text())["quantization_config"]
    described["ignore"] = [*described["ignore"], "model.layers.0.block_sparse_moe.experts.1.w1"]
    raw = json.loads((tmp_path / "hf" / "config.json").read_text())
    raw["quantization_config"] = described
    (tmp_path / "hf" / "ridgeline.sha256").unlink()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match="gate_up is a stack of bfloat16, int8, which"):
        resolve.resolve(str(tmp_path / "hf"))


def test_groups_that_do_not_divide_rows_are_named(tmp_path):
    folder = changed(tmp_path, "awq-g32", group_size=48)
    with pytest.raises(InputError, match="rows of 128, not a multiple of its groups of 48"):
        checkpoint(folder)


def test_a_module_that_is_said_to_be_dense_and_is_not(tmp_path):
    folder = changed(tmp_path, "ct-int4-g32", ignore=["lm_head", "re:.*q_proj$"])
    with pytest.raises(InputError, match="says nothing of .*q_proj"):
        checkpoint(folder)


def test_a_part_of_a_stack_may_be_dense(tmp_path):
    """Query, key and value have formats of their own."""

    def edit(tensors):
        for ending in ("weight_packed", "weight_scale", "weight_shape"):
            without(ending)(tensors)
        tensors[f"{FIRST}.weight"] = expected("ct-int4-g32")[f"weight/{FIRST}"]

    folder = changed(tmp_path, "ct-int4-g32", edit, ignore=["lm_head", FIRST])
    own = checkpoint(folder)
    kept = dict(own.config.formats)
    assert kept["layers/0/mixer/qkv"] == ("bfloat16", "int4_g32", "int4_g32")
    assert kept["layers/1/mixer/qkv"] == ("int4_g32",)
    assert own.formats()["layers/0/mixer/qkv"] == ("float32", "int4_g32", "int4_g32")
    config = dense(own.config)
    assert_logits(config, own.load_params(decoder.param_infos(config)), "ct-int4-g32")


def test_groups_of_others_are_split_or_dequantized(tmp_path, caplog):
    """A group of 64 is two of 32 where 64 does not divide the rows; one of 16 is none of ours."""
    scheme = Scheme("packed", 4, None)
    assert [scheme.format(row) for row in (64, 96, 256, 40)] == [
        "int4_g64", "int4_g32", "int4", None,
    ]  # fmt: skip
    assert Scheme("packed", 3, 256, is_symmetric=False).format(512) == "int3_asym"
    assert Scheme("gptq", 8, 128).format(256) is None
    numbers = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    scale = np.abs(numbers.reshape(64, 4, 16)).max(-1).astype(np.float32) / 7
    integers = np.rint(numbers / scale.repeat(16, 1)).astype(np.int8)

    def edit(tensors):
        tensors[f"{FIRST}.weight_packed"] = words.pack((integers + 8).astype(np.uint8), 4)
        tensors[f"{FIRST}.weight_scale"] = scale

    whole = group()["config_groups"]["group_0"]
    small = whole | {"targets": [FIRST], "weights": whole["weights"] | {"group_size": 16}}
    folder = changed(tmp_path, "ct-int4-g32", edit, config_groups={"a": small, "b": whole})
    own = checkpoint(folder)
    assert "int4 in groups of 16 have no format" in caplog.text
    found = own.contents().source.read(f"{FIRST}.weight", 0, 64)
    np.testing.assert_array_equal(found, integers * scale.repeat(16, 1))
    assert dict(own.config.formats)["layers/0/mixer/qkv"] == ("bfloat16", "int4_g32", "int4_g32")
