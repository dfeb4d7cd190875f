"""The device that a program is traced for."""

from typing import NamedTuple

import jax

_HOPPER = ("H100", "H200", "H800", "H20")  # parts of names, where the capability is not known
_TPUS = {  # by the names that runtimes and compilers give
    "TPU v5 lite": "TPU v5e", "TPU v5": "TPU v5p", "TPU v6 lite": "TPU v6e", "TPU v7x": "TPU7x",
}  # fmt: skip


class Device(NamedTuple):
    """What a kernel must know about its device."""

    platform: str  # "cpu", "gpu" or "tpu"
    kind: str  # as `jax.Device.device_kind` names it
    num_cores: int  # streaming multiprocessors, tensor cores
    compute_capability: str = ""  # of NVIDIA's, such as "9.0"; "" where only the kind is known

    @property
    def is_hopper(self) -> bool:
        return self.architecture == "Hopper"

    @property
    def architecture(self) -> str:
        """Devices that run the same kernels alike: "Hopper", a generation of TPUs, or the kind."""
        if self.platform == "gpu" and self.compute_capability:
            return "Hopper" if self.compute_capability == "9.0" else self.kind
        return architecture(self.kind)


def architecture(kind: str) -> str:
    """`Device.architecture` by the name of a kind alone."""
    if kind.startswith("NVIDIA") and any(name in kind for name in _HOPPER):
        return "Hopper"
    return _TPUS.get(kind, kind)


def target_device() -> Device:
    """The abstract mesh's device where one is set, as for a compilation without the device
    (`jax.sharding.use_abstract_mesh`); else JAX's default device.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None:
        platform = "gpu" if described.platform == "cuda" else described.platform
        return Device(platform, described.device_kind, described.num_cores or 1)
    device = jax.devices()[0]
    num_cores = getattr(device, "core_count", None) or 1
    capability = str(getattr(device, "compute_capability", ""))
    return Device(device.platform, device.device_kind, num_cores, capability)
