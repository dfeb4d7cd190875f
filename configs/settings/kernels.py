"""Kernels: the implementations of attention and of products with weights."""

import dataclasses
from typing import ClassVar

from configs.settings.section import Section, setting

ATTENTIONS = ("reference", "pallas_gpu", "pallas_tpu", "jax_tpu", "ffi_cpu")
LINEARS = ("reference", "ffi_cpu")
ACTIVATIONS = ("int8", "exact")


@dataclasses.dataclass(frozen=True)
class KernelConfig(Section):
    """Implementations by name. The engine refuses one that cannot run on its device."""

    path: ClassVar[str] = "engine.kernels"

    attention: str | None = setting(
        None,
        "Implementation of attention over pages (`docs/kernels.md`); 'reference' runs anywhere. "
        "None: 'ffi_cpu' on a CPU; on an accelerator the kernel that was measured to be right and "
        "faster on this kind of device, if it can run; else the reference.",
        one_of=ATTENTIONS, host_only=True,
    )  # fmt: skip
    linear: str | None = setting(
        None,
        "Implementation of products with weights: 'reference' is XLA's, 'ffi_cpu' packs weights "
        "for the native library's kernels. None: 'ffi_cpu' where the library is there.",
        one_of=LINEARS,
    )
    activations: str = setting(
        "int8",
        "Activations in products of the CPU's kernels with weights of few bits. 'int8' rounds 32 "
        "of them by one scale, unless the format decides. 'exact' multiplies them as they are, in "
        "three products instead of one.",
        one_of=ACTIVATIONS,
    )
