"""`kernelbench --products` for people."""

from collections.abc import Mapping
from typing import Any

from scripts.reports import kernel_text


def ceilings(results: Mapping[str, Any]) -> list[str]:
    """Rates of a device, by JAX or by a peer."""
    maker = results.get("peer") or f"{results['device']}, jax {results['jax']}"
    copied = results.get("copy_bandwidth") or results["hardware"]["read_bandwidth"]
    lines = [f"{maker}; measured: memory {copied / 1e9:.0f} GB/s{kernel_text.read_only(results)}"]
    for width, rate in results.get("rates", {}).items():
        lines.append(f"bfloat16 products of {width} x {width}: {rate / 1e12:.1f} TFLOP/s")
    return lines


def table(results: Mapping[str, Any]) -> list[str]:
    """A line a case and implementation; shares are of the bandwidth of reading alone."""
    lines = [
        *ceilings(results),
        f"{'':46}{'us':>10}{'GB/s':>8}{'of reading':>12}{'error':>10}",
    ]
    for row in results["rows"]:
        for name, result in row["results"].items():
            label = f"{row['case']:38}{name:8}"
            lines.append(f"{label}{_line(result, row['bytes'])}".rstrip())
    return lines


def _line(result: Mapping[str, Any], num_bytes: float) -> str:
    if (reason := kernel_text.why_untimed(result)) is not None:
        return reason
    seconds = result["seconds"]
    return (
        f"{1e6 * seconds:10.1f}{num_bytes / seconds / 1e9:8.0f}{result['share']:12.0%}"
        f"{result['error']:10.1e}"
    )
