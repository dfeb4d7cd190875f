"""How small a child is to be, and the shapes of that size, whatever their units matter."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from configs.errors import InputError
from configs.hardware.spec import HardwareSpec
from configs.model import ModelConfig
from inference.planner.deployment import Deployment
from inference.prune import shapes
from inference.prune.axes import LAYERS, WIDTH

CONTEXT = 512  # tokens before the step whose time is predicted

_FREE = ("ffn_width", "expert_width", "state_channels", "state_heads")  # solves for the budget
_TOLERANCE = 0.02  # of a budget
_GRID = 16  # steps that a size is divided into
_LEAST = 4  # part of the free axis that stays at least
_TRIED = {LAYERS: 7, WIDTH: 4, "kv_heads": 4, "latent_heads": 4, "experts": 4}  # sizes of an axis


class Shape(NamedTuple):
    """A shape that a budget allows.

    Attributes:
        widths: of the axes that it changes.
        layers: numbers of those that stay.
        config: the model.
    """

    widths: Mapping[str, int]
    layers: tuple[int, ...]
    config: ModelConfig


@dataclasses.dataclass(frozen=True)
class Budget:
    """How small a child is: one of the three, a share of the parent's `params` without embeddings,
    `latency_s`, seconds of a decode step of one sequence on the hardware, or `weight_bytes`.
    """

    hardware: HardwareSpec
    params: float | None = None
    latency_s: float | None = None
    weight_bytes: float | None = None
    context: int = CONTEXT

    @property
    def flag(self) -> str:
        """What says it, for messages."""
        if self.params is not None:
            return f"--target_params={self.params}"
        if self.latency_s is not None:
            return f"--target_latency_ms={1000 * self.latency_s:g}"
        return f"weights of {self.weight_bytes:,.0f} bytes"

    def check(self, parent: ModelConfig) -> None:
        """Raises InputError if a model meets it as it is."""
        if self.excess(parent, parent) <= 1:
            raise InputError(f"{self.flag}: {parent.name} meets it as it is; give less")

    def step_s(self, config: ModelConfig) -> float:
        """Returns the predicted seconds of a decode step of one sequence."""
        context = min(self.context, config.max_context - 1)
        return Deployment(config, self.hardware).step_seconds(1, context)

    def excess(self, config: ModelConfig, parent: ModelConfig) -> float:
        """Returns the size of a child as a multiple of the budget; it fits up to 1."""
        if self.params is not None:
            share = shapes.num_parameters(config) / _whole(parent)
            return share / self.params
        if self.latency_s is not None:
            return self.step_s(config) / self.latency_s
        assert self.weight_bytes is not None
        return Deployment(config, self.hardware).weight_bytes / self.weight_bytes

    def smallest(self, excess: float) -> str:
        """Returns the flag that says a multiple of this budget, rounded up."""
        if self.params is not None:
            return f"--target_params={np.ceil(1e3 * self.params * excess) / 1e3:g}"
        if self.latency_s is not None:
            return f"--target_latency_ms={np.ceil(1e6 * self.latency_s * excess) / 1e3:g}"
        return f"{np.ceil((self.weight_bytes or 0) * excess):,.0f} bytes"


def within(
    config: ModelConfig,
    budget: Budget,
    fixed: Mapping[str, int],
    staying: Callable[[int], tuple[int, ...]],
    can_be: Callable[[Mapping[str, int], tuple[int, ...]], bool],
    most_axes: int | None = None,
) -> list[Shape]:
    """Returns shapes that are as large as a budget allows, or as near below it as one is.

    Args:
        fixed: widths that all of them have.
        staying: count -> numbers of the layers that stay; InputError: so few cannot.
        can_be: whether a shape, with the layers that stay, can be written.
        most_axes: that a shape changes in addition to depth and to the axis that solves for the
            budget; None: any number.

    Raises:
        InputError: all shapes that are tried are larger, or none can be written.
    """
    sizes = shapes.sizes(config)
    free = _free(config, sizes, fixed)
    choices = [0] if free is None else _free_sizes(config, free, sizes[free])
    layers_of = {}
    for count in _sizes(LAYERS, sizes[LAYERS], fixed):
        with contextlib.suppress(InputError):  # layers that others read are too many
            layers_of[count] = staying(count)
    matches: list[tuple[float, Shape]] = []
    for widths in _grid(config, sizes, fixed, free):
        if most_axes is not None and len(widths.keys() - fixed.keys() - {LAYERS}) > most_axes:
            continue
        layers = layers_of.get(widths.get(LAYERS, config.num_layers))
        if layers is None:
            continue
        with contextlib.suppress(InputError):  # parts that do not go with each other
            excess, shape = _solved(config, budget, widths, layers, free, choices)
            if shape.widths and can_be(shape.widths, layers):
                matches.append((excess, shape))
    nearest = max((excess for excess, _ in matches if excess <= 1), default=None)
    if not matches:
        raise InputError(
            f"{budget.flag}: no config.json says a smaller shape of {config.name}; give --widths "
            "and --native to scripts.prune"
        )
    if nearest is None:
        smallest = budget.smallest(min(excess for excess, _ in matches))
        raise InputError(
            f"{budget.flag}: no shape that is tried of {config.name} is that small; the smallest "
            f"is {smallest}, or give --widths"
        )
    least = 1 - _TOLERANCE if nearest >= 1 - _TOLERANCE else nearest - _TOLERANCE
    return [shape for excess, shape in matches if least <= excess <= 1]


@functools.lru_cache(maxsize=1)
def _whole(parent: ModelConfig) -> int:
    return shapes.num_parameters(parent)


def _sizes(name: str, size: int, fixed: Mapping[str, int]) -> list[int]:
    """Sizes of an axis that are tried, from all of it to half."""
    if name in fixed:
        return [fixed[name]]
    steps = np.linspace(size, max(size // 2, 1), _TRIED[name])
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


def _free(config: ModelConfig, sizes: Mapping[str, int], fixed: Mapping[str, int]) -> str | None:
    """The axis that solves for the budget: of those that can, the one whose units hold the most
    parameters.
    """

    def parameters(name: str) -> int:
        try:
            half = shapes.pruned(config, {name: sizes[name] // 2}, range(config.num_layers))
        except InputError:
            return 0
        return whole - shapes.num_parameters(half)

    whole = shapes.num_parameters(config)
    names = [name for name in _FREE if name in sizes and name not in fixed]
    return max(names, key=parameters, default=None)


def _free_sizes(config: ModelConfig, free: str, size: int) -> list[int]:
    """Sizes of the axis that solves for the budget, rising; the last is all of it."""
    grain, sizes = max(size // (2 * _GRID), 1), list[int]()
    for units in range(grain, size, grain):
        if units * _LEAST >= size:
            with contextlib.suppress(InputError):  # groups that it would divide
                shapes.check(config, {free: units})
                sizes.append(units)
    return [*sizes, size]


def _solved(
    config: ModelConfig,
    budget: Budget,
    widths: Mapping[str, int],
    layers: tuple[int, ...],
    free: str | None,
    choices: list[int],
) -> tuple[float, Shape]:
    """The shape with the free axis as wide as the budget allows, or as narrow as it can be, with
    its size as a multiple of the budget; raises InputError if its parts do not go together.
    """

    def solution(place: int) -> tuple[float, Shape]:
        is_free = free is not None and place < len(choices) - 1
        changed = {**widths, free: choices[place]} if is_free and free else dict(widths)
        model = shapes.pruned(config, changed, layers)
        return budget.excess(model, config), Shape(changed, layers, model)

    best, low, high = solution(0), 1, len(choices) - 1
    while low <= high and best[0] <= 1:
        middle = (low + high) // 2
        wider = solution(middle)
        if wider[0] <= 1:
            best, low = wider, middle + 1
        else:
            high = middle - 1
    shapes.check(config, best[1].widths)
    return best
