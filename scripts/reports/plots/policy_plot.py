"""What `train --task=grpo` draws at its end."""

from collections.abc import Mapping, Sequence

from scripts.reports.plots import figures
from scripts.reports.plots.figures import Axes

_REWARD, _GAP, _MEAN, _RATE = "#332288", "#CC6677", "#DDCC77", "#117733"  # Paul Tol's muted scheme


def curves(iterations: Sequence[Mapping[str, float]], title: str) -> bytes:
    """A PNG: the mean reward of each iteration over its answers; and how far the log-probabilities
    of trainer and engine lie apart, beside the answers' tokens a second.
    """
    numbers = [line["iteration"] + 1 for line in iterations]

    def draw(rewards: Axes, gaps: Axes) -> None:
        rewards.plot(numbers, [line["reward"] for line in iterations], color=_REWARD)
        rewards.set(xlabel="iterations", ylabel="mean reward of the answers")
        for name, color in (("max_gap", _GAP), ("mean_gap", _MEAN)):
            label = f"{name.removesuffix('_gap')} |difference| of log-probabilities"
            gaps.plot(numbers, [line[name] for line in iterations], color=color, label=label)
        gaps.set(xlabel="iterations", ylabel="nats")
        gaps.set_yscale("symlog", linthresh=1e-9)
        gaps.set_ylim(0, None)
        rates = gaps.twinx()
        seconds = [line["rollout_s"] + line["update_s"] for line in iterations]
        rate = [line["tokens"] / s for line, s in zip(iterations, seconds, strict=True)]
        rates.plot(numbers, rate, color=_RATE, linewidth=0.7, label="tokens of answers a second")
        rates.set(ylabel="tokens of answers a second", ylim=(0, None))
        lines = [*gaps.get_lines(), *rates.get_lines()]
        gaps.legend(lines, [line.get_label() for line in lines], fontsize=8)

    return figures.png(title, draw)
