"""Gumbel noise as a pure function of (request seed, position, purpose, token id).

Nothing is drawn in order and nothing is stored: any step, in any batch, on any path of the sampler,
sees the same noise for the same token. Coupled speculation and independence from other requests
both rest on that.

The hash is `triple32` (Chris Wellons, github.com/skeeto/hash-prospector: three rounds of xor-shift
and multiply, bias 0.021, about that of a random 32-bit permutation). Its input is the token id
xored with one key word; a second key word enters between the rounds, so that a row's stream is
chosen by 64 bits.
"""

import enum

import jax
import jax.numpy as jnp


class Purpose(enum.IntEnum):
    """What noise at a position is for. Those of two purposes are independent."""

    SAMPLE = 0  # plain decoding, and both sides of coupled acceptance
    ACCEPT = 1  # rejection: whether a draft is accepted
    RESIDUAL = 2  # rejection: the token after the last accepted draft
    DRAFT = 3  # rejection: what a proposer draws


def row_keys(
    seed_Q2: jax.Array, position_Q: jax.Array, purpose: Purpose = Purpose.SAMPLE
) -> jax.Array:
    """The key of each row's stream of noise.

    Args:
        seed_Q2: u32[Q, 2], the request's seed: high word, low word.
        position_Q: i32[Q], absolute position of the token that is sampled.
        purpose: static.

    Returns:
        u32[Q, 2]: two words, each a hash of both seed words, the position and the purpose.
    """
    high_Q, low_Q = seed_Q2[:, 0], seed_Q2[:, 1]
    position_Q = position_Q.astype(jnp.uint32)
    first_Q = _mix(_mix(_mix(high_Q ^ jnp.uint32(0x9E3779B9)) + low_Q) ^ position_Q)
    second_Q = _mix(_mix(_mix(low_Q ^ jnp.uint32(0x85EBCA6B)) + high_Q) + position_Q)
    keys_Q2 = jnp.stack([first_Q, second_Q], axis=-1)
    return keys_Q2 if purpose == Purpose.SAMPLE else _mix(keys_Q2, int(purpose))


def uniform(keys_Q2: jax.Array, ids_QJ: jax.Array) -> jax.Array:
    """Uniform noise per (row, token id): f32[Q, J] strictly inside (0, 1).

    Near 0 it has 32 bits (its smallest value is 2^-33), near 1 it has the 24 bits of a float32.
    """
    bits = _mix(ids_QJ.astype(jnp.uint32) ^ keys_Q2[:, :1], keys_Q2[:, 1:])
    return jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)


def gumbel(keys_Q2: jax.Array, ids_QJ: jax.Array) -> jax.Array:
    """Standard Gumbel noise per (row, token id), f32[Q, J]; `ids_QJ` may be [1, J] for all rows.

    argmax over ids of (logit + noise) is a draw from softmax(logits)
    (Maddison et al. 2014, arXiv 1411.0030).
    """
    # log1p keeps the fine end of the uniform at the large values, which are the ones that win.
    return -jnp.log(-jnp.log1p(-uniform(keys_Q2, ids_QJ)))


def _mix(x: jax.Array, key: jax.Array | int = 0) -> jax.Array:
    """triple32 with `key` added after its first round: u32, a permutation of x for each key."""
    x = (x ^ (x >> 17)) * jnp.uint32(0xED5AD4BB) + jnp.uint32(key)
    x = (x ^ (x >> 11)) * jnp.uint32(0xAC4C1B51)
    x = (x ^ (x >> 15)) * jnp.uint32(0x31848BAB)
    return x ^ (x >> 14)
