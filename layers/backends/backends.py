"""The back end that a program is traced for. An engine chooses it once, and traces its steps under
`use`; other programs take the one of their target device.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Concatenate, ParamSpec, TypeVar

import jax

from configs.errors import InputError
from layers.backends.backend import Backend, RowKernels
from layers.backends.cpu import Cpu, XlaCpu
from layers.backends.gpu import Gpu, Hopper
from layers.backends.tpu import Tpu
from layers.kernels.device import Device, target_device

# The first that runs on a device serves it.
ALL = HOPPER, GPU, TPU, XLA_CPU, CPU, XLA = Hopper(), Gpu(), Tpu(), XlaCpu(), Cpu(), Backend()

_Arrays = ParamSpec("_Arrays")
_Out = TypeVar("_Out")
_chosen = jax.make_user_context(default_value=None)  # a part of the keys of jit's caches


def of(device: Device, linear: str | None = None) -> Backend:
    """A device's back end for `engine.kernels.linear`; its first for None. Raises InputError if
    none of them has these products.
    """
    able = [backend for backend in ALL if backend.runs_on(device)]
    for backend in able:
        if linear in (None, backend.linear):
            return backend
    names = ", ".join(dict.fromkeys(backend.linear for backend in able))
    raise InputError(f"engine.kernels.linear={linear}: not for {device.kind}; valid: {names}")


def use(backend: Backend | None) -> AbstractContextManager[None]:
    """A context: programs that are traced in it ask this back end; None: their device's."""
    return _chosen(backend)


def current() -> Backend:
    """The back end of the program that is traced."""
    backend: Backend | None = _chosen.value
    return of(target_device()) if backend is None else backend


def kernel_or(
    reference: Callable[_Arrays, _Out], kernel: Callable[Concatenate[RowKernels, _Arrays], _Out]
) -> Callable[_Arrays, _Out]:
    """A function of arrays: the kernel, of a back end that has kernels of rows, with the
    derivative of the reference; else the reference, which is the kernel's oracle.
    """

    @functools.cache
    def of_backend(backend: Backend) -> Callable[_Arrays, _Out]:
        assert backend.rows is not None
        return differentiable(functools.partial(kernel, backend.rows), reference)

    def run(*arrays: _Arrays.args, **keywords: _Arrays.kwargs) -> _Out:
        backend = current()
        function = reference if backend.rows is None else of_backend(backend)
        return function(*arrays, **keywords)

    return run


def differentiable(
    kernel: Callable[_Arrays, _Out], reference: Callable[_Arrays, _Out]
) -> Callable[_Arrays, _Out]:
    """The kernel, with the derivative of its reference."""
    function = jax.custom_jvp(kernel)
    function.defjvp(lambda primals, tangents: jax.jvp(reference, primals, tangents))
    return function
