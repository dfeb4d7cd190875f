"""`bench --decode` for people."""

from collections.abc import Sequence
from typing import Any

from configs.hardware.spec import HardwareSpec
from inference.planner import report


def table(rows: Sequence[dict[str, Any]], hardware: HardwareSpec) -> list[str]:
    """The lines for people."""
    names = ("measured ms", "predicted ms", "ratio", "GB a step", "bandwidth", "engine adds us")
    lines = [f"{'rows x context':>16}" + "".join(f"{name:>16}" for name in names)]
    for row in rows:
        line = f"{row['rows']:>8} x {row['context']:<5}"
        if "measured_s" not in row:
            room = f"{hardware.memory_bytes / 1e9:.1f} GB"
            lines.append(f"{line}  does not fit: {row['needed_bytes'] / 1e9:.1f} GB of {room}")
            continue
        share = f"{row['bandwidth_share']:.0%}" if row["bandwidth_share"] <= 1 else "caches"
        gap = "" if row["gap_s"] is None else f"{1e6 * row['gap_s']:.0f}"
        lines.append(
            f"{line}{1e3 * row['measured_s']:16.3f}{1e3 * row['predicted_s']:16.3f}"
            f"{row['ratio']:16.2f}{row['step_bytes'] / 1e9:16.2f}{share:>16}"
            f"{gap:>16}"
        )
    lines.append(
        f"{hardware.name}: {hardware.read_bandwidth / 1e9:.0f} GB/s, measured; predicted by: "
        f"{report.predicted_by(hardware)}"
    )
    return lines
