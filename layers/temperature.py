"""Factors of queries that grow with their position (Nakanishi 2025, arXiv 2501.19399)."""

import jax
import jax.numpy as jnp

from configs.kinds.temperature import Temperature


def scaled(x_TNH: jax.Array, temperature: Temperature | None, position_T: jax.Array) -> jax.Array:
    """Queries times the factor of their position, of x's shape and type; None: as they are."""
    if temperature is None:
        return x_TNH
    turns_T = (position_T + temperature.offset) // temperature.length
    factor_T = 1 + temperature.scale * jnp.log1p(turns_T.astype(jnp.float32))
    return (x_TNH * factor_T[:, None, None]).astype(x_TNH.dtype)
