"""A mixture of experts: tokens are sorted by the experts that they visit, each expert multiplies
its own, and a token's results are summed by weight. No token is dropped; padding is routed to none.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from configs.kinds.experts import Experts
from configs.model import ModelConfig
from layers import norm
from layers.backends import backends
from layers.backends.backend import MixtureKernel
from layers.feed_forwards import dense, routing
from layers.kernels.linear import adapted
from layers.linear import add_bias, grouped_linear, linear
from layers.params import Params
from layers.registry import RoutedTokens, StepContext
from layers.stacks import group_of_rows
from sharding import collectives


class _Tokens(NamedTuple):
    x_TD: jax.Array
    weights_TJ: jax.Array  # float32
    ids_TJ: jax.Array  # i32; the number of experts is nobody


def apply(
    params: Params, config: ModelConfig, kind: Experts, x_TD: jax.Array, context: StepContext
) -> tuple[jax.Array, RoutedTokens]:
    """The weighted sum of each token's experts, and of the shared one, float32 [T, D]; and the
    tokens routed to each expert. Chips that divide the experts exchange all tokens, and each gets
    its own sums.
    """
    out_TD, routed = _summed(params, config, kind, x_TD, context)
    if kind.has_post_norm:
        out_TD = norm.apply(out_TD, params["post_norm"], config)
    return out_TD, routed


def _summed(
    params: Params, config: ModelConfig, kind: Experts, x_TD: jax.Array, context: StepContext
) -> tuple[jax.Array, RoutedTokens]:
    with jax.named_scope("router"):
        routed_TD = x_TD
        if kind.router.has_norm:
            routed_TD = norm.rms_norm(x_TD, params["router_norm"], config.norm_eps)
            routed_TD *= config.width**-0.5
        logits_TE = routing.logits(params, routed_TD)
    normed_TD = norm.apply(x_TD, params["experts_norm"], config) if kind.has_norms else x_TD
    if kind.latent_width:
        with jax.named_scope("experts"):
            normed_TD = add_bias(
                linear(normed_TD, params["latent_down"]), params, "latent_down_bias"
            )
    mix = _mixture(params, config, kind, len(x_TD), context)
    out_TD, routed = mix(params, normed_TD.astype(config.dtype), logits_TE, context.ragged.valid_T)
    if kind.latent_width:  # a chip's part of each sum, as of what experts alone add
        with jax.named_scope("experts"):
            out_TD = linear(out_TD.astype(config.dtype), params["latent_up"])
    if not kind.shared_width:
        return add_bias(collectives.total(out_TD), params, "latent_up_bias"), routed
    with jax.named_scope("shared"):
        normed_TD = norm.apply(x_TD, params["shared_norm"], config) if kind.has_norms else x_TD
        feed = dense.up_alone_and_down
        if kind.is_gated:
            feed = functools.partial(
                dense.up_and_down, limit=kind.limit, late_limit=kind.late_limits[1]
            )
        shared_TD = feed(params["shared"], config, kind.activation, normed_TD)
        if kind.has_shared_gate:
            shared_TD *= jax.nn.sigmoid(linear(normed_TD, params["shared_gate"]))
    if not kind.has_norms:
        out_TD = add_bias(collectives.total(out_TD + shared_TD), params, "latent_up_bias")
        return add_bias(out_TD, params["shared"], "down_bias"), routed
    out_TD, shared_TD = collectives.total(jnp.stack([out_TD, shared_TD]))
    shared_TD = norm.apply(shared_TD, params["shared_post_norm"], config)
    return norm.apply(out_TD, params["experts_post_norm"], config) + shared_TD, routed


def _mixture(
    params: Params, config: ModelConfig, kind: Experts, num_tokens: int, context: StepContext
) -> Callable[[Params, jax.Array, jax.Array, jax.Array], tuple[jax.Array, RoutedTokens]]:
    """A function of parameters, x_TD, the router's logits and valid_T: the weighed sum of each
    token's experts, float32 [T, D], on a mesh a part of it, and the tokens routed to each expert. A
    back end's kernel has the derivatives of XLA's, where weights are plain arrays.
    """
    by_xla = functools.partial(_mixture_by_xla, config, kind, context)
    weights, is_divided = params["experts"], kind.num_held < kind.num_experts
    if is_divided or not kind.is_gated:
        return by_xla
    kernel = backends.current().mixture(kind, num_tokens, weights["gate_up"], weights["down"])
    if kernel is None:
        return by_xla
    by_kernel = jax.custom_jvp(functools.partial(_mixture_by_kernel, kernel, config, kind))
    by_kernel.defjvp(lambda primals, tangents: jax.jvp(by_xla, primals, tangents))
    return by_kernel


def _mixture_by_kernel(
    kernel: MixtureKernel, config: ModelConfig, kind: Experts, params: Params, x_TD: jax.Array,
    logits_TE: jax.Array, valid_T: jax.Array,
) -> tuple[jax.Array, RoutedTokens]:  # fmt: skip
    routed, out_TD = kernel(
        x_TD, logits_TE, valid_T, params["experts"], functools.partial(_gate, kind),
        params.get("router_offsets"), params.get("router_factors"),
    )  # fmt: skip
    if kind.has_bias:
        weights_TE = routed.weights_EW.T[: len(x_TD)]
        if kind.weighs_inputs:
            weights_TE = (weights_TE != 0).astype(jnp.float32)
        bias_ED = _first_chips(params["experts"]["down_bias"])
        out_TD += jnp.dot(weights_TE, bias_ED, precision=jax.lax.Precision.HIGHEST)
    return out_TD, RoutedTokens(routed.num_tokens_E, routed.share_E)


def _mixture_by_xla(
    config: ModelConfig, kind: Experts, context: StepContext, params: Params, x_TD: jax.Array,
    logits_TE: jax.Array, valid_T: jax.Array,
) -> tuple[jax.Array, RoutedTokens]:  # fmt: skip
    with jax.named_scope("router"):
        weights_TJ, ids_TJ, scores_TE = routing.route(
            params, kind.router, kind.top_k, logits_TE, context.tokens_T
        )
        ids_TJ = jnp.where(valid_T[:, None], ids_TJ, kind.num_experts)
        shares_TE = scores_TE / scores_TE.sum(1, keepdims=True)
        share_E = jnp.where(valid_T[:, None], shares_TE, 0).sum(0) / jnp.maximum(valid_T.sum(), 1)
        routed = RoutedTokens(_counts(ids_TJ, kind.num_experts), share_E)
    with jax.named_scope("experts"):
        every = _tokens_of_all(x_TD, weights_TJ, ids_TJ)
        out_TD = _mixed(params["experts"], config, kind, every, context.deterministic)
        return collectives.own_tokens(out_TD), routed


def _tokens_of_all(x_TD: jax.Array, weights_TJ: jax.Array, ids_TJ: jax.Array) -> _Tokens:
    """The tokens of all chips that divide the experts, in two exchanges."""
    if collectives.num_chips(collectives.EXPERTS) == 1:
        return _Tokens(x_TD, weights_TJ, ids_TJ)
    bits_TJ = jax.lax.bitcast_convert_type(weights_TJ, jnp.int32)
    both_TJ = collectives.tokens_of_all(jnp.concatenate([bits_TJ, ids_TJ], axis=1))
    bits_TJ, ids_TJ = jnp.split(both_TJ, 2, axis=1)
    weights_TJ = jax.lax.bitcast_convert_type(bits_TJ, jnp.float32)
    return _Tokens(collectives.tokens_of_all(x_TD), weights_TJ, ids_TJ)


def _mixed(
    params: Params, config: ModelConfig, kind: Experts, routed: _Tokens, deterministic: bool
) -> jax.Array:
    """Sums the local experts' results of each token, float32 [T, D]; on a mesh a part of it."""
    x_TD, weights_TJ, ids_TJ = routed
    local_TJ = ids_TJ - collectives.chip(collectives.EXPERTS) * kind.num_held
    local_TJ = jnp.where((local_TJ >= 0) & (local_TJ < kind.num_held), local_TJ, kind.num_held)
    sizes_E, order_X = _counts(local_TJ, kind.num_held), jnp.argsort(local_TJ.ravel(), stable=True)
    token_X = order_X // kind.top_k
    x_XD = x_TD[token_X]
    params = adapted.for_rows(params, lambda slot_T: collectives.tokens_of_all(slot_T)[token_X])
    if kind.weighs_inputs:
        x_XD = (x_XD * weights_TJ.ravel()[order_X, None]).astype(x_XD.dtype)
        weights_TJ = jnp.ones_like(weights_TJ)
    up = "gate_up" if kind.is_gated else "up"
    gate_up_XF = grouped_linear(x_XD, params[up], sizes_E, deterministic)
    ids_X = group_of_rows(sizes_E, len(x_XD))
    if kind.has_bias:
        bias_EF = params["gate_up_bias"].astype(jnp.float32).reshape(kind.num_held, -1)
        gate_up_XF += bias_EF.at[ids_X].get(mode="clip")
    hidden_XF = _gated(kind, gate_up_XF, config.dtype)
    out_XD = grouped_linear(hidden_XF, params["down"], sizes_E, deterministic)
    if kind.has_bias:
        out_XD += _first_chips(params["down_bias"]).at[ids_X].get(mode="fill", fill_value=0)
    return _weighed(weights_TJ, out_XD[jnp.argsort(order_X)].reshape(*ids_TJ.shape, -1))


def _first_chips(bias_ED: jax.Array) -> jax.Array:
    """What is added once, though chips along `model` sum what they add."""
    bias_ED = bias_ED.astype(jnp.float32)
    return bias_ED if collectives.num_chips() == 1 else bias_ED * (collectives.chip() == 0)


def _counts(ids_TJ: jax.Array, num_experts: int) -> jax.Array:
    return (ids_TJ.ravel()[:, None] == jnp.arange(num_experts)).sum(0, dtype=jnp.int32)


def _weighed(weights_TJ: jax.Array, out_TJD: jax.Array) -> jax.Array:
    """The sum of a token's J results, in one order, whatever lies beside it: float32 [T, D]."""
    parts = [weights_TJ[:, nth, None] * out_TJD[:, nth] for nth in range(weights_TJ.shape[1])]
    return functools.reduce(jnp.add, parts)


def _gated(kind: Experts, gate_up_XF: jax.Array, dtype: str) -> jax.Array:
    """act(gate) (up + offset) within the limit, or act(up) alone, [X, F] of `dtype`."""
    if not kind.is_gated:
        return dense.ACTIVATIONS[kind.activation](gate_up_XF).astype(dtype)
    is_limited = kind.limit is not None or kind.late_limits[0] is not None
    if kind.activation != "quick_gelu" and not is_limited and not kind.up_offset:
        return dense.gate(kind.activation, dtype)(gate_up_XF)
    return _gate(kind, *jnp.split(gate_up_XF, 2, axis=-1)).astype(dtype)


def _gate(kind: Experts, gate_XF: jax.Array, up_XF: jax.Array) -> jax.Array:
    """act(gate) (up + offset) within the limit, float32 [X, F]."""
    activation, late_limit = dense.ACTIVATIONS[kind.activation], kind.late_limits[0]
    if late_limit is not None:
        return dense.late_limited(activation, gate_XF, up_XF, late_limit)
    if kind.limit is not None:
        gate_XF = jnp.minimum(gate_XF, kind.limit)
        up_XF = jnp.clip(up_XF, -kind.limit, kind.limit)
    return activation(gate_XF) * (up_XF + kind.up_offset)
