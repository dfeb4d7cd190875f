"""TPUs, with kernels of Mosaic, which is slow to load."""

import dataclasses

import jax
import jax.numpy as jnp

from layers.backends.backend import Backend, Kernel, StateKernel
from layers.kernels.device import Device
from layers.kernels.linear import grouped
from layers.kernels.linear.low_bit import Quantized


@dataclasses.dataclass(frozen=True)
class Tpu(Backend):
    """Google's TPUs."""

    attention: tuple[str, ...] = ("pallas_tpu", "jax_tpu")
    skinny_kernel: str | None = "low_bit_tpu"
    has_free_views: bool = False  # arrays are tiled by shape and type
    least_rows: int = 2  # XLA gives a lone row to the vector units, which take longer than memory

    def runs_on(self, device: Device) -> bool:
        return device.platform == "tpu"

    def skinny_product(self, num_rows: int, w: jax.Array | Quantized) -> Kernel | None:
        from layers.kernels.linear import low_bit_tpu

        takes = isinstance(w, Quantized) and low_bit_tpu.can_multiply(num_rows, w)
        return low_bit_tpu.products if takes else None

    def expanded(self, w: Quantized) -> jax.Array | None:
        from layers.kernels.linear import low_bit_tpu

        return low_bit_tpu.expanded(w) if low_bit_tpu.can_expand(w) else None

    def grouped_product(self, w_EFD: jax.Array) -> Kernel | None:
        return grouped.on_tpu if w_EFD.dtype in (jnp.bfloat16, jnp.float16) else None

    def update(
        self, num_heads: int, num_keys: int, state: tuple[int, int], decays_of_keys: bool
    ) -> StateKernel | None:
        from layers.kernels.recurrence import tpu

        takes = not decays_of_keys and tpu.can_update(num_heads, num_keys, state)
        return tpu.update if takes else None
