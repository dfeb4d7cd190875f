"""Measurements: which kernels were correct and faster, and the best sizes, by kind of device.

`tuning.json` maps a device kind (as `jax.Device.device_kind` names it) to what
`python -m scripts.kernelbench --tune` measured there:

    {"NVIDIA H200": {
        "attention": ["pallas_gpu"],
        "cases": ["decode 32 x 1 at 4096, ..."],
        "cores": 132,
        "date": "...", "jax": "...",
        "sizes": {"pallas_gpu": {"H128 page64 blocks256": {"num_splits": 2, "num_stages": 2}}}}}

`attention` lists the implementations that won in all of `cases`, best first. `sizes` are keyword
arguments of an implementation's kernel by class of shape; for a class that is not listed the
kernel's own rule holds. Both hold for the whole architecture (`Device.architecture`): those of the
kind itself, else those of the measured kind whose number of cores is nearest.
"""

import functools
import json
import logging
from pathlib import Path
from typing import Any

from configs.settings.kernels import ATTENTIONS
from layers.kernels.device import Device, architecture

PATH = Path(__file__).with_name("tuning.json")


def winners(operation: str, device: Device) -> tuple[str, ...] | None:
    """Implementations that a measurement on this architecture ranks above the reference."""
    ranked = _nearest(device).get(operation)
    return None if ranked is None else tuple(ranked)


def sizes(implementation: str, device: Device, shape_class: str) -> dict[str, int]:
    """Tuned sizes of a kernel; it chooses those that are missing."""
    tuned = _nearest(device).get("sizes", {})
    return dict(tuned.get(implementation, {}).get(shape_class, {}))


def _nearest(device: Device) -> dict[str, Any]:
    """What was measured on the kind of device that is nearest to this one."""
    measured = results()
    alike = [kind for kind in measured if architecture(kind) == device.architecture]

    def distance(kind: str) -> tuple[bool, int]:
        return kind != device.kind, abs(measured[kind].get("cores", 0) - device.num_cores)

    return measured[min(alike, key=distance)] if alike else {}


def attention_class(rows: int, num_kv_heads: int, head_width: int, page_tokens: int) -> str:
    """Key of shapes that share sizes: pairs of row and KV head, up to a power of 2."""
    blocks = 1 << (rows * num_kv_heads - 1).bit_length()
    return f"H{head_width} page{page_tokens} blocks{blocks}"


@functools.cache
def results() -> dict[str, dict[str, Any]]:
    """The whole file; {} with a warning where it is damaged."""
    try:
        entries: dict[str, dict[str, Any]] = json.loads(PATH.read_text(encoding="utf-8"))
        for kind, entry in entries.items():
            _check(kind, entry)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        logging.warning("%s is not used, kernels choose their sizes: %s", PATH, error)
        return {}
    return entries


def _check(kind: str, entry: dict[str, Any]) -> None:
    """Raises ValueError, AttributeError or TypeError for what `results` must not return."""
    counts = [entry.get("cores", 1)]
    for classes in entry.get("sizes", {}).values():
        counts += [count for of_class in classes.values() for count in of_class.values()]
    if not set(entry.get("attention", ())) <= set(ATTENTIONS):
        raise ValueError(f"{kind}: attention lists some of {', '.join(ATTENTIONS)}")
    if not all(isinstance(count, int) and count > 0 for count in counts):
        raise ValueError(f"{kind}: cores and sizes are whole numbers from 1")
