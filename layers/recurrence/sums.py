"""Sums and products of the recurrences, in float32."""

import jax
import jax.numpy as jnp

_LOWEST = float(jnp.finfo(jnp.float32).min)


def product(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """An einsum of two arrays with float32 products: a GPU's default is TF32."""
    return jnp.einsum(
        subscripts, x, y,
        precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32,
    )  # fmt: skip


def rounded(x: jax.Array) -> jax.Array:
    """Rounds a finite product to float32 before it is added to something.

    Compilers fuse a product and a sum, and choose which product of two differently from program to
    program. They cannot where a maximum lies between.
    """
    return jnp.maximum(x, _LOWEST)


def read(state_YNMH: jax.Array, q_YNM: jax.Array) -> jax.Array:
    """S^T q of every head, [Y, N, H]; its bits do not depend on Y, as a sum's would on a CPU."""
    return product("YNM,YNMH->YNH", q_YNM, state_YNMH)
