"""Chips by the name that `--hardware` takes, from their vendors' data sheets.

Rates are of dense products: where a sheet prints the rate with 2:4 sparsity, half of it. Links are
all links of a chip together, one direction: half of what sheets print as bidirectional; they join
the eight GPUs of a server through a switch, or a TPU pod as a torus: of two axes in v5e and v6e, of
three in v5p and v7x (Austin et al. 2025). GPUs reach their host's memory by 16 lanes of PCIe: half
of the sheets' 128 GB/s (gen 5) or 64 GB/s (gen 4).

Memory is what a device reports, not the sheet's round figure: for GPUs the total that `nvidia-smi`
prints, for TPUs the HBM that XLA's compiler has to place programs in.
"""

from configs.errors import InputError
from configs.hardware.spec import HardwareSpec
from configs.settings.cache import padded_caches

# What one turn of a ring takes before data move, by NCCL's own table (src/graph/tuning.cc,
# hwLatencies, ring, LL protocol, which short messages use): 0.6 us by NVLink, 1 us by PCIe.
_NVLINK_S, _PCIE_S = 0.6e-6, 1.0e-6
# About 1 us a hop: Austin et al. 2025, How to Scale Your Model, "Sharded matrices".
_ICI_S = 1.0e-6

_GEN5, _GEN4 = 64e9, 32e9
_MIB, _GIB = 2**20, 2**30
# Only Hopper has a kernel of quantized pages.
_HOPPER_CACHES, _TPU_CACHES = padded_caches("gpu", True), padded_caches("tpu", True)
_TPU_HOST = 15e9  # Austin et al. 2025, "How to Think About TPUs", question 3

NAMES = {
    spec.name: spec
    for spec in (
        # NVIDIA H100 Tensor Core GPU data sheet, SXM: 3.35 TB/s; 1,979 TFLOP/s bf16 and 3,958
        # fp8 and int8 with sparsity; 67 TFLOP/s fp32; NVLink 900 GB/s.
        HardwareSpec(
            "h100", 81_559 * _MIB, 3.35e12,
            {"bfloat16": 989e12, "fp8": 1979e12, "int8": 1979e12, "float32": 67e12},
            450e9, _NVLINK_S, 8, host_bandwidth=_GEN5, padded_caches=_HOPPER_CACHES,
        ),
        # NVIDIA H200 data sheet, SXM: 4.8 TB/s; the rates of H100.
        HardwareSpec(
            "h200", 143_771 * _MIB, 4.8e12,
            {"bfloat16": 989e12, "fp8": 1979e12, "int8": 1979e12, "float32": 67e12},
            450e9, _NVLINK_S, 8, host_bandwidth=_GEN5, padded_caches=_HOPPER_CACHES,
        ),
        # NVIDIA HGX B200 data sheet, a GPU at 1,000 W: 4.5 PFLOP/s bf16 and 9 fp8 and int8 with
        # sparsity; 80 TFLOP/s fp32; NVLink 1.8 TB/s. It reads 7.67 TB/s ("up to 8").
        HardwareSpec(
            "b200", 183_359 * _MIB, 7.67e12,
            {"bfloat16": 2250e12, "fp8": 4500e12, "int8": 4500e12, "float32": 80e12},
            900e9, _NVLINK_S, 8, host_bandwidth=_GEN5,
        ),
        # NVIDIA A100 data sheet, 80 GB SXM: 2,039 GB/s; dense 312 TFLOP/s bf16, 624 int8, 19.5
        # fp32; no fp8; NVLink 600 GB/s.
        HardwareSpec(
            "a100", 81_920 * _MIB, 2.039e12,
            {"bfloat16": 312e12, "int8": 624e12, "float32": 19.5e12},
            300e9, _NVLINK_S, 8, host_bandwidth=_GEN4,
        ),
        # NVIDIA L4 data sheet: 300 GB/s; 242 TFLOP/s bf16 and 485 fp8 and int8 with sparsity;
        # 30.3 fp32; no NVLink, PCIe gen 4 x16 at 64 GB/s.
        HardwareSpec(
            "l4", 23_034 * _MIB, 300e9,
            {"bfloat16": 121e12, "fp8": 242.5e12, "int8": 242.5e12, "float32": 30.3e12},
            32e9, _PCIE_S, 8, host_bandwidth=_GEN4,
        ),
        # docs.cloud.google.com/tpu/docs/v5e: 197 TFLOP/s bf16, 393 TOP/s int8, ICI 400 GB/s
        # bidirectional; 819 GB/s: Austin et al. 2025 (the page has 800 GiB/s).
        HardwareSpec(
            "v5e", 15.75 * _GIB, 819e9, {"bfloat16": 197e12, "int8": 393e12}, 200e9, _ICI_S, 256,
            link_axes=2, host_bandwidth=_TPU_HOST, padded_caches=_TPU_CACHES,
        ),
        # docs.cloud.google.com/tpu/docs/v5p: 2,765 GB/s, 459 TFLOP/s bf16 (fp8 is no faster), ICI
        # 1,200 GB/s bidirectional; int8 918 TOP/s: Austin et al. 2025.
        HardwareSpec(
            "v5p", 95.74 * _GIB, 2.765e12, {"bfloat16": 459e12, "int8": 918e12}, 600e9, _ICI_S,
            8960, link_axes=3, host_bandwidth=_TPU_HOST, padded_caches=_TPU_CACHES,
        ),
        # docs.cloud.google.com/tpu/docs/v6e: 1,640 GB/s (1,638 in older editions), 918 TFLOP/s bf16
        # (fp8 is no faster), 1,836 TOP/s int8, ICI 800 GB/s bidirectional.
        HardwareSpec(
            "v6e", 31.25 * _GIB, 1.64e12, {"bfloat16": 918e12, "int8": 1836e12}, 400e9, _ICI_S, 256,
            link_axes=2, host_bandwidth=_TPU_HOST, padded_caches=_TPU_CACHES,
        ),
        # docs.cloud.google.com/tpu/docs/tpu7x: 7,380 GB/s, 2,307 TFLOP/s bf16, 4,614 fp8 (no
        # faster int8), ICI 1,200 GB/s bidirectional. Two cores of 94.75 GiB each.
        HardwareSpec(
            "v7x", 2 * 94.75 * _GIB, 7.38e12, {"bfloat16": 2307e12, "fp8": 4614e12}, 600e9, _ICI_S,
            9216, link_axes=3, host_bandwidth=_TPU_HOST, padded_caches=_TPU_CACHES,
        ),
    )
}  # fmt: skip

# The machine at hand, which is measured and not looked up.
THIS_MACHINE = "cpu"


def platform(name: str) -> str:
    """What JAX calls the platform of a chip that is here: 'cpu', 'gpu' or 'tpu'."""
    if name == THIS_MACHINE:
        return "cpu"
    return "tpu" if name.startswith("v") else "gpu"  # only Google's go by versions


def get(name: str) -> HardwareSpec:
    """The chip of that name.

    Raises:
        InputError: no such chip.
    """
    if name not in NAMES:
        raise InputError(
            f"no hardware {name!r}; valid: {', '.join(NAMES)}, {THIS_MACHINE} (this machine)"
        )
    return NAMES[name]
