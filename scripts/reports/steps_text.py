"""`bench --decode` and `bench --prefill` for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from configs.hardware.spec import HardwareSpec
from inference.planner import report

_DECODE = ("measured ms", "predicted ms", "ratio", "GB a step", "bandwidth", "engine adds us")
_PREFILL = ("measured ms", "predicted ms", "ratio", "TFLOP a step", "product rate", "tokens/s")


def lines(result: Mapping[str, Any]) -> list[str]:
    """The table of either, and what predicted it."""
    hardware = HardwareSpec(**result["hardware"])
    if "decode_steps" in result:
        table = _table("context", _DECODE, result["decode_steps"], _decode, hardware)
        rate = f"{hardware.read_bandwidth / 1e9:.0f} GB/s"
    else:
        table = _table("tokens", _PREFILL, result["prefill_steps"], _prefill, hardware)
        rate = f"{max(hardware.rates.values()) / 1e12:.1f} TFLOP/s"
    predicted_by = report.predicted_by(hardware)
    return [*table, f"{hardware.name}: {rate}, measured; predicted by: {predicted_by}"]


def _table(
    unit: str,
    names: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    cells: Any,
    hardware: HardwareSpec,
) -> list[str]:
    table = [f"{f'rows x {unit}':>16}" + "".join(f"{name:>16}" for name in names)]
    for row in rows:
        line = f"{row['rows']:>8} x {row[unit]:<5}"
        if "measured_s" not in row:
            room = f"{hardware.memory_bytes / 1e9:.1f} GB"
            table.append(f"{line}  does not fit: {row['needed_bytes'] / 1e9:.1f} GB of {room}")
            continue
        times = f"{1e3 * row['measured_s']:16.3f}{1e3 * row['predicted_s']:16.3f}"
        more = "".join(f"{cell:>16}" for cell in cells(row))
        table.append(f"{line}{times}{row['ratio']:16.2f}{more}")
    return table


def _decode(row: Mapping[str, Any]) -> tuple[str, str, str]:
    share = f"{row['bandwidth_share']:.0%}" if row["bandwidth_share"] <= 1 else "caches"
    gap = "" if row["gap_s"] is None else f"{1e6 * row['gap_s']:.0f}"
    return f"{row['step_bytes'] / 1e9:.2f}", share, gap


def _prefill(row: Mapping[str, Any]) -> tuple[str, str, str]:
    rate = row["rows"] * row["tokens"] / row["measured_s"]
    return f"{row['step_flops'] / 1e12:.2f}", f"{row['rate_share']:.0%}", f"{rate:.0f}"
