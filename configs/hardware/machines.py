"""How clouds offer chips: machines by their number of chips, and the names that schedulers take.

TPUs: docs.cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus, the table of machine types,
and docs.cloud.google.com/tpu/docs for accelerator types and runtime versions. GPUs:
docs.cloud.google.com/compute/docs/gpus, and the labels of NVIDIA's GPU feature discovery.
"""

import dataclasses
from collections.abc import Mapping

from configs.errors import InputError
from configs.hardware.targets import Target


@dataclasses.dataclass(frozen=True)
class Offer:
    """A chip as it is offered.

    Attributes:
        machines: GKE's machine types, by chips.
        label: of GKE's nodes: `gke-tpu-accelerator` of TPUs, `gke-accelerator` of GPUs.
        accelerator: as SkyPilot names a GPU; of TPUs the family of Google's accelerator types.
        cores: that accelerator types count for each chip.
        runtime: version of the software on a TPU VM.
        product: `nvidia.com/gpu.product` of any Kubernetes' nodes; without a '-SUFFIX' of some.
        xpk: as xpk names a host of GPUs.
    """

    machines: Mapping[int, str]
    label: str
    accelerator: str
    cores: int = 1
    runtime: str = ""
    product: str = ""
    xpk: str = ""


OFFERS = {
    "h100": Offer(
        {chips: f"a3-highgpu-{chips}g" for chips in (1, 2, 4, 8)}, "nvidia-h100-80gb", "H100",
        product="NVIDIA-H100-80GB-HBM3", xpk="h100-80gb-8",
    ),
    "h200": Offer(
        {8: "a3-ultragpu-8g"}, "nvidia-h200-141gb", "H200",
        product="NVIDIA-H200", xpk="h200-141gb-8",
    ),
    "v5e": Offer(
        {chips: f"ct5lp-hightpu-{chips}t" for chips in (1, 4, 8)}, "tpu-v5-lite-podslice",
        "v5litepod", runtime="v2-alpha-tpuv5-lite",
    ),
    "v5p": Offer(
        {chips: f"ct5p-hightpu-{chips}t" for chips in (1, 4)}, "tpu-v5p-slice", "v5p", cores=2,
        runtime="v2-alpha-tpuv5",
    ),
    "v6e": Offer(
        {chips: f"ct6e-standard-{chips}t" for chips in (1, 4, 8)}, "tpu-v6e-slice", "v6e",
        runtime="v2-alpha-tpuv6e",
    ),
    "v7x": Offer(
        {chips: f"tpu7x-standard-{chips}t" for chips in (1, 4)}, "tpu7x", "tpu7x", cores=2,
    ),
}  # fmt: skip

# Chips of each host of a slice of several; of a cluster of GPUs.
_SLICE_HOST, _GPU_HOST = 4, 8


@dataclasses.dataclass(frozen=True)
class Hosts:
    """The hosts of a target.

    Attributes:
        count: how many there are.
        chips: of each.
        machine: GKE's type of each; '' where it has none with so many chips.
    """

    target: Target
    count: int
    chips: int
    machine: str

    @property
    def offer(self) -> Offer:
        return OFFERS[self.target.chip]

    @property
    def accelerator_type(self) -> str:
        """Google's name of a slice, which counts cores in some families: 'v5p-32' has 16 chips."""
        return f"{self.offer.accelerator}-{self.target.num_chips * self.offer.cores}"

    @property
    def topology(self) -> str:
        """Of a slice: '2x4'."""
        return self.target.topology.partition(":")[2]


def hosts_of(target: Target, count: int | None = None) -> Hosts:
    """The hosts of a target, as few as there can be unless a number is given.

    Raises:
        InputError: nobody offers the chip, or not on so many hosts.
    """
    if target.chip not in OFFERS:
        raise InputError(f"target={target.name}: no cloud offers it; valid: {', '.join(OFFERS)}")
    offer, chips = OFFERS[target.chip], target.num_chips
    if target.platform == "gpu":
        counts = {-(-chips // _GPU_HOST)}
    else:
        counts = {1} if chips in offer.machines else set()
        counts |= {chips // _SLICE_HOST} if chips > _SLICE_HOST else set()
    if not counts:
        raise InputError(f"target={target.name}: no host has {chips} chips of it")
    if count is not None and count not in counts:
        valid = " or ".join(map(str, sorted(counts)))
        raise InputError(f"hosts={count}: {target.name} is on {valid}")
    count = min(counts) if count is None else count
    return Hosts(target, count, chips // count, offer.machines.get(chips // count, ""))
