"""A step's outputs leave in one array, bit for bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from inference.runtime import packed_output
from inference.scheduling.step_output import StepOutput


def test_every_field_comes_back_bit_for_bit():
    rng = np.random.default_rng(0)
    logprobs = rng.normal(size=(3, 2)).astype(np.float32)
    logprobs[1] = np.nan, -np.inf
    output = StepOutput(
        rng.integers(-9, 9, (3, 2), np.int32), np.array([0, 2, 1], np.int32),
        np.array([0, 2, 1], np.int32), np.array([0, 1, 1], np.int32),
        np.array([True, False, True]), logprobs,
        rng.integers(0, 9, (3, 2, 4), np.int32),
        rng.normal(size=(3, 2, 4)).astype(np.float32), np.zeros((0, 0), np.float32),
        np.zeros((0, 0, 4), np.int32), -np.zeros((0, 0, 4), np.float32),
        rng.normal(size=(2, 5)).astype(np.float32),
    )  # fmt: skip
    values = [getattr(output, field.name) for field in dataclasses.fields(output)]

    @jax.jit
    def packed(*values):
        return packed_output.pack(StepOutput(*values))

    on_device = packed(*map(jnp.asarray, values))
    assert [leaf.ndim for leaf in jax.tree.leaves(on_device)] == [1]
    for field, value in zip(dataclasses.fields(output), values, strict=True):
        found = getattr(packed_output.unpack(on_device), field.name)
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        assert found.tobytes() == value.tobytes()
