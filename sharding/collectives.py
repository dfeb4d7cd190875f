"""What chips that divide a model exchange. Outside of a mesh, and on one chip, nothing happens."""

from typing import TypeVar

import jax

Tree = TypeVar("Tree")
_AXIS, EXPERTS = "model", "expert"


def num_chips(axis: str = _AXIS) -> int:
    """Chips that divide the model that is traced now, or its experts, each with its own tokens."""
    mesh = jax.sharding.get_abstract_mesh()
    return int(mesh.shape[axis]) if axis in mesh.manual_axes else 1


def chip(axis: str = _AXIS) -> jax.Array | int:
    """Which of them this is."""
    return jax.lax.axis_index(axis) if num_chips(axis) > 1 else 0


def total(x: Tree) -> Tree:
    """The sums of all chips' arrays, on each of them."""
    return jax.lax.psum(x, _AXIS) if num_chips() > 1 else x


def maximum(x: jax.Array) -> jax.Array:
    """The largest of all chips' entries, on each of them."""
    return jax.lax.pmax(x, _AXIS) if num_chips() > 1 else x


def gather(x: jax.Array) -> jax.Array:
    """All chips' arrays, on each of them: [...] -> [chips, ...]."""
    return jax.lax.all_gather(x, _AXIS) if num_chips() > 1 else x[None]


def tokens_of_all(x_TX: jax.Array) -> jax.Array:
    """All-gather along `expert`: the rows of all chips, one behind the other, on each of them."""
    if num_chips(EXPERTS) == 1:
        return x_TX
    return jax.lax.all_gather(x_TX, EXPERTS, tiled=True)


def own_tokens(x_TX: jax.Array) -> jax.Array:
    """Reduce-scatter along `expert`: of the sums of all chips' arrays, the rows of this chip; the
    way back of `tokens_of_all`.
    """
    if num_chips(EXPERTS) == 1:
        return x_TX
    by_chip = x_TX.reshape(num_chips(EXPERTS), -1, *x_TX.shape[1:])  # no tile belongs to two
    return jax.lax.psum_scatter(by_chip, EXPERTS)
