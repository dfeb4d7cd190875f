"""What chips that divide a model exchange. Outside of a mesh, and on one chip, nothing happens."""

from typing import TypeVar

import jax

Tree = TypeVar("Tree")
_AXIS = "model"


def num_chips() -> int:
    """Chips that divide the model that is traced now."""
    mesh = jax.sharding.get_abstract_mesh()
    return int(mesh.shape[_AXIS]) if _AXIS in mesh.manual_axes else 1


def chip() -> jax.Array | int:
    """Which of them this is."""
    return jax.lax.axis_index(_AXIS) if num_chips() > 1 else 0


def total(x: Tree) -> Tree:
    """The sums of all chips' arrays, on each of them."""
    found: Tree = jax.lax.psum(x, _AXIS) if num_chips() > 1 else x
    return found


def most(x: jax.Array) -> jax.Array:
    """The largest of all chips' entries, on each of them."""
    found: jax.Array = jax.lax.pmax(x, _AXIS) if num_chips() > 1 else x
    return found


def gather(x: jax.Array) -> jax.Array:
    """All chips' arrays, on each of them: [...] -> [chips, ...]."""
    return jax.lax.all_gather(x, _AXIS) if num_chips() > 1 else x[None]
