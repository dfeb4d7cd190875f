"""GPTQ beside a plain reading of its paper: column by column, each time with the whole inverse."""

import numpy as np
import pytest

from inference.quantize.methods import gptq, rtn
from layers import quantized
from tests.inference.quantize import models

FORMATS = ["int4_g32", "int3_g32", "int4_asym_g32", "int8", "fp8", "mxfp4"]


def by_columns(format, values_FD, products_DD):
    """The numbers of equation 3 of Frantar et al. 2022: the inverse over the columns left is formed
    anew for each.
    """
    F, D = values_FD.shape
    scale_FG, zero_FG = quantized.scales(format, values_FD)
    size = D // scale_FG.shape[1]
    damped = products_DD + 0.01 * np.diagonal(products_DD).mean() * np.eye(D)
    order, left = np.argsort(-np.diagonal(products_DD), kind="stable"), values_FD.astype(np.float64)
    found = np.empty((F, D), np.float32)
    for nth, column in enumerate(order):
        rest, group = order[nth:], slice(column // size, column // size + 1)
        inverse = np.linalg.inv(damped[np.ix_(rest, rest)])
        zero = None if zero_FG is None else zero_FG[:, group]
        groups = quantized.rounded(format, left[:, [column]], scale_FG[:, group], zero)
        found[:, column] = quantized.numbers(format, groups)[:, 0]
        error = (left[:, column] - found[:, column]) / inverse[0, 0]
        left[:, rest] -= np.outer(error, inverse[0])
    return found


@pytest.mark.parametrize("format", ["int3_g32", "int4_asym_g32", "int8"])
def test_it_is_what_the_paper_says(format):
    rng = np.random.default_rng(0)  # columns of two blocks
    seen = models.seen_of(models.inputs(rng, 400, 160))
    values = rng.normal(size=(24, 160)).astype(np.float32)
    groups = gptq.groups(format, values, seen)
    found = quantized.numbers(format, groups)
    np.testing.assert_array_equal(found, by_columns(format, values, seen.products_DD))
    again = quantized.unpack(format, quantized.pack(format, groups), 160)
    np.testing.assert_array_equal(quantized.numbers(format, again), found)


@pytest.mark.parametrize("format", FORMATS)
def test_inputs_that_go_apart_make_up_for_nothing(format):
    """With a diagonal H each column is rounded by itself."""
    rng = np.random.default_rng(1)
    values = rng.normal(size=(16, 64)).astype(np.float32)
    seen = models.seen_of(np.diag(np.exp(rng.normal(size=64))).astype(np.float32))
    found, plain = gptq.groups(format, values, seen), rtn.groups(format, values)
    np.testing.assert_array_equal(quantized.pack(format, found), quantized.pack(format, plain))


@pytest.mark.parametrize("format", ["int4_g32", "int3_g32"])
def test_results_are_nearer_than_those_of_rounding(format):
    rng = np.random.default_rng(2)
    x_XD = models.inputs(rng, 1000, 128)
    values = rng.normal(size=(64, 128)).astype(np.float32)

    def error(groups):
        return np.square(x_XD @ (quantized.numbers(format, groups) - values).T).sum()

    assert error(gptq.groups(format, values, models.seen_of(x_XD))) < 0.6 * error(
        rtn.groups(format, values)
    )


def test_columns_that_no_input_reaches_are_rounded_to_nearest():
    rng = np.random.default_rng(3)
    x_XD = models.inputs(rng, 200, 64)
    x_XD[:, ::2] = 0
    values = rng.normal(size=(8, 64)).astype(np.float32)
    found = gptq.groups("int4_g32", values, models.seen_of(x_XD))
    plain = rtn.groups("int4_g32", values)
    np.testing.assert_array_equal(found.q_FD[:, ::2], plain.q_FD[:, ::2])
