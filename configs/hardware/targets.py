"""Chips that programs are compiled for without being there, by the name that `--target` takes."""

import dataclasses
import math
import re

from configs.errors import InputError
from configs.hardware import catalog
from configs.mesh import Mesh

# GPUs of one host: beyond them, whole hosts.
_HOST_GPUS = 8
_MOST_GPUS = 256

# docs.cloud.google.com/tpu/docs: the slices of v5e and v6e; a torus of v5p and 7x has sides of a
# multiple of 4 from one cube on.
_SLICES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_BELOW_A_CUBE = ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4")
_TPUS = {"v5e": 2, "v6e": 2, "v5p": 3, "tpu7x": 3}  # axes of their slices

FORMS = (
    "h200, 8xh200, v5e:2x4, v6e:4x4, v5p:4x4x4, tpu7x:2x2x1, h100, 16xh100 or cpu (this machine)"
)


@dataclasses.dataclass(frozen=True)
class Target:
    """Chips that a program is compiled for.

    Attributes:
        name: as `parse` reads it.
        chip: by its name in `catalog`.
        num_chips: all of them.
        topology: as the compiler's plug-in takes it.
    """

    name: str
    chip: str
    num_chips: int
    topology: str

    @property
    def platform(self) -> str:
        """'cpu', 'gpu' or 'tpu'."""
        return catalog.platform(self.chip)

    @property
    def pads_bytes(self) -> bool:
        """As `Config.for_platform` takes it."""
        return not self.is_here and bool(catalog.get(self.chip).padded_caches)

    @property
    def devices_a_chip(self) -> int:
        """What JAX calls devices: a 7x has two, with half of its memory each."""
        return 2 if self.chip == "v7x" else 1

    @property
    def num_devices(self) -> int:
        """Devices of all chips."""
        return self.num_chips * self.devices_a_chip

    def check_mesh(self, mesh: Mesh) -> None:
        """Whether a mesh has as many devices.

        Raises:
            InputError: it has not.
        """
        if mesh.num_chips != self.num_devices:
            raise InputError(
                f"mesh {mesh} is {mesh.num_chips} devices, --target={self.name} has "
                f"{self.num_devices}"
            )

    @property
    def is_here(self) -> bool:
        """Whether it is the machine at hand."""
        return self.chip == catalog.THIS_MACHINE


def parse(name: str) -> Target:
    """The target that a name stands for.

    Raises:
        InputError: there is none such; says what would be valid.
    """
    if name == catalog.THIS_MACHINE:
        return Target(name, name, 1, "")
    if match := re.fullmatch(r"(?:([1-9]\d{0,4})x)?(h100|h200)", name, re.ASCII):
        return _gpus(name, match[2], int(match[1] or 1))
    chip, _, topology = name.partition(":")
    if chip in _TPUS:
        return _tpus(name, chip, topology)
    raise InputError(f"no target {name[:80]!r}; valid: {FORMS}")


def _gpus(name: str, chip: str, count: int) -> Target:
    hosts, of_host = (1, count) if count <= _HOST_GPUS else (count // _HOST_GPUS, _HOST_GPUS)
    if hosts * of_host != count or count > _MOST_GPUS:
        raise InputError(
            f"--target={name}: 1 to {_HOST_GPUS} GPUs of a host, or up to {_MOST_GPUS} of hosts "
            f"with {_HOST_GPUS} each"
        )
    return Target(name, chip, count, f"1x{hosts}x{of_host}")


def _tpus(name: str, chip: str, topology: str) -> Target:
    hardware = catalog.get("v7x" if chip == "tpu7x" else chip)
    is_slice = topology in _SLICES
    valid = ", ".join(_SLICES)
    if _TPUS[chip] == 3:
        is_slice = topology in _BELOW_A_CUBE or _is_torus(topology)
        valid = f"{', '.join(_BELOW_A_CUBE)}, or three growing multiples of 4, as 4x4x8"
    num_chips = math.prod(map(int, topology.split("x"))) if is_slice else 0
    if not 0 < num_chips <= hardware.linked_chips:
        raise InputError(
            f"no slice {topology[:80]!r} of {chip}, of at most {hardware.linked_chips} chips; "
            f"valid: {valid}"
        )
    return Target(name, hardware.name, num_chips, f"{chip}:{topology}")


def _is_torus(topology: str) -> bool:
    if not re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3}){2}", topology, re.ASCII):
        return False
    sides = [int(side) for side in topology.split("x")]
    return sides == sorted(sides) and not any(side % 4 for side in sides)
