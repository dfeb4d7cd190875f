"""What computes a model's attention and products on a device, in the line of an engine's start."""

import collections
import logging
from typing import cast

import jax

from configs.engine import Config
from layers import params as parameters
from layers.backends import backends
from layers.backends.backend import Backend
from layers.kernels.attention import api
from layers.kernels.device import Device
from layers.kernels.linear import api as linear
from layers.kernels.linear.low_bit import Quantized
from sharding import rules

_MOST_ROWS = 128  # of any kernel of few rows


def log(config: Config, attention: api.Choice, device: Device) -> None:
    """One line names the implementations, and matrices without a kernel; it is a warning where a
    faster kernel of attention cannot run. Another names what a mesh does not divide evenly.
    """
    is_slow = attention.name == "reference" and config.engine.kernels.attention is None
    why = "".join(f"; {name} {reason}" for name, reason in attention.passed_over.items())
    backend = backends.of(device)
    # Where the CPU's library is not there, a line of its own has said why.
    warns = is_slow and not backend.has_native_kernels
    level = logging.WARNING if warns else logging.INFO
    logging.log(
        level, "on %s: attention by %s, products %s%s", device.kind, attention.name,
        _products(config, backend), why,
    )  # fmt: skip
    infos = parameters.flatten(config.model.parameters())
    padded = [path for path, info in infos.items()
              if rules.is_padded(config.model, path, info, config.mesh)]  # fmt: skip
    if padded:
        logging.info(
            "mesh %s: %d of %d parameters have zeros or copies, as nothing divides them evenly: "
            "%s first", config.mesh, len(padded), len(infos), padded[0],
        )  # fmt: skip


def _products(config: Config, backend: Backend) -> str:
    """By what, to how many rows; and how many matrices XLA multiplies, and why."""
    if config.engine.kernels.linear != "reference":
        return f"by {config.engine.kernels.linear}"
    if backend.skinny_kernel is None:
        return "by XLA"
    infos = parameters.flatten(config.chip_model.parameters()).values()
    counts = collections.Counter((info.format, info.shape) for info in infos if info.is_multiplied)
    examples = {(info.format, info.shape): info for info in infos}
    most_rows: dict[str, int] = {}
    without: collections.Counter[tuple[str, str]] = collections.Counter()
    for (format, shape), count in counts.items():
        w = cast("jax.Array | Quantized", linear.abstract(config, examples[format, shape]))
        rows = [n for n in range(1, 1 + _MOST_ROWS) if backend.skinny_product(n, w) is not None]
        if rows:
            most_rows[format] = max(rows)
        else:
            without[format, backend.why_no_product(w)] += count
    exceptions = ", ".join(
        f"{count} {'matrix' if count == 1 else 'matrices'} of {format}"
        f"{f' ({reason})' if reason else ''}"
        for (format, reason), count in without.items()
    )
    if not most_rows:
        return f"by XLA: {exceptions}"
    most = max(most_rows.values())
    fewer = ", ".join(f"{format}: {rows}" for format, rows in most_rows.items() if rows < most)
    by_kernel = f"of up to {most} rows{f' ({fewer})' if fewer else ''} by {backend.skinny_kernel}"
    return f"{by_kernel}, except {exceptions} by XLA" if exceptions else by_kernel
