"""Calls of the native library's functions, as JAX traces them."""

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax

from configs.errors import InputError

Outs = jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...]


def call(
    target: str,
    out: Outs,
    *arrays: jax.Array,
    in_place: Mapping[int, int] = types.MappingProxyType({}),
    **attributes: object,
) -> Any:
    """Calls a function of the library, once for each under `vmap`, with its attributes. Raises
    InputError where it is differentiated.

    Args:
        out: shape and dtype of the result, or a tuple of several.
        in_place: results that are made in arguments, by numbers of these.
    """
    aliases = tuple(sorted(in_place.items()))
    return _function(target, out, aliases, tuple(sorted(attributes.items())))(*arrays)


@functools.cache  # with jit: traced once for all layers, and inlined into them
def _function(
    target: str,
    out: Outs,
    aliases: tuple[tuple[int, int], ...],
    attributes: tuple[tuple[str, object], ...],
) -> Callable[..., Any]:
    function = jax.ffi.ffi_call(
        target, out, vmap_method="sequential", input_output_aliases=dict(aliases)
    )

    @jax.custom_jvp
    def run(*arrays: jax.Array) -> Any:
        return function(*arrays, **dict(attributes))

    @run.defjvp
    def refuse(primals: object, tangents: object) -> NoReturn:
        raise InputError(
            "the CPU kernels have no gradients: train with engine.kernels.linear=reference and "
            "engine.kernels.attention=reference"
        )

    return jax.jit(run, inline=True)
