"""Compilation in a quarter of the time, for tests whose subject is not the compiled code.

Tests marked `quick_code` run in `quickly()`: what is compiled ahead of time, as engines do, and
what the `jit` of this module compiles is machine code without optimization, for the same program.
What `jax.jit` compiles at a call is not touched. Bits, rounding, aliasing and costs of compiled
programs are looked at without the mark.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest

_OPTIONS: dict[str, int | bool] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,  # a module each of them, and as many threads
}
if jax.__version_info__ < (0, 11):  # later ones have no other emitters to choose
    _OPTIONS["xla_cpu_use_fusion_emitters"] = False
_compile = jax.stages.Lowered.compile


def _compile_quickly(lowered: jax.stages.Lowered, *args, **more) -> jax.stages.Compiled:
    return _compile(lowered, *args, **{"compiler_options": _OPTIONS} | more)


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    """What is compiled ahead of time in this context is not optimized."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", _compile_quickly)
        yield


def is_quick() -> bool:
    """Whether `quickly` holds."""
    return jax.stages.Lowered.compile is _compile_quickly


def jit(function: Callable, **options) -> Callable:
    """`jax.jit`, without optimization where a call stands in `quickly`."""
    plain = jax.jit(function, **options)
    quick = jax.jit(function, compiler_options=_OPTIONS, **options)
    return lambda *args, **named: (quick if is_quick() else plain)(*args, **named)


def call(function: Callable, *arrays, **static):
    """One program for one call: operation by operation, each would be compiled for itself."""
    return jit(functools.partial(function, **static))(*arrays)


def environment(cache: Path, **more: str) -> dict[str, str]:
    """Of a process that a test starts: it compiles quickly, and its caches lie in a folder of their
    own, but for what the suite has compiled.
    """
    flags = (f"--{name}={str(value).lower()}" for name, value in _OPTIONS.items())
    cache.mkdir(exist_ok=True)
    if not (compiled := cache / "compiled").exists():
        compiled.symlink_to(os.environ["JAX_COMPILATION_CACHE_DIR"])
    quickly = {"XLA_FLAGS": " ".join((os.environ.get("XLA_FLAGS", ""), *flags))}
    return os.environ | quickly | {"RIDGELINE_CACHE": str(cache)} | more
