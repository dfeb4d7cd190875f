"""Reads and writes experts as the `config.json` of many families has them."""

from collections.abc import Callable
from typing import Any

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.kinds.kind import FeedForward
from configs.kinds.rope import Rope
from configs.model import MOST_LAYERS, ModelConfig
from inference.families.shared import export_fields, fields
from inference.families.shared.config_keys import Keys

_PLAIN = Router()


def experts(
    keys: Keys,
    count: str,
    num_experts: int | None,
    top_k: int | None,
    width: int,
    router: Router = _PLAIN,
    **overrides: Any,
) -> Experts:
    """Returns a mixture.

    Args:
        count: the key that counts the experts.
        num_experts: where the file does not state it.
        top_k: likewise.
        width: of an expert.
        overrides: further fields, which win.
    """
    num_experts = keys.integer(count, num_experts)
    top_k = keys.integer("num_experts_per_tok", top_k)
    if top_k > num_experts:
        raise InputError(f"num_experts_per_tok={top_k} is more than {count}={num_experts}")
    if num_experts % router.num_groups:
        raise InputError(f"n_group={router.num_groups} does not divide {count}={num_experts}")
    activation = {"activation": fields.activation(keys)}
    return Experts(num_experts, top_k, width, router, **activation | overrides)


def sharing_experts(
    keys: Keys, num_experts: int, top_k: int | None, router: Router, width: int, num_shared: int = 1
) -> Experts:
    """Returns a mixture whose shared experts are as wide as the others, by DeepSeek's keys."""
    width = keys.integer("moe_intermediate_size", width)
    shared_width = width * keys.whole("n_shared_experts", num_shared)
    return experts(
        keys, "n_routed_experts", num_experts, top_k, width, router, shared_width=shared_width
    )


def softmax_router(keys: Keys, default: bool) -> Router:
    """Returns a router whose chosen weights may be normalized."""
    return Router(is_normalized=keys.boolean("norm_topk_prob", default))


def groups(
    keys: Keys, num_groups: int | None = None, top_groups: int | None = None
) -> tuple[int, int]:
    """Returns how many groups of experts there are, and how many a router chooses."""
    count, chosen = keys.integer("n_group", num_groups), keys.integer("topk_group", top_groups)
    if chosen > count:
        raise InputError(f"topk_group={chosen} is more than n_group={count}")
    return count, chosen


def offset_router(
    keys: Keys, scale: float, num_groups: int, top_groups: int, is_normalized: bool = True
) -> Router:
    """Returns DeepSeek-V3's router: sigmoid scores, offsets in the choice, groups by two."""
    keys.choice("topk_method", {"noaux_tc": "noaux_tc"}, "noaux_tc")
    keys.choice("scoring_func", {"sigmoid": "sigmoid"}, "sigmoid")
    count, chosen = groups(keys, num_groups, top_groups)
    return Router(
        "sigmoid",
        keys.boolean("norm_topk_prob", is_normalized),
        keys.number("routed_scaling_factor", scale),
        has_offsets=True,
        num_groups=count,
        top_groups=chosen,
        group_best=2,
    )


def after_dense(keys: Keys, experts: Experts, first_dense: int) -> list[FeedForward]:
    """Returns dense layers first, then the mixture."""
    dense = keys.whole("first_k_dense_replace", first_dense, limit=MOST_LAYERS)
    return by_layer(keys, experts, lambda layer: layer >= dense)


def by_mlp_types(keys: Keys, experts: Experts) -> list[FeedForward] | None:
    """Returns each layer's feed-forward by `mlp_layer_types`; None: it is absent."""
    kinds = keys.listed("mlp_layer_types", fields.num_layers(keys))
    if any(kind not in ("dense", "sparse") for kind in kinds or ()):
        raise InputError("mlp_layer_types lists 'dense' or 'sparse' for each layer")
    if kinds is None:
        return None
    return by_layer(keys, experts, lambda layer: kinds[layer] == "sparse")


def by_layer(keys: Keys, experts: Experts, is_mixture: Callable[[int], bool]) -> list[FeedForward]:
    """Returns each layer's feed-forward, the mixture or a dense one, by the layer's number."""
    dense = Gated(keys.integer("intermediate_size"), fields.activation(keys))
    return [experts if is_mixture(layer) else dense for layer in range(fields.num_layers(keys))]


def attention(config: ModelConfig) -> Attention:
    """Returns the first attention, or a placeholder where no layer attends."""
    return next(iter(config.mixers(Attention)), Attention(1, 1, 2))


def mixture(config: ModelConfig) -> Experts:
    """Returns the first mixture, or a placeholder where all layers are dense."""
    ffns = (layer.ffn for layer in config.layers)
    return next((ffn for ffn in ffns if isinstance(ffn, Experts)), Experts(1, 1, 1, Router()))


def with_heads(config: ModelConfig) -> dict[str, object]:
    """Returns the keys of sizes of a model and of its heads."""
    mixer = attention(config)
    return export_fields.sizes(config, mixer.rope or Rope()) | export_fields.heads(mixer)


def dense_layers(config: ModelConfig) -> dict[int, Gated]:
    """Returns the layers without a mixture, by number."""
    return {n: layer.ffn for n, layer in enumerate(config.layers) if isinstance(layer.ffn, Gated)}


def mlp_types(config: ModelConfig) -> list[str]:
    """Returns the kinds that `mlp_layer_types` lists."""
    dense = dense_layers(config)
    return ["dense" if n in dense else "sparse" for n in range(config.num_layers)]


def routed(config: ModelConfig) -> dict[str, object]:
    """Returns the keys of a mixture as DeepSeek's relatives write it (`sharing_experts`)."""
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
