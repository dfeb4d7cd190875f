"""CPUs: by XLA alone, and with the native library (`kernels/cpu/`).

By XLA's CPU backend a row's bits depend on the order of sums, which it picks by the size of the
whole array; a branch is cheap, and views are free.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from layers.backends.backend import Append, Backend, Convolution, RowKernels, StateKernel
from layers.kernels.cpu import rows as row_kernels
from layers.kernels.device import Device
from layers.kernels.linear import adapted_cpu, packed
from layers.kernels.recurrence import ffi_cpu


@dataclasses.dataclass(frozen=True)
class XlaCpu(Backend):
    """XLA's CPU backend."""

    attention: tuple[str, ...] = ("ffi_cpu",)
    has_native_kernels: bool = True
    is_deterministic: bool = True
    keeps_executables: bool = True  # JAX's cache of them needs the traced step to find one
    has_wide_reductions: bool = False
    multiplies_all_types: bool = False
    sums_by_product: bool = True
    scans_by_token: bool = True
    copies_in_blocks: bool = True
    # It converts the whole weight to float32 for a single bfloat16 row, and takes one row that is
    # looked up for a slice, and copies all sequences' states before it writes one.
    least_rows: int = 2

    def runs_on(self, device: Device) -> bool:
        return device.platform == "cpu"

    def where_needed(
        self,
        is_needed: Callable[[], jax.Array],
        compute: Callable[..., Any],
        shortcut: Callable[..., Any],
        *operands: Any,
    ) -> Any:
        return jax.lax.cond(is_needed(), compute, shortcut, *operands)

    def repeated(self, count: int, run: Callable[..., Any], state: Any) -> Any:
        return jax.lax.fori_loop(0, count, run, state)  # unrolled, pages are copied in every turn

    def computed_once(self, x_TX: jax.Array) -> jax.Array:
        identity = jnp.eye(x_TX.shape[-1])  # it knows no barrier; this changes no bit
        return jnp.dot(x_TX, identity, precision=jax.lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True)
class Cpu(XlaCpu):
    """The native library's kernels, and XLA for the rest."""

    linear: str = "ffi_cpu"
    skips_zero_rows: bool = True
    rows: RowKernels | None = row_kernels
    scan: StateKernel | None = ffi_cpu.scan

    def gated_product(
        self, x_TD: jax.Array, w: Any, activation: str, dtype: str
    ) -> jax.Array | None:
        adapters: tuple[jax.Array, ...] = ()
        if adapted_cpu.takes(w):
            w, adapters = w.weight, adapted_cpu.operands(x_TD, w)
        if not packed.multiplies_gated(w):
            return None
        return packed.gated_product(x_TD, w, activation, dtype, adapters)

    def append(self, attention: str, shape: tuple[int, int, int], has_norms: bool) -> Append | None:
        return row_kernels.append if attention == "ffi_cpu" else None

    def update(
        self, num_heads: int, num_keys: int, state: tuple[int, int], decays_of_keys: bool
    ) -> StateKernel:
        return ffi_cpu.update

    def convolution(self, widths: tuple[int, ...]) -> Convolution:
        return ffi_cpu.convolve
