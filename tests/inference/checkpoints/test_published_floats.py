"""NVFP4, MXFP8 and MXFP4 as ModelOpt, compressed-tensors and Quark publish them: kept as they are,
exact to the last bit, each module by its own scheme.
"""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from configs.errors import InputError
from inference.checkpoints import resolve
from inference.checkpoints.hf.quantized import modelopt
from layers import quantized
from tests.inference.checkpoints import published
from tests.inference.checkpoints.published import E4M3
from tests.layers import native

pytestmark = pytest.mark.quick_code
RAW = published.QWEN3_MOE | {"moe_intermediate_size": 64}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))


def of_e2m1(ratios):
    """Codes of the nearest numbers, two a byte, and the numbers."""
    size = np.abs(np.abs(ratios)[..., None] - E2M1).argmin(-1).astype(np.uint8)
    codes = size | (np.signbit(ratios).astype(np.uint8) << 3)
    numbers = np.where(codes < 8, E2M1[size], -E2M1[size]).astype(np.float32)
    return codes[:, ::2] | codes[:, 1::2] << 4, numbers


def nvfp4(values, divides=False):
    F, D = values.shape
    whole = np.float32(np.abs(values).max() / (448 * 6))
    groups = values.reshape(F, D // 16, 16)
    scale = (np.abs(groups).max(-1) / 6 / whole).astype(E4M3)
    stored = np.float32(1) / whole if divides else whole  # the reciprocal is what is read
    whole = np.float32(1) / stored if divides else whole
    factor = (scale.astype(np.float32) * whole)[..., None]
    packed, numbers = of_e2m1((groups / np.where(factor == 0, 1, factor)).reshape(F, D))
    numbers = (numbers.reshape(groups.shape) * factor).reshape(F, D)
    if divides:
        return {
            "weight_packed": packed, "weight_scale": scale,
            "weight_global_scale": np.array([stored]), "input_global_scale": np.array([stored]),
        }, numbers  # fmt: skip
    return {
        "weight": packed, "weight_scale": scale, "weight_scale_2": np.array(stored),
        "input_scale": np.array(stored),
    }, numbers  # fmt: skip


def powers(values, bits, codes_name):
    F, D = values.shape
    groups = values.reshape(F, D // 32, 32)
    exponent = np.floor(np.log2(np.abs(groups).max(-1))).astype(int) - (8 if bits == 8 else 2)
    factor = np.exp2(exponent).astype(np.float32)[..., None]
    ratios = (groups / factor).reshape(F, D)
    codes, numbers = of_e2m1(ratios) if bits == 4 else (c := ratios.clip(-448, 448).astype(E4M3), c)
    numbers = numbers.astype(np.float32).reshape(groups.shape) * factor
    return {
        codes_name: codes, "weight_scale": (exponent + 127).astype(np.uint8)
    }, numbers.reshape(F, D)  # fmt: skip


def fp8(values):
    scale = np.float32(np.abs(values).max() / 448)
    codes = (values / scale).astype(E4M3)
    arrays = {"weight": codes, "weight_scale": np.array(scale), "input_scale": np.array(scale)}
    return arrays, codes.astype(np.float32) * scale


def compressed(name, format, **weights):
    weights = {"type": "float", "symmetric": True, "dynamic": False} | weights
    local = {"num_bits": 4, "type": "float", "dynamic": "local", "strategy": "tensor_group"}
    return {
        "targets": [name], "weights": weights, "format": format, "input_activations": local,
    }  # fmt: skip


NVFP4_GROUP = compressed(
    "Linear", "nvfp4-pack-quantized", num_bits=4, group_size=16, strategy="tensor_group"
)
CASES = {
    "modelopt": (
        nvfp4, "nvfp4",
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.mlp.gate"],
         "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
    ),
    "compressed-tensors": (
        lambda values: nvfp4(values, divides=True), "nvfp4",
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
         "config_groups": {"group_0": NVFP4_GROUP}, "ignore": ["lm_head", "re:.*mlp.gate$"]},
    ),
    "modelopt mxfp8": (
        lambda values: powers(values, 8, "weight"), "mxfp8",
        {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]},
    ),
    "compressed-tensors mxfp8": (
        lambda values: powers(values, 8, "weight"), "mxfp8",
        {"quant_method": "compressed-tensors", "format": "mxfp8-quantized",
         "config_groups": {"group_0": compressed("Linear", "mxfp8-quantized", num_bits=8,
                                                 group_size=32, strategy="group")},
         "ignore": ["lm_head", "re:.*mlp.gate$"]},
    ),
    "quark": (
        lambda values: powers(values, 4, "weight"), "mxfp4",
        {"quant_method": "quark", "exclude": ["lm_head", "*.mlp.gate"],
         "global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group", "ch_axis": -1,
                                            "group_size": 32, "scale_format": "e8m0"},
                                 "input_tensors": {"dtype": "fp4", "is_dynamic": True}}},
    ),
    "compressed-tensors mxfp4": (
        lambda values: powers(values, 4, "weight_packed"), "mxfp4",
        {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
         "config_groups": {"group_0": compressed("Linear", "mxfp4-pack-quantized", num_bits=4,
                                                 group_size=32, strategy="group")},
         "ignore": ["lm_head", "re:.*mlp.gate$"]},
    ),
}  # fmt: skip


def written(tmp_path, encode, described):
    def of_linear(module, values):
        return encode(module, values) if published.is_linear(module) else None

    tensors = published.drawn(RAW, tmp_path)
    return published.write(tmp_path, RAW, tensors, of_linear, described)


@pytest.mark.parametrize("case", CASES)
def test_blocks_and_logits_are_those_of_the_definition_to_the_last_bit(case, tmp_path):
    native.need()
    encode, format, described = CASES[case]
    stored, plain = written(tmp_path, lambda _, values: encode(values), described)
    checkpoint = resolve.resolve(str(stored)).open(None)
    formats = dict(checkpoint.config.formats)
    assert len(formats) == 8 and set(formats.values()) == {(format,)}
    source = checkpoint.contents().source
    for name, numbers in load_file(plain / "model.safetensors").items():
        np.testing.assert_array_equal(source.read(name, 0, len(numbers)), numbers)
        if name in source.formats:
            blocks = source.read_blocks(name)
            np.testing.assert_array_equal(
                quantized.dequantize(format, blocks, numbers.shape[1]), numbers
            )
    if format != "mxfp4":  # beside which the kernels round activations
        np.testing.assert_array_equal(published.scores(stored), published.scores(plain))


def mixed(module, values):
    if "experts" in module:
        return nvfp4(values)
    return fp8(values) if "self_attn" in module else None


LAYERS = {
    **{f"model.layers.{layer}.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16}
       for layer in (0, 1)},
    **{f"model.layers.{layer}.self_attn.{part}_proj": {"quant_algo": "FP8"}
       for layer in (0, 1) for part in "qkvo"},
}  # fmt: skip
MIXED = {"quant_algo": "MIXED_PRECISION", "quantized_layers": LAYERS}


def test_each_module_has_its_own_scheme(tmp_path):
    """ModelOpt's MIXED_PRECISION, in `hf_quant_config.json` alone, and groups with targets."""
    native.need()
    stored, plain = written(tmp_path / "one", mixed, {})
    (stored / modelopt.FILE).write_text(json.dumps({"quantization": MIXED}))
    groups = {
        "group_0": NVFP4_GROUP | {"targets": ["re:.*experts.*"]},
        "group_1": compressed("re:.*self_attn.*", "float-quantized", num_bits=8, strategy="tensor")
        | {"input_activations": {"dynamic": False, "num_bits": 8, "type": "float"}},
    }
    other, _ = written(
        tmp_path / "two",
        lambda module, values: (
            nvfp4(values, True) if "experts" in module else mixed(module, values)
        ),
        {"quant_method": "compressed-tensors", "format": "mixed-precision",
         "config_groups": groups, "ignore": ["lm_head"]},
    )  # fmt: skip
    for folder in (stored, other):
        formats = dict(resolve.resolve(str(folder)).open(None).config.formats)
        assert formats == {
            "layers/0/mixer/qkv": ("fp8",), "layers/0/mixer/out": ("fp8",),
            "layers/1/mixer/qkv": ("fp8",), "layers/1/mixer/out": ("fp8",),
            "layers/1/ffn/experts/gate_up": ("nvfp4",), "layers/1/ffn/experts/down": ("nvfp4",),
        }  # fmt: skip
    np.testing.assert_allclose(published.scores(stored), published.scores(plain), atol=1e-5)


WRONG = {
    "algorithm": ({"quant_algo": "NVFP2"}, "quant_algo='NVFP2' is not served; valid: NVFP4"),
    "group": ({"group_size": 32}, "group_size=32: NVFP4 has 16"),
    "no layers": ({"quant_algo": "MIXED_PRECISION"}, "needs quantized_layers"),
    "no algorithm": ({"quant_algo": None}, "quant_algo=None is not served"),
    "other file": ({"quant_algo": "FP8"}, "hf_quant_config.json says 'NVFP4'; weights are"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_described_in_half_or_twice_is_one_line(case, tmp_path):
    changes, message = WRONG[case]
    stored, _ = written(tmp_path, lambda _, values: nvfp4(values), CASES["modelopt"][2] | changes)
    if case == "other file":
        other = {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}
        (stored / modelopt.FILE).write_text(json.dumps(other))
    with pytest.raises(InputError) as caught:
        resolve.resolve(str(stored))
    assert message in str(caught.value) and "\n" not in str(caught.value)


# What Quark writes as `algo_config`, and what is wrong with it; None: the weights are all of it.
ROTATION = {
    "name": "rotation", "r1": True, "r2": True, "r3": True, "r4": False,
    "online_r1_rotation": False, "rotation_size": None,
}  # fmt: skip
ALGORITHMS = {
    "none": (None, None),
    "an empty list": ([], None),
    "in weights": ([{"name": "smooth", "alpha": 0.5}, {"name": "gptq", "desc_act": True}], None),
    "one alone": ({"name": "awq", "scaling_layers": []}, None),
    "a merged rotation": ([ROTATION], None),
    "R1 of activations": ([ROTATION | {"online_r1_rotation": True}],
                          "rotation: online_r1_rotation=True: activations that are rotated at run"),
    "R4": ([{"name": "awq"}, ROTATION | {"r4": True}], "rotation: r4=True: activations"),
    "R4 by default": ([{"name": "quarot"}], "quarot: r4=True: activations that are rotated"),
    "layers by name": ([ROTATION | {"online_config": {"online_rotation_layers": ["q_proj"]}}],
                       "rotation: online_config: online_rotation_layers=['q_proj'] is not"),
    "matrices of low rank": ([{"name": "svdquant"}], "name='svdquant' is not supported; valid:"),
    "no name": ([{}], "name='' is not supported; valid: awq"),
    "no object": (["awq"], "an algorithm must be an object, not 'awq'"),
}  # fmt: skip


@pytest.mark.parametrize("case", ALGORITHMS)
def test_an_algorithm_of_quark_that_does_more_than_weights_say_is_one_line(case, tmp_path):
    algorithms, message = ALGORITHMS[case]
    _, format, described = CASES["quark"]
    described = described | {"algo_config": algorithms}
    stored, _ = written(tmp_path, lambda _, values: powers(values, 4, "weight"), described)
    if message is None:
        formats = dict(resolve.resolve(str(stored)).open(None).config.formats)
        assert set(formats.values()) == {(format,)}
        return
    with pytest.raises(InputError) as caught:
        resolve.resolve(str(stored))
    assert f"quantization_config: algo_config: {message}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_descriptions_in_one_file_that_differ(tmp_path):
    stored, _ = written(tmp_path, lambda _, values: nvfp4(values), CASES["modelopt"][2])
    raw = json.loads((stored / "config.json").read_text())
    raw["compression_config"] = CASES["compressed-tensors"][2]
    (stored / "config.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match="quantization_config and compression_config differ"):
        resolve.resolve(str(stored))


TENSORS = {
    "no scale of the tensor": (
        lambda name, tensors: tensors.pop(f"{name}.weight_scale_2"),
        "q_proj' needs one of weight_scale_2 and weight_global_scale as fp4 in groups of 16",
    ),
    "both": (
        lambda name, tensors: tensors.update(
            {f"{name}.weight_global_scale": np.ones(1, np.float32)}
        ),
        "q_proj' needs one of weight_scale_2 and weight_global_scale",
    ),
    "scales of another type": (
        lambda name, tensors: tensors.update(
            {f"{name}.weight_scale": tensors[f"{name}.weight_scale"].astype(ml_dtypes.bfloat16)}
        ),
        "q_proj.weight_scale' is bfloat16; expected float8_e4m3fn",
    ),
    "scales of another shape": (
        lambda name, tensors: tensors.update(
            {f"{name}.weight_scale": np.ascontiguousarray(tensors[f"{name}.weight_scale"][:, :5])}
        ),
        "q_proj.weight_scale' is [192, 5]; expected [192, 10] for fp4 in groups of 16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_a_tensor_that_does_not_fit_is_named(case, tmp_path):
    change, message = TENSORS[case]
    stored, _ = written(tmp_path, lambda _, values: nvfp4(values), CASES["modelopt"][2])
    name = "model.layers.0.self_attn.q_proj"
    published.edited(stored, lambda tensors: change(name, tensors))
    with pytest.raises(InputError) as caught:
        resolve.resolve(str(stored)).open(None)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def changed(name, position, value):
    """A change of one value of a tensor of `q_proj`, as bytes where it is no float32."""

    def change(tensors):
        tensor = tensors[f"model.layers.0.self_attn.q_proj.{name}"]
        (tensor if tensor.dtype == np.float32 else tensor.view(np.uint8))[position] = value

    return change


# The case above, changes, and the tensor and what is wrong with it; None: nothing.
NUMBERS = {
    "divided by 0": (
        "compressed-tensors", [("weight_global_scale", 0, 0)],
        "q_proj.weight_global_scale' is 0; valid: a number but 0, with a finite inverse",
    ),
    "divided by next to 0": (
        "compressed-tensors", [("weight_global_scale", 0, 1e-45)],
        "q_proj.weight_global_scale' is 1.4013e-45; valid: a number but 0",
    ),
    "no factor": (
        "modelopt", [("weight_scale_2", (), np.inf)],
        "q_proj.weight_scale_2' is inf; valid: a finite number",
    ),
    "multiplied by 0": ("modelopt", [("weight_scale_2", (), 0)], None),
    "a factor that is too large": (
        "modelopt", [("weight_scale_2", (), 1e38)], "q_proj.weight_scale' multiplies a group by "
    ),
    "e4m3 that is no number": (
        "modelopt", [("weight_scale", (3, 1), 0x7F)],
        "q_proj.weight_scale' multiplies a group by nan",
    ),
    "2^126 with 6": (
        "quark", [("weight_scale", (3, 1), 253), ("weight", (3, 20), 0x70)],
        "q_proj.weight_scale' multiplies a group by 8.50706e+37, and a number of it is "
        "then not finite; valid: 5.671e+37 at most",
    ),
    "2^126 with 3 at most": (
        "quark", [("weight_scale", (3, 1), 253), ("weight", (3, slice(16, 32)), 0x5D)], None
    ),
    "2^120 with -448": (
        "modelopt mxfp8", [("weight_scale", (3, 1), 247), ("weight", (3, 40), 0xFE)],
        "q_proj.weight_scale' multiplies a group by 1.32923e+36, and a number of it is "
        "then not finite; valid: 7.596e+35 at most",
    ),
    "2^127 with 1 at most": (
        "modelopt mxfp8", [("weight_scale", (3, 1), 254), ("weight", (3, slice(32, 64)), 0x38)],
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NUMBERS)
def test_a_scale_beyond_float32_is_named(case, tmp_path):
    method, changes, message = NUMBERS[case]
    encode, _, described = CASES[method]
    stored, _ = written(tmp_path, lambda _, values: encode(values), described)
    for change in changes:
        published.edited(stored, changed(*change))
    source = resolve.resolve(str(stored)).open(None).contents().source
    name = "model.layers.0.self_attn.q_proj.weight"
    for read in (source.read_blocks, lambda name: source.read(name, 0, source.shapes[name][0])):
        if message is None:
            read(name)
            continue
        with pytest.raises(InputError) as caught:
            read(name)
        assert message in str(caught.value) and "\n" not in str(caught.value)
    if message is None:
        assert np.isfinite(source.read(name, 0, source.shapes[name][0])).all()
