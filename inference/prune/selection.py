"""Which units stay: of each layer those with the highest scores, as many as a shape says."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from configs.errors import InputError
from configs.model import ModelConfig
from inference.prune import axes, shapes
from inference.prune.importance import Importance
from inference.prune.shapes import Widths


@dataclasses.dataclass(frozen=True)
class Selection:
    """What stays of a model.

    Attributes:
        layers: numbers of the layers, rising.
        channels: of the model's width, bool [D].
        units: by the number of such a layer and the name of an axis: bool [n], or [E, n] where each
            matrix of a stack has units of its own.
    """

    layers: tuple[int, ...]
    channels: np.ndarray
    units: Mapping[tuple[int, str], np.ndarray]

    def removed(self) -> dict[str, object]:
        """Returns what does not stay, as plain JSON values: channels, and units by layer."""
        units: dict[str, dict[str, object]] = {}
        for (layer, axis), stays in self.units.items():
            if not stays.all():
                units.setdefault(axis, {})[str(layer)] = _numbers(~stays)
        removed: dict[str, object] = {}
        if not self.channels.all():
            removed[axes.WIDTH] = _numbers(~self.channels)
        return removed | units


def layers(importance: Importance, count: int, is_contiguous: bool) -> tuple[int, ...]:
    """Returns the numbers of `count` layers that stay.

    Args:
        is_contiguous: whether what is removed is one span, the one whose scores have the least sum.

    Raises:
        InputError: so few cannot stay, since some read what others made.
    """
    config = importance.config
    removed = config.num_layers - count
    if not removed:
        return tuple(range(config.num_layers))
    scores = importance.depth()
    owners = {spec.owner for spec in config.cache_specs} | config.choice_owners
    for owner in owners - {None}:
        scores[owner] = np.inf  # others read it
    if is_contiguous:
        sums = np.array([scores[i : i + removed].sum() for i in range(count + 1)])
        first = int(np.argmin(sums))
        leaving = np.arange(first, first + removed)
    else:
        leaving = np.argsort(scores, kind="stable")[:removed]
    if not np.isfinite(scores[leaving]).all():
        raise InputError(
            f"--widths=layers={count}: layers of {config.name} that others read must stay, which "
            f"leaves no {removed} to remove"
        )
    return tuple(sorted(set(range(config.num_layers)) - set(leaving.tolist())))


def select(importance: Importance, widths: Widths, layers: tuple[int, ...]) -> Selection:
    """Returns what stays of these layers in a shape; raises InputError as `shapes.check`."""
    config = importance.config
    shapes.check(config, widths)
    scores = {layer: importance.layer(layer) for layer in layers}
    width = widths.get(axes.WIDTH, config.width)
    channels = np.ones(config.width, bool)
    if width < config.width:
        channels = highest(_summed(config, scores), width)
    units: dict[tuple[int, str], np.ndarray] = {}
    homes = {layer: _home(config, layer) for layer in layers}
    for layer in layers:
        for axis, part in axes.of_layer(config.layers[layer]):
            size = axis.size(part.kind)
            if (units_staying := widths.get(axis.name, size)) >= size:
                continue
            sharers = [layer]
            if axis.name in ("kv_heads", "kv_rank"):  # of a cache that several layers read
                sharers = [other for other in layers if homes[other] == homes[layer]]
            present = [scores[other][axis.name] for other in sharers if axis.name in scores[other]]
            if not present:
                raise InputError(
                    f"--widths={axis.name}: layer {layer} has no scores of its {axis.label}"
                )
            total = np.sum(present, axis=0)
            units[layer, axis.name] = highest(total, units_staying, axis.groups(part.kind))
    return Selection(layers, channels, units)


def highest(scores: np.ndarray, count: int, groups: int = 1) -> np.ndarray:
    """Returns which units stay, bool in the shape of the scores.

    Args:
        scores: [n], or [E, n] of which each row keeps `count`.
        count: of units that stay, equally many of each group; of equal scores the first stay.
        groups: of equally many units, one behind the other.
    """
    grouped = scores.reshape(*scores.shape[:-1], groups, -1)
    order = np.argsort(-grouped, axis=-1, kind="stable")[..., : count // groups]
    stays = np.zeros(grouped.shape, bool)
    np.put_along_axis(stays, order, True, axis=-1)
    return stays.reshape(scores.shape)


def _summed(config: ModelConfig, scores: Mapping[int, Mapping[str, np.ndarray]]) -> np.ndarray:
    present = [of_layer[axes.WIDTH] for of_layer in scores.values() if axes.WIDTH in of_layer]
    if not present:
        raise InputError(f"--widths=width: no layer of {config.name} has scores of its channels")
    total: np.ndarray = np.sum(present, axis=0)
    return total


def _home(config: ModelConfig, layer: int) -> int:
    owner = config.cache_specs[layer].owner
    return layer if owner is None else owner


def _numbers(which: np.ndarray) -> list[object]:
    """The numbers of what is true, of each row where there are several."""
    return (
        [_numbers(row) for row in which] if which.ndim > 1 else [*map(int, np.flatnonzero(which))]
    )
