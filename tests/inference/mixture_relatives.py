"""Newer mixtures among the tiny checkpoints: what each would be without its quirk."""

import dataclasses
from collections.abc import Callable

from configs.kinds.attention import Attention
from configs.kinds.experts import Experts, Router
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from inference.families.shared.fields import ModelFields

# Each has the attention and the experts of others, in another combination.
FAMILIES = (
    "lfm2_moe", "ernie4_5_moe", "granitemoe", "granitemoeshared", "bailing_moe_v2", "solar_open",
    "hy_v3", "exaone_moe", "mellum", "hunyuan_v1_moe", "afmoe", "laguna", "mimo_v2_flash", "youtu",
    "phimoe", "step3p5", "axk1",
)  # fmt: skip

Change = Callable[[ModelConfig], ModelFields]


def _with(**changes: object) -> Change:
    """What changes these fields of every kind that has them."""
    return lambda model: {"pattern": model.with_kinds(**changes).pattern}


def _each_layer(changed: Callable[[LayerSpec], LayerSpec]) -> Change:
    return lambda model: {"pattern": tuple(map(changed, model.pattern))}


def _routed(**changes: object) -> Change:
    """What changes the router of every mixture."""

    def changed(layer: LayerSpec) -> LayerSpec:
        if not isinstance(layer.ffn, Experts):
            return layer
        router = dataclasses.replace(layer.ffn.router, **changes)
        return dataclasses.replace(layer, ffn=dataclasses.replace(layer.ffn, router=router))

    return _each_layer(changed)


def _distant(**changes: object) -> Change:
    """What changes attention to all tokens."""

    def changed(layer: LayerSpec) -> LayerSpec:
        if not isinstance(layer.mixer, Attention) or layer.mixer.window is not None:
            return layer
        return dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, **changes))

    return _each_layer(changed)


def _unscaled(scale: str) -> Change:
    return lambda model: {scale: 1.0}


_SCALES = tuple(map(_unscaled, ("embedding_scale", "residual_scale", "logit_scale")))
_NO_GROUPS = _routed(num_groups=1, top_groups=1, group_best=1)

VISIBLE = {
    "lfm2_moe-gqa-dense-bias-tied": (_routed(scores="softmax"), _routed(scale=1.0)),
    "lfm2_moe-mqa-no-offsets-float32": (_routed(is_normalized=True),),
    "ernie4_5_moe-gqa-dense-shared": (
        _with(rope=Rope(5e5)), _routed(scores="sigmoid"),
    ),
    "granitemoe-gqa-scales": (
        *_SCALES, _with(scale=None), _with(router=Router(is_normalized=False)),
    ),
    "granitemoeshared-gqa-scales": (*_SCALES, _with(scale=None)),
    "bailing_moe_v2-gqa-partial-groups": (
        _with(rope=Rope()), _NO_GROUPS, _routed(scale=1.0),
    ),
    "bailing_moe_v2-mqa-bias-tied-float32": (_routed(scores="softmax"),),
    "solar_open-gqa-yarn": (_with(rope=Rope()), _routed(scale=1.0)),
    "solar_open-mqa-bias-tied-float32": (_NO_GROUPS, _routed(is_normalized=True)),
    "hy_v3-gqa-dense": (_routed(scale=1.0),),
    "hunyuan_v1_moe-gqa-alpha": (_with(rotates_first=False), _with(rope=Rope())),
    "exaone_moe-gqa-window": (_distant(rope=Rope()), _with(window=None)),
    "exaone_moe-mqa-groups-tied-float32": (_NO_GROUPS,),
    "mellum-gqa-window-yarn": (_distant(rope=Rope()), _with(window=None), _with(rope=Rope())),
    "youtu-mha-lite-yarn": (_with(scale=None), _with(rope=Rope(neighbours=True))),
    "afmoe-gqa-window-scaled": (
        *_SCALES[:1], _with(head_gate="softplus"), _with(head_gate=None, gates_elements=False),
        _distant(rope=Rope()), _with(window=None), _routed(scale=1.0),
    ),
    "laguna-gqa-heads-yarn": (
        _with(head_gate="sigmoid"), _distant(rope=Rope()), _with(rope=Rope()),
        _with(window=None), _routed(scale=1.0),
    ),
    "mimo_v2_flash-gqa-sinks": (
        _with(value_scale=1.0), _with(window=None), _with(window=25), _with(rope=Rope()),
    ),
    "phimoe-gqa-longrope-bias": (
        _routed(jitter=None), _routed(jitter=0.3), _with(rope=Rope()),
        lambda model: {"has_head_bias": False},
    ),
    "axk1-mha-groups-yarn": (
        _with(has_post_norm=False), _with(scale=None), _NO_GROUPS, _routed(scale=1.0),
    ),
    "step3p5-gqa-limits": (
        _with(late_limits=(None, 0.25)), _with(late_limits=(0.3, None)), _with(head_gate=None),
        _with(window=None), _distant(rope=Rope(1e3, share=0.5)), _with(rope=Rope()),
        _routed(scale=1.0), lambda model: {"norm_offset": 0.0},
    ),
    "phimoe-mqa-window-tied-float32": (_with(window=None),),
    "mellum-mqa-bias-dense-tied-float32": (_routed(is_normalized=True),),
}  # fmt: skip
