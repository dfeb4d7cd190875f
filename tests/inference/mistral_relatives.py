"""Ministral 3, Mistral 4 and Llama 4 among the tiny checkpoints: what each would be without its
quirk.
"""

import dataclasses
from collections.abc import Callable

from configs.kinds.attention import Attention
from configs.kinds.experts import Experts
from configs.kinds.rope import Rope
from configs.kinds.temperature import Temperature
from configs.model import LayerSpec, ModelConfig
from inference.families.shared.fields import ModelFields

Change = Callable[[ModelConfig], ModelFields]


def _with(**changes: object) -> Change:
    """What changes these fields of every kind that has them."""
    return lambda model: {"pattern": model.with_kinds(**changes).pattern}


def _each_layer(changed: Callable[[LayerSpec], LayerSpec]) -> Change:
    return lambda model: {"pattern": tuple(map(changed, model.pattern))}


def _turning(**changes: object) -> Change:
    """What changes the positions of layers that rotate."""

    def changed(layer: LayerSpec) -> LayerSpec:
        if layer.mixer.rope is None:
            return layer
        rope = dataclasses.replace(layer.mixer.rope, **changes)
        return dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, rope=rope))

    return _each_layer(changed)


def _heated(temperature: Temperature) -> Change:
    """What changes the queries of layers whose queries grow."""

    def changed(layer: LayerSpec) -> LayerSpec:
        if not isinstance(layer.mixer, Attention) or layer.mixer.temperature is None:
            return layer
        mixer = dataclasses.replace(layer.mixer, temperature=temperature)
        return dataclasses.replace(layer, mixer=mixer)

    return _each_layer(changed)


def _routed(**changes: object) -> Change:
    """What changes the router of every mixture."""

    def changed(layer: LayerSpec) -> LayerSpec:
        if not isinstance(layer.ffn, Experts):
            return layer
        router = dataclasses.replace(layer.ffn.router, **changes)
        return dataclasses.replace(layer, ffn=dataclasses.replace(layer.ffn, router=router))

    return _each_layer(changed)


VISIBLE = {
    "ministral3-gqa-yarn": (
        _with(temperature=None),
        _heated(Temperature(0.6, 16, offset=4)),
        _turning(scaling=None),
    ),
    "ministral3-mqa-tied-window-float32": (
        _with(window=None),
        _with(temperature=None),
        _with(rope=Rope()),
    ),
    "mistral4-mha-groups-yarn": (
        _with(temperature=None),
        _with(scale=None),
        _turning(neighbours=False),
        _routed(num_groups=1, top_groups=1, group_best=1),
        _routed(group_best=1),
        _routed(scale=1.0),
        _routed(is_normalized=False),
        _routed(scores="sigmoid"),
    ),
    "mistral4-mha-halves-float32": (_routed(is_normalized=True),),
    "llama4-gqa-chunks": (
        _with(window=None, chunked=False),
        _with(chunked=False),
        _heated(Temperature(0.6, 6)),
        _with(qk_norm=None),
        _turning(scaling=None),
        _turning(neighbours=False),
        _with(weighs_inputs=False),
        _routed(is_normalized=True),
    ),
    "llama4-mha-listed-tied-float32": (
        _with(qk_norm="plain"),
        _with(window=None, chunked=False),
    ),
}
