"""A model walked through: what is stored, what goes on, what is refused."""

import json
import subprocess
import sys

import chex
import numpy as np
import pytest

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.kinds.params import leaves
from configs.model import LayerSpec
from configs.recipes import few_bits
from inference.checkpoints import convert, load, manifest, resolve
from inference.checkpoints.names import Stored
from inference.layerwise.parts import Parts
from inference.quantize import export, plan
from inference.quantize.walk import Walk
from layers import params, quantized
from tests.inference.quantize import models

WINDOWS = np.random.default_rng(1).integers(0, models.VOCAB, (6, 24)).astype(np.int32)


def quantize(source, output, method="gptq", name="int4_g32", windows=WINDOWS, stop_after=None):
    """A quantized directory, and its walk."""
    checkpoint = resolve.resolve(str(source)).open(None)
    contents, config = checkpoint.contents(), checkpoint.config
    asked = plan.Plan(method, few_bits.formats(config, name, ()))
    parts = Parts(output.with_name(output.name + ".quantizing"), {"method": method})
    walk = Walk(contents, config, asked, parts)

    def progress(done, total, label):
        if done == stop_after:
            raise KeyboardInterrupt

    walk.run(windows, progress)
    export.write(checkpoint, walk, parts, {}, output, None)
    return output


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return models.written(models.llama(), tmp_path_factory.mktemp("llama") / "model")


def arrays(folder):
    """What a directory's arrays hold, by path."""
    checkpoint = resolve.resolve(str(folder)).open(None)
    source, infos = checkpoint.contents().source, params.flatten(checkpoint.config.parameters())
    return {
        path: np.asarray(load.StoredParameter(source, Stored((path,), False), info)).tobytes()
        for path, info in infos.items()
    }


@pytest.mark.parametrize(
    "make, method", [(models.llama, "awq"), (models.mixture, "gptq"), (models.latent, "gptq")]
)
def test_any_model_is_walked_through(make, method, tmp_path):
    source = models.written(make(), tmp_path / "model")
    output = quantize(source, tmp_path / "few", method)
    config, values = models.loaded(output)
    _, full = models.loaded(source)
    declared = resolve.resolve(str(output)).config
    formats = dict(declared.formats)
    assert formats["embed/table"] == ("int8",) and formats["layers/0/mixer/out"] == ("int4_g32",)
    before, after = params.flatten(full), params.flatten(values)
    for path, value in before.items():
        if path not in formats:
            is_moved = method == "awq" and path.endswith(("mixer_norm", "ffn_norm", "router"))
            assert np.array_equal(value, after[path]) != is_moved, path
            continue
        name, width = formats[path][0], value.shape[-1]
        blocks = quantized.quantize(name, np.reshape(value, (-1, width)))
        plain = quantized.dequantize(name, blocks, width).reshape(value.shape)
        assert np.array_equal(plain, after[path]) == ("table" in path)
    parts = Parts(output.with_name("few.quantizing"), {"method": method})
    figures = parts.figures("layer-0001")
    assert figures.keys() == {path.removeprefix("layers/1/") for path in formats if "rs/1/" in path}
    assert all(0 < error < 0.2 for error in figures.values())


def test_rounding_needs_no_text(llama, tmp_path):
    output = quantize(llama, tmp_path / "few", "rtn", windows=None)
    formats = dict(resolve.resolve(str(output)).config.formats)
    full, few = (params.flatten(models.loaded(folder)[1]) for folder in (llama, output))
    for path, [name] in formats.items():
        blocks = quantized.quantize(name, np.asarray(full[path]))
        expected = quantized.dequantize(name, blocks, full[path].shape[-1])
        np.testing.assert_array_equal(few[path], expected)


def test_an_interrupted_run_goes_on_to_the_same_bytes(llama, tmp_path, stop_after=1):
    straight = quantize(llama, tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        quantize(llama, tmp_path / "resumed", stop_after=stop_after)
    parts = tmp_path / "resumed.quantizing"
    assert len(list(parts.glob("layer-*"))) == stop_after and not (tmp_path / "resumed").exists()
    kept = {path.name: path.stat().st_mtime_ns for path in parts.iterdir()}
    resumed = quantize(llama, tmp_path / "resumed")
    assert {n: (parts / n).stat().st_mtime_ns for n in kept} == kept, "what is there is not redone"
    assert arrays(resumed) == arrays(straight)


def test_another_run_does_not_go_on(llama, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        quantize(llama, tmp_path / "few", stop_after=1)
    with pytest.raises(InputError, match="its method is 'gptq', not 'rtn'; remove it"):
        quantize(llama, tmp_path / "few", method="rtn")
    (tmp_path / "other.quantizing").mkdir()
    (tmp_path / "other.quantizing" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="in the way"):
        quantize(llama, tmp_path / "other")


def test_later_layers_read_what_earlier_ones_leave(llama, tmp_path):
    """The second layer is made for the first one's new results, not for its old ones."""
    coarse = quantize(llama, tmp_path / "coarse", name="int3_g32")
    fine = quantize(llama, tmp_path / "fine", name="int8")
    mixed = resolve.resolve(str(llama)).open(None)
    formats = few_bits.formats(mixed.config, "int8", ["layers/1"]) | {
        path: "int3_g32"
        for path in few_bits.formats(mixed.config, "int3_g32", ["layers/0"])
        if path.startswith("layers/1")
    }
    parts = Parts(tmp_path / "mixed.quantizing", {})
    walk = Walk(mixed.contents(), mixed.config, plan.Plan("gptq", formats), parts)
    walk.run(WINDOWS)
    found = parts.read("layer-0001")["layers/1/mixer/qkv"].tobytes()
    assert found != arrays(coarse)["layers/1/mixer/qkv"]
    assert (
        parts.read("layer-0000")["layers/0/mixer/qkv"].tobytes()
        == (arrays(fine)["layers/0/mixer/qkv"])
    )


def test_blocks_are_copied_and_dequantized(llama, tmp_path):
    few = quantize(llama, tmp_path / "few", method="rtn")
    checkpoint = resolve.resolve(str(few)).open(None)
    assert checkpoint.formats()["layers/1/ffn/down"] == ("int4_g32",)
    convert.convert(checkpoint, tmp_path / "copy", "orbax")
    assert arrays(tmp_path / "copy") == arrays(few)
    assert resolve.resolve(str(tmp_path / "copy")).config == checkpoint.config
    convert.convert(checkpoint, tmp_path / "wide", "orbax", "float32")
    _, expected = models.loaded(few)
    wide, found = models.loaded(tmp_path / "wide")
    assert resolve.resolve(str(tmp_path / "wide")).config == wide
    chex.assert_trees_all_equal(found, expected)


def test_rows_and_columns_of_blocks_are_read(tmp_path):
    source = models.written(models.mixture(), tmp_path / "model")
    few = quantize(source, tmp_path / "few", method="rtn")
    tensors = resolve.resolve(str(few)).open(None).contents().source
    for path in ("layers/0/ffn/experts/down", "layers/0/mixer/out"):
        whole = np.concatenate(list(tensors.blocks(path)))
        assert whole.shape == tensors.shapes[path]
        np.testing.assert_array_equal(tensors.read(path, 1, 3), whole[1:3])
    np.testing.assert_array_equal(tensors.read("layers/0/mixer/out", 0, 4, slice(3, 9)),
                                  whole[:4, 3:9])  # fmt: skip


def spoil(folder, change):
    """A directory whose description is another, though its digests are right."""
    path = folder / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    manifest.write(folder)


@pytest.mark.parametrize(
    "formats, message",
    [
        ({"layers/0/mixer/out": "int4"}, "rows of 64, not a multiple of int4's block of 128"),
        ({"layers/0/mixer/out": "int3_g32"}, r"in int3_g32, scales included, \[64, 64\] is uint8"),
        ({"layers/0/mixer/out": "float32"}, "holds blocks, and config.json names no format"),
        ({"layers/0/mixer_norm": "int8"}, "mixer_norm is float32"),
        ({"layers/0/mixer/out": "int5"}, "no number format 'int5'"),
    ],
)
def test_formats_that_are_not_those_of_the_arrays_are_named(llama, tmp_path, formats, message):
    few = quantize(llama, tmp_path / "few", method="rtn", windows=None)

    def change(raw):
        own = dict(raw["model"]["formats"]) | {path: [name] for path, name in formats.items()}
        raw["model"]["formats"] = [[path, names] for path, names in own.items()]
        return raw

    spoil(few, change)
    with pytest.raises(InputError, match=message):
        resolve.resolve(str(few)).open(None)


def test_scales_of_another_size_are_named(llama, tmp_path):
    few = quantize(llama, tmp_path / "few", method="rtn", windows=None)
    folder = few / "params" / "layers.0.mixer.out"
    layout = json.loads((folder / ".zarray").read_text())
    layout["shape"] = layout["chunks"] = [64, 48]
    (folder / ".zarray").write_text(json.dumps(layout))
    (folder / "0.0").write_bytes(bytes(64 * 48))
    manifest.write(few)
    with pytest.raises(InputError, match=r"out is uint8 \[64, 48\]; in int4_g32, scales included"):
        resolve.resolve(str(few)).open(None)


@pytest.mark.parametrize("name", ["embed", "head", "layers"])
def test_numbers_that_are_not_finite_are_named(name, tmp_path):
    def spoilt(values):
        node = values["layers"][1]["mixer"] if name == "layers" else values[name]
        key = "out" if name == "layers" else "table"
        node[key] = node[key].at[7, 3].set(np.inf)
        return values

    source = models.written(models.llama(), tmp_path / "model", spoilt)
    with pytest.raises(InputError, match=f"{name}/.* holds numbers that are not finite"):
        quantize(source, tmp_path / "few", "rtn", windows=None)


@pytest.mark.parametrize(
    "ask, message",
    [
        (lambda m: few_bits.formats(m, "int5", ()), "no format 'int5'; valid: int8"),
        (lambda m: few_bits.formats(m, "int4_g128", ()), "not a multiple of int4's block of 128"),
        (
            lambda m: few_bits.formats(m, "int4_g64", ()),
            "down has rows of 96, of which int4_g64 has no",
        ),
        (lambda m: few_bits.formats(m, "int8", ["layers/7"]), "--skip=layers/7: no parameter"),
        (lambda m: few_bits.integers(5, None, False), "8, 4 or 3 bits, not 5"),
        (lambda m: few_bits.integers(4, 48, False), "128, 64, 32 numbers, not 48"),
        (lambda m: few_bits.integers(8, 32, False), "8 bits have one scale a row"),
        (lambda m: plan.Plan("magic", {}), "no method 'magic'; valid: rtn"),
    ],
)
def test_what_cannot_be_is_refused(ask, message):
    with pytest.raises(InputError, match=message):
        ask(models.llama())


def test_formats_of_a_plan():
    config = models.llama()
    assert few_bits.integers(3, 64, True) == "int3_asym_g64"
    fitting = few_bits.formats(config, few_bits.integers(4, None, False), ())
    assert fitting["layers/0/ffn/down"] == "int4_g32"
    assert fitting["layers/0/ffn/gate_up"] == "int4_g64"
    found = few_bits.formats(config, "int4_g32", ["embed", "layers/0"])
    assert set(found) == {
        *(f"layers/1/{p}" for p in ("mixer/qkv", "mixer/out", "ffn/gate_up", "ffn/down")),
        "head/table",
    }
    assert found["head/table"] == "int8"
    mixed = few_bits.formats(models.mixture(), "int4_g32", ())
    assert not any("router" in path for path in mixed)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_memory_is_that_of_the_model_and_one_layer(tmp_path):
    """Beside them no more than a gigabyte, JAX and its programs included."""
    layer = LayerSpec(Attention(16, 8, 64), Gated(4096))
    config = models.llama(pattern=(layer,), width=1024, num_layers=24, dtype="bfloat16")
    source = models.written(config, tmp_path / "model")
    program = f"""if True:
        from pathlib import Path
        from tests.inference.quantize import test_walk
        test_walk.quantize(Path({str(source)!r}), Path({str(tmp_path / "few")!r}), "rtn", "int4")
        print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
    """
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    peak = int(ran.stdout.split()[-1]) << 10
    model = params.num_bytes(config.parameters())
    one_layer = sum(4 * i.elements for _, i in leaves(config.parameters()["layers"][0]))
    assert model > 0.7e9 and peak < model + one_layer + 1e9
