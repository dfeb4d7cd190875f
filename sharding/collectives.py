"""What chips that divide a model exchange. Outside of a mesh, and on one chip, nothing happens.

Chips of `HEADS` divide the heads of mixers, those of `CONTEXT` the cached tokens of each sequence,
and both together, the default here, all else: columns of feed-forwards and the vocabulary.
"""

import math
from typing import TypeVar

import jax

Tree = TypeVar("Tree")
Axes = tuple[str, ...]
HEADS, CONTEXT, EXPERTS = ("model",), ("context",), ("expert",)
_ALL = HEADS + CONTEXT


def _names(axes: Axes) -> Axes:
    """Those of the axes along which there are several chips."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(name for name in axes if name in mesh.manual_axes and mesh.shape[name] > 1)


def num_chips(axes: Axes = _ALL) -> int:
    """Chips that divide the model that is traced now, or its experts, each with its own tokens."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(int(mesh.shape[name]) for name in _names(axes))


def chip(axes: Axes = _ALL) -> jax.Array | int:
    """Which of them this is."""
    return jax.lax.axis_index(names) if (names := _names(axes)) else 0


def total(x: Tree, axes: Axes = _ALL) -> Tree:
    """The sums of all chips' arrays, on each of them."""
    return jax.lax.psum(x, names) if (names := _names(axes)) else x


def maximum(x: jax.Array) -> jax.Array:
    """The largest of all chips' entries, on each of them."""
    return jax.lax.pmax(x, names) if (names := _names(_ALL)) else x


def gather(x: jax.Array, axes: Axes = _ALL) -> jax.Array:
    """All chips' arrays, on each of them: [...] -> [chips, ...]."""
    return jax.lax.all_gather(x, names) if (names := _names(axes)) else x[None]


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
