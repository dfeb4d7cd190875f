"""Experts as the `config.json` of many families has them, read and written."""

from collections.abc import Callable, Sequence
from typing import Any

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.kinds.kind import FeedForward
from configs.kinds.rope import Rope
from configs.model import MOST_LAYERS, ModelConfig
from inference.families.shared import (
    export_fields,
    fields,
    rope_keys,
)
from inference.families.shared.config_keys import Keys

_PLAIN = Router()


def model(
    keys: Keys,
    name: str,
    family: str,
    rope: Rope,
    mixers: Sequence[Any],
    ffns: FeedForward | Sequence[FeedForward],
    eps: float = 1e-6,
) -> ModelConfig:
    """One mixer is that of all layers, and so is one feed-forward."""
    if len(mixers) == 1 and not isinstance(ffns, FeedForward):
        mixers = [*mixers] * len(ffns)
    return ModelConfig(
        **fields.llama_fields(keys, name, family, eps=eps),
        max_context=rope_keys.max_context(keys, rope),
        pattern=fields.pattern(mixers, ffns),
    )


def experts(
    keys: Keys,
    count: str,
    num_experts: int | None,
    top_k: int | None,
    width: int,
    router: Router = _PLAIN,
    **own: Any,
) -> Experts:
    """A mixture: the key that counts its experts, the family's defaults, and what else it has."""
    num_experts, top_k = (
        keys.integer(count, num_experts),
        keys.integer("num_experts_per_tok", top_k),
    )
    if top_k > num_experts:
        raise InputError(f"num_experts_per_tok={top_k} is more than {count}={num_experts}")
    if num_experts % router.num_groups:
        raise InputError(f"n_group={router.num_groups} does not divide {count}={num_experts}")
    return Experts(
        num_experts,
        top_k,
        width,
        router,
        **{"activation": keys.choice("hidden_act", {"silu": "silu"}, "silu")} | own,
    )


def softmax_router(keys: Keys, default: bool) -> Router:
    return Router(is_normalized=keys.boolean("norm_topk_prob", default))


def groups(
    keys: Keys, num_groups: int | None = None, top_groups: int | None = None
) -> dict[str, Any]:
    count, chosen = keys.integer("n_group", num_groups), keys.integer("topk_group", top_groups)
    if chosen > count:
        raise InputError(f"topk_group={chosen} is more than n_group={count}")
    return {"num_groups": count, "top_groups": chosen}


def offset_router(
    keys: Keys, scale: float, num_groups: int, top_groups: int, is_normalized: bool = True
) -> Router:
    """DeepSeek-V3's: sigmoid scores, learned offsets in the choice, groups by their best two."""
    keys.choice("topk_method", {"noaux_tc": "noaux_tc"}, "noaux_tc")
    keys.choice("scoring_func", {"sigmoid": "sigmoid"}, "sigmoid")
    return Router(
        "sigmoid",
        keys.boolean("norm_topk_prob", is_normalized),
        keys.number("routed_scaling_factor", scale),
        has_offsets=True,
        group_best=2,
        **groups(keys, num_groups, top_groups),
    )


def after_dense(keys: Keys, experts: Experts, first_dense: int) -> list[FeedForward]:
    """Dense layers first, then the mixture."""
    dense = keys.whole("first_k_dense_replace", first_dense, limit=MOST_LAYERS)
    return by_layer(keys, experts, lambda layer: layer >= dense)


def by_mlp_types(keys: Keys, experts: Experts) -> list[FeedForward] | None:
    """The kinds that are listed by layer; None: they are not."""
    kinds = keys.listed("mlp_layer_types", fields.num_layers(keys))
    if any(kind not in ("dense", "sparse") for kind in kinds or ()):
        raise InputError("mlp_layer_types lists 'dense' or 'sparse' for each layer")
    return kinds and by_layer(keys, experts, lambda layer: kinds[layer] == "sparse")


def by_layer(keys: Keys, experts: Experts, is_mixture: Callable[[int], bool]) -> list[FeedForward]:
    dense = Gated(
        keys.integer("intermediate_size"), keys.choice("hidden_act", {"silu": "silu"}, "silu")
    )
    return [experts if is_mixture(layer) else dense for layer in range(fields.num_layers(keys))]


def attention(config: ModelConfig) -> Attention:
    """The first that attends; where other mixers stand in its place, there is none to write."""
    return next(iter(config.mixers(Attention)), Attention(1, 1, 2))


def mixture(config: ModelConfig) -> Experts:
    """The first mixture; a model of dense layers has none to write."""
    found = (layer.ffn for layer in config.layers if isinstance(layer.ffn, Experts))
    return next(found, Experts(1, 1, 1, Router()))


def with_heads(config: ModelConfig) -> dict[str, Any]:
    """Sizes of a model and of its heads."""
    own = attention(config)
    return export_fields.sizes(config, own.rope or Rope()) | export_fields.heads(own)


def dense_layers(config: ModelConfig) -> dict[int, Gated]:
    """Layers without a mixture."""
    return {n: layer.ffn for n, layer in enumerate(config.layers) if isinstance(layer.ffn, Gated)}


def mlp_types(config: ModelConfig) -> list[str]:
    """Which layers have a mixture."""
    dense = dense_layers(config)
    return ["dense" if n in dense else "sparse" for n in range(config.num_layers)]


def routed(config: ModelConfig) -> dict[str, Any]:
    """The mixture as DeepSeek's relatives write it, whose shared experts are as wide as others."""
    experts, dense = mixture(config), dense_layers(config)
    router = experts.router
    return {
        "intermediate_size": dense[min(dense)].width if dense else experts.width,
        "moe_intermediate_size": experts.width,
        "n_routed_experts": experts.num_experts,
        "n_shared_experts": experts.shared_width // experts.width,
        "num_experts_per_tok": experts.top_k,
        "n_group": router.num_groups,
        "topk_group": router.top_groups,
        "norm_topk_prob": router.is_normalized,
        "routed_scaling_factor": router.scale,
        "first_k_dense_replace": len(dense),
    }
