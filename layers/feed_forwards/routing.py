"""Which experts a token visits, and what each of them counts: in float32, whatever the model's
type, since a near tie decides which weights are read.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from configs.kinds.experts import Router
from layers.linear import add_bias, linear, look_up
from layers.params import Params
from layers.reduce import row_sum

_LEAST_SUM = 1e-20  # of scores that all vanish


class Routes(NamedTuple):
    """The J experts of each token, the best first."""

    weights_TJ: jax.Array  # float32
    ids_TJ: jax.Array  # i32
    scores_TE: jax.Array  # float32, of all experts


def logits(params: Params, x_TD: jax.Array) -> jax.Array:
    """What scores are made of, float32 [T, E]."""
    return add_bias(linear(x_TD, params["router"]), params, "router_bias")


def route(
    params: Params,
    router: Router,
    top_k: int,
    logits_TE: jax.Array,
    tokens_T: jax.Array | None = None,
) -> Routes:
    """Which `top_k` experts each token visits, and what each of them counts.

    Args:
        logits_TE: of `logits`.
        tokens_T: i32[T] token ids, where these choose (`Router.table_rows`).
    """
    scores_TE = _SCORES[router.scores](logits_TE)
    if router.table_rows:
        assert tokens_T is not None, "ids of tokens choose experts"
        ids_TJ = look_up(params["router_table"], tokens_T).astype(jnp.int32)
        return _weighed(
            params, router, jnp.take_along_axis(scores_TE, ids_TJ, 1), ids_TJ, scores_TE
        )
    if router.jitter is not None:
        return Routes(*_one_by_one(logits_TE, top_k, router.jitter), scores_TE)
    choice_TE = add_bias(scores_TE, params, "router_offsets")
    if router.top_groups < router.num_groups:
        choice_TE = _of_best_groups(router, choice_TE)
    _, ids_TJ = jax.lax.top_k(choice_TE, top_k)
    weights_TJ = jnp.take_along_axis(scores_TE, ids_TJ, axis=1)
    if top_k > scores_TE.shape[1] // router.num_groups * router.top_groups:
        is_eligible_TJ = jnp.isfinite(jnp.take_along_axis(choice_TE, ids_TJ, axis=1))
        weights_TJ = jnp.where(is_eligible_TJ, weights_TJ, 0)
    return _weighed(params, router, weights_TJ, ids_TJ, scores_TE)


def _weighed(
    params: Params, router: Router, weights_TJ: jax.Array, ids_TJ: jax.Array, scores_TE: jax.Array
) -> Routes:
    if router.is_normalized:
        weights_TJ /= row_sum(weights_TJ) + _LEAST_SUM
    if router.has_factors:
        weights_TJ *= params["router_factors"][ids_TJ]
    return Routes(weights_TJ * router.scale, ids_TJ, scores_TE)


def _softmax(logits_TE: jax.Array) -> jax.Array:
    top_T1 = jax.lax.stop_gradient(logits_TE.max(axis=1, keepdims=True))
    weights_TE = jnp.exp(logits_TE - top_T1)
    return weights_TE / row_sum(weights_TE)


def _one_by_one(logits_TE: jax.Array, top_k: int, jitter: float) -> tuple[jax.Array, jax.Array]:
    """Weights and ids of the experts of `Router.jitter`, [T, J] each."""
    weights, ids, left_TE = [], [], logits_TE
    for _ in range(top_k):
        best_T1 = left_TE.max(axis=1, keepdims=True)
        ids_T1 = left_TE.argmax(axis=1, keepdims=True).astype(jnp.int32)
        is_below_TE = (best_T1 - logits_TE) / jnp.maximum(jnp.abs(logits_TE), best_T1) > jitter
        near_TE = jnp.where(is_below_TE, -jnp.inf, left_TE)
        weights.append(jnp.take_along_axis(_softmax(near_TE), ids_T1, axis=1))
        ids.append(ids_T1)
        left_TE = jnp.put_along_axis(left_TE, ids_T1, -jnp.inf, axis=1, inplace=False)
    return jnp.concatenate(weights, axis=1), jnp.concatenate(ids, axis=1)


_SCORES = {
    "softmax": _softmax,
    "sigmoid": jax.nn.sigmoid,
    "sqrt_softplus": lambda logits_TE: jnp.sqrt(jax.nn.softplus(logits_TE)),
}


def _of_best_groups(router: Router, choice_TE: jax.Array) -> jax.Array:
    """-inf for experts of other groups."""
    grouped_TXE = choice_TE.reshape(len(choice_TE), router.num_groups, -1)
    best_TXJ, _ = jax.lax.top_k(grouped_TXE, router.group_best)
    _, groups_TJ = jax.lax.top_k(best_TXJ.sum(2), router.top_groups)
    is_best_TX = (groups_TJ[:, :, None] == jnp.arange(router.num_groups)).any(1)
    return jnp.where(is_best_TX[:, :, None], grouped_TXE, -jnp.inf).reshape(choice_TE.shape)
