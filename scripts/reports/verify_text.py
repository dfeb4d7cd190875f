"""`plan --verify` as JSON and as a page."""

import datetime
import importlib.metadata
from typing import Any

from inference.files import local_machine
from inference.planner.calibration import calibrate, verify
from inference.planner.calibration.verify import Verification

_COMMAND = "python -m scripts.plan --verify"


def as_json(found: Verification) -> dict[str, Any]:
    """Everything as plain data, and which machine it was."""
    where = {"processor": local_machine.processor(), "cores": local_machine.num_cores()}
    return verify.as_json(found) | where | {"jax": importlib.metadata.version("jax")}


def markdown(found: Verification) -> str:
    """The result page."""
    hardware = found.hardware
    median, p90 = (f"{100 * share:.1f} %" for share in found.errors())
    lines = [
        f"# Predicted and measured steps on {local_machine.name()}",
        "",
        f"Written by `{_COMMAND} --output=...` on {datetime.date.today()}, jax "
        f"{importlib.metadata.version('jax')}. Weights are random. A time is the median over "
        "rounds in random orders; in each it is the best of three between two readings of the "
        "bandwidth, in units of the lower one. Half of the points calibrate, the errors are of "
        "the other half.",
        "",
        f"* Held-out points: median error **{median}**, 90th percentile **{p90}**.",
    ]
    for name in dict.fromkeys(result.point.model.name for result in found.results):
        shares = [f"{100 * share:.1f} %" for share in found.errors(name)]
        lines.append(f"* Of them {name}: {shares[0]}, {shares[1]}.")
    plain = [f"{100 * share:.1f} %" for share in found.errors(roofline=True)]
    low, high = (f"{each / 1e9:.1f}" for each in found.bandwidths)
    constants = ", ".join(f"{n} {getattr(hardware, n):.4g}" for n in calibrate.CONSTANTS)
    rates = ", ".join(f"{n} {rate / 1e9:.0f} GFLOP/s" for n, rate in hardware.rates.items())
    lines += [
        f"* A plain max(bytes / bandwidth, FLOPs / rate): {plain[0]}, {plain[1]}.",
        f"* Bandwidth {hardware.read_bandwidth / 1e9:.1f} GB/s ({low} to {high} between rounds); "
        f"{rates}.",
        f"* Constants: {constants}.",
        "",
        "| model | type | step | context | measured ms | predicted ms | error | held out |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        "| " + " | ".join(map(str, result.point.label)) + f" | {1e3 * result.seconds:.1f} | "
        f"{1e3 * result.predicted_s:.1f} | {100 * result.error:+.0f} % | "
        f"{'yes' if result.is_held_out else ''} |"
        for result in found.results
    ]
    lines += [
        "",
        "| model | type | weights predicted | allocated | cache predicted | allocated |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {each.model.name} | {each.model.dtype} | {each.predicted[0]} | {each.allocated[0]} | "
        f"{each.predicted[1]} | {each.allocated[1]} |"
        for each in found.memory
    ]
    return "\n".join(lines) + "\n"
