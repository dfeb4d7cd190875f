"""Compilation in a quarter of the time, for tests whose subject is not the compiled code.

Tests marked `quick_code` run in `quickly()`: what is compiled ahead of time, as engines do, is
machine code without optimization, for the same program. What `jax.jit` compiles at a call is not
touched. Bits, rounding, aliasing and costs of compiled programs are looked at without the mark.
"""

import contextlib
import os
from collections.abc import Iterator

import jax
import pytest

_OPTIONS: dict[str, int | bool] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # later ones have no other emitters to choose
    _OPTIONS["xla_cpu_use_fusion_emitters"] = False
_compile = jax.stages.Lowered.compile
_flags = " ".join(f"--{name}={str(value).lower()}" for name, value in _OPTIONS.items())

# The same for programs that a test starts.
ENVIRONMENT = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {_flags}".strip()}


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
