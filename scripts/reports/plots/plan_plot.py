"""`plan --plot`: the roofline with each operation on it, and latency against throughput."""

from collections.abc import Sequence

from inference.planner import parts
from inference.planner.deployment import Deployment
from scripts.reports.plots import figures
from scripts.reports.plots.figures import Axes

# Paul Tol's muted and bright schemes: told apart by most eyes, and more than ten of them.
_COLORS = (
    "#332288", "#88CCEE", "#44AA99", "#117733", "#999933", "#DDCC77", "#CC6677", "#882255",
    "#AA4499", "#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#BBBBBB",
)  # fmt: skip


def draw(deployment: Deployment, batches: Sequence[int], context: int, new_tokens: int) -> bytes:
    """A PNG: on the left the operations of the largest batch asked for, decode and prefill, under
    the roof of each type; on the right every batch up to the largest that fits.
    """

    def panels(roofline: Axes, tradeoff: Axes) -> None:
        _roofline(roofline, deployment, max(batches), context)
        _tradeoff(tradeoff, deployment, batches, context, new_tokens)

    chips = deployment.mesh.num_chips * deployment.replicas
    title = f"{deployment.config.name} on {chips} x {deployment.hardware.name}"
    return figures.png(title, panels)


def _roofline(axes: Axes, deployment: Deployment, batch: int, context: int) -> None:
    """A color an operation, a marker a phase: points lie on each other where bytes dominate."""
    chip, formats = deployment.hardware, deployment.formats
    explanation = parts.explain(deployment, batch, context)
    bandwidth = chip.read_bandwidth * chip.bandwidth_share
    for compute in sorted({formats.weights.compute, formats.rest.compute}):
        rate = chip.rate(compute) * chip.rate_share
        ridge = chip.ridge(compute)
        x = [0.1, ridge, 2e4]
        axes.plot(x, [min(rate, bandwidth * i) for i in x], color="0.6", linewidth=1, zorder=1)
        axes.axvline(ridge, color="0.8", linestyle=":", linewidth=1)
        axes.annotate(f"{compute}: ridge {ridge:.0f}", (ridge, rate), fontsize=7,
                      xytext=(4, 4), textcoords="offset points")  # fmt: skip
    names = list(
        dict.fromkeys(part.operation for part in explanation.decode.operations if part.flops)
    )
    for step, marker in ((explanation.decode, "o"), (explanation.prefill, "^")):
        for part in step.operations:
            if part.flops:
                color = _COLORS[names.index(part.operation) % len(_COLORS)]
                axes.scatter(part.intensity, part.flops / part.seconds, marker=marker, s=34,
                             color=color, alpha=0.8, zorder=2,
                             label=part.operation if marker == "o" else None)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="FLOPs a byte", ylabel="FLOP/s of a chip",
             title=f"{context:,} tokens: o decode of {batch}, ^ prefill of one")  # fmt: skip
    axes.legend(fontsize=7, loc="lower right")


def _tradeoff(
    axes: Axes, deployment: Deployment, batches: Sequence[int], context: int, new_tokens: int
) -> None:
    largest = deployment.largest_batch(context, new_tokens)
    sizes = sorted({*batches, *(2**n for n in range(14) if 2**n <= largest), max(1, largest)})
    rows = [deployment.row(batch, context, new_tokens) for batch in sizes]
    axes.plot([1e3 * row.tpot_s for row in rows], [row.output_tok_s for row in rows], color="0.7")
    for fits, color, label in ((True, "C0", "fits"), (False, "C3", "does not fit")):
        some = [row for row in rows if row.fits is fits]
        if not some:
            continue
        axes.scatter([1e3 * row.tpot_s for row in some], [row.output_tok_s for row in some],
                     color=color, label=label, zorder=3)  # fmt: skip
    for row in rows:
        axes.annotate(str(row.batch), (1e3 * row.tpot_s, row.output_tok_s), fontsize=7,
                      xytext=(4, -8), textcoords="offset points")  # fmt: skip
    axes.set(xlabel="ms a token of one sequence", ylabel="tokens a second",
             title=f"each batch, {deployment.accounting} accounting")  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
