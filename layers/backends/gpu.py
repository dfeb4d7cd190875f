"""GPUs by XLA, and Hopper's with kernels of Mosaic, which is slow to load."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs.kinds.experts import Experts
from layers.backends.backend import (
    Append,
    Backend,
    Convolution,
    Kernel,
    MixtureKernel,
    StateKernel,
    SumNorm,
)
from layers.kernels.device import Device
from layers.kernels.linear import grouped
from layers.kernels.linear.adapted import Adapted
from layers.kernels.linear.low_bit import Quantized, Word


@dataclasses.dataclass(frozen=True)
class Gpu(Backend):
    """XLA's GPU backend."""

    attention: tuple[str, ...] = ("pallas_gpu",)
    # XLA would merge two products of the same rows into one, and copy their matrices together in
    # every step: a seventh of Mamba-2 2.7B's step with one row on an H200.
    compiler_options: tuple[tuple[str, object], ...] = (("xla_gpu_dot_merger_threshold_mb", 0),)
    autotunes: bool = True
    looks_up_in_products: bool = True

    def runs_on(self, device: Device) -> bool:
        return device.platform == "gpu"


@dataclasses.dataclass(frozen=True)
class Hopper(Gpu):
    """NVIDIA's H100, H200, H800 and H20."""

    word: Word = np.uint16
    skinny_kernel: str | None = "skinny_gpu"

    # Kernels whose blocks wait for each other (`attention/splits.py`) need a device of their own:
    # each of two at a time could hold the multiprocessors that the other's blocks wait for.
    compiler_options: tuple[tuple[str, object], ...] = (
        *Gpu.compiler_options,
        ("xla_gpu_command_buffer_scheduling_mode", "SERIALIZE"),
    )

    def runs_on(self, device: Device) -> bool:
        return device.is_hopper

    def skinny_product(self, num_rows: int, w: jax.Array | Quantized) -> Kernel | None:
        from layers.kernels.linear import skinny_gpu

        if not skinny_gpu.can_multiply(num_rows, w):
            return None
        return functools.partial(skinny_gpu.products, prefetch=self.prefetches_weights)

    def why_no_product(self, w: jax.Array | Quantized) -> str:
        from layers.kernels.linear import skinny_operands

        *_, F, D = w.shape
        if w.dtype != "bfloat16":
            return ""
        if F % skinny_operands.PART:
            return f"{F:,} features: no multiple of {skinny_operands.PART}"
        if D % (step := skinny_operands.of(w).step):
            return f"depth {D:,}: no multiple of {step}"
        return ""

    def gated_product(
        self, x_TD: jax.Array, w: Any, activation: str, dtype: str
    ) -> jax.Array | None:
        from layers.kernels.linear import skinny_gpu

        is_matrix = isinstance(w, jax.Array | Quantized) and len(w.shape) == 2
        if not is_matrix or activation not in skinny_gpu.GATES:
            return None
        if not skinny_gpu.can_gate(x_TD.shape[0], w):
            return None
        return skinny_gpu.gated_products(
            x_TD[None], w, None, activation, dtype, prefetch=self.prefetches_weights
        )[0]

    def addition(self, leaf: Adapted) -> Kernel | None:
        from layers.kernels.linear import adapted_gpu

        return adapted_gpu.add if adapted_gpu.can_add(leaf) else None

    def mixture(
        self, kind: Experts, num_tokens: int, gate_up: Any, down: Any
    ) -> MixtureKernel | None:
        from layers.kernels.experts import gpu

        can_mix = gpu.can_mix(kind, num_tokens, gate_up, down)
        return functools.partial(gpu.mix, kind) if can_mix else None

    def grouped_product(self, w_EFD: jax.Array) -> Kernel | None:
        is_half = w_EFD.dtype in (jnp.bfloat16, jnp.float16)
        is_whole = w_EFD.shape[2] % grouped.GPU_DEPTH == 0
        return grouped.on_gpu if is_half and is_whole else None

    def norm_of_sum(self, width: int) -> SumNorm | None:
        from layers.kernels.norm import gpu

        return gpu.of_sum if gpu.can_normalize(width) else None

    def append(self, attention: str, shape: tuple[int, int, int], has_norms: bool) -> Append | None:
        from layers.kernels.attention import append_gpu

        appends = attention == "pallas_gpu" and append_gpu.can_append(shape, has_norms)
        return append_gpu.append if appends else None

    def update(
        self, num_heads: int, num_keys: int, state: tuple[int, int], decays_of_keys: bool
    ) -> StateKernel | None:
        from layers.kernels.recurrence import gpu

        return gpu.update if not decays_of_keys and gpu.can_update(state) else None

    def convolution(self, widths: tuple[int, ...]) -> Convolution | None:
        from layers.kernels.recurrence import convolution_gpu as gpu

        return gpu.convolve if gpu.can_convolve(widths) else None
