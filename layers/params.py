"""Parameters from their declarations (`configs/kinds/params.py`): random values, shapes, bytes."""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from configs.kinds.params import Declared, ParamInfo
from configs.precision import FORMATS

_ALIGNMENT = 64  # bytes
# A stream begins with the same numbers however many are drawn, and any count is a program of its
# own, which takes up to two seconds to compile: so many are drawn at least.
_DRAWN = 1 << 16
_STREAMS = 1 << 10

Params = dict[str, Any]  # a pytree of arrays with the structure of its declaration


def is_info(node: object) -> TypeGuard[ParamInfo]:
    """Whether a node of a declaration is a leaf."""
    return isinstance(node, ParamInfo)


def init_leaf(info: ParamInfo, key: jax.Array) -> jax.Array:
    """Random values of one parameter; float32 where its format has few bits."""
    format = "float32" if FORMATS[info.format].is_quantized else info.format  # rounded when placed
    if info.init == "normal":
        shape, scale = info.shape, info.shape[-1] ** -0.5
        if info.elements < _DRAWN:
            drawn = np.asarray(jax.random.normal(key, (_DRAWN,), jnp.float32))
            values = drawn[: info.elements].reshape(shape) * np.float32(scale)
            return jnp.asarray(values.astype(jnp.dtype(format)))
        return (jax.random.normal(key, shape, jnp.float32) * scale).astype(format)
    if info.init == "columns":
        return jnp.broadcast_to(jnp.arange(info.shape[-1]).astype(format), info.shape)
    value = 0.0 if info.init == "zeros" else 1.0
    if info.elements < _DRAWN:
        return jnp.asarray(np.full(info.shape, value, jnp.dtype(format)))
    return jnp.full(info.shape, value, format)


def init(
    infos: Declared, seed: int = 0, draw: Callable[[ParamInfo, jax.Array], object] = init_leaf
) -> Params:
    """Random parameters for a declaration, each from its own stream of `seed`."""
    leaves, tree = jax.tree.flatten(infos, is_leaf=is_info)
    keys = jax.random.split(jax.random.key(seed), max(len(leaves), _STREAMS))
    return jax.tree.unflatten(tree, [draw(i, keys[n]) for n, i in enumerate(leaves)])


def abstract(infos: Declared) -> Params:
    """Shapes and dtypes without arrays, for compiling ahead of time."""
    return jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, i.format), infos, is_leaf=is_info)


def aligned(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> np.ndarray:
    """Memory with arbitrary values, which JAX adopts as an array on a CPU instead of copying it."""
    dtype = jnp.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def num_bytes(infos: Declared) -> int:
    """Bytes of all parameters."""
    leaves = jax.tree.leaves(infos, is_leaf=is_info)
    return int(sum(FORMATS[i.format].bytes_for(i.elements, i.shape[-1]) for i in leaves))


@jax.custom_jvp
def looked_up(table: jax.Array, ids_X: jax.Array) -> jax.Array:
    """`table[ids_X]`, read as bits where XLA's CPU backend would convert a gathered bfloat16 table
    whole; bits alone would have no gradient.
    """
    if table.dtype != jnp.bfloat16:
        return table[ids_X]
    bits = jax.lax.bitcast_convert_type(table, jnp.uint16)[ids_X]
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)


@looked_up.defjvp
def _looked_up_jvp(
    primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    (table, ids_X), (turned, _) = primals, tangents
    return looked_up(table, ids_X), turned[ids_X]


def flatten(tree: object, is_leaf: Callable[[object], bool] = is_info) -> dict[str, Any]:
    """{'layers/3/mixer/qkv': leaf} for a tree of parameters or of their declarations."""
    leaves, _ = jax.tree.flatten_with_path(tree, is_leaf=is_leaf)
    return {"/".join(map(_key_name, path)): leaf for path, leaf in leaves}


def _key_name(key: object) -> str:
    return str(
        getattr(key, "key", getattr(key, "idx", key))
    )  # attributes are ".data": files' names


def unflatten(infos: Declared, leaves: Mapping[str, object]) -> Params:
    """Inverse of `flatten`, in the structure of `infos`."""
    tree = jax.tree.structure(infos, is_leaf=is_info)
    return jax.tree.unflatten(tree, [leaves[path] for path in flatten(infos)])
