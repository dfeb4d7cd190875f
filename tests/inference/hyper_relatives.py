"""DeepSeek-V4 and GLM-5.2 among the tiny checkpoints: what they would be without their quirks."""

import dataclasses
from collections.abc import Callable

from configs.kinds.compressed import Compressed
from configs.kinds.experts import Experts
from configs.kinds.hyper_connections import HyperConnections
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from inference.families.shared.fields import ModelFields

Change = Callable[[ModelConfig], ModelFields]


def _choosing_first(model: ModelConfig) -> ModelFields:
    """Layers that read a choice read the first layer's."""

    def changed(layer: LayerSpec) -> LayerSpec:
        if layer.mixer.choice_owner is None:
            return layer
        return dataclasses.replace(layer, mixer=layer.mixer.changed({"index_owner": 0}))

    return {"pattern": tuple(map(changed, model.pattern))}


def _connected(**changes: object) -> Change:
    def changed(model: ModelConfig) -> ModelFields:
        assert isinstance(model.hyper_connections, HyperConnections)
        return {"hyper_connections": dataclasses.replace(model.hyper_connections, **changes)}

    return changed


def _mixing(**changes: object) -> Change:
    """What changes the attention of layers with entries."""

    def changed(layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.mixer, Compressed)
        if not layer.mixer.stride:
            return layer
        return dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, **changes))

    return lambda model: {"pattern": tuple(map(changed, model.pattern))}


def _with(**changes: object) -> Change:
    return lambda model: {"pattern": model.with_kinds(**changes).pattern}


def _routed(is_hashed: bool, **changes: object) -> Change:
    """What changes the router of mixtures that ids of tokens choose in, or of the others."""

    def changed(layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.ffn, Experts)
        if layer.ffn.reads_tokens != is_hashed:
            return layer
        router = dataclasses.replace(layer.ffn.router, **changes)
        return dataclasses.replace(layer, ffn=dataclasses.replace(layer.ffn, router=router))

    return lambda model: {"pattern": tuple(map(changed, model.pattern))}


VISIBLE = {
    "deepseek_v4-sparse-heavy-windows": (
        _connected(iterations=1),
        _connected(eps=1e-6),
        _mixing(rope=Rope(1000.0, neighbours=True)),
        _mixing(stride=0, overlaps=False, indexer=None),
        _with(window=40),
        _with(limit=None),
        _routed(True, table_rows=0),
        _routed(False, scores="sigmoid"),
        _routed(False, scale=1.0),
    ),
    "deepseek_v4-published-tied-float32": (_routed(False, scale=1.0), _connected(iterations=1)),
    "glm_moe_dsa-mha-shared-tied-float32": (_choosing_first,),
}
