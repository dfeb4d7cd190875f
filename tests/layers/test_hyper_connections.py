"""Several residual streams beside numpy."""

import dataclasses

import numpy as np
import pytest

from configs.errors import InputError
from configs.kinds.hyper_connections import HyperConnections
from configs.kinds.layer_inputs import LayerInputs
from layers import hyper_connections
from tests import compiling, fakes

pytestmark = pytest.mark.quick_code

M, D, T = 3, 10, 7
KIND = HyperConnections(M, iterations=4, eps=1e-3)


def _case(rows, factors):
    rng = np.random.default_rng(rows)
    weights = {
        "weights": rng.normal(0, 0.3, (rows, M * D)),
        "biases": rng.normal(0, 1, rows),
        "factors": rng.normal(1, 0.3, factors),
    }
    return {name: value.astype(np.float32) for name, value in weights.items()}


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _logits(weights, x_TMD, factors_X):
    x_TX = x_TMD.reshape(T, -1).astype(np.float64)
    x_TX = x_TX / np.sqrt((x_TX**2).mean(1, keepdims=True) + 1e-5)
    return x_TX @ weights["weights"].T * factors_X + weights["biases"]


def test_what_is_read_and_what_is_left_are_the_definition():
    weights, config = _case((2 + M) * M, 3), fakes.llama(norm_eps=1e-5)
    rng = np.random.default_rng(1)
    x_TMD = rng.normal(0, 1, (T, M, D)).astype(np.float32)
    out_TD = rng.normal(0, 1, (T, D)).astype(np.float32)

    def run(weights, x_TMD, out_TD):
        read_TD, connections = hyper_connections.read(weights, config, KIND, x_TMD)
        return read_TD, hyper_connections.added(x_TMD, out_TD, connections), connections.mix_TMM

    read_TD, left_TMD, mix_TMM = compiling.call(run, weights, x_TMD, out_TD)
    factors_X = np.repeat(weights["factors"], (M, M, M * M))
    logits_TX = _logits(weights, x_TMD, factors_X)
    sums_TM = _sigmoid(logits_TX[:, :M]) + KIND.eps
    np.testing.assert_allclose(read_TD, np.einsum("tm,tmd->td", sums_TM, x_TMD), atol=1e-5)
    mix = np.exp(logits_TX[:, 2 * M :].reshape(T, M, M))
    mix = mix / mix.sum(2, keepdims=True) + KIND.eps
    mix /= mix.sum(1, keepdims=True) + KIND.eps
    for _ in range(KIND.iterations - 1):
        mix /= mix.sum(2, keepdims=True) + KIND.eps
        mix /= mix.sum(1, keepdims=True) + KIND.eps
    np.testing.assert_allclose(mix_TMM, mix, atol=1e-5)
    added_TM = 2 * _sigmoid(logits_TX[:, M : 2 * M])
    expected = added_TM[:, :, None] * out_TD[:, None] + np.einsum("tjk,tjd->tkd", mix, x_TMD)
    np.testing.assert_allclose(left_TMD, expected, atol=1e-5)


def test_the_last_streams_become_one():
    weights, config = _case(M, 1), fakes.llama(norm_eps=1e-5)
    x_TMD = np.random.default_rng(2).normal(0, 1, (T, M, D)).astype(np.float32)
    found = compiling.call(
        lambda weights, x: hyper_connections.closed(weights, config, KIND, x), weights, x_TMD
    )
    sums_TM = _sigmoid(_logits(weights, x_TMD, weights["factors"])) + KIND.eps
    np.testing.assert_allclose(found, np.einsum("tm,tmd->td", sums_TM, x_TMD), atol=1e-5)


def test_a_model_counts_them():
    plain = fakes.llama()
    model = dataclasses.replace(plain, hyper_connections=KIND)
    width = model.width
    more = sum(model.vectors.values()) - sum(plain.vectors.values())
    parts, rows = 2 * model.num_layers, (2 + M) * M
    assert more == parts * (rows + 3) + M + 1  # biases and factors; of the last streams, too
    products = {o.name: (o, count) for o, count in model.operations.items()}
    product, count = products["hyper.weights"]
    assert count == parts and product.flops == ((2 * rows * M * width, ("tokens",)),)
    assert products["last_hyper.weights"][1] == 1 and products["hyper.mix"][1] == parts
    assert not {"hyper.mix", "last_hyper.mix"} & {o.name for o in plain.operations}


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda: HyperConnections(0), "num_streams is at least 1, not 0"),
        (lambda: HyperConnections(2, iterations=0), "iterations is at least 1, not 0"),
        (
            lambda: fakes.llama(hyper_connections=KIND, layer_inputs=LayerInputs(6)),
            "go without factors",
        ),
    ],
)
def test_what_does_not_go_together_is_named(make, cause):
    with pytest.raises(InputError, match=cause):
        make()
