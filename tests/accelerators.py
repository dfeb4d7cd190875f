"""The programs that accelerators get, on this machine: traced as if one were there, run here."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

KINDS = {"cuda": "NVIDIA H200", "tpu": "TPU v6 lite"}


def mesh(platform: str = "cuda") -> AbstractMesh:
    """Under it programs are traced for one such device."""
    device = AbstractDevice(KINDS[platform], 1, platform)
    return AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)


def written_for(platform: str, function: Callable) -> Callable:
    """The function as it is written for a 'cuda' or a 'tpu' device, to be run on any; what is named
    in its call is static.
    """

    def run(*arguments, **static):
        with jax.sharding.use_abstract_mesh(mesh(platform)):
            traced = jax.make_jaxpr(functools.partial(function, **static), return_shape=True)
            program, shapes = traced(*arguments)
        found = jaxpr_as_fun(program)(*jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return run


def primitives(function: Callable, *arguments, platform: str = "cuda") -> set[str]:
    """Names of all that the function does there, calls and branches looked into."""
    with jax.sharding.use_abstract_mesh(mesh(platform)):
        program = jax.make_jaxpr(function)(*arguments)
    return set(_names(program.jaxpr))


def _names(jaxpr: Any) -> Iterator[str]:
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
            if _is_program(inner):
                yield from _names(getattr(inner, "jaxpr", inner))


def _is_program(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")
