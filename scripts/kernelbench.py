"""Times kernels of attention, or products, beside predictions: python -m scripts.kernelbench.

Every implementation that this device can run, and cuDNN and flash-attn3-jax where they are
installed. A wrong kernel gets no time. --tune tries sizes of ours, without these baselines, and
writes layers/kernels/tuning.json. --products times Llama 3 8B's matrices in several formats, by the
engine's back end and by XLA alone.
"""

from scripts import interrupts  # noqa: F401

# isort: split
import dataclasses
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from configs.errors import InputError
from configs.settings.kernels import ATTENTIONS
from scripts import common
from scripts.flags import json_lines_flag, shared_flags
from scripts.reports import kernel_text, product_text

if TYPE_CHECKING:
    from layers.kernels.device import Device

_DEVICE = shared_flags.DEVICE
_REPEATS = shared_flags.REPEATS
_SECONDS = flags.DEFINE_float("seconds", 240.0, "Begin no kernel after that.")
_ONLY = flags.DEFINE_list("only", None, "Only these kernels, by name.")
_TUNE = flags.DEFINE_bool("tune", False, "Try sizes of ours, write layers/kernels/tuning.json.")
_PRODUCTS = flags.DEFINE_bool("products", False, "Products of few rows instead of attention.")
_CEILINGS = flags.DEFINE_bool("ceilings", False, "The device's rates alone.")
_READ = ("device", "repeats", "seconds", "only", "tune", "products", "ceilings", "json",
         "json_lines")  # fmt: skip
_WIDTHS = 4096, 8192, 16384  # of large products


def main(_: Sequence[str]) -> None:
    common.check_flags("kernelbench", {"kernelbench": _READ})
    if _REPEATS.value < 3:
        raise InputError(f"--repeats is at least 3, not {_REPEATS.value}")
    if not _SECONDS.value > 0:
        raise InputError(f"--seconds is above 0, not {_SECONDS.value}")
    if _TUNE.value and _ONLY.value is not None:
        raise InputError("--tune compares all kernels of ours: leave --only out")
    if _TUNE.value + _PRODUCTS.value + _CEILINGS.value > 1:
        raise InputError("--tune, --products and --ceilings are three measurements: choose one")
    device = _device()
    if _TUNE.value and device.platform == "cpu":
        raise InputError("--tune needs an accelerator: the CPU has one implementation")
    from inference.runtime import compilation_cache

    compilation_cache.enable()
    if _CEILINGS.value:
        _print_ceilings(device)
    elif _PRODUCTS.value:
        _time_products(device)
    else:
        _time_attention(device)


def _print_ceilings(device: "Device") -> None:
    """Rates that kernels are compared with; on a CPU those of its calibration."""
    import jax

    from inference.planner.calibration import on_device

    result = _result(device)
    if jax.default_backend() != "cpu":
        result["rates"] = {width: on_device.matmul_rate("bfloat16", width) for width in _WIDTHS}
    if json_lines_flag.is_json():
        common.print_plain(result)
    else:
        print("\n".join(product_text.ceilings(result)))


def _time_products(device: "Device") -> None:
    from inference.benchmark.kernels import products

    back_ends = products.implementations(device)
    chosen = {name: back_ends[name] for name in shared_flags.chosen(_ONLY, list(back_ends))}
    result = _result(device) | {"seed": secrets.randbits(31), "rows": []}
    with common.bars() as progress:
        for row in products.measure(
            products.cases(device.platform), chosen, result["read_bandwidth"], seed=result["seed"],
            repeats=_REPEATS.value, budget_s=_SECONDS.value, progress=progress,
        ):  # fmt: skip
            result["rows"].append(row)
            json_lines_flag.print_line(result)
    if json_lines_flag.is_json():
        common.print_plain(result)
    else:
        print("\n".join(product_text.table(result)))


def _result(device: "Device") -> dict[str, Any]:
    """What holds for all rows: the device and its rates."""
    import jax

    from inference.planner.calibration import lookup, on_device

    hardware = lookup.this_machine("bfloat16")
    on_cpu = jax.default_backend() == "cpu"
    read_bandwidth = hardware.read_bandwidth if on_cpu else on_device.read_only_bandwidth()
    return {
        "device": device.kind, "jax": jax.__version__, "hardware": dataclasses.asdict(hardware),
        "read_bandwidth": read_bandwidth,
    }  # fmt: skip


def _time_attention(device: "Device") -> None:
    from configs.hardware.spec import HardwareSpec
    from inference.benchmark.kernels import baselines, timing, tune

    kernels = {kernel.name: kernel for kernel in baselines.kernels()}
    names = ATTENTIONS if _TUNE.value else list(kernels)
    chosen = [kernels[name] for name in shared_flags.chosen(_ONLY, names)]
    result = _result(device) | {"seed": secrets.randbits(31), "rows": []}
    hardware = HardwareSpec(**result["hardware"])
    with common.bars() as progress:
        for row in timing.measure(
            timing.cases(device.platform, hardware.memory_bytes), chosen, hardware,
            seed=result["seed"], repeats=_REPEATS.value, budget_s=_SECONDS.value,
            tunes=_TUNE.value, progress=progress,
        ):  # fmt: skip
            result["rows"].append(row)
            json_lines_flag.print_line(result)
    result["paged_over_contiguous"] = kernel_text.paged_over_contiguous(result["rows"])
    result["shuffled_over_in_order"] = kernel_text.shuffled_over_in_order(result["rows"])
    reason = tune.missing(result["rows"]) if _TUNE.value else None
    if _TUNE.value:
        result["tuning"] = f"as it was: {reason}" if reason else tune.entry(result["rows"])
    if json_lines_flag.is_json():
        common.print_plain(result)
    else:
        print("\n".join(kernel_text.table(result)))
    if _TUNE.value and reason is None:  # last, so that what was measured is printed in any case
        tune.write(device, result["tuning"])


def _device() -> "Device":
    """The device that --device names; raises InputError if JAX has none."""
    import jax

    from layers.kernels.device import target_device

    platform = _DEVICE.value
    if platform != "auto":
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(platform, platform))
    try:
        device = target_device()
    except RuntimeError as failure:
        reason = " ".join(str(failure).split())[:300]
        raise InputError(f"--device={platform}: JAX finds none here ({reason})") from None
    if platform not in ("auto", device.platform):
        raise InputError(f"--device={platform}: JAX computes on {device.platform} here")
    return device


if __name__ == "__main__":
    common.run(main)
