"""The shape to prune to, where a budget says how small: candidates of the same size, ranked by what
they lose before they are trained and by the time that a decode step is predicted to take.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from configs.errors import InputError
from configs.hardware.spec import HardwareSpec
from configs.model import ModelConfig
from inference.checkpoints.checkpoint import Checkpoint
from inference.checkpoints.load import Progress
from inference.layerwise.parts import Parts
from inference.layerwise.reader import Reader
from inference.planner.deployment import Deployment
from inference.prune import child, loss, selection, shapes
from inference.prune.axes import LAYERS, WIDTH
from inference.prune.export import checkpoint
from inference.prune.importance import Importance

CONTEXT = 512  # tokens before the step whose time is predicted

_FREE = ("ffn_width", "expert_width", "state_channels", "state_heads")  # solves for the budget
_TOLERANCE = 0.02  # of a budget
_GRID = 16  # steps that a size is divided into
_TRIED = {LAYERS: 5, WIDTH: 3, "kv_heads": 3, "latent_heads": 3, "experts": 3}  # sizes of an axis
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


@dataclasses.dataclass(frozen=True)
class Budget:
    """How small a child is: `params`, a share of the parent's parameters without embeddings, or
    `latency_s`, seconds of a decode step of one sequence on the hardware.
    """

    hardware: HardwareSpec
    params: float | None = None
    latency_s: float | None = None

    @property
    def flag(self) -> str:
        """The flag that says it, for messages."""
        if self.latency_s is None:
            return f"--target_params={self.params}"
        return f"--target_latency_ms={1000 * self.latency_s:g}"

    def check(self, parent: ModelConfig) -> None:
        """Raises InputError if a model meets it as it is."""
        if self.excess(parent, parent) <= 1:
            raise InputError(f"{self.flag}: {parent.name} meets it as it is; give less")

    def step_s(self, config: ModelConfig) -> float:
        """Returns the predicted seconds of a decode step of one sequence."""
        context = min(CONTEXT, config.max_context - 1)
        return Deployment(config, self.hardware).step_seconds(1, context)

    def excess(self, config: ModelConfig, parent: ModelConfig) -> float:
        """Returns the size of a child as a multiple of the budget; it fits up to 1."""
        if self.params is not None:
            share = child.num_parameters(config) / child.num_parameters(parent)
            return share / self.params
        assert self.latency_s is not None
        return self.step_s(config) / self.latency_s


def candidates(
    importance: Importance,
    config: ModelConfig,
    budget: Budget,
    fixed: Mapping[str, int],
    is_contiguous: bool,
    can_be: Callable[[Mapping[str, int], tuple[int, ...]], bool],
) -> list[Candidate]:
    """Returns shapes that meet a budget, those that lose the least importance first.

    Args:
        fixed: widths that all of them have.
        can_be: whether a shape, with the layers that stay, can be written.

    Raises:
        InputError: no shape does.
    """
    sizes = shapes.sizes(config)
    free = _free(config, sizes, fixed)
    scores = [importance.layer(layer) for layer in range(config.num_layers)]
    depth = importance.depth()
    depth = np.where(np.isfinite(depth), np.maximum(depth, 0), 0)
    staying = {}
    for count in _sizes(LAYERS, sizes[LAYERS], fixed):
        with contextlib.suppress(InputError):  # layers that others read are too many
            staying[count] = selection.layers(importance, count, is_contiguous)
    matches = []
    for widths in _grid(config, sizes, fixed, free):
        layers = staying.get(widths.get(LAYERS, config.num_layers))
        if layers is None:
            continue
        solved = _solved(config, budget, widths, layers, free, sizes)
        if solved is None or not can_be(solved, layers):
            continue
        model = shapes.pruned(config, solved, layers)
        leaving = np.delete(depth, layers)
        lost = _lost(solved, scores) + float(_share(leaving.sum(), depth.sum()))
        matches.append(
            Candidate(solved, layers, child.num_parameters(model), budget.step_s(model), lost)
        )
    if not matches:
        raise InputError(
            f"{budget.flag}: no shape that is tried of {config.name} is within "
            f"{_TOLERANCE:.0%} below it; give another, or --widths alone"
        )
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
            model = checkpoint(parent, importance, candidate.widths, stays, {})
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


def _sizes(name: str, size: int, fixed: Mapping[str, int]) -> list[int]:
    """Sizes of an axis that are tried, from all of it to half."""
    if name in fixed:
        return [fixed[name]]
    steps = np.linspace(size, max(size / 2, 1), 2 * _TRIED[name] - 1)[: _TRIED[name]]
    grain = max(size // _GRID, 1) if name == WIDTH else 1
    return sorted({max(round(step / grain), 1) * grain for step in steps.tolist()}, reverse=True)


def _grid(
    config: ModelConfig, sizes: Mapping[str, int], fixed: Mapping[str, int], free: str | None
) -> Iterator[dict[str, int]]:
    names = [name for name in _TRIED if name in sizes and name != free]
    choices = [_sizes(name, sizes[name], fixed) for name in names]
    for widths in itertools.product(*choices):
        proposed = dict(zip(names, widths, strict=True)) | dict(fixed)
        changed = {name: width for name, width in proposed.items() if width < sizes[name]}
        try:
            shapes.check(config, changed)
        except InputError:
            continue
        yield changed


def _solved(
    config: ModelConfig,
    budget: Budget,
    widths: dict[str, int],
    layers: tuple[int, ...],
    free: str | None,
    sizes: Mapping[str, int],
) -> dict[str, int] | None:
    """The shape with the free axis as wide as the budget allows; None: none is close to it."""

    def excess(widths: Mapping[str, int]) -> float:
        return budget.excess(shapes.pruned(config, widths, layers), config)

    if free is not None:
        grain = max(sizes[free] // (2 * _GRID), 1)
        low, high = 1, sizes[free] // grain
        while low < high:
            middle = (low + high + 1) // 2
            if excess(widths | {free: middle * grain}) <= 1:
                low = middle
            else:
                high = middle - 1
        widths = widths | ({free: low * grain} if low * grain < sizes[free] else {})
        if low * grain < sizes[free] // 4:
            return None
    try:
        shapes.check(config, widths)
        return widths if widths and 1 - _TOLERANCE <= excess(widths) <= 1 else None
    except InputError:
        return None


def _free(config: ModelConfig, sizes: Mapping[str, int], fixed: Mapping[str, int]) -> str | None:
    """The axis that solves for the budget: of those that can, the one whose units hold the most
    parameters.
    """

    def parameters(name: str) -> int:
        try:
            half = shapes.pruned(config, {name: sizes[name] // 2}, range(config.num_layers))
        except InputError:
            return 0
        return whole - child.num_parameters(half)

    whole = child.num_parameters(config)
    names = [name for name in _FREE if name in sizes and name not in fixed]
    return max(names, key=parameters, default=None)


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
