"""GGUF files of families with states: written by us, and read by us, by the package `gguf`, by
transformers and beside llama.cpp's converter.
"""

import dataclasses
import json
import os
import shutil
import subprocess
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from configs.errors import InputError
from configs.kinds.combined import Parallel
from configs.kinds.recurrent.mamba import Mamba2
from configs.model import ModelConfig
from inference.checkpoints import resolve
from inference.checkpoints.gguf import gguf_file, gguf_metadata
from inference.checkpoints.gguf.export import export_metadata, gguf_export
from layers import decoder, params
from layers.ragged import contiguous
from tests import compiling
from tests.inference.checkpoints.test_gguf_types import logits_of

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"
CASES = (
    "mamba-bias-tied", "mamba-rank-untied-float32", "mamba2-groups-bias-limit",
    "mamba2-one-group-tied-float32", "falcon_mamba-rank-untied-float32",
    "jamba-gqa-experts-bias", "jamba-mqa-dense-tied-float32", "lfm2-gqa-adjusted-bias-tied",
    "lfm2-mha-listed-untied-float32", "falcon_h1-gqa-multipliers-gate-norm",
    "falcon_h1-mha-no-norm-tied-float32", "falcon_h1-mqa-norm-gate-limit",
    "granitemoehybrid-mha-nope-dense-tied-float32", "granitemoehybrid-mqa-rope-experts",
    "nemotron_h-gqa-latent-experts", "nemotron_h-mha-bias-float32", "lfm2_moe-gqa-dense-bias-tied",
)  # fmt: skip


def expressible(config: ModelConfig) -> ModelConfig:
    """With the steps' limits and the order of gate and norm that llama.cpp knows."""
    least = 0.001 if config.family == "nemotron_h" else 0.0

    def changed(mixer):
        if isinstance(mixer, Mamba2):
            return dataclasses.replace(mixer, step_limits=(least, None), norms_first=False)
        if isinstance(mixer, Parallel):
            return dataclasses.replace(mixer, recurrent=changed(mixer.recurrent))
        return mixer

    pattern = [dataclasses.replace(own, mixer=changed(own.mixer)) for own in config.pattern]
    return dataclasses.replace(config, pattern=tuple(pattern))


def checkpoint(path: Path):
    own = resolve.resolve(str(path)).open(None)
    return dataclasses.replace(own, config=expressible(own.config))


def exact(own) -> tuple:
    """The model in float32, with the checkpoint's own numbers."""
    config = dataclasses.replace(own.config, dtype="float32", formats=())
    return config, own.exact().load_params(decoder.param_infos(config))


@pytest.mark.quick_code
@pytest.mark.parametrize("case", CASES)
def test_the_model_is_the_same(case, tmp_path, monkeypatch):
    """Up to the rounding of a rate and of its logarithm, and of factors that weights take up."""
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    file, original = tmp_path / "model.gguf", checkpoint(GOLDEN / case)
    gguf_export.write(original, file, "float32")
    found = checkpoint(file)
    assert found.config.family == original.config.family
    assert found.config.layers == export_metadata.renamed(original.config).layers
    one, two = exact(found), exact(original)
    np.testing.assert_allclose(logits_of(*one), logits_of(*two), rtol=0, atol=1e-5)
    if not export_metadata.writer_of(original.config).factors(original.config):
        expected = params.flatten(two[1])
        for path, values in params.flatten(one[1]).items():
            is_decay = path.endswith("/decay")
            np.testing.assert_allclose(values, expected[path], rtol=0, atol=is_decay * 1e-7)


# Keys without which llama.cpp loads no file, by architecture: those of its `load_arch_hparams`.
_SIZES = "context_length", "embedding_length", "block_count"
_SSM = (*_SIZES, "ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank")
_GROUPS, _NORM, _RMS = (
    "ssm.group_count", "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon",
)  # fmt: skip
REQUIRED = {
    **dict.fromkeys(("mamba", "jamba"), (*_SSM, _RMS)),
    **dict.fromkeys(("mamba2", "falcon-h1", "granitehybrid"), (*_SSM, _GROUPS, _RMS)),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), (*_SSM, _GROUPS, _NORM)),
    **dict.fromkeys(("lfm2", "lfm2moe"), (*_SIZES, "shortconv.l_cache", _RMS)),
}


def missing(fields: dict[str, gguf.ReaderField]) -> list[str]:
    """Required keys that a file has not."""
    name = fields["general.architecture"].contents()
    return [key for key in REQUIRED[name] if f"{name}.{key}" not in fields]


def layout(file: Path) -> dict[str, tuple]:
    """Of each tensor, by its name: its shape, its type and its numbers, as the package reads it."""
    return {
        tensor.name: (
            tensor.shape.tolist()[::-1],
            tensor.tensor_type.name,
            gguf.dequantize(tensor.data, tensor.tensor_type),
        )
        for tensor in gguf.GGUFReader(file).tensors
    }


@pytest.mark.parametrize("case", CASES)
def test_tensors_and_keys_are_those_of_the_package(case, tmp_path):
    """Every name is one that `gguf` lists for the architecture, and none is missing but biases."""
    file = tmp_path / "model.gguf"
    gguf_export.write(checkpoint(GOLDEN / case), file, "bfloat16")
    fields = gguf.GGUFReader(file).fields
    name = fields["general.architecture"].contents()
    architecture = {own: key for key, own in gguf.MODEL_ARCH_NAMES.items()}[name]
    tensors = gguf.MODEL_TENSORS[architecture]
    listed = {gguf.TENSOR_NAMES[tensor].format(bid="N") for tensor in tensors}
    found = layout(file)
    for own, (shape, kind, _) in found.items():
        stem = own.removesuffix(".weight").removesuffix(".bias")
        parts = stem.split(".")
        stem = ".".join(["blk", "N", *parts[2:]]) if parts[0] == "blk" else stem
        assert stem in listed, own
        is_float32 = len(shape) == 1 or not own.endswith(".weight") or stem.endswith(
            ("_norm", "ssm_conv1d", "shortconv.conv", "ffn_gate_inp")
        )  # fmt: skip
        assert kind == ("F32" if is_float32 else "BF16"), own
    known = {
        value.replace("{arch}", name)
        for group in vars(gguf.Keys).values() if isinstance(group, type)
        for value in vars(group).values() if isinstance(value, str)
    }  # fmt: skip
    assert {key for key in fields if key.startswith(f"{name}.")} <= known
    assert missing(fields) == []
    assert f"{name}.{_RMS}" in fields, "older llama.cpp loads no file without"


def test_a_state_space_layer_is_laid_out_as_in_llama_cpp(tmp_path):
    """By hand: gate, input, maps and steps in one tensor, rates instead of their logarithms, and a
    second axis of what each head or each group has.
    """
    own, file = checkpoint(GOLDEN / "mamba2-groups-bias-limit"), tmp_path / "model.gguf"
    gguf_export.write(own, file, "float32")
    stored = load_file(GOLDEN / "mamba2-groups-bias-limit" / "model.safetensors")
    stored = {name.removeprefix("backbone.layers.1.mixer."): np.asarray(values, np.float32)
              for name, values in stored.items()}  # fmt: skip
    found = {name: own[2] for name, own in layout(file).items()}
    np.testing.assert_array_equal(found["blk.1.ssm_in.weight"], stored["in_proj.weight"])
    np.testing.assert_array_equal(found["blk.1.ssm_in.bias"], stored["in_proj.bias"])
    np.testing.assert_array_equal(found["blk.1.ssm_conv1d.weight"], stored["conv1d.weight"][:, 0])
    np.testing.assert_array_equal(found["blk.1.ssm_dt.bias"], stored["dt_bias"])
    np.testing.assert_array_equal(found["blk.1.ssm_d"], stored["D"][:, None])
    np.testing.assert_allclose(found["blk.1.ssm_a"], -np.exp(stored["A_log"])[:, None], rtol=1e-6)
    np.testing.assert_array_equal(
        found["blk.1.ssm_norm.weight"], stored["norm.weight"].reshape(3, 16)
    )


BIASED = (
    "falcon_h1-gqa-multipliers-gate-norm", "lfm2-gqa-adjusted-bias-tied", "mamba-bias-tied",
    "lfm2_moe-gqa-dense-bias-tied",
)  # fmt: skip


def converted(case: str, folder: Path) -> Path:
    """A directory as llama.cpp's converter knows it: kinds of layers by their older names, and no
    biases that it has no place for, or scales as if they were weights.
    """
    shutil.copytree(GOLDEN / case, folder)
    raw = json.loads((folder / "config.json").read_text())
    if indices := raw.get("full_attn_idxs"):
        kinds = {True: "full_attention", False: "conv"}
        raw["layer_types"] = [kinds[n in indices] for n in range(raw["num_hidden_layers"])]
    if case.startswith("granite"):
        older = {"full_attention": "attention", "linear_attention": "mamba"}
        raw["layer_types"] = [older.get(kind, kind) for kind in raw["layer_types"]]
        raw["position_embedding_type"] = "nope"  # its converter knows no hybrid that turns
        if not raw["num_local_experts"]:  # published files have both widths alike
            raw["intermediate_size"] = raw["shared_intermediate_size"]
    if case in BIASED:
        raw |= {f"{p}_bias": False for p in ("attention", "mamba_proj", "mlp", "conv", "use")}
        raw["projectors_bias"] = False
        stored = load_file(folder / "model.safetensors")
        is_own = ("conv1d.bias", "dt_proj.bias")
        biased = [n for n in stored if n.endswith(".bias") and not n.endswith(is_own)]
        kept = {name: values for name, values in stored.items() if name not in biased}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


# Those that its converter takes: others expand by something else than 2, state no width of their
# states, or have dense layers beside experts.
ITS_OWN = [case for case in CASES if case not in (
    "mamba-rank-untied-float32", "falcon_mamba-rank-untied-float32",
    "falcon_h1-mha-no-norm-tied-float32", "nemotron_h-gqa-latent-experts",
)]  # fmt: skip


@pytest.mark.long
@pytest.mark.skipif(
    not {"LLAMA_CPP_SOURCE", "GOLDEN_PYTHON"} <= os.environ.keys(),
    reason="llama.cpp's converter: LLAMA_CPP_SOURCE= and GOLDEN_PYTHON=",
)
def test_llama_cpp_converts_to_the_same_tensors(tmp_path):
    """Of each directory the same names, shapes and numbers, and the same values of the keys that
    both have: it writes some that nothing reads.
    """
    folders = {case: converted(case, tmp_path / case) for case in ITS_OWN}
    files = {case: tmp_path / f"{case}.theirs.gguf" for case in ITS_OWN}
    paths = [str(path) for case in ITS_OWN for path in (folders[case], files[case])]
    command = [os.environ["GOLDEN_PYTHON"], "tests/golden/convert_gguf.py"]
    subprocess.run([*command, os.environ["LLAMA_CPP_SOURCE"], *paths], cwd=ROOT, check=True)
    for case in ITS_OWN:
        ours, theirs = tmp_path / f"{case}.gguf", files[case]
        gguf_export.write(checkpoint(folders[case]), ours, "float32")
        one, two = layout(ours), layout(theirs)
        assert one.keys() == two.keys(), case
        for name, (shape, kind, values) in one.items():
            assert shape == two[name][0] and kind == two[name][1], (case, name)
            np.testing.assert_allclose(values, two[name][2], rtol=2e-7, err_msg=f"{case} {name}")
        fields = [gguf.GGUFReader(path).fields for path in (ours, theirs)]
        assert [missing(own) for own in fields] == [[], []], case
        for key in fields[0].keys() & fields[1].keys():
            if key.startswith(("general.", "GGUF.")) or key.endswith("context_length"):
                continue
            assert fields[0][key].contents() == fields[1][key].contents(), (case, key)
        read = gguf_metadata.read_config(gguf_file.open_gguf(theirs))
        assert read.layers == checkpoint(ours).config.layers, case


@pytest.mark.long
@pytest.mark.skipif("GOLDEN_PYTHON" not in os.environ, reason="transformers: GOLDEN_PYTHON=")
@pytest.mark.parametrize("case", ["mamba-bias-tied", "lfm2-mha-listed-untied-float32"])
def test_transformers_computes_the_same_logits_from_the_file(case, tmp_path):
    """Of the families with states those that its own reader of such files knows."""
    folder = GOLDEN / case if case.startswith("lfm2") else converted(case, tmp_path / case)
    gguf_export.write(checkpoint(folder), tmp_path / "bare.gguf", "float32")
    file = rewritten(tmp_path / "bare.gguf", tmp_path / "model.gguf", num_tokens=29)
    command = [os.environ["GOLDEN_PYTHON"], "tests/golden/load_gguf.py", str(file)]
    subprocess.run(command, cwd=ROOT, check=True)
    theirs = np.load(file.with_suffix(".npz"))
    config, loaded = exact(checkpoint(file))
    found = compiling.call(
        lambda loaded: decoder.logits(
            loaded,
            config,
            decoder.forward(loaded, config, theirs["tokens"], contiguous(1, 40))[0],
        ),
        loaded,
    )
    np.testing.assert_allclose(found, theirs["logits"], rtol=0, atol=1e-4)


def test_decays_stay_as_they_are_stored(tmp_path, monkeypatch):
    """Others are rounded to bfloat16, once: a rate is the exponential of an exponential."""
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    gguf_export.write(checkpoint(GOLDEN / "mamba2-one-group-tied-float32"), file, "float32")
    own = checkpoint(file)
    rounded, stored = (
        params.flatten(load(decoder.param_infos(dataclasses.replace(own.config, dtype="float32"))))
        for load in (own.load_params, own.exact().load_params)
    )
    for path in stored:
        is_kept = path.endswith(("/decay", "/skip", "/step_bias"))
        assert np.array_equal(rounded[path], stored[path]) == is_kept or path.endswith("norm"), path


def rewritten(file: Path, target: Path, num_tokens: int = 0, **changes) -> Path:
    """A file with some keys, by their names without the architecture's, or tensors changed (None
    drops one), and with names of so many tokens.
    """
    reader = gguf.GGUFReader(file)
    name = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, name)
    values = {
        key: (field.contents(), field.types[0], field.types[-1])
        for key, field in reader.fields.items()
        if key.startswith(f"{name}.")
    }
    for key, (value, kind, item) in values.items():
        own = key.removeprefix(f"{name}.")
        value = changes.get(own, value)
        if value is not None:
            is_list = kind == gguf.GGUFValueType.ARRAY
            writer.add_key_value(key, value, kind, item if is_list else None)
    if num_tokens:
        writer.add_token_list([f"token {number}" for number in range(num_tokens)])
    for tensor in reader.tensors:
        data = changes.get(tensor.name, np.array(tensor.data))
        if data is not None:
            writer.add_tensor(tensor.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


BAD = {
    "group": ("mamba2-one-group-tied-float32", {"ssm.group_count": 3}, "is no multiple of"),
    "taps": ("lfm2-mha-listed-untied-float32", {"shortconv.l_cache": None}, "l_cache is missing"),
    "heads": (
        "jamba-mqa-dense-tied-float32", {"attention.head_count_kv": [1, 0, 0]},
        "attention.head_count_kv must list 2 integers from 0",
    ),
    "shape": (
        "mamba2-one-group-tied-float32", {"blk.1.ssm_d": np.ones((5, 1), np.float32)},
        r"'blk.1.ssm_d' is \[5, 1\]; expected \[4, 1\]",
    ),
    "growth": (
        "mamba2-one-group-tied-float32", {"blk.1.ssm_a": np.ones((4, 1), np.float32)},
        "'blk.1.ssm_a' holds a rate that lets a state grow",
    ),
    "absent": (
        "mamba-rank-untied-float32", {"blk.0.ssm_x.weight": None},
        "tensor 'blk.0.ssm_x.weight' is missing",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_an_unsound_file_is_named(case, tmp_path):
    name, changes, message = BAD[case]
    gguf_export.write(checkpoint(GOLDEN / name), tmp_path / "model.gguf", "float32")
    file = rewritten(tmp_path / "model.gguf", tmp_path / "changed.gguf", **changes)
    with pytest.raises(InputError, match=message) as caught:
        exact(resolve.resolve(str(file)).open(None))
    assert "\n" not in str(caught.value)


def test_axes_of_one_element_may_be_left_out(tmp_path):
    """As where a file was quantized by llama.cpp."""
    name, file = "mamba2-one-group-tied-float32", tmp_path / "model.gguf"
    gguf_export.write(checkpoint(GOLDEN / name), file, "float32")
    norm = layout(file)["blk.0.ssm_norm.weight"][2].reshape(-1)
    changed = rewritten(file, tmp_path / "x.gguf", **{"blk.0.ssm_norm.weight": norm})
    found = params.flatten(exact(checkpoint(changed))[1])
    np.testing.assert_array_equal(found["layers/0/mixer/out_norm"], norm)


def test_biases_may_have_an_axis_of_one_element_more(tmp_path):
    name, file = "mamba2-groups-bias-limit", tmp_path / "model.gguf"
    gguf_export.write(checkpoint(GOLDEN / name), file, "float32")
    bias = layout(file)["blk.1.ssm_in.bias"][2]
    changed = rewritten(file, tmp_path / "x.gguf", **{"blk.1.ssm_in.bias": bias[None]})
    found, expected = (params.flatten(exact(checkpoint(own))[1]) for own in (changed, file))
    for path in ("in_bias", "gates_bias"):
        path = f"layers/1/mixer/{path}"
        np.testing.assert_array_equal(found[path], expected[path])


REFUSED = {
    "falcon_mamba-bias-tied": "model.pattern has no place",
    "bamba-mqa-groups-bias-limit": "the family bamba is not written as .gguf; valid:",
    "minimax-gqa-factors": "the family minimax is not written as .gguf; valid:",
    "mamba2-groups-bias-limit": "model.pattern has no place",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_place_is_named(case, tmp_path):
    with pytest.raises(InputError) as caught:
        gguf_export.write(resolve.resolve(str(GOLDEN / case)).open(None), tmp_path / "x.gguf")
    assert REFUSED[case] in str(caught.value) and "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_factors_on_one_table_are_named(tmp_path):
    own = checkpoint(GOLDEN / "falcon_h1-mha-no-norm-tied-float32")
    own = dataclasses.replace(own, config=dataclasses.replace(own.config, logit_scale=0.5))
    with pytest.raises(InputError, match="act on one table"):
        gguf_export.write(own, tmp_path / "x.gguf")
