"""What was measured: which kernels were shown right and faster, and where.

`tuning.json` maps a device kind (as `jax.Device.device_kind` names it) to its operations, and each
of these to the implementations that won there, best first:

    {"NVIDIA H200": {"attention": ["pallas_gpu"]}}
"""

import functools
import json
from pathlib import Path


def winners(operation: str, device_kind: str) -> tuple[str, ...]:
    """Implementations of an operation that a committed result puts before the reference."""
    return tuple(_results().get(device_kind, {}).get(operation, ()))


@functools.cache
def _results() -> dict[str, dict[str, list[str]]]:
    return json.loads(Path(__file__).with_name("tuning.json").read_text(encoding="utf-8"))
