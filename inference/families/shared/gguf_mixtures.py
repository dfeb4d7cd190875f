"""Reads experts from the metadata of a `.gguf` file."""

from typing import Any

from configs.errors import InputError
from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.kinds.kind import FeedForward, Mixer
from configs.model import MOST_LAYERS, LayerSpec, ModelConfig
from inference.families.shared.gguf_keys import GgufKeys
from inference.families.shared.gguf_states import Metadata

# Keys that architectures with experts read, in addition to those of all.
COUNTS = ("expert_count", "expert_used_count")
ROUTED = (
    *COUNTS,
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "expert_gating_func",
    "expert_weights_norm",
    "expert_weights_scale",
    "expert_group_count",
    "expert_group_used_count",
)
DENSE = (*ROUTED, "expert_shared_count", "leading_dense_block_count")
_SCORES = {1: "softmax", 2: "sigmoid"}


def read_router(keys: GgufKeys, is_normalized: bool, scores: str = "softmax") -> Router:
    """Returns the router.

    Args:
        keys: of the file, which need not state how it routes.
        is_normalized: the architecture's default, as llama.cpp has it.
        scores: likewise.
    """
    function = keys.whole("expert_gating_func")
    if function and function not in _SCORES:
        raise InputError(
            f"metadata {keys.architecture}.expert_gating_func={function} is not supported; "
            "valid: 1 (softmax), 2 (sigmoid)"
        )
    scores = _SCORES.get(function, scores)
    groups = max(keys.whole("expert_group_count"), 1)
    top_groups = max(keys.whole("expert_group_used_count"), 1) if groups > 1 else 1
    has_offsets = scores == "sigmoid"
    return Router(
        scores,
        keys.boolean("expert_weights_norm", is_normalized),
        keys.number("expert_weights_scale", 1.0),
        has_offsets=has_offsets,
        num_groups=groups,
        top_groups=top_groups,
        group_best=2 if has_offsets else 1,
    )


def read_experts(
    keys: GgufKeys, router: Router, width: int | None = None, **fields: Any
) -> Experts:
    """Returns a mixture; `width` None: the file's key of it counts."""
    return Experts(
        keys.integer("expert_count"),
        keys.integer("expert_used_count"),
        width or keys.integer("expert_feed_forward_length"),
        router,
        **fields,
    )


def feed_forwards(keys: GgufKeys, router: Router, count: int) -> list[FeedForward]:
    """Returns those of `count` layers: dense ones first, then mixtures with shared experts."""
    dense = min(keys.whole("leading_dense_block_count", limit=MOST_LAYERS), count)
    ffns: list[FeedForward] = [Gated(keys.ffn_width)] * dense if dense else []
    if dense == count:
        return ffns
    shared = keys.whole("expert_shared_count") * keys.integer("expert_feed_forward_length")
    return ffns + [read_experts(keys, router, shared_width=shared)] * (count - dense)


def after_dense(keys: GgufKeys, mixer: Mixer, router: Router, extra: int) -> tuple[LayerSpec, ...]:
    """Returns layers with `feed_forwards`; skips the `extra` last blocks."""
    ffns = feed_forwards(keys, router, keys.num_layers - extra)
    layers = tuple(LayerSpec(mixer, ffn) for ffn in ffns)
    return layers if keys.whole("leading_dense_block_count") else layers[:1]


def metadata(config: ModelConfig) -> Metadata:
    """Returns the keys of experts: the inverse of `read_router`, `read_experts` and
    `feed_forwards`.
    """
    mixtures = [layer.ffn for layer in config.layers if isinstance(layer.ffn, Experts)]
    dense: Metadata = {"leading_dense_block_count": config.num_layers - len(mixtures)}
    if not mixtures:
        return dense
    experts, router = mixtures[0], mixtures[0].router
    metadata: Metadata = dense | {
        "expert_count": experts.num_experts,
        "expert_used_count": experts.top_k,
        "expert_feed_forward_length": experts.width,
        "expert_shared_count": experts.shared_width // experts.width,
        "expert_gating_func": next(n for n, scores in _SCORES.items() if scores == router.scores),
        "expert_weights_norm": router.is_normalized,
        "expert_weights_scale": router.scale,
    }
    if experts.shared_width:
        metadata["expert_shared_feed_forward_length"] = experts.shared_width
    if router.num_groups > 1:
        metadata["expert_group_count"] = router.num_groups
        metadata["expert_group_used_count"] = router.top_groups
    return metadata
