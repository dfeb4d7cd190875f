"""Each method does what it is for."""

import numpy as np
import pytest

from inference.checkpoints.native import blocks
from inference.quantize import folds
from inference.quantize.folds import Fold
from inference.quantize.methods import awq, llm_int8, percentile, rtn, smoothquant
from layers import quantized
from tests.inference.quantize import models


def as_int8(x_XD):
    return quantized.dequantize("int8", quantized.quantize("int8", x_XD), x_XD.shape[1])


def matrix(rng, rows=48, width=128):
    return rng.normal(size=(rows, width)).astype(np.float32)


@pytest.mark.parametrize("format", ["int3_g32", "int4_asym_g64", "int8", "mxfp4"])
@pytest.mark.parametrize("seed", range(2))
def test_awq_never_leaves_more_error_than_rounding(format, seed):
    rng = np.random.default_rng(seed)
    x_XD, value = models.inputs(rng, 500, 128), matrix(rng)
    fold = Fold((128,), ("w",), norm=("norm", None))
    values, inputs = {"w": value, "norm": np.ones(128, np.float32)}, {"w": models.seen_of(x_XD)}
    plain = quantized.numbers(format, rtn.groups(format, value))
    factors = awq.factors(fold, values, inputs, {"w": format})
    fold.apply(values, inputs, factors, "float32")
    scaled = quantized.numbers(format, rtn.groups(format, values["w"]))
    back = (values["norm"] * x_XD) @ (scaled - values["w"]).T
    assert np.linalg.norm(back) <= 1.001 * np.linalg.norm(x_XD @ (plain - value).T)
    clipped = quantized.numbers(format, awq.groups(format, values["w"], inputs["w"]))
    nearer = (values["norm"] * x_XD) @ (clipped - values["w"]).T
    assert np.linalg.norm(nearer) <= 1.001 * np.linalg.norm(back)
    if format in ("int3_g32", "int4_asym_g64"):  # with groups, whose scales are not powers of two
        assert np.linalg.norm(nearer) < 0.95 * np.linalg.norm(back)


def test_what_was_seen_follows_the_factors():
    rng = np.random.default_rng(0)
    x_XD = models.inputs(rng, 50, 16)
    factors = np.exp(rng.normal(size=16)).astype(np.float32)
    found, expected = models.seen_of(x_XD).scaled(factors), models.seen_of(x_XD * factors)
    for name in ("sum_D", "largest_D", "rows_RD", "products_DD"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-5)


def test_factors_of_a_head_are_those_of_all_its_queries():
    fold = Fold((6,), ("out",), rows=("qkv", slice(6, None)), head=3, copies=2)
    largest = np.arange(12.0)
    gathered = fold.gathered(largest, np.max)
    np.testing.assert_array_equal(gathered, [3, 4, 5, 9, 10, 11])
    np.testing.assert_array_equal(fold.spread(gathered), [3, 4, 5] * 2 + [9, 10, 11] * 2)
    stack = fold.gathered(np.stack([largest, largest + 1]), np.max)
    np.testing.assert_array_equal(stack, gathered + 1)


def planted(rng, factor=50.0):
    """Inputs of which one feature is much larger, and a matrix."""
    x_XD = rng.normal(size=(400, 128)).astype(np.float32)
    x_XD[:, 77] *= factor
    value = matrix(rng)
    value[:, 77] /= factor
    return x_XD, value


def test_an_outlier_ruins_rounded_activations_and_no_method_that_knows_of_it():
    rng = np.random.default_rng(0)
    x_XD, value = planted(rng)
    seen = models.seen_of(x_XD)
    rounded = quantized.numbers("w8a8", rtn.groups("w8a8", value))
    exact = x_XD @ value.T

    def off(found):
        return np.linalg.norm(found - exact) / np.linalg.norm(exact)

    ruined = off(as_int8(x_XD) @ rounded.T)
    assert ruined > 0.1

    parts = llm_int8.parts(value, seen)
    features = parts["features"]
    assert 77 in features and np.all(np.diff(features) > 0) and len(features) == 32
    assert parts["outliers"].shape == (48, 32)
    rest_FD = quantized.dequantize("w8a8", parts["int8"], 128)
    assert not rest_FD[:, features].any()
    rest_XD = x_XD.copy()
    rest_XD[:, features] = 0
    apart = x_XD[:, features] @ parts["outliers"].astype(np.float32).T
    assert off(as_int8(rest_XD) @ rest_FD.T + apart) < 0.02
    np.testing.assert_allclose(blocks.joined(parts, 128), value, atol=0.02)

    fold = Fold((128,), ("w",), norm=("norm", None))
    values, inputs = {"w": value, "norm": np.ones(128, np.float32)}, {"w": seen}
    factors = smoothquant.factors(fold, values, inputs, {"w": "w8a8"})
    fold.apply(values, inputs, factors, "float32")
    smooth = quantized.numbers("w8a8", rtn.groups("w8a8", values["w"]))
    assert off(as_int8(x_XD * values["norm"]) @ smooth.T) < 0.02


def test_percentile_clips_what_few_numbers_span():
    rng = np.random.default_rng(0)
    value = matrix(rng, 8, 4096)
    value[:, 5] = 400.0
    plain = quantized.numbers("int8", rtn.groups("int8", value))
    found = quantized.numbers("int8", percentile.groups("int8", value))
    rest = np.arange(4096) != 5
    assert np.abs(found - value)[:, rest].max() < 0.05 * np.abs(plain - value)[:, rest].max()
    assert (found[:, 5] < 10).all()


@pytest.mark.parametrize("format", ["int8", "int4_g32", "int3_asym_g32"])
def test_percentile_keeps_a_lone_number(format):
    value = np.zeros((2, 64), np.float32)
    value[0, 5] = 3.0
    found = quantized.numbers(format, percentile.groups(format, value))
    np.testing.assert_allclose(found, value, rtol=0.1)


def test_experts_have_factors_of_their_own():
    config = models.mixture()
    [fold] = [f for f in folds.of_layer(config, 0) if f.readers == ("ffn/experts/down",)]
    assert fold.shape == (4, 32)
    rng = np.random.default_rng(0)
    each = [models.seen_of(models.inputs(rng, 60, 32)) for _ in range(4)]
    seen = type(each[0])(*(np.stack([getattr(e, name) for e in each]) for name in (
        "count", "sum_D", "largest_D", "rows_RD", "products_DD")))  # fmt: skip
    values = {"ffn/experts/down": rng.normal(size=(4, 64, 32)).astype(np.float32)}
    for method in (awq, smoothquant):
        found = method.factors(fold, values, {"ffn/experts/down": seen},
                               {"ffn/experts/down": "int4_g32"})  # fmt: skip
        assert found.shape == (4, 32) and (found > 0).all()
        assert len({tuple(row) for row in found.round(6)}) == 4
