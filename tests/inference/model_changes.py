"""Changes of models, as functions that return changed fields: what a model would be without a
quirk.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from configs.kinds.attention import Attention
from configs.kinds.experts import Experts
from configs.model import LayerSpec, ModelConfig
from inference.families.shared.fields import ModelFields

Change = Callable[[ModelConfig], ModelFields]


def each_spec(changed: Callable[[LayerSpec], LayerSpec]) -> Change:
    """What changes all layers."""
    return lambda model: {"pattern": tuple(map(changed, model.pattern))}


def each_layer(change: Callable[[Any], Mapping[str, Any]]) -> Change:
    """What changes the mixers of all layers."""

    def changed(spec: LayerSpec) -> LayerSpec:
        mixer = dataclasses.replace(spec.mixer, **change(spec.mixer))
        return dataclasses.replace(spec, mixer=mixer)

    return each_spec(changed)


def with_fields(**changes: Any) -> Change:
    """What changes these fields of every kind that has them."""
    return lambda model: {"pattern": model.with_kinds(**changes).pattern}


def each_of(kind: type, **changes: Any) -> Change:
    """What changes these fields of mixers of one kind alone."""
    return each_layer(lambda mixer: changes if isinstance(mixer, kind) else {})


def parallel(norms: int) -> Change:
    """What has feed-forwards read beside attention, by so many norms, or what it adds to (0)."""
    return each_spec(lambda layer: dataclasses.replace(layer, parallel_norms=norms))


def rescaled(**changes: Any) -> Change:
    """What changes how every layer's frequencies are stretched."""

    def change(mixer: Attention) -> dict[str, Any]:
        assert mixer.rope is not None
        scaling = dataclasses.replace(mixer.rope.scaling, **changes)
        return {"rope": dataclasses.replace(mixer.rope, scaling=scaling)}

    return each_layer(change)


def each_mixture(change: Callable[[Experts], Mapping[str, Any]]) -> Change:
    """What changes the experts of every mixture."""

    def changed(layer: LayerSpec) -> LayerSpec:
        if not isinstance(layer.ffn, Experts):
            return layer
        return dataclasses.replace(layer, ffn=dataclasses.replace(layer.ffn, **change(layer.ffn)))

    return each_spec(changed)


def routed(**changes: Any) -> Change:
    """What changes the routers of every mixture."""
    return each_mixture(lambda e: {"router": dataclasses.replace(e.router, **changes)})
