"""Seconds and rates of the device that JAX computes on, by loops that run there.

A program is put into a loop on the device, so that one dispatch pays for many runs; several such
calls are queued before the host waits, so that the rest of the dispatch hides behind them. The trip
count is static: a loop that asks the host whether to go on would wait for it each time. What a run
returns must reach what the next one reads, or XLA moves the work out of the loop.

Rates are measured once a process: the device is not shared, and an engine leaves little memory.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from configs.hardware.spec import HardwareSpec
from configs.settings.cache import padded_caches
from inference.planner.calibration import measure
from layers.kernels.device import target_device

_CALL_S = 0.02  # of one call: hundreds of dispatches
_QUEUED = 3
_MAX_RUNS = 2000
_COPIED_BYTES, _PRODUCT_WIDTH = 1 << 30, 8192


def seconds(
    step: Callable[..., object],
    carry: object,
    *arguments: object,
    expected_s: float,
    repeats: int = 3,
    call_s: float = _CALL_S,
    options: Mapping[str, object] | None = None,
) -> float:
    """Seconds of one run: the median over `repeats`.

    Args:
        step: (carry, *arguments) -> carry; its work must depend on the carry.
        carry: arrays, which are donated.
        expected_s: of one run, which says how many fill a call.
        repeats: at least 1.
        call_s: seconds that a call should take.
        options: of the compiler.
    """
    num_runs = max(1, min(_MAX_RUNS, math.ceil(call_s / expected_s)))
    loop = jax.jit(looped(step, num_runs), donate_argnums=0, compiler_options=dict(options or {}))
    call = loop.lower(carry, *arguments).compile()
    carry = jax.block_until_ready(call(carry, *arguments))
    run_s = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(_QUEUED):
            carry = call(carry, *arguments)
        jax.block_until_ready(carry)
        run_s.append((time.perf_counter() - start) / (_QUEUED * num_runs))
    return statistics.median(run_s)


def looped(step: Callable[..., object], num_runs: int) -> Callable[..., object]:
    """(carry, *arguments) -> the carry after so many runs of `step`."""

    def loop(carry: object, *arguments: object) -> object:
        return jax.lax.fori_loop(0, num_runs, lambda _, c: step(c, *arguments), carry)

    return loop


def one_after_another() -> dict[str, object]:
    """Compiler options under which independent operations of a program do not run side by side."""
    is_gpu = jax.default_backend() == "gpu"
    return {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"} if is_gpu else {}


def changed(x: jax.Array) -> jax.Array:
    """A copy in place: reads and writes every element."""
    return x + 1


def summed(sum_1: jax.Array, x: jax.Array) -> jax.Array:
    """Reads every element of x, and writes none."""
    return sum_1 + (x ^ sum_1).sum(dtype=jnp.uint32)


def products(x: jax.Array, w: jax.Array) -> jax.Array:
    """Two products, so that the second one's result takes the operand's place in memory."""
    return (x @ w) @ w


@functools.cache
def copy_bandwidth(num_bytes: int = _COPIED_BYTES, repeats: int = 3) -> float:
    """Bytes a second that are read and written: an array of random numbers, each changed in
    place.
    """
    x = jax.random.bits(jax.random.key(0), (num_bytes // 4,), jnp.uint32)
    moved = 2 * x.nbytes
    return moved / seconds(changed, x, expected_s=moved / 2e12, repeats=repeats)


@functools.cache
def read_only_bandwidth(num_bytes: int = _COPIED_BYTES, repeats: int = 3) -> float:
    """Bytes a second of a sum over an array of random numbers."""
    x = jax.random.bits(jax.random.key(0), (num_bytes // 4,), jnp.uint32)
    sum_1 = jnp.zeros(1, jnp.uint32)
    return x.nbytes / seconds(summed, sum_1, x, expected_s=x.nbytes / 4e12, repeats=repeats)


@functools.cache
def matmul_rate(dtype: str, width: int = _PRODUCT_WIDTH, repeats: int = 3) -> float:
    """FLOPs a second of [width, width] x [width, width] on random numbers, each product the next
    one's operand.
    """
    keys = jax.random.split(jax.random.key(0))
    x, w = (jax.random.normal(key, (width, width), dtype) for key in keys)
    w = w * jnp.asarray(width**-0.5, dtype)  # products keep the size of their operands
    flops = 2 * 2 * width**3
    return flops / seconds(products, x, w, expected_s=flops / 5e14, repeats=repeats)


def memory_bytes() -> float:
    """Bytes of the device's memory that programs may use."""
    statistics_of = jax.devices()[0].memory_stats() or {}
    return float(statistics_of.get("bytes_limit") or measure.this_memory())


def this_device(*dtypes: str) -> HardwareSpec:
    """The device with its memory, its copy bandwidth, and its rates in these types."""
    rates = {dtype: matmul_rate(dtype) for dtype in dtypes}
    device = target_device()
    padded = padded_caches(device.platform, device.is_hopper)
    return HardwareSpec(device.kind, memory_bytes(), copy_bandwidth(), rates, padded_caches=padded)
