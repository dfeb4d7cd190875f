"""`kernelbench` for people."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from inference.benchmark.kernels.attention_case import Case


def table(results: Mapping[str, Any]) -> list[str]:
    hardware = results["hardware"]
    rate = hardware["rates"]["bfloat16"]
    lines = [
        f"{results['device']}, jax {results['jax']}; measured: memory "
        f"{hardware['read_bandwidth'] / 1e9:.0f} GB/s{read_only(results)}, bfloat16 products "
        f"{rate / 1e12:.1f} TFLOP/s",
        f"{'':18}{'us':>10}{'of the bound':>14}{'of the fastest':>16}{'error':>10}",
    ]
    for row in results["rows"]:
        lines += [
            "",
            f"{row['case']}: {row['bytes'] / 1e6:.1f} MB, {row['flops'] / 1e9:.2f} GFLOP, "
            f"{row['bound']}: {1e6 * row['predicted_s']:.1f} us",
        ]
        kernels = row["results"]
        fastest_s = min((r["seconds"] for r in kernels.values() if "seconds" in r), default=0.0)
        lines += [f"  {name:16}{_line(result, fastest_s)}" for name, result in kernels.items()]
    for ratios, text in (
        (shuffled_over_in_order(results["rows"]), "pages in random order over pages in order"),
        (paged_over_contiguous(results["rows"]), "pages over the fastest on contiguous keys"),
    ):
        lines += ["", f"{text}, at most:"] if ratios else []
        lines += [f"  {name:24}{ratio:.2f} x" for name, ratio in ratios.items()]
    if "tuning" in results:
        lines += ["", f"tuning.json: {results['tuning']}"]
    return lines


def read_only(results: Mapping[str, Any]) -> str:
    """The bandwidth of reading alone, beside that of a copy."""
    bandwidth = results.get("read_bandwidth")
    return "" if bandwidth is None else f" ({bandwidth / 1e9:.0f} GB/s where nothing is written)"


def paged_over_contiguous(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Time of each kernel that reads pages over the fastest that does not: the largest ratio over
    the cases in which pages are in random order.
    """
    ratios: dict[str, float] = {}
    for row in rows:
        timed = {name: r for name, r in row["results"].items() if "seconds" in r}
        peers = [result["seconds"] for result in timed.values() if not result["is_paged"]]
        for name, result in timed.items() if peers and row["is_shuffled"] else ():
            if result["is_paged"]:
                ratios[name] = max(ratios.get(name, 0.0), result["seconds"] / min(peers))
    return ratios


def shuffled_over_in_order(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Time of each kernel that reads pages with pages in random order over that in order: the
    largest ratio.
    """
    names = [field.name for field in dataclasses.fields(Case) if field.name != "is_shuffled"]

    def sizes(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in names)

    in_order = {sizes(row): row["results"] for row in rows if not row["is_shuffled"]}
    ratios: dict[str, float] = {}
    for row in rows:
        for name, result in row["results"].items() if row["is_shuffled"] else ():
            beside = in_order.get(sizes(row), {}).get(name, {})
            if "seconds" in result and "seconds" in beside and result["is_paged"]:
                ratio = result["seconds"] / beside["seconds"]
                ratios[name] = max(ratio, ratios.get(name, 0.0))
    return ratios


def why_untimed(result: Mapping[str, Any]) -> str | None:
    """Why a kernel has no time: it did not run, or was wrong; None if it has one."""
    if "reason" in result:
        return f"{result['status']}: {result['reason']}"
    if "seconds" not in result:
        off = "not finite" if result["error"] is None else f"error {result['error']:.1e}"
        return f"{result['status'].upper()}: {off}"
    return None


def _line(result: Mapping[str, Any], fastest_s: float) -> str:
    if (reason := why_untimed(result)) is not None:
        return reason
    sizes = ", ".join(f"{name} {value}" for name, value in result["sizes"].items())
    bits = "" if result["is_repeatable"] else "bits vary"
    notes = ", ".join(filter(None, (sizes, bits)))
    seconds = result["seconds"]
    return (
        f"{1e6 * seconds:10.1f}{result['share']:14.0%}{fastest_s / seconds:16.0%}"
        f"{result['error']:10.1e}   {notes}".rstrip()
    )
