"""What `train` draws at its end."""

import numpy as np

from scripts.reports.plots import figures
from scripts.reports.plots.figures import Axes

_EACH, _MEAN = "#88CCEE", "#332288"  # of Paul Tol's muted scheme
_PARTS = 50  # of a run, of each of which the mean is drawn


def curve(losses: np.ndarray, tokens_per_step: int, title: str, unit: str) -> bytes:
    """A PNG: the loss of each step, and its mean over a fiftieth of the run, over steps and (with
    logarithmic axes) over tokens.

    Args:
        losses: float32 [steps].
        tokens_per_step: predicted.
        title: above both.
        unit: of a loss; empty: it has none.
    """
    parts = np.array_split(np.arange(len(losses)), min(_PARTS, len(losses)))
    middles = np.array([part.mean() for part in parts])
    means = np.array([losses[part].mean() for part in parts])

    label = f"loss ({unit})" if unit else "loss"

    def draw(by_step: Axes, by_token: Axes) -> None:
        for axes, scale in ((by_step, 1), (by_token, tokens_per_step)):
            axes.plot((np.arange(len(losses)) + 1) * scale, losses, color=_EACH, linewidth=0.7)
            axes.plot((middles + 1) * scale, means, color=_MEAN)
        by_step.set(xlabel="steps", ylabel=label)
        by_token.set(xscale="log", yscale="log", xlabel="tokens")

    return figures.png(title, draw)
