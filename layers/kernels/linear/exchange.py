"""Parameters over a mesh in the model's own order, and in that of its chips, without the host.

A chip has its rows of each matrix that is stacked into one side by side, so the array over all
chips has them in the order of the chips (`rules.pieces`), and zeros or copies where nothing divides
evenly. Other programs of JAX read and make parameters as the model declares them, with the
shardings of `rules.layout`.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from configs.engine import Config
from configs.kinds.params import ParamInfo, device_format
from layers.kernels.device import target_device
from layers.kernels.linear import packed
from layers.kernels.linear.packed import Packed
from sharding import mesh as meshes
from sharding import rules
from sharding.rules import Piece


def to_chips(config: Config, path: str, info: ParamInfo, array: jax.Array, mesh: Mesh) -> jax.Array:
    """A new array over a mesh, as its chips hold it, of a parameter that lies on any devices."""
    axis, pieces = rules.pieces(config.model, path, info, config.mesh)
    if pieces:
        array = jax.device_put(array, rules.layout(path, info, mesh))
    format = device_format(info, target_device().platform)
    return _in_order(array, axis, pieces, format, NamedSharding(mesh, rules.spec(path, info)))


def unpacked(w: Packed, spec: PartitionSpec, mesh: Mesh | None) -> jax.Array:
    """The plain array of a matrix in strips, over a mesh by its spec."""
    return packed.unpack(w) if mesh is None else _unpacking(mesh, w.specs(spec), spec)(w)


@functools.lru_cache(maxsize=256)
def _unpacking(mesh: Mesh, specs: Packed, spec: PartitionSpec) -> Callable[[Packed], jax.Array]:
    return meshes.jitted(mesh, packed.unpack, (specs,), spec)


def from_chips(
    config: Config, path: str, info: ParamInfo, array: jax.Array, mesh: Mesh
) -> jax.Array:
    """A new array as the model declares it, of one over a mesh as its chips hold it."""
    axis, pieces = rules.pieces(config.model, path, info, config.mesh)
    places, first = {}, 0
    for piece in pieces:
        if piece.start < piece.stop:  # copies are alike
            places[piece.start] = Piece(first, first + piece.stop - piece.start, 0)
        first += piece.stop - piece.start + piece.zeros
    in_order = tuple(places[start] for start in sorted(places))
    return _in_order(array, axis, in_order, info.format, rules.layout(path, info, mesh))


def _in_order(
    array: jax.Array, axis: int, pieces: tuple[Piece, ...], format: str, sharding: NamedSharding
) -> jax.Array:
    """A new array of these pieces of another's axis; without pieces of all of it."""
    if not pieces:
        array = jax.device_put(array, sharding, may_alias=False)
        return array if array.dtype == format else array.astype(format)
    return _joining(axis, pieces, format, sharding)(array)


@functools.lru_cache(maxsize=256)
def _joining(
    axis: int, pieces: tuple[Piece, ...], format: str, sharding: NamedSharding
) -> Callable[[jax.Array], jax.Array]:
    def join(array: jax.Array) -> jax.Array:
        parts = []
        for start, stop, zeros in pieces:
            parts.append(jax.lax.slice_in_dim(array, start, stop, axis=axis))
            shape = *array.shape[:axis], zeros, *array.shape[axis + 1 :]
            parts.append(jnp.zeros(shape, array.dtype))
        return jnp.concatenate(parts, axis).astype(format)

    return jax.jit(join, out_shardings=sharding)
