"""Kernels in the interpreters of their back ends: what threads run is compiled once."""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as of_gpu
from jax._src.pallas.mosaic_gpu.interpret import shared_memory
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # no public name in 0.10

HOPPER = InterpretGPUParams(detect_races=jax.__version_info__ >= (0, 11))  # 0.10 overlooks them
_compiling = threading.Lock()


def check_races(interpret: InterpretGPUParams | None) -> None:
    """The last kernel had none, where it was interpreted and not compiled (None)."""
    if interpret is not None and interpret.detect_races:
        assert not of_gpu.get_races().races_found


def sum_error(interpret: InterpretGPUParams | None) -> float:
    """What a float32 sum of products may be off, as a share of the sum of their sizes: some units
    of 2^-24 on a CPU; tensor cores cut what they align to the largest.
    """
    return 2e-6 if interpret is None else 2e-7


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
