"""`engine.weights`: a checkpoint's weights in another format, or as the file has them."""

import dataclasses
import re
from pathlib import Path

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest

from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.mesh import Mesh
from configs.precision import FORMATS
from inference.checkpoints import resolve, weight_formats
from inference.engine import Engine
from inference.planner import cost, weights
from inference.request import SamplingParams
from layers import params
from layers.kernels.linear import packed
from layers.linear import look_up
from tests import fakes
from tests.inference.checkpoints import test_gguf as tiny
from tests.inference.checkpoints.test_gguf_types import WIDE, blocks
from tests.layers import native

pytestmark = pytest.mark.quick_code

MIXED = {"attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K", "attn_output": "Q5_0",
         "ffn_gate": "Q4_1", "ffn_up": "Q4_1", "ffn_down": "Q4_0", "token_embd": "Q8_0",
         "output": "F16"}  # fmt: skip
OTHERS = MIXED | {"attn_q": "Q5_K", "attn_k": "IQ4_NL", "attn_v": "Q3_K", "attn_output": "IQ4_XS",
                  "ffn_down": "Q2_K"}  # fmt: skip
# Float16 numbers at such bytes of a block, for weights near 0.06 of random integers.
SCALES = {"Q4_K": {0: 3e-4, 2: 2e-3}, "Q5_K": {0: 1.5e-4, 2: 2e-3}, "Q6_K": {208: 5e-5},
          "Q3_K": {108: 1e-3}, "Q2_K": {80: 4e-3, 82: 6e-3}, "IQ4_NL": {0: 1e-3},
          "IQ4_XS": {0: 5e-5}}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))


def write(path, types=MIXED):
    """A model of 256 columns whose matrices have these types."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in tiny.metadata_of(WIDE).items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"llama.{key}", value)
    for name, values in tiny.tensors_of(WIDE, tiny.random_params(WIDE)).items():
        kind = types.get(name.removeprefix("blk.0.").removesuffix(".weight"))
        if kind is None:
            writer.add_tensor(name, values)
            continue
        kind = gguf.GGMLQuantizationType[kind]
        values = np.asarray(values, np.float32)
        if kind.name in SCALES:
            data = blocks(kind, *values.shape)
            for offset, scale in SCALES[kind.name].items():
                size = gguf.GGML_QUANT_SIZES[kind][1]
                each = data.reshape(-1, size)[:, offset : offset + 2]
                each[:] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        else:
            data = gguf.quantize(values, kind)
        shape = data.shape if data.dtype == np.uint8 else None
        writer.add_tensor(name, data, raw_shape=shape, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def engine_of(path, **settings):
    settings = {"max_seqs": 2, "chunk_tokens": 16} | settings
    return Engine.from_model(str(path), **settings)


def scores(engine):
    with fakes.no_draws():
        [score] = engine.score([[1, 2, 3, 4, 5, 6, 7, 1, 3, 5]])
    return np.array(score.logprobs)


def numbers_of(engine):
    """The matrices of an engine, float32, by path."""
    infos = params.flatten(engine.config.model.parameters())
    leaves = jax.tree.leaves(engine.model_runner.params, is_leaf=packed.is_packed)
    return {
        path: np.asarray(look_up(leaf, np.arange(info.shape[0])))
        for (path, info), leaf in zip(infos.items(), leaves, strict=True)
        if info.is_matrix
    }


@pytest.mark.parametrize(
    ("types", "activations", "near"), [(MIXED, "int8", 0.02), (OTHERS, "exact", 1e-4)],
    ids=["mixed", "others"],
)  # fmt: skip
def test_a_file_runs_as_it_is(types, activations, near, tmp_path):
    """Its own numbers in their own bits: activations alone are rounded, to int8, or nothing is."""
    native.need()
    path = write(tmp_path / "mixed.gguf", types)
    as_it_is = engine_of(path, weights="file", dtype="float32", activations=activations)
    leaves = params.flatten(as_it_is.model_runner.params)
    formats = {name.removesuffix("/.data"): leaf for name, leaf in leaves.items()}
    assert {name: leaf.dtype for name, leaf in formats.items() if "qkv" in name} == {
        f"layers/0/mixer/qkv/{part}": np.uint8 for part in range(3)
    }
    declared = params.flatten(as_it_is.config.model.parameters())
    paths = {
        "attn_q": "mixer/qkv/0", "attn_k": "mixer/qkv/1", "attn_v": "mixer/qkv/2",
        "attn_output": "mixer/out", "ffn_gate": "ffn/gate_up", "ffn_down": "ffn/down",
    }  # fmt: skip
    for name, parameter in paths.items():
        assert declared[f"layers/0/{parameter}"].format == types[name].lower()
    exact = engine_of(path, weights="float32", dtype="float32")
    for name, numbers in numbers_of(exact).items():
        stack = [found for path, found in numbers_of(as_it_is).items() if path.startswith(name)]
        np.testing.assert_allclose(np.concatenate(stack), numbers, rtol=1e-5, atol=1e-9)
    expected = scores(exact)
    np.testing.assert_allclose(scores(as_it_is), expected, atol=near * np.abs(expected).max())
    rounded = engine_of(path, dtype="float32")
    assert np.abs(scores(rounded) - expected).max() > 1e-5  # bfloat16, once
    greedy = SamplingParams(max_new_tokens=8, ignore_eos=True)
    with fakes.no_draws():
        assert len(as_it_is.generate([[1, 2, 3]], greedy)[0].token_ids) == 8


def test_a_second_start_maps_what_the_first_packed(tmp_path):
    native.need()
    path = write(tmp_path / "mixed.gguf")
    expected = scores(engine_of(path, weights="file"))
    assert list(tmp_path.glob("cache/converted/*/float32/packed-*.safetensors"))
    np.testing.assert_array_equal(scores(engine_of(path, weights="file")), expected)
    exact = scores(engine_of(path, weights="float32"))
    assert np.abs(exact - expected).max() > 0  # not the same file


def test_planned_bytes_are_those_of_the_leaves(tmp_path):
    """But for strips: V = 8 rows of the tables lie in one of 16, and a strip is whole lines."""
    native.need()
    engine = engine_of(write(tmp_path / "mixed.gguf"), weights="file")
    model = engine.config.model
    infos, leaves = params.flatten(model.parameters()), engine.model_runner.params
    found = params.flatten(leaves)
    for name, info in infos.items():
        nbytes = found.get(f"{name}/.data", found.get(name)).nbytes
        strip = dataclasses.replace(info, shape=(16, *info.shape[1:]))
        padded = -(-info.shape[0] // 16) * -(-params.num_bytes(strip) // 64) * 64
        assert nbytes == (padded if info.is_matrix else params.num_bytes(info)), name
    planned = weights.weight_bytes(model)
    assert planned == params.num_bytes(model.parameters())
    step = cost.step_operations(model, cost.Work.decode(1, 16))
    tables = 2 * model.vocab_size * model.width
    read = sum(operation.weight_bytes for operation in step)
    assert planned - FORMATS["q8_0"].bytes_for(tables, model.width) < read <= planned


def test_dense_formats_change_the_type_of_every_weight(tmp_path):
    path = write(tmp_path / "mixed.gguf")
    for asked, dtype in (("float32", np.float32), ("bfloat16", ml_dtypes.bfloat16)):
        checkpoint = resolve.resolve(str(path)).open(None)
        config = Config(WIDE, EngineConfig.of(weights=asked, linear="reference"))
        config, exact = weight_formats.choose(config, checkpoint, "reference")
        loaded = exact.load_params(config.model.parameters())
        assert {leaf.dtype for leaf in params.flatten(loaded).values()} == {np.dtype(dtype)}


def test_blocks_that_are_rounded_again_are_named(tmp_path, caplog):
    """Those of as few bits as asked for: nothing is won of them."""
    path = write(tmp_path / "mixed.gguf")
    for asked, kinds in (("int3", None), ("int4", "q4_0, q4_1, q4_k"), ("int8", "q4_0")):
        caplog.clear()
        checkpoint = resolve.resolve(str(path)).open(None)
        config = Config(WIDE, EngineConfig.of(weights=asked, linear="reference"))
        weight_formats.choose(config, checkpoint, "reference")
        [line] = caplog.messages if kinds else [""]
        assert not kinds or f"weights={asked} rounds" in line and kinds in line, line
        assert len(caplog.messages) == (kinds is not None)


def test_what_routes_stays_float32():
    """Also in a model of which all else is."""
    folder = Path(__file__).parents[2] / "golden" / "gpt_oss-gqa-limit"
    checkpoint = resolve.resolve(str(folder)).open(None)
    model = dataclasses.replace(checkpoint.config, dtype="float32")
    config = Config(model, EngineConfig.of(weights="bfloat16", linear="reference"))
    config, exact = weight_formats.choose(config, checkpoint, "reference")
    loaded = params.flatten(exact.load_params(config.model.parameters()))
    wide = {path.split("/", 2)[2] for path, leaf in loaded.items() if leaf.dtype == np.float32}
    assert wide == {"ffn/router", "ffn/router_bias", "mixer/sinks"}


def test_blocks_and_xlas_products_do_not_go_together(tmp_path):
    path = write(tmp_path / "mixed.gguf")
    with pytest.raises(
        InputError, match="engine.kernels.linear=reference multiplies no weights in q4_0"
    ):
        engine_of(path, weights="file", linear="reference")


def test_without_kernels_blocks_are_dequantized_and_that_is_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("layers.kernels.cpu.library.is_loaded", lambda: False)
    path = write(tmp_path / "mixed.gguf")
    engine = engine_of(path, weights="file", dtype="float32")
    assert "need the CPU kernels: dequantized, in float32" in caplog.text
    expected = scores(engine_of(path, weights="float32", dtype="float32"))
    np.testing.assert_array_equal(scores(engine), expected)


@pytest.mark.parametrize("kind", ["Q5_1", "TQ2_0"])
def test_a_type_that_no_kernel_multiplies_is_named(kind, tmp_path):
    path = write(tmp_path / "mixed.gguf", MIXED | {"ffn_down": kind})
    with pytest.raises(InputError) as caught:
        engine_of(path, weights="file")
    assert f"blk.0.ffn_down.weight' has type {kind}" in str(caught.value)
    assert "engine.weights=bfloat16" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["blk.0.attn_k.weight", "blk.0.ffn_norm.weight", "output.weight"])
def test_a_tensor_that_is_missing_is_named(name, tmp_path, monkeypatch):
    whole = tiny.tensors_of
    monkeypatch.setattr(
        tiny, "tensors_of", lambda *a: {n: t for n, t in whole(*a).items() if n != name}
    )
    path = write(tmp_path / "cut.gguf")
    if name == "output.weight":  # the file says by it that the head is the table
        assert engine_of(path, weights="file").config.model.tied
        return
    with pytest.raises(InputError, match=f"tensor '{name}' is missing"):
        engine_of(path, weights="file")


@pytest.mark.parametrize(
    ("formats", "expected"),
    [
        ((("layers/0/mixer/kqv", ("q8_0",)),), "'layers/0/mixer/kqv', which is no parameter"),
        (
            (("layers/0/mixer/out", ("q8_0", "q8_0")),),
            "2 formats for the parts of layers/0/mixer/out",
        ),
        ((("layers/0/mixer/out", ("q9_0",)),), "no number format 'q9_0'"),
        ((("layers/0/mixer/out", ("q4_k",)),), "rows of 96, not a multiple of q4_k's block of 256"),
    ],
)
def test_formats_that_no_parameter_can_have_are_refused(formats, expected):
    narrow = WIDE.with_kinds(num_heads=2, num_kv_heads=1, head_width=48)
    with pytest.raises(InputError, match=re.escape(expected)):
        dataclasses.replace(narrow, formats=formats)


def test_chips_hold_copies_of_the_heads_of_a_mixed_stack():
    """Four chips, two key/value heads: the parts keep them as the whole stack does."""
    chip_bytes = []
    for formats in (("q8_0",) * 3, ("q8_0", "q8_0", "float32")):
        mixed = dataclasses.replace(WIDE, formats=(("layers/0/mixer/qkv", formats),))
        chip_bytes.append(weights.chip_weight_bytes(mixed, cost.Precision.of(mixed), Mesh(model=4)))
    v_rows = 2 * 64 * 256 / 2  # of a chip, which has one of two heads
    bits = FORMATS["float32"].bits - 8.5
    assert chip_bytes[1] - chip_bytes[0] == pytest.approx(v_rows * bits / 8)


@pytest.mark.long
@pytest.mark.quick_code(False)
def test_an_answer_does_not_depend_on_its_neighbours_nor_on_chunks(tmp_path):
    native.need()
    path = write(tmp_path / "mixed.gguf")
    prompts = [[1 + (i * j) % 7 for j in range(5 + 7 * i)] for i in range(1, 4)]
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    found = []
    for settings in ({"max_seqs": 1}, {"max_seqs": 4}, {"max_seqs": 4, "chunk_tokens": 8}):
        sizes = {"decode_rows": (settings["max_seqs"],), "prefill_chunks": (2,)} | settings
        engine = engine_of(path, weights="file", deterministic=True, **sizes)
        engine.scheduler.shapes = engine.scheduler.shapes[-1:]  # one to compile
        answers = engine.generate(prompts, params)
        found.append([(answer.token_ids, answer.logprobs) for answer in answers])
    assert found[0] == found[1] == found[2]
