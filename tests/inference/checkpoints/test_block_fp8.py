"""Block FP8 as DeepSeek, Qwen and others publish it: kept in its blocks, exact to the last bit."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from configs.errors import InputError
from configs.mesh import Mesh
from configs.precision import FORMATS
from inference.checkpoints import convert, resolve
from inference.engine import Engine
from layers import params, quantized
from layers.kernels.linear import packed
from tests.inference.checkpoints import published
from tests.inference.checkpoints.published import E4M3
from tests.layers import native

pytestmark = pytest.mark.quick_code
BLOCK = 128
KEYS = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))


def blocks(scale_type=np.float32):
    def encode(module: str, values: np.ndarray):
        if not published.is_linear(module):
            return None
        (F, D), parts = values.shape, [-(-size // BLOCK) for size in values.shape]
        wide = np.zeros([part * BLOCK for part in parts], np.float32)
        wide[:F, :D] = np.abs(values)
        scale = wide.reshape(parts[0], BLOCK, parts[1], BLOCK).max((1, 3)) / 448
        if scale_type is not np.float32:  # rounded up, to a power of two for e8m0
            scale = np.exp2(np.ceil(np.log2(scale))).astype(scale_type)
        numbers = np.asarray(scale, np.float32).repeat(BLOCK, 0).repeat(BLOCK, 1)[:F, :D]
        codes = (values / numbers).astype(E4M3)
        return {"weight": codes, "weight_scale_inv": scale}, codes.astype(np.float32) * numbers

    return encode


def written(tmp_path, encode=None, **changes):
    tensors = published.drawn(published.QWEN3_MOE, tmp_path)
    keys = KEYS | changes
    return published.write(tmp_path, published.QWEN3_MOE, tensors, encode or blocks(), keys)


@pytest.mark.parametrize("linear", ["ffi_cpu", "reference"])
def test_logits_are_those_of_the_numbers_to_the_last_bit(linear, tmp_path):
    """Experts, heads and columns that end within a block; scales of DeepSeek-V3.1 are powers."""
    native.need()
    stored, plain = written(tmp_path, blocks(ml_dtypes.float8_e8m0fnu), scale_fmt="ue8m0")
    formats = dict(resolve.resolve(str(stored)).open(None).config.formats)
    assert len(formats) == 8 and set(formats.values()) == {("fp8_block",)}
    found, expected = (published.scores(path, linear=linear) for path in (stored, plain))
    if linear == "ffi_cpu":
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(found, expected, atol=1e-5)  # XLA sums blocks of rows in its order


@pytest.mark.parametrize("scale_type", [np.float32, ml_dtypes.bfloat16])
def test_numbers_and_bytes_are_the_files(scale_type, tmp_path):
    native.need()
    stored, plain = written(tmp_path, blocks(scale_type))
    source = resolve.resolve(str(stored)).open(None).contents().source
    for name, numbers in load_file(plain / "model.safetensors").items():
        np.testing.assert_array_equal(source.read(name, 0, len(numbers)), numbers)
        if name in source.formats:
            raw = source.read_blocks(name)
            found = quantized.dequantize(source.formats[name], raw, numbers.shape[1])
            np.testing.assert_array_equal(found, numbers)
    engine = Engine.from_model(str(stored), linear="ffi_cpu", max_seqs=2, chunk_tokens=16)
    leaves = params.flatten(engine.model_runner.params, packed.is_packed)
    kept = {
        path: leaf for path, leaf in leaves.items() if path in dict(engine.config.model.formats)
    }
    assert {leaf.format for leaf in kept.values()} == {"fp8_block"}


def test_modules_that_are_not_converted(tmp_path):
    """By their names, or because they have no scales: DeepSeek lists none of these."""

    def encode(module, values):
        return None if module.endswith("down_proj") else blocks()(module, values)

    for number, skipped in enumerate(({}, {"modules_to_not_convert": ["down_proj", "lm_head"]})):
        stored, _ = written(tmp_path / str(number), encode, **skipped)
        formats = dict(resolve.resolve(str(stored)).open(None).config.formats)
        assert formats and not any("down" in path for path in formats)


def test_heads_that_are_cut_anywhere_are_read_as_numbers(tmp_path):
    """Latent attention of odd sizes: rows that share scales would lie in parts."""
    raw, tensors = published.golden("deepseek_v3-mha-halves-float32")
    stored, plain = published.write(tmp_path, raw, tensors, blocks(), KEYS)
    formats = dict(resolve.resolve(str(stored)).open(None).config.formats)
    assert "layers/1/mixer/out" in formats and "layers/1/ffn/experts/gate_up" not in formats
    np.testing.assert_array_equal(published.scores(stored), published.scores(plain))


def test_native_directories_keep_the_blocks(tmp_path):
    native.need()
    stored, plain = written(tmp_path)
    convert.convert(resolve.resolve(str(stored)).open(None), tmp_path / "native", "orbax")
    expected = published.scores(plain)
    np.testing.assert_array_equal(published.scores(tmp_path / "native"), expected)
    with pytest.raises(
        InputError, match="is stored as fp8_block, which compressed-tensors has not"
    ):
        convert.convert(resolve.resolve(str(stored)).open(None), tmp_path / "hf", "hf")


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_experts_are_divided_and_rows_within_a_block_of_rows_are_refused(tmp_path):
    native.need()
    stored, plain = written(tmp_path)
    found = published.scores(stored, mesh=Mesh(expert=2))
    np.testing.assert_allclose(found, published.scores(plain), atol=1e-4)
    with pytest.raises(InputError) as caught:
        published.scores(stored, mesh=Mesh(model=2))
    assert "mesh.model=2 divides its rows" in str(caught.value) and "\n" not in str(caught.value)


def test_a_scale_a_tensor_and_constants_of_activations(tmp_path, caplog):
    """Mistral's: `activation_scheme: static`, whose activations stay as they are here."""
    native.need()

    def encode(module, values):
        if not published.is_linear(module):
            return None
        scale = np.asarray(np.abs(values).max() / 448, ml_dtypes.bfloat16)
        codes = (values / np.float32(scale)).clip(-448, 448).astype(E4M3)
        arrays = {"weight": codes, "weight_scale_inv": scale, "activation_scale": scale}
        return arrays, codes.astype(np.float32) * np.float32(scale)

    stored, plain = written(
        tmp_path, encode, activation_scheme="static", weight_block_size=None, dequantize=False
    )
    checkpoint = resolve.resolve(str(stored)).open(None)
    assert set(dict(checkpoint.config.formats).values()) == {("fp8",)}
    source = checkpoint.contents().source
    assert "are served as fp8: activations stay as they are" in caplog.text
    for name, numbers in load_file(plain / "model.safetensors").items():
        np.testing.assert_array_equal(source.read(name, 0, len(numbers)), numbers)
    np.testing.assert_allclose(published.scores(stored), published.scores(plain), atol=1e-5)


WRONG = {
    "static blocks": ({"activation_scheme": "static"}, "activation_scheme='static': is described"),
    "scales": ({"scale_fmt": "e5m2"}, "scale_fmt='e5m2' is not supported; valid: 'ue8m0'"),
    "one number": ({"weight_block_size": 128}, "weight_block_size must list rows and columns"),
    "no blocks": ({"weight_block_size": None}, "weight_scale_inv' is [2, 1]; expected [] or [1]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_described_in_half_is_one_line(case, tmp_path):
    changes, message = WRONG[case]
    stored, _ = written(tmp_path, **changes)
    with pytest.raises(InputError) as caught:
        resolve.resolve(str(stored)).open(None)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_codes_without_scales_are_named(tmp_path):
    stored, _ = written(tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight_scale_inv"
    published.edited(stored, lambda tensors: tensors.pop(name))
    with pytest.raises(
        InputError, match="q_proj.weight' is float8_e4m3fn, and quantization_config"
    ):
        resolve.resolve(str(stored)).open(None)
    raw = json.loads((stored / "config.json").read_text())
    del raw["quantization_config"]
    (stored / "config.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match="weight' has type F8_E4M3; valid: F32"):
        resolve.resolve(str(stored)).open(None)


def test_a_plan_counts_scales_of_16_rows():
    format = FORMATS["fp8_block"]
    assert format.bytes_for(7168 * 576, 7168) == 7168 * 576 * (1 + 4 / 2048)
    assert format.row_bytes(7168) == 7168 + 56 * 4
