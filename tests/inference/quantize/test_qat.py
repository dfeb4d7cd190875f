"""Training with numbers of few bits: what the forward pass sees, and what gradients reach."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.recipes import few_bits
from configs.recipes.training import Distillation
from inference.quantize import straight_through
from inference.training import distillation, loop, losses
from inference.training.windows import Windows
from layers import decoder, params, quantized
from layers.quantized import OURS
from tests import compiling, fakes
from tests.inference.quantize import models

pytestmark = pytest.mark.quick_code


@pytest.mark.parametrize("format", OURS)
def test_numbers_are_those_that_are_stored(format):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(40, 256)).astype(np.float32)
    values[3, :128] = 0
    values[5] = np.abs(values[5])
    expected = quantized.dequantize(format, quantized.quantize(format, values), 256)
    rounded = jax.jit(lambda x: straight_through.rounded(format, x))
    np.testing.assert_array_equal(rounded(values), expected)
    stack = np.asarray(rounded(values.reshape(4, 10, 256)))
    np.testing.assert_array_equal(stack.reshape(40, 256), expected)


def test_gradients_pass_the_rounding():
    config = models.llama()
    masters = fakes.real_params(config)
    formats = {"layers/0/mixer/out": "int3_g32"}
    student = straight_through.student(config, formats)

    @jax.jit
    def loss(values):
        return sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(student(values, None)))

    slopes = params.flatten(jax.grad(loss)(masters), lambda _: False)
    stored = params.flatten(jax.jit(student)(masters, None), lambda _: False)
    path = "layers/0/mixer/out"
    np.testing.assert_allclose(slopes[path], 2 * stored[path], rtol=1e-6)
    assert not np.allclose(stored[path], params.flatten(masters, lambda _: False)[path])
    assert len({*np.unique(np.asarray(stored[path][0, :32]).round(5))}) <= 8


def test_training_brings_the_laws_nearer():
    config = models.llama()
    formats = few_bits.formats(config, "int3_g32", ["embed", "head"])
    full = fakes.real_params(config)
    student = straight_through.student(config, formats)
    tokens = np.random.default_rng(0).integers(0, models.VOCAB, 2000).astype(np.int32)
    training = Distillation(
        steps=30, batch=8, window=24, learning_rate=3e-3, warmup_steps=2, weight_decay=0.0
    )
    loss = distillation.from_memory(config, config, training, student)
    seen = []
    masters = jax.tree.map(jnp.array, full)
    loop.train(
        loss, masters, Windows(tokens, 24, 8, 0), training, frozen=full,
        observe=lambda so_far: seen.append(so_far[-1]),
    )  # fmt: skip
    assert np.mean(seen[-5:]) < 0.7 * seen[0]


def test_a_student_without_formats_says_what_the_model_says():
    config = dataclasses.replace(models.llama(), num_layers=1)
    full = fakes.real_params(config)
    batch = {"tokens": np.random.default_rng(0).integers(0, models.VOCAB, (2, 13), np.int32)}
    student = straight_through.student(config, {})
    training = Distillation(steps=1, batch=2, window=12)
    loss = compiling.jit(distillation.from_memory(config, config, training, student))
    assert abs(float(loss(full, full, batch))) < 1e-6
    other = jax.tree.map(lambda leaf: leaf * 1.1, full)

    @compiling.jit
    def law(own):
        tokens_T, every = batch["tokens"][:, :-1].ravel(), losses.ragged.contiguous(2, 12)
        hidden_TD, _ = decoder.forward(own, config, tokens_T, every)
        return jax.nn.log_softmax(decoder.logits(own, config, hidden_TD))

    laws = [np.asarray(law(own), np.float64) for own in (full, other)]
    expected = (np.exp(laws[0]) * (laws[0] - laws[1])).sum(1).mean()
    assert float(loss(other, full, batch)) == pytest.approx(expected, rel=1e-4)
