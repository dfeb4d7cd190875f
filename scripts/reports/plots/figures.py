"""Pictures of two panels."""

import io
from collections.abc import Callable
from typing import Any

Axes = Any  # matplotlib's, which has no types


def png(title: str, draw: Callable[[Axes, Axes], None]) -> bytes:
    """A PNG of what `draw` puts on the left and the right axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.5), layout="constrained")
    draw(*figure.subplots(1, 2))
    figure.suptitle(title)
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=130)
    return written.getvalue()
