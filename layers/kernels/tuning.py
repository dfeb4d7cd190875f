"""Measurements: which kernels were correct and faster, and the best sizes, by kind of device.

`tuning.json` maps a device kind (as `jax.Device.device_kind` names it) to what
`python -m scripts.kernelbench --tune` found there:

    {"NVIDIA H200": {
        "attention": ["pallas_gpu"],
        "cases": ["decode 32 x 1 at 4096, ..."],
        "date": "...", "jax": "...",
        "sizes": {"pallas_gpu": {"H128 page64 blocks256": {"num_splits": 2, "num_stages": 2}}}}}

`attention` lists the implementations that won in all of `cases`, best first. `sizes` are keyword
arguments of an implementation's kernel by class of shape; for a class that is not listed the
kernel's own rule holds.
"""

import functools
import json
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("tuning.json")


def winners(operation: str, device_kind: str) -> tuple[str, ...]:
    """Implementations of an operation that a committed measurement ranks above the reference."""
    return tuple(results().get(device_kind, {}).get(operation, ()))


def sizes(implementation: str, device_kind: str, shape_class: str) -> dict[str, int]:
    """Tuned sizes of a kernel; it chooses those that are missing."""
    tuned = results().get(device_kind, {}).get("sizes", {})
    return dict(tuned.get(implementation, {}).get(shape_class, {}))


def attention_class(rows: int, num_kv_heads: int, head_width: int, page_tokens: int) -> str:
    """Shapes of attention that share their sizes: blocks are pairs of row and KV head, up to a
    power of 2.
    """
    blocks = 1 << (rows * num_kv_heads - 1).bit_length()
    return f"H{head_width} page{page_tokens} blocks{blocks}"


@functools.cache
def results() -> dict[str, dict[str, Any]]:
    """The whole file."""
    return json.loads(PATH.read_text(encoding="utf-8"))
