"""gpt-oss as it is published: experts in MXFP4, read as the numbers that they stand for."""

import dataclasses
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from configs.errors import InputError
from inference.checkpoints import convert, resolve, safetensors_file
from inference.checkpoints.hf import mxfp4
from layers import decoder, params, quantized
from tests.inference.checkpoints.test_gguf_types import logits_of
from tests.inference.checkpoints.test_parts import check_parts

GOLDEN = Path(__file__).parents[2] / "golden" / "gpt_oss-gqa-limit"
D, F, E, LAYERS = 96, 64, 5, 3
EXPERTS = "model.layers.{}.mlp.experts.{}_proj"
PUBLISHED = {
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"],
        "quant_method": "mxfp4",
    }
}


def numbers(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """By the formats' definitions: a sign, two bits of exponent and one of mantissa."""
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:-1], 32)
    sign, exponent, mantissa = codes >> 3, (codes >> 1 & 3).astype(int), (codes & 1) / 2
    values = np.where(exponent == 0, mantissa, (1 + mantissa) * 2.0 ** (exponent - 1))
    values = (-1.0) ** sign * values * 2.0 ** (scales.astype(int) - 127)[..., None]
    return values.reshape(*scales.shape[:-1], -1)


def packed(generator: np.random.Generator, rows: int, width: int) -> dict[str, np.ndarray]:
    shape = E, rows, width // 32
    return {
        "_blocks": generator.integers(0, 256, (*shape, 16), np.uint8),
        "_scales": generator.integers(119, 127, shape, np.uint8),
    }


def write(folder: Path, tensors: dict[str, np.ndarray], **changes) -> Path:
    folder.mkdir(exist_ok=True)
    raw = json.loads((GOLDEN / "config.json").read_text())
    raw |= {"hidden_size": D, "intermediate_size": F} | changes
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return folder


def dense(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same, in bfloat16: experts as [in, out]."""
    found = {name: value for name, value in tensors.items() if value.dtype != np.uint8}
    for name in tensors:
        if name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            values = numbers(tensors[name], tensors[f"{stem}_scales"]).swapaxes(1, 2)
            found[stem] = np.ascontiguousarray(values.astype(ml_dtypes.bfloat16))
    return found


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    """The golden checkpoint's names, with widths that blocks divide."""
    generator, found = np.random.default_rng(0), {}
    for name, golden in load_file(GOLDEN / "model.safetensors").items():
        if name.endswith("_proj") and ".experts." in name:
            continue
        shape = tuple({40: D}.get(size, size) for size in golden.shape)
        shape = (E, 2 * F) if name.endswith("gate_up_proj_bias") else shape
        found[name] = (generator.standard_normal(shape) / 4).astype(ml_dtypes.bfloat16)
    for layer in range(LAYERS):
        for part, shape in {"gate_up": (2 * F, D), "down": (D, F)}.items():
            for ending, values in packed(generator, *shape).items():
                found[EXPERTS.format(layer, part) + ending] = values
    return found


def load(folder: Path):
    """Dequantized, in bfloat16."""
    resolved = resolve.resolve(str(folder))
    config = dataclasses.replace(resolved.config, formats=())
    return config, resolved.open(None).load_params(decoder.param_infos(config), None)


def assert_same(found, expected) -> None:
    for (name, one), two in zip(
        params.flatten(expected).items(), params.flatten(found).values(), strict=True
    ):
        assert one.dtype == two.dtype and one.tobytes() == two.tobytes(), name


def test_every_number_of_every_scale_is_exact():
    codes = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    for scale in range(mxfp4.MOST + 1):
        scales = np.full((1, 16), scale, np.uint8)
        found = mxfp4.dequantize(codes, scales)
        assert found.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(found.astype(np.float64), numbers(codes, scales))
    assert (np.signbit(found) == np.signbit(numbers(codes, scales))).all()
    with np.errstate(over="ignore"):
        beyond = numbers(codes, scales + np.uint8(1)).astype(ml_dtypes.bfloat16)
    assert np.isinf(beyond).any()


def test_logits_are_those_of_the_dense_checkpoint(tensors, tmp_path):
    config, found = load(write(tmp_path / "packed", tensors, **PUBLISHED))
    other, expected = load(write(tmp_path / "dense", dense(tensors)))
    assert config.layers == other.layers
    assert_same(found, expected)
    logits = logits_of(config, found)
    assert np.isfinite(logits).all() and logits.std() > 0
    assert logits.tobytes() == logits_of(other, expected).tobytes()


def test_a_conversion_is_dense(tensors, tmp_path):
    _, expected = load(write(tmp_path / "packed", tensors, **PUBLISHED))
    for to in convert.FORMATS:
        checkpoint = resolve.resolve(str(tmp_path / "packed")).open(None)
        convert.convert(checkpoint, tmp_path / to, to, dtype="bfloat16")
        assert_same(load(tmp_path / to)[1], expected)
    assert "quantization_config" not in (tmp_path / "hf" / "config.json").read_text()


def test_a_layer_may_be_left_dense(tensors, tmp_path):
    """As `modules_to_not_convert` may say."""
    _, expected = load(write(tmp_path / "packed", tensors, **PUBLISHED))
    first = {name: value for name, value in tensors.items() if ".layers.0.mlp.experts." in name}
    rest = {name: value for name, value in tensors.items() if name not in first}
    folder = write(tmp_path / "mixed", rest | dense(first), **PUBLISHED)
    with pytest.raises(InputError, match="gate_up_proj.*is stored as bfloat16; by its .* is mxfp4"):
        load(folder)
    said = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.0.mlp.experts"]}
    folder = write(tmp_path / "said", rest | dense(first), quantization_config=said)
    assert len(resolve.resolve(str(folder)).config.formats) == 2 * (LAYERS - 1)
    _, found = load(folder)
    assert_same(found, expected)


def test_blocks_are_the_checkpoints_numbers(tensors, tmp_path):
    own = resolve.resolve(str(write(tmp_path / "packed", tensors, **PUBLISHED))).open(None)
    assert {kind for _, kinds in own.config.formats for kind in kinds} == {"mxfp4"}
    assert {path: own.formats()[path] for path, _ in own.config.formats} == dict(own.config.formats)
    infos = params.flatten(decoder.param_infos(own.config))
    kept = params.flatten(own.load_params(decoder.param_infos(own.config), None))
    numbers = params.flatten(load(tmp_path / "packed")[1])
    for path, _ in own.config.formats:
        blocks, width = np.asarray(kept[path]), infos[path].shape[-1]
        rows = quantized.dequantize("mxfp4", blocks.reshape(-1, blocks.shape[-1]), width)
        expected = np.asarray(numbers[path], np.float32)
        np.testing.assert_array_equal(rows.reshape(expected.shape), expected)


def test_blocks_and_scales_in_two_files_of_a_tied_model(tensors, tmp_path):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tied = PUBLISHED | {"tie_word_embeddings": True}
    _, expected = load(write(tmp_path / "whole", tensors, **tied))
    shards = {"a.safetensors": {}, "b.safetensors": {}}
    for name, value in tensors.items():
        shards["b.safetensors" if name.endswith("_scales") else "a.safetensors"][name] = value
    folder = write(tmp_path / "shards", {}, **tied)
    (folder / safetensors_file.SINGLE).unlink()
    for file, own in shards.items():
        save_file(own, folder / file)
    index = {name: file for file, own in shards.items() for name in own}
    (folder / safetensors_file.INDEX).write_text(json.dumps({"weight_map": index}))
    config, found = load(folder)
    assert config.tied
    assert_same(found, expected)


@pytest.mark.parametrize("chips, changes", [(2, {}), (2, {"formats": ()}), (3, {"formats": ()})])
def test_chips_read_their_parts(chips, changes, tensors, tmp_path):
    check_parts(write(tmp_path / "packed", tensors, **PUBLISHED), chips, **changes)


GATES, DOWN = EXPERTS.format(1, "gate_up"), EXPERTS.format(2, "down")
BAD = {
    "blocks": (lambda t: t.pop(f"{GATES}_blocks"), f"tensor '{GATES}_blocks' is missing"),
    "scales": (lambda t: t.pop(f"{DOWN}_scales"), f"tensor '{DOWN}_scales' is missing"),
    "both": (
        lambda t: [t.pop(DOWN + ending) for ending in mxfp4.ENDINGS],
        f"tensor '{DOWN}_blocks' is missing",
    ),
    "shape": (
        lambda t: t.update({f"{GATES}_blocks": t[f"{GATES}_blocks"][:, :-2].copy()}),
        f"'{GATES}_blocks' is [5, 126, 3, 16]; expected [5, 128, 3, 16]",
    ),
    "shape of scales": (
        lambda t: t.update({f"{DOWN}_scales": t[f"{DOWN}_scales"][..., None]}),
        f"'{DOWN}_scales' is [5, 96, 2, 1]; expected [5, 96, 2]",
    ),
    "numbers": (
        lambda t: t.update({f"{DOWN}_scales": t[f"{DOWN}_scales"].astype(np.float32)}),
        f"'{DOWN}_scales' is float32; expected uint8",
    ),
    "signed": (
        lambda t: t.update({f"{DOWN}_scales": t[f"{DOWN}_scales"].astype(np.int8)}),
        f"'{DOWN}_scales' is int8; expected uint8",
    ),
    "bytes elsewhere": (
        lambda t: t.update({"model.norm.weight": np.ones(D, np.uint8)}),
        "tensor 'model.norm.weight' has type U8; valid: F32",
    ),
    "dense beside blocks": (
        lambda t: t.update({DOWN: np.zeros((E, F, D), np.float32)}),
        f"'{DOWN}.0' is stored as bfloat16; by its quantization_config it is mxfp4",
    ),
    "scale": (
        lambda t: t[f"{DOWN}_scales"].__setitem__((3, 4, 1), 253),
        f"'{DOWN}_scales' holds a scale of 253; numbers of scales above 252",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_there_is_named(case, tensors, tmp_path):
    change, expected = BAD[case]
    change(tensors)
    with pytest.raises(InputError) as caught:
        load(write(tmp_path / "bad", tensors, **PUBLISHED))
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_blocks_are_read_where_they_are_announced(tensors, tmp_path):
    folder = write(tmp_path / "silent", tensors)
    with pytest.raises(InputError, match="_blocks' has type U8; valid: F32"):
        load(folder)
    narrow = PUBLISHED | {"hidden_size": 40}
    with pytest.raises(InputError, match="has rows of 40, not a multiple of mxfp4's block of 32$"):
        load(write(tmp_path / "narrow", tensors, **narrow))


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen3MoeForCausalLM"])
def test_other_families_are_refused(architecture, tmp_path):
    folder = write(tmp_path / "x", {}, architectures=[architecture], **PUBLISHED)
    with pytest.raises(InputError, match="quant_method='mxfp4' is not served; valid:") as caught:
        resolve.resolve(str(folder))
    assert "\n" not in str(caught.value)
