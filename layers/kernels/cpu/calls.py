"""Calls of the native library's functions, as JAX traces them."""

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import jax

from configs.errors import InputError

Outs = jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...]


def call(target: str, out: Outs, *arrays: jax.Array, **attributes: Any) -> Any:
    """What a function of the library makes of arrays, one or (a tuple) several; under `vmap` it is
    called for each.

    Raises:
        InputError: it is differentiated.
    """
    return _function(target, out, tuple(sorted(attributes.items())))(*arrays)


@functools.cache  # with jit: traced once for all layers, and inlined into them
def _function(
    target: str, out: Outs, attributes: tuple[tuple[str, Any], ...]
) -> Callable[..., Any]:
    @jax.custom_jvp
    def run(*arrays: jax.Array) -> Any:
        return jax.ffi.ffi_call(target, out, vmap_method="sequential")(*arrays, **dict(attributes))

    @run.defjvp
    def refuse(primals: Any, tangents: Any) -> NoReturn:
        raise InputError(
            "the CPU kernels have no gradients: train with engine.linear=reference and "
            "engine.attention=reference"
        )

    return jax.jit(run, inline=True)
