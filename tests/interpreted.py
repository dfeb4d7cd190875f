"""Kernels in the interpreters of their back ends: what threads run is compiled once."""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret import shared_memory

_compiling = threading.Lock()


@functools.lru_cache(16)
def _executables(jaxpr: Any) -> list[Any]:
    """The executable of a program of threads, once compiled; blocks differ in arguments alone."""
    return []


def _run_compiled(jaxpr: Any, consts: Any, *args: Any) -> None:
    with _compiling:
        if not (known := _executables(jaxpr)):
            jitted = jax.jit(lambda consts, *args: jax.core.eval_jaxpr(jaxpr, consts, *args))
            known.append(jitted.lower(consts, *args).compile())
    known[0](consts, *args)


@pytest.fixture(autouse=True)
def threads_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each block of threads anew, as jax 0.10 does where a block has several warpgroups; of
    every test in a file that has this.
    """
    monkeypatch.setattr(thread_map, "_run_jaxpr", _run_compiled)


@contextlib.contextmanager
def blocks_in_order() -> Iterator[None]:
    """Blocks of a grid on Hopper happen one after another, as they are interpreted: what they count
    in device memory orders them, which the search for races does not know. Within a block it finds
    all. From jax 0.11 on, which takes blocks for concurrent.
    """
    memory = shared_memory.GPUSharedMemory
    reset = getattr(memory, "reset_per_cluster_state", None)
    if reset is None:
        yield
        return

    def follow(self: Any) -> None:
        ended = getattr(self, "clocks", {})
        reset(self)
        for clock in self.clocks.values():
            for earlier in ended.values():
                clock.update(earlier)

    memory.reset_per_cluster_state = follow
    try:
        yield
    finally:
        memory.reset_per_cluster_state = reset
