"""The shape to prune to, where a budget says how small: candidates of the same size, ranked by what
they lose before they are trained and by the time that a decode step is predicted to take.
"""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from configs.model import ModelConfig
from inference.checkpoints.checkpoint import Checkpoint
from inference.checkpoints.load import Progress
from inference.layerwise.parts import Parts
from inference.layerwise.reader import Reader
from inference.prune import loss, selection, shapes
from inference.prune.axes import LAYERS
from inference.prune.budget import Budget, within
from inference.prune.export import checkpoint
from inference.prune.importance import Importance

_EVALUATED = 12  # candidates whose loss is computed


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A shape within the budget.

    Attributes:
        widths: of the axes that it changes.
        layers: numbers of those that stay.
        parameters: without those of embeddings.
        step_s: predicted seconds of a decode step of one sequence.
        importance: what it loses of all scores, a share summed over axes.
        loss: nats a token without any training; None: not computed.
        is_best: whether no other candidate has less loss and a shorter step.
    """

    widths: Mapping[str, int]
    layers: tuple[int, ...]
    parameters: int
    step_s: float
    importance: float
    loss: float | None = None
    is_best: bool = False


def candidates(
    importance: Importance,
    config: ModelConfig,
    budget: Budget,
    fixed: Mapping[str, int],
    is_contiguous: bool,
    can_be: Callable[[Mapping[str, int], tuple[int, ...]], bool],
) -> list[Candidate]:
    """Returns shapes of `budget.within`, those that lose the least importance first.

    Args:
        fixed: widths that all of them have.
        can_be: whether a shape, with the layers that stay, can be written.

    Raises:
        InputError: all shapes that are tried are larger.
    """
    scores = [importance.layer(layer) for layer in range(config.num_layers)]
    depth = importance.depth()
    depth = np.where(np.isfinite(depth), np.maximum(depth, 0), 0)

    def staying(count: int) -> tuple[int, ...]:
        return selection.layers(importance, count, is_contiguous)

    matches = []
    for shape in within(config, budget, fixed, staying, can_be):
        leaving = np.delete(depth, shape.layers)
        matches.append(
            Candidate(
                shape.widths, shape.layers, shapes.num_parameters(shape.config),
                budget.step_s(shape.config),
                _lost(shape.widths, scores) + float(_share(leaving.sum(), depth.sum())),
            )
        )  # fmt: skip
    return sorted(matches, key=lambda candidate: candidate.importance)


def evaluated(
    parent: Checkpoint,
    importance: Importance,
    candidates: list[Candidate],
    tokens_YW: np.ndarray,
    parts: Parts,
    progress: Progress | None = None,
) -> list[Candidate]:
    """Returns the first of the candidates with their losses on windows of ids, the least first."""
    windows_YW = loss.spread(tokens_YW)
    results = []
    first = candidates[:_EVALUATED]
    for nth, candidate in enumerate(first):
        if progress:
            progress(nth, len(first), "trying shapes")
        name = "shape-" + "-".join(
            f"{axis}-{size}" for axis, size in sorted(candidate.widths.items())
        )
        if not parts.has(name):
            stays = selection.select(importance, candidate.widths, candidate.layers)
            model = checkpoint(parent, candidate.widths, stays, {})
            reader = Reader(model.contents(), model.config)
            parts.write(name, {}, {"loss": loss.of_model(reader, windows_YW)})
        results.append(dataclasses.replace(candidate, loss=parts.figures(name)["loss"]))
    if progress:
        progress(len(first), len(first), "trying shapes")
    return sorted((_ranked(result, results) for result in results), key=_loss)


def _ranked(candidate: Candidate, rivals: list[Candidate]) -> Candidate:
    is_beaten = any(
        _loss(rival) < _loss(candidate) and rival.step_s < candidate.step_s for rival in rivals
    )
    return dataclasses.replace(candidate, is_best=not is_beaten)


def _loss(candidate: Candidate) -> float:
    assert candidate.loss is not None
    return candidate.loss


def _lost(widths: Mapping[str, int], scores: list[dict[str, np.ndarray]]) -> float:
    """What a shape loses of its units' scores, a share summed over axes other than depth."""
    lost = 0.0
    for name, width in widths.items():
        if name == LAYERS:
            continue
        shares = []
        for score in (of_layer[name] for of_layer in scores if name in of_layer):
            leaving = np.sort(score, axis=-1)[..., : max(score.shape[-1] - width, 0)]
            shares.append(_share(leaving.sum(), score.sum()))
        lost += float(np.mean(shares)) if shares else 0.0
    return lost


def _share(part: float, whole: float) -> float:
    """0 of what does nothing."""
    return part / whole if whole else 0.0
