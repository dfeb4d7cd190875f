"""`plan --verify` as JSON and as a page."""

import dataclasses
import datetime
import importlib.metadata
import statistics
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from inference.files import local_machine
from inference.planner.calibration import calibrate
from inference.planner.calibration.verify import Result, Verification


def as_json(verifications: Sequence[Verification]) -> dict[str, Any]:
    """Everything as plain data, and which machine it was."""
    results = [result for verified in verifications for result in verified.results]
    median, largest = errors(results)
    return {
        "rows": [
            {"model": verified.model.name, "weights": verified.weights}
            | {"size": result.point.size, "context": result.point.context}
            | {"measured_s": result.seconds, "predicted_s": result.predicted_s}
            | {"spread": result.spread, "roofline_s": result.roofline_s}
            for verified in verifications
            for result in verified.results
        ],
        "models": [
            {"model": verified.model.name, "weights": verified.weights}
            | {"predicted_weight_bytes": verified.predicted_bytes[0]}
            | {"weight_bytes": verified.allocated_bytes[0]}
            | {"predicted_cache_bytes": verified.predicted_bytes[1]}
            | {
                "cache_bytes": verified.allocated_bytes[1],
                "calibration_s": verified.calibration_s,
            }
            | {"hardware": [dataclasses.asdict(machine) for machine in verified.hardware]}
            for verified in verifications
        ],
        "median_error": median,
        "largest_error": largest,
        "processor": local_machine.processor(),
        "cores": local_machine.num_cores(),
        "jax": importlib.metadata.version("jax"),
    }


def markdown(verifications: Sequence[Verification]) -> str:
    results = [result for verified in verifications for result in verified.results]
    rounds = len(verifications[0].hardware)
    plain = " and ".join(_percent(share) for share in errors(results, roofline=True))
    median, largest = map(_percent, errors(results))
    lines = [
        f"# Predicted and measured steps on {local_machine.name()}",
        "",
        f"Written on {datetime.date.today()}, jax {importlib.metadata.version('jax')}, by",
        "",
        f"    python -m scripts.plan {' '.join(sys.argv[1:])}",
        "",
        f"Weights are random. Each of {rounds} rounds calibrated the machine as first starts do, "
        "and timed steps of sizes that calibrate nothing in a random order. Measured is the least "
        "of all rounds, predicted the median of the rounds' predictions, spread the largest of "
        "these over the smallest.",
        "",
        f"* Median error **{median}**, largest **{largest}**; of a plain max(bytes / bandwidth, "
        f"FLOPs / rate) {plain}.",
    ]
    for verified in verifications:
        median, largest = map(_percent, errors(verified.results))
        lines.append(
            f"* {verified.model.name}, weights in {verified.weights}: {median} and {largest}; "
            f"calibrated in {verified.calibration_s:.1f} s."
        )
    lines += [
        "",
        "| model | weights | step | context | measured, ms | predicted, ms | error | spread |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {verified.model.name} | {verified.weights} | {result.point.size} | "
        f"{result.point.context:,} | {1e3 * result.seconds:.1f} | {1e3 * result.predicted_s:.1f} | "
        f"{100 * result.error:+.0f} % | {result.spread:.2f} x |"
        for verified in verifications
        for result in verified.results
    ]
    lines += [
        "",
        "What the last round's calibration found:",
        "",
        f"| weights | memory, GB/s | rates, GFLOP/s | {' | '.join(calibrate.CONSTANTS)} |",
        "|---" * (3 + len(calibrate.CONSTANTS)) + "|",
    ]
    for verified in verifications:
        machine = verified.hardware[-1]
        rates = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in machine.rates.items())
        constants = " | ".join(f"{getattr(machine, name):.3g}" for name in calibrate.CONSTANTS)
        lines.append(
            f"| {verified.weights} | {machine.read_bandwidth / 1e9:.1f} | {rates} | {constants} |"
        )
    lines += [
        "",
        "| weights | bytes of them, predicted | allocated | of the cache, predicted | allocated |",
        "|---|---|---|---|---|",
    ]
    for verified in verifications:
        pairs = zip(verified.predicted_bytes, verified.allocated_bytes, strict=True)
        lines.append(f"| {verified.weights} | {' | '.join(f'{p} | {a}' for p, a in pairs)} |")
    return "\n".join(lines) + "\n"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def errors(results: Iterable[Result], roofline: bool = False) -> tuple[float, float]:
    """Median and largest error."""
    sizes = [abs(r.roofline_s / r.seconds - 1) if roofline else abs(r.error) for r in results]
    return statistics.median(sizes), max(sizes)
