"""Noise, bit by bit: seeds that clients keep name the same text in the next release."""

import jax.numpy as jnp
import numpy as np
import pytest

from inference.sampling import gumbel


def triple32(x: int, key: int = 0) -> int:
    """Of Python's integers."""
    for shift, factor, added in (
        (17, 0xED5AD4BB, key), (11, 0xAC4C1B51, 0), (15, 0x31848BAB, 0)
    ):  # fmt: skip
        x = ((x ^ x >> shift) * factor + added) % 2**32
    return x ^ x >> 14


@pytest.mark.parametrize("purpose", gumbel.Purpose)
def test_noise_is_the_hash_of_seed_position_purpose_and_token(purpose):
    rng = np.random.default_rng(int(purpose))
    seeds_Q2, ids_J = rng.integers(0, 2**32, (9, 2)), rng.integers(0, 1 << 18, 9)
    positions_Q = rng.integers(0, 1 << 17, 9)
    keys_Q2 = gumbel.row_keys(jnp.asarray(seeds_Q2, jnp.uint32), jnp.asarray(positions_Q), purpose)
    u_QJ = np.asarray(gumbel.uniform(keys_Q2, jnp.asarray(ids_J)[None]), np.float64)
    for row, ((high, low), position) in enumerate(
        zip(seeds_Q2.tolist(), positions_Q.tolist(), strict=True)
    ):
        first = triple32(triple32((triple32(high ^ 0x9E3779B9) + low) % 2**32) ^ position)
        second = triple32(
            (triple32((triple32(low ^ 0x85EBCA6B) + high) % 2**32) + position) % 2**32
        )
        if purpose:
            first, second = triple32(first, int(purpose)), triple32(second, int(purpose))
        assert keys_Q2[row].tolist() == [first, second]
        bits = [triple32(token ^ first, second) for token in ids_J.tolist()]
        np.testing.assert_allclose(u_QJ[row], (np.array(bits) + 0.5) / 2**32, rtol=2**-24)
