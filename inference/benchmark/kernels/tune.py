"""Writes `layers/kernels/tuning.json`: kernels and sizes that were measured right and faster."""

import collections
import datetime
import importlib.metadata
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from configs.settings.kernels import ATTENTIONS
from inference.files import atomic
from layers.kernels import tuning
from layers.kernels.device import Device

_GAIN = 1.01  # below, a difference is noise
_OWN = [name for name in ATTENTIONS if name not in ("reference", "ffi_cpu")]  # of accelerators

Row = Mapping[str, Any]  # of `timing.measure`


def missing(rows: Sequence[Row]) -> str | None:
    """Why the rows do not suffice to replace the file's entry; None if they do."""
    for row in rows:
        status = row["results"].get("reference", {}).get("status")
        if status != "right":
            return f"no time of the reference ({status}): {row['case']}"
        for name in _OWN:
            if row["results"].get(name, {}).get("status") in (None, "out of time"):
                return f"{name} was not begun: {row['case']}"
    return None


def entry(rows: Sequence[Row], today: datetime.date | None = None) -> dict[str, object]:
    """The file's entry for the device on which the rows were measured, none of them missing."""
    ahead = {name: gain for name in _OWN if (gain := _gain(rows, name)) is not None}
    sizes = {name: _sizes(rows, name) for name in _OWN}
    return {
        "attention": sorted(ahead, key=lambda name: -ahead[name]),
        "cases": [row["case"] for row in rows],
        "date": str(today or datetime.date.today()),
        "jax": importlib.metadata.version("jax"),
        "sizes": {name: best for name, best in sizes.items() if best},
    }


def write(device: Device, measured: Mapping[str, object]) -> None:
    """Replaces the entry of a kind of device; the other kinds keep theirs.

    Raises:
        OSError: the file cannot be written.
    """
    whole = tuning.results() | {device.kind: {**measured, "cores": device.num_cores}}
    with atomic.open_file(tuning.PATH) as file:
        file.write(json.dumps(whole, indent=1, sort_keys=True).encode() + b"\n")
    tuning.results.cache_clear()


def _gain(rows: Sequence[Row], name: str) -> float | None:
    """Speed relative to the reference, the median over cases; None unless it was right and
    repeatable wherever it could run, and faster in every case.
    """
    gains = []
    for row in rows:
        result, reference = row["results"][name], row["results"]["reference"]
        if result["status"] == "not run":
            continue
        if result["status"] != "right" or not result["is_repeatable"]:
            return None
        gains.append(reference["seconds"] / result["seconds"])
    return statistics.median(gains) if gains and min(gains) > _GAIN else None


def _sizes(rows: Sequence[Row], name: str) -> dict[str, dict[str, int]]:
    """The best sizes of each class of shape, where they beat the kernel's default."""
    classes: dict[str, list[dict[Any, float]]] = collections.defaultdict(list)
    for row in rows:
        result = row["results"][name]
        if result["status"] != "right" or "candidates" not in result:
            continue
        shape = (row["rows"], row["kv_heads"], row["head_width"], row["page_tokens"])
        # Relative to the default, so that long and short contexts weigh the same.
        own_s = result["candidates"][0]["seconds"]
        times = {tuple(c["sizes"].items()): c["seconds"] / own_s for c in result["candidates"]}
        classes[tuning.attention_class(*shape)].append(times)
    best = {}
    for shape_class, cases in sorted(classes.items()):
        common = sorted(set.intersection(*(set(times) for times in cases)))
        times = {c: statistics.mean(case[c] for case in cases) for c in common}
        chosen = min(times, key=lambda candidate: times[candidate], default=())
        if chosen and times[chosen] * _GAIN < 1:
            best[shape_class] = dict(chosen)
    return best
