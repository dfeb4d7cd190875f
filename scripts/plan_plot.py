"""`plan --plot`: the roofline with each operation on it, and latency against throughput."""

import io
from collections.abc import Sequence
from typing import Any

from configs.errors import InputError
from inference.planner import parts
from inference.planner.plan import Deployment


def draw(deployment: Deployment, batches: Sequence[int], context: int, new_tokens: int) -> bytes:
    """A PNG: on the left the operations of the largest batch asked for, decode and prefill, under
    the roof of each type; on the right every batch up to the largest that fits.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("--plot needs matplotlib: pip install 'ridgeline[plots]'") from None
    figure = Figure(figsize=(13, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _roofline(left, deployment, max(batches), context)
    _tradeoff(right, deployment, batches, context, new_tokens)
    chips = deployment.mesh.num_chips * deployment.replicas
    figure.suptitle(f"{deployment.config.name} on {chips} x {deployment.hardware.name}")
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=130)
    return written.getvalue()


def _roofline(axes: Any, deployment: Deployment, batch: int, context: int) -> None:
    chip, formats = deployment.hardware, deployment.formats
    found = parts.explain(deployment, batch, context)
    intensities = [2.0**n for n in range(-4, 15)]
    bandwidth = chip.read_bandwidth * chip.bandwidth_share
    for compute in sorted({formats.weights.compute, formats.rest.compute}):
        rate = chip.rate(compute) * chip.rate_share
        roof = [min(rate, bandwidth * intensity) for intensity in intensities]
        axes.plot(intensities, roof, label=f"roof, {compute}", linewidth=1)
        axes.axvline(rate / bandwidth, color="0.8", linestyle=":", linewidth=1)
    decode, prefill = f"decode, batch {batch}", "prefill of one prompt"
    for name, step, marker in ((decode, found.decode, "o"), (prefill, found.prefill, "^")):
        drawn = [part for part in step.operations if part.flops]
        x = [part.intensity for part in drawn]
        y = [part.flops / part.seconds for part in drawn]
        axes.scatter(x, y, marker=marker, s=28, label=name)
        for part in _apart(drawn):
            axes.annotate(part.operation, (part.intensity, part.flops / part.seconds), fontsize=6,
                          xytext=(4, -7), textcoords="offset points")  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="FLOPs a byte", ylabel="FLOP/s of a chip",
             title=f"roofline, {context:,} tokens")  # fmt: skip
    axes.legend(fontsize=7)


def _apart(drawn: Sequence[parts.Part]) -> list[parts.Part]:
    """Of operations that lie on each other, the one that takes longest."""
    nearest: dict[tuple[int, int], parts.Part] = {}
    for part in sorted(drawn, key=lambda part: part.seconds):
        nearest[int(part.intensity).bit_length(), part.bound == "compute"] = part
    return list(nearest.values())


def _tradeoff(
    axes: Any, deployment: Deployment, batches: Sequence[int], context: int, new_tokens: int
) -> None:
    most = deployment.largest_batch(context, new_tokens)
    asked = sorted({*batches, *(2**n for n in range(14) if 2**n <= most), max(1, most)})
    rows = [deployment.row(batch, context, new_tokens) for batch in asked]
    axes.plot([1e3 * row.tpot_s for row in rows], [row.output_tok_s for row in rows], color="0.7")
    for fits, color, label in ((True, "C0", "fits"), (False, "C3", "does not fit")):
        some = [row for row in rows if row.fits is fits]
        axes.scatter([1e3 * row.tpot_s for row in some], [row.output_tok_s for row in some],
                     color=color, label=label, zorder=3)  # fmt: skip
    for row in rows:
        axes.annotate(str(row.batch), (1e3 * row.tpot_s, row.output_tok_s), fontsize=7,
                      xytext=(4, -8), textcoords="offset points")  # fmt: skip
    axes.set(xlabel="ms a token of one sequence", ylabel="tokens a second",
             title=f"each batch, {deployment.accounting} accounting")  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
