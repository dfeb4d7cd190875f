"""The shapes that a model can be pruned to: its configuration with fewer layers and narrower parts.

Widths are integers by the names of axes (`axes.py`), of `width` and of `layers`. A part that is
narrower than a width says already stays as it is.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from configs.errors import InputError
from configs.kinds.kind import FeedForward, Kind, Mixer
from configs.kinds.params import leaves
from configs.model import LayerSpec, ModelConfig
from inference.prune import axes
from inference.prune.axes import LAYERS, WIDTH, AnyKind

Widths = Mapping[str, int]

_SHOWN = 8  # sizes that a message lists


def sizes(config: ModelConfig) -> dict[str, int]:
    """Returns the largest size of each axis that a model has, by name."""
    sizes = {LAYERS: config.num_layers, WIDTH: config.width}
    for layer in dict.fromkeys(config.layers):
        for axis, part in axes.of_layer(layer):
            sizes[axis.name] = max(sizes.get(axis.name, 0), axis.size(part.kind))
    return sizes


def check(config: ModelConfig, widths: Widths) -> None:
    """Raises InputError if a model has no such axis, or cannot lose units to such a width."""
    if config.hyper_connections is not None:
        raise InputError(f"{config.name}: models with hyper-connections are not pruned yet")
    present = sizes(config)
    for name, width in widths.items():
        if name not in present:
            valid = ", ".join(f"{axis}={size}" for axis, size in present.items())
            raise InputError(
                f"--widths={name}={width}: {config.name} has none of it; it has {valid}"
            )
        if width > present[name]:
            raise InputError(
                f"--widths={name}={width}: {config.name} has {present[name]}; give fewer"
            )
        if width < 1:
            raise InputError(f"--widths={name}={width}: must be at least 1")
    for name in (LAYERS, WIDTH) if config.layer_inputs is not None else ():
        if widths.get(name, present[name]) < present[name]:
            raise InputError(
                f"--widths={name}={widths[name]}: layers of {config.name} read inputs of their "
                "own, whose tables stay; leave it out"
            )
    for layer in dict.fromkeys(config.layers):
        for axis, part in axes.of_layer(layer):
            if axis.name in widths:
                _check_units(axis, part.kind, widths[axis.name])


def _check_units(axis: axes.Axis, kind: Kind, units: int) -> None:
    least, groups, size = axis.least(kind), axis.groups(kind), axis.size(kind)
    if units >= size:
        return
    if units < least:
        raise InputError(
            f"--widths={axis.name}={units}: {kind.name} layers need at least {least} {axis.label}"
        )
    if units % groups:
        raise InputError(
            f"--widths={axis.name}={units}: must be a multiple of the {groups} groups that "
            f"{axis.label} lie in"
        )
    try:
        axis.reduced(kind, units)
    except InputError as error:
        raise InputError(f"--widths={axis.name}={units}: {error}") from None


def pruned(config: ModelConfig, widths: Widths, layers: Sequence[int]) -> ModelConfig:
    """Returns a model of these layers, in their order, and of these widths, without formats.

    Raises:
        InputError: its parts do not go with each other, or a layer reads what a removed one made.
    """
    place_of = {layer: place for place, layer in enumerate(layers)}
    pattern = []
    narrowed: dict[int, tuple[Mixer, FeedForward | None]] = {}  # of layers that are one object
    for index in layers:
        layer = config.layers[index]
        if id(layer) not in narrowed:
            ffn = layer.ffn and _narrowed(layer.ffn, widths)
            narrowed[id(layer)] = _narrowed(layer.mixer, widths), ffn
        mixer, ffn = narrowed[id(layer)]
        owners = {
            "owner": config.cache_specs[index].owner,
            "index_owner": layer.mixer.choice_owner,
        }
        for field, owner in owners.items():
            if owner is not None and owner not in place_of:
                raise InputError(f"layer {index} reads what layer {owner} made: both must stay")
            if owner is not None:
                mixer = mixer.changed({field: place_of[owner]})
        pattern.append(dataclasses.replace(layer, mixer=mixer, ffn=ffn))
    width, scale = widths.get(WIDTH, config.width), config.embedding_scale
    if width != config.width and has_root_scale(config):
        scale = math.sqrt(width)
    return dataclasses.replace(
        config, num_layers=len(pattern), pattern=_shortest(pattern), width=width,
        embedding_scale=scale, formats=(),
    )  # fmt: skip


def num_parameters(config: ModelConfig) -> int:
    """Returns a model's parameters without those of its tables of tokens and its head."""
    tables = "embed", "head", "positions", "inputs"
    return sum(
        math.prod(info.shape) for path, info in leaves(config.parameters()) if path[0] not in tables
    )


def has_root_scale(config: ModelConfig) -> bool:
    """Returns whether embedded tokens are multiplied by the root of the width (Gemma), which then
    no file of the family states.
    """
    is_root = math.isclose(config.embedding_scale, math.sqrt(config.width), rel_tol=1e-6)
    return is_root and config.width > 1 and config.norm != "layer_bare"


def _narrowed(kind: AnyKind, widths: Widths) -> AnyKind:
    if len(kind.parts) > 1:
        parts = {
            name: _narrowed(part, widths)
            for name, part in vars(kind).items()
            if isinstance(part, Kind)
        }
        replace: Callable[..., AnyKind] = dataclasses.replace
        return replace(kind, **parts)
    for axis in axes.AXES:
        size = axis.size(kind)
        if size > widths.get(axis.name, size):
            kind = axis.reduced(kind, widths[axis.name])
    return kind


def _shortest(pattern: list[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Returns the shortest pattern that repeats to these layers."""
    for period in range(1, len(pattern)):
        if all(layer == pattern[i % period] for i, layer in enumerate(pattern)):
            return tuple(pattern[:period])
    return tuple(pattern)


def check_transformers(config: ModelConfig, widths: Widths, layers: Sequence[int]) -> None:
    """Raises InputError, with sizes that can be, if no `config.json` of the family says a shape."""
    error = refusal(config, widths, layers)
    if error is None:
        return
    present = sizes(config)
    for name, width in widths.items():
        staying = layers if name == LAYERS else range(config.num_layers)
        if refusal(config, {name: width}, staying) is None:
            continue
        near = sorted(range(1, present[name]), key=lambda size: (abs(size - width), size))
        valid: list[int] = []
        for size in near if name != LAYERS else ():
            if len(valid) < _SHOWN and refusal(config, {name: size}, staying) is None:
                valid.append(size)
        can = f"it can say {', '.join(map(str, sorted(valid)))}" if valid else "leave it out"
        raise InputError(f"--widths={name}={width}: {error}; {can}, or write --native")
    raise InputError(f"{error}; write --native")


def refusal(config: ModelConfig, widths: Widths, layers: Sequence[int]) -> str | None:
    """Returns why no `config.json` of the family says a shape; None: one does."""
    from inference.checkpoints.hf import config_export  # brings JAX, without which plans start

    try:
        check(config, widths)
        config_export.of_model(pruned(config, widths, layers))
    except InputError as error:
        return str(error).partition("; --to=orbax")[0]  # that is another script's
    return None
