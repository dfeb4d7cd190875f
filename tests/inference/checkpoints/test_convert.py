"""Conversion: nothing is lost, nothing is half there, and no flipped bit goes unseen."""

import dataclasses
import fcntl
import json
import os
import random
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import chex
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from configs import presets
from configs.errors import InputError
from configs.kinds.feed_forward import Gated
from configs.kinds.latent import Latent
from configs.kinds.rope import Dynamic, Linear, Llama3, LongRope, Rope, Yarn
from configs.model import LayerSpec
from inference.checkpoints import convert, manifest, new_directory, resolve
from inference.checkpoints.checkpoint import NewCheckpoint
from inference.checkpoints.hf import config_export, config_json, hf_directory
from inference.checkpoints.native import config_file, orbax_directory
from layers import decoder, params, quantized

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"
TINY = GOLDEN / "llama-tokenizer"
GOLDEN_PYTHON = Path(os.environ.get("GOLDEN_PYTHON", ROOT / ".venv-golden" / "bin" / "python"))


def run(source: Path, output: Path, to: str, **options) -> Path:
    convert.convert(resolve.resolve(str(source)).open(None), output, to, **options)
    return output


def load(directory: Path, dtype: str | None = None) -> dict[str, np.ndarray]:
    resolved = resolve.resolve(str(directory))
    config = dataclasses.replace(resolved.config, dtype=dtype or resolved.config.dtype)
    loaded = resolved.open(None).load_params(decoder.param_infos(config), None)
    return {path: np.asarray(leaf) for path, leaf in params.flatten(loaded).items()}


def stored(directory: Path) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for path in directory.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        chex.assert_trees_all_equal_shapes_and_dtypes(found[name], value)
        assert found[name].tobytes() == value.tobytes(), name


# As transformers saves them; what is written has the names and shapes of published files. The last
# is as published, and written as transformers saves it.
SAVED_OTHERWISE = (
    "deepseek_v4-published-tied-float32", "deepseek_v4-sparse-heavy-windows",
    "kimi_linear-latent-queries-dense-float32", "olmo_hybrid-mha-rope", "qwen3_5_moe-gqa-stacked",
)  # fmt: skip
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))


@pytest.mark.parametrize("case", CASES)
def test_a_configuration_is_written_for_every_family(case):
    """What a checkpoint that brings none of transformers' own is exported with."""
    config = resolve.resolve(str(GOLDEN / case)).config
    raw = json.loads(json.dumps(config_export.of_model(config)))
    read_back = config_json.parse(raw, Path(config.name))
    assert read_back.layers == config.layers
    text = json.dumps(config_file.to_json(config))
    assert config_file.from_json(json.loads(text), "config.json") == config


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_left_to_the_defaults_of_transformers(case):
    """Whose tokens are those of a family's best known vocabulary, larger than a tiny one."""
    config = resolve.resolve(str(GOLDEN / case)).config
    raw = config_export.of_model(config, {"bos_token_id": 3})
    assert (raw["bos_token_id"], raw["eos_token_id"], raw["pad_token_id"]) == (3, None, None)
    assert isinstance(raw.get("query_pre_attn_scalar", 0), int)


@pytest.mark.long
@pytest.mark.skipif(
    not GOLDEN_PYTHON.exists(), reason="transformers is missing: make golden, or GOLDEN_PYTHON="
)
def test_transformers_reads_the_exports_of_every_family(tmp_path):
    """With a config.json of our own making, as for a checkpoint that brings none."""
    # Logits token by token, and what transformers has no code of.
    others = (
        *("llama-mqa-dynamic", "mistral_large3-mha-own-names", "internlm2-", "mimo-"),
        *("bailing_moe_v2-", "step3p5-"),
    )
    cases = [case for case in CASES if not case.startswith(others)]
    for case in cases:
        checkpoint = resolve.resolve(str(GOLDEN / case)).open(None)
        contents = dataclasses.replace(checkpoint.contents(), raw_config=None)
        ours = NewCheckpoint(
            config=checkpoint.config, eos_ids=checkpoint.eos_ids, new_contents=contents
        )
        convert.convert(ours, tmp_path / case, "hf")
    command = [str(GOLDEN_PYTHON), "tests/golden/compare_exports.py", str(tmp_path)]
    worst = json.loads(subprocess.check_output(command, cwd=ROOT, text=True))
    assert worst.keys() == set(cases) and max(worst.values()) <= 1e-4, worst


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_is_bit_identical(case, tmp_path):
    native = run(GOLDEN / case, tmp_path / "native", "orbax")
    back = run(native, tmp_path / "back", "hf")
    tensors = stored(GOLDEN / case)
    if "bare" in case:  # written without its head: transformers adds the prefix, and so do we
        tensors = {
            f"transformer.{name}": tensor
            for name, tensor in tensors.items()
            if not name.endswith(".attn.bias")
        }  # a causal mask that old files store
    if case.startswith(("minimax-", "gpt_neox-")):  # decays or masks, which are derived
        ends = "slope_rate", "_decay", ".attention.bias", ".attention.masked_bias"
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(ends)}
    if case == "mimo-gqa-predicting":  # a layer that predicts a second token stays behind
        tensors = {name: tensor for name, tensor in tensors.items() if ".mtp_" not in name}
    if case not in SAVED_OTHERWISE:
        assert_equal(stored(back), tensors)
    first, second, third = (resolve.resolve(str(d)) for d in (GOLDEN / case, native, back))
    assert first.config == second.config == dataclasses.replace(third.config, name=case)
    assert len({r.open(None).eos_ids for r in (first, second, third)}) == 1
    assert_equal(load(native), load(GOLDEN / case))
    assert_equal(load(back), load(GOLDEN / case))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (GOLDEN / case / name).exists():
            assert (back / name).read_bytes() == (GOLDEN / case / name).read_bytes()


def test_orbax_itself_restores_what_is_written(tmp_path):
    import orbax.checkpoint as ocp

    directory = run(TINY, tmp_path / "native", "orbax")
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore((directory / orbax_directory.PARAMS).absolute())
    expected = load(directory)
    assert_equal({p: np.asarray(v) for p, v in params.flatten(restored).items()}, expected)


@pytest.mark.parametrize("to", convert.FORMATS)
def test_two_conversions_have_the_same_manifest(to, tmp_path):
    first, second = (run(TINY, tmp_path / name, to) for name in ("first", "second"))
    assert (first / manifest.NAME).read_text() == (second / manifest.NAME).read_text()


@pytest.mark.parametrize("to", convert.FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_type_is_a_choice(to, dtype, tmp_path):
    for case in ("llama-mqa-float32", "llama-tokenizer"):
        directory = run(GOLDEN / case, tmp_path / f"{case}-{to}", to, dtype=dtype)
        assert_equal(load(directory, dtype), load(GOLDEN / case, dtype))
        if to == "orbax":
            assert resolve.resolve(str(directory)).config.dtype == dtype
        else:
            assert {str(tensor.dtype) for tensor in stored(directory).values()} == {dtype}


def retyped(folder: Path, change) -> Path:
    made = Path(shutil.copytree(TINY, folder / "retyped"))
    tensors = stored(TINY)
    change(tensors)
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    return made


NORM = "model.norm.weight"


def test_of_mixed_types_the_wider_is_kept(tmp_path):
    mixed = retyped(tmp_path, lambda t: t.update({NORM: t[NORM].astype(np.float32) + 1e-7}))
    native = run(mixed, tmp_path / "native", "orbax")
    back = stored(run(native, tmp_path / "back", "hf"))
    assert {str(tensor.dtype) for tensor in back.values()} == {"float32"}
    for name, tensor in stored(mixed).items():
        np.testing.assert_array_equal(back[name], tensor.astype(np.float32))


def test_what_routes_keeps_what_would_be_lost(tmp_path):
    """It is float32 here whatever the rest; as wide as that is stored only what has to be."""
    source = Path(shutil.copytree(GOLDEN / "glm4_moe-gqa-norm-bias", tmp_path / "wide"))
    tensors = stored(source)
    wide = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors[wide] = tensors[wide].astype(np.float32) + 1e-7
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    native = run(source, tmp_path / "native", "orbax")
    assert_equal(stored(run(native, tmp_path / "back", "hf")), tensors)
    for directory in (source, native):
        formats = resolve.resolve(str(directory)).open(None).formats()
        assert {f for path, own in formats.items() if "rout" not in path for f in own} == {
            "bfloat16"
        }
        assert formats["layers/1/ffn/router_offsets"] == ("float32",)


def test_float64_needs_a_decision(tmp_path):
    wide = retyped(tmp_path, lambda t: t.update({NORM: t[NORM].astype(np.float64)}))
    with pytest.raises(InputError, match="weights are float64, which is not kept; say what"):
        run(wide, tmp_path / "native", "orbax")
    run(wide, tmp_path / "native", "orbax", dtype="float32")


@pytest.mark.parametrize("to", convert.FORMATS)
def test_no_value_becomes_infinite(to, tmp_path):
    large = retyped(tmp_path, lambda t: t.update({NORM: t[NORM].astype(np.float32) * 0 + 3.4e38}))
    with pytest.raises(InputError, match="final_norm holds values that bfloat16 has no number for"):
        run(large, tmp_path / "native", to, dtype="bfloat16")
    run(large, tmp_path / "native", to)


def test_large_files_are_cut_into_shards(tmp_path):
    whole = run(TINY, tmp_path / "whole", "hf")
    cut = run(TINY, tmp_path / "cut", "hf", max_shard_bytes=10_000)
    shards = sorted(cut.glob("*.safetensors"))
    assert len(shards) > 3 and shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
    assert_equal(stored(cut), stored(whole))
    assert_equal(load(cut), load(whole))
    index = json.loads((cut / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored(whole).values())


def test_orbax_is_imported_by_its_writer_only(tmp_path):
    directory = run(TINY, tmp_path / "native", "orbax")
    code = (
        "import sys\nfrom inference.checkpoints import convert, resolve\n"
        "from layers import decoder\n"
        f"found = resolve.resolve({str(directory)!r})\n"
        "found.open(None).load_params(decoder.param_infos(found.config), None)\n"
        "assert 'orbax.checkpoint' not in sys.modules and 'huggingface_hub' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# --- configurations -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*presets.NAMES, *presets.PLANNED])
def test_every_preset_survives_our_json(name):
    config = presets.get(name).config
    text = json.dumps(config_file.to_json(config))
    assert config_file.from_json(json.loads(text), "config.json") == config


@pytest.mark.parametrize("name", presets.NAMES)
def test_presets_have_a_configuration_of_transformers(name):
    raw = config_export.of_model(presets.get(name).config)
    assert json.loads(json.dumps(raw)) == raw


def test_what_transformers_cannot_say_is_refused():
    config = presets.get("smollm2-135m").config
    odd = {
        "model.pattern": {"pattern": config.with_kinds(window=8).pattern},
        "a layer of latent and gated": {"pattern": (LayerSpec(Latent(9, 64, 8, 8, 8), Gated(8)),)},
        "model.embedding_scale": {"embedding_scale": 2.0},
        "the family falcom": {"family": "falcom"},
    }
    for message, changes in odd.items():
        with pytest.raises(InputError, match=message):
            config_export.of_model(dataclasses.replace(config, **changes))


def test_scaled_positions_are_written(tmp_path):
    config = presets.get("smollm2-135m").config
    for scaling, longest in (
        (Llama3(8.0, 1.0, 4.0, 8192), 8192),
        (Linear(2.0), 8192),
        (Dynamic(2.0, 4096), 8192),
        (Yarn(4.0, 4096), 16384),
        (Yarn(4.0, 4096, 16.0, 2.0, 0.9, False), 16384),
        (LongRope((1.0,) * 32, (2.0,) * 32, 4096, 1.2), 8192),
    ):
        scaled = config.with_kinds(rope=Rope(5e5, scaling))
        scaled = dataclasses.replace(scaled, max_context=longest)
        assert config_export.of_model(scaled)["rope_scaling"]["rope_type"]
        text = json.dumps(config_file.to_json(scaled))
        assert config_file.from_json(json.loads(text), "config.json") == scaled


# --- damage ---------------------------------------------------------------------------------------


def flip(directory: Path, generator: random.Random) -> tuple[Path, bytes, str]:
    """Flips one bit of one file: half of the time of any file, else in proportion to size."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    if generator.random() < 0.5:
        path = generator.choice(files)
    else:
        path = generator.choices(files, [file.stat().st_size for file in files])[0]
    before = path.read_bytes()
    position, bit = generator.randrange(len(before)), generator.randrange(8)
    changed = bytearray(before)
    changed[position] ^= 1 << bit
    path.write_bytes(changed)
    return path, before, f"bit {bit} of byte {position} of {path.relative_to(directory)}"


@pytest.mark.parametrize("to", convert.FORMATS)
def test_a_hundred_flipped_bits_are_found(to, tmp_path):
    directory = run(TINY, tmp_path / to, to, max_shard_bytes=20_000)
    generator = random.Random(4)
    for _ in range(100):
        path, before, what = flip(directory, generator)
        with pytest.raises(InputError) as caught:
            load(directory)
            pytest.fail(f"{what} went unseen")
        assert "\n" not in str(caught.value) and str(directory) in str(caught.value), what
        path.write_bytes(before)
    load(directory)


@pytest.mark.parametrize("reads", ["whole", "slices"])
def test_a_flipped_bit_is_found_where_numbers_are_rounded(reads, tmp_path):
    """Whoever reads slices reads all of them, unless a host of several has some of the chips."""
    directory, matrix = run(TINY, tmp_path / "native", "orbax"), "layers/0/mixer/out"
    checkpoint = resolve.resolve(str(directory)).open(None)
    config = dataclasses.replace(checkpoint.config, formats=((matrix, ("int8",)),))

    def in_slices(path, info, values):
        if path != matrix:
            return np.asarray(values)
        return np.concatenate([values[row : row + 10] for row in range(0, info.shape[0], 10)])

    def blocks(**options):
        place = in_slices if reads == "slices" else lambda path, info, values: np.asarray(values)
        infos = decoder.param_infos(config)
        return params.flatten(checkpoint.load_params(infos, place=place, **options))[matrix]

    expected = quantized.quantize("int8", load(directory)[matrix])
    np.testing.assert_array_equal(blocks(), expected)
    file = directory / "params" / matrix.replace("/", ".") / "0.0"
    changed = bytearray(file.read_bytes())
    changed[100] ^= 1
    file.write_bytes(changed)
    with pytest.raises(InputError, match="not what was written") as caught:
        blocks()
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)
    if reads == "slices":
        assert (blocks(in_part=True) != expected).sum() <= expected.shape[1]  # of one row


def test_files_that_come_or_go_are_found(tmp_path):
    directory = run(TINY, tmp_path / "native", "orbax")
    (directory / "README.md").write_text("mine")
    with pytest.raises(InputError, match="'README.md' is not in ridgeline.sha256"):
        load(directory)
    (directory / "README.md").unlink()
    (directory / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    with pytest.raises(InputError, match="'tokenizer.json' is missing"):
        load(directory)
    (directory / "tokenizer.json").symlink_to(tmp_path / "tokenizer.json")
    load(directory)  # a cache of links is as good
    (directory / manifest.NAME).unlink()
    with pytest.raises(InputError, match="an unfinished or damaged conversion"):
        load(directory)
    exported = run(TINY, tmp_path / "exported", "hf")
    (exported / "README.md").write_text("mine")  # as every repository has one
    load(exported)
    (exported / "added_tokens.json").write_text("{}")
    with pytest.raises(InputError, match="'added_tokens.json' is not in ridgeline.sha256"):
        load(exported)


def refused(directory: Path, expected: str) -> None:
    """After the manifest was made to agree."""
    (directory / manifest.NAME).unlink()
    manifest.write(directory)
    start = time.process_time()
    with pytest.raises(InputError, match=expected) as caught:
        load(directory)
    assert "\n" not in str(caught.value) and time.process_time() - start < 1


def _mixer(**fields):
    """A change to a model of one layer: of its mixer's fields."""
    whole = {"kind": "attention", "num_heads": 4, "num_kv_heads": 2, "head_width": 8} | fields
    return {"pattern": [{"mixer": whole, "ffn": None}]}


BAD_CONFIG = {
    "no object": ([], "model is an object, not"),
    "missing": ({}, "model.name is missing"),
    "unknown": ({"nmae": 1}, "model.nmae is not a field"),
    "type": ({"width": "32"}, "model.width is int, not '32'"),
    "boolean": ({"width": True}, "model.width is int, not True"),
    "zero": ({"width": 0}, "width is at least 1"),
    "huge": ({"vocab_size": 1 << 62}, "vocab_size is at most"),
    "layers": ({"num_layers": 1 << 30}, "num_layers is at most 10000"),
    "pattern": ({"pattern": 7}, "pattern is a list"),
    "long pattern": ({"pattern": [None] * 20_000}, "lists 20000 values"),
    "nested": (_mixer(rope={"theta": []}), "rope.theta is float, not"),
    "not finite": ({"norm_eps": float("inf")}, "norm_eps is float, not inf"),
    "scaling": (_mixer(rope={"scaling": "x"}), "scaling.kind is one of Linear,"),
    "kind": (_mixer(rope={"scaling": {"kind": [1]}}), "scaling.kind is one of"),
    "short scaling": (_mixer(rope={"scaling": {"kind": "Yarn"}}), "factor is missing"),
    "mixer": ({"pattern": [{"mixer": "x", "ffn": None}]}, "mixer.kind is one of .*attention"),
    "layer kind": (_mixer(kind="x"), "mixer.kind is one of .*attention"),
    "no feed-forward": (
        {"pattern": [_mixer()["pattern"][0] | {"ffn": {"kind": "attention"}}]},
        "ffn.kind is one of .*gated",
    ),
    "heads": (_mixer(num_kv_heads=3), "is not a multiple"),
}


@pytest.mark.parametrize("case", BAD_CONFIG)
def test_bad_configuration_of_ours_is_named(case, tmp_path):
    directory = run(TINY, tmp_path / "native", "orbax")
    changes, expected = BAD_CONFIG[case]
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    raw["model"] = raw["model"] | changes if changes and isinstance(changes, dict) else changes
    path.write_text(json.dumps(raw))
    refused(directory, expected)


def test_other_formats_and_layouts_are_named(tmp_path):
    directory = run(TINY, tmp_path / "native", "orbax")
    config = directory / "config.json"
    before = config.read_text()
    config.write_text(before.replace("ridgeline-orbax-2", "ridgeline-orbax-9"))
    refused(directory, "format 'ridgeline-orbax-9'; valid: ridgeline-orbax-2")
    config.write_text(before)
    array = directory / "params" / "final_norm" / ".zarray"
    layout = json.loads(array.read_text())
    for key, value, expected in (
        ("compressor", {"id": "zstd"}, "compressor is"),
        ("chunks", [1], "chunks is"),
        ("shape", [1 << 62], "not an array of"),
        ("shape", [], "not an array of"),
        ("shape", [7], "chunks is"),
        ("dtype", "|O", "not an array of"),
        ("order", "F", "order is"),
    ):
        array.write_text(json.dumps(layout | {key: value}))
        refused(directory, expected)
    wide = layout | {"shape": [1 << 30], "chunks": [1 << 30]}
    array.write_text(json.dumps(wide))
    refused(directory, "not the .* bytes of final_norm")
    array.write_text(json.dumps(layout))
    shutil.rmtree(array.parent)
    refused(directory, "'final_norm' is missing")


# --- unfinished -----------------------------------------------------------------------------------


def test_the_output_is_checked_first(tmp_path):
    checkpoint = resolve.resolve(str(TINY)).open(None)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    (tmp_path / "file").write_text("")
    for target, expected in (
        ("full", "exists already"), ("file", "exists already"), ("none/x", "no folder to write to"),
        ("a\0b", "is no path"), ("x" * 5000, "is no path"), ("x" * 250, "is no path"),
        ("file/x", "no folder to write to"), ("a.incomplete", "of unfinished directories only"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=expected):
            convert.convert(checkpoint, tmp_path / target, "orbax")
    (tmp_path / "empty").mkdir()
    run(TINY, tmp_path / "empty", "orbax")
    load(tmp_path / "empty")


def test_two_conversions_to_one_place_are_kept_apart(tmp_path):
    folder = tmp_path / "native.incomplete"
    folder.mkdir()
    (folder / manifest.NAME).write_text("")
    (folder / "left over").write_text("from a run that was killed")
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(InputError, match="another conversion is writing it"):
        run(TINY, tmp_path / "native", "orbax")
    os.close(descriptor)
    run(TINY, tmp_path / "native", "orbax")
    assert [path.name for path in tmp_path.iterdir()] == ["native"]


def test_what_another_thread_still_writes_is_cleared_away_later(tmp_path, monkeypatch):
    """While an interrupted conversion removes its directory."""
    output, clear = tmp_path / "native", new_directory._clear

    def clear_late(folder):
        clear(folder)
        (folder / "late").write_text("part of a tensor")

    with pytest.raises(KeyboardInterrupt), new_directory.create(output):
        monkeypatch.setattr(new_directory, "_clear", clear_late)
        raise KeyboardInterrupt
    monkeypatch.undo()
    assert (tmp_path / "native.incomplete" / "late").exists()
    with new_directory.create(output) as folder:
        (folder / "whole").write_text("x")
    assert [*tmp_path.iterdir()] == [output] and not (output / "late").exists()


def test_what_is_not_ours_stays(tmp_path):
    """A folder, a file and links under the name that an unfinished directory has."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thesis").write_text("mine")
    place = tmp_path / "native.incomplete"
    for make in (
        lambda: place.symlink_to(theirs),
        lambda: place.symlink_to(tmp_path / "nowhere"),
        lambda: place.write_text("mine"),
        lambda: shutil.copytree(theirs, place),
    ):
        make()
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(InputError, match="native.incomplete: in the way, and not what a conv"):
            run(TINY, tmp_path / "native", "orbax")
        assert sorted(tmp_path.rglob("*")) == before
        if place.is_symlink() or place.is_file():
            place.unlink()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="exists already"):
        run(TINY, tmp_path / "dangling", "orbax")


def test_whoever_is_killed_at_once_has_left_a_mark(tmp_path):
    with pytest.raises(KeyboardInterrupt), new_directory.create(tmp_path / "native") as folder:
        assert [path.name for path in folder.iterdir()] == [manifest.NAME]
        with pytest.raises(InputError, match="no digest and name of a file"):
            manifest.read(folder)
        new_directory.check(tmp_path / "native")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_no_room_for_the_second_copy_is_one_line(tmp_path, monkeypatch):
    """Or what the library says that writes it."""
    usage = types.SimpleNamespace(free=1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(InputError, match="cannot write .*native: No space left on device$"):
            run(TINY, tmp_path / "native", "orbax")

    def fail(*args):
        raise ValueError("RESOURCE_EXHAUSTED: " + "detail\n" * 999)

    monkeypatch.setattr(orbax_directory, "save", fail)
    with pytest.raises(InputError, match="cannot write .*native: RESOURCE_EXHAUSTED") as caught:
        run(TINY, tmp_path / "native", "orbax")
    assert len(str(caught.value)) < 600 and not list(tmp_path.iterdir())


def test_a_failed_conversion_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(orbax_directory, "save", lambda *args: (tmp_path / "no" / "x").touch())
    with pytest.raises(InputError, match="cannot write .*native: No such file or directory: /"):
        run(TINY, tmp_path / "native", "orbax")
    assert not list(tmp_path.iterdir())


def test_what_would_not_come_back_is_refused(tmp_path, monkeypatch):
    """A family whose tensors are turned on the way in, for which nothing turns them back."""

    def turned(source, config, num_predicting):
        def read(name, start, stop):
            rows = source.read(name, start, stop)
            return -rows if "q_proj" in name else rows

        return dataclasses.replace(source, read=read)

    monkeypatch.setattr(hf_directory, "tensors", turned)
    with pytest.raises(InputError, match="mixer/qkv would not come back as written: llama cannot"):
        run(TINY, tmp_path / "back", "hf")
    assert not list(tmp_path.iterdir())
