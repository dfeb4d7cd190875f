"""Acceptance by rejection: exactly the target's distribution, and no rule accepts more drafts.

A draft d, drawn from p, is accepted with probability min(1, q(d) / p(d)), where q is the target's
distribution. A draw from (q - p)+, normalized, replaces the first rejected draft (Leviathan et al.
2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318). Both distributions are those after
every filter (`sampler.distribution`). At temperature 0 drafts must equal the argmax.

The tokens differ from plain decoding's, their distribution does not; coupled acceptance gives equal
tokens. Noise is a function of the request's seed, the position and its purpose: proposers draw
with `Purpose.DRAFT` and nothing else.
"""

import jax
import jax.numpy as jnp

from inference.sampling import gumbel, sampler
from inference.sampling.gumbel import Purpose
from sharding import collectives


def verify(
    prob_RWV: jax.Array,
    seed_R2: jax.Array,
    position_R: jax.Array,
    draft_Rk: jax.Array,
    num_drafts_R: jax.Array,
    draft_prob_RkV: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Accepts a prefix of each row's drafts and draws the token after it.

    Args:
        prob_RWV: f32[R, 1 + k, V], the target's distribution at each position, given the drafts
            before it; on a mesh the chip's part of the vocabulary, here and below.
        seed_R2: u32[R, 2], the requests' seeds.
        position_R: i32[R], absolute position of the first token sampled.
        draft_Rk: i32[R, k].
        num_drafts_R: i32[R], 0 .. k; those after are padding. What a draft was drawn as may decide
            whether others follow, not whether it counts itself: unlikely drafts that are dropped
            make their tokens rare.
        draft_prob_RkV: f32[R, k, V], the distribution of each draft, given the tokens before it;
            None where those alone decide on it, as with n-grams.

    Returns:
        tokens i32[R, 1 + k], and i32[R], how many of them count: 1 .. 1 + k.
    """
    rows, width, vocab = prob_RWV.shape
    k = width - 1
    flat_prob = prob_RWV[:, :k].reshape(rows * k, vocab)
    target_Rk = sampler.at(flat_prob, draft_Rk.ravel()).reshape(rows, k)
    if draft_prob_RkV is None:
        drafted_Rk = jnp.ones_like(target_Rk)
    else:
        flat_draft_prob = draft_prob_RkV.reshape(rows * k, vocab)
        drafted_Rk = sampler.at(flat_draft_prob, draft_Rk.ravel()).reshape(rows, k)
    position_Rk = position_R[:, None] + jnp.arange(k)
    seed_Q2 = jnp.repeat(seed_R2, k, axis=0)
    keys_Q2 = gumbel.row_keys(seed_Q2, position_Rk.ravel(), Purpose.ACCEPT)
    u_Rk = gumbel.uniform(keys_Q2, jnp.zeros((1, 1), jnp.int32)).reshape(rows, k)
    is_accepted_Rk = (drafted_Rk > 0) & (u_Rk * drafted_Rk < target_Rk)  # a proposer's NaN is none
    is_accepted_Rk &= jnp.arange(k) < num_drafts_R[:, None]
    num_accepted_R = jnp.cumprod(is_accepted_Rk.astype(jnp.int32), axis=1).sum(1)

    weight_RV = _row(prob_RWV, num_accepted_R)
    if k:
        last_R = jnp.minimum(num_accepted_R, k - 1)
        if draft_prob_RkV is None:
            drafted_RV = (sampler.ids_of(weight_RV) == _row(draft_Rk, last_R)[:, None]) * 1.0
        else:
            drafted_RV = _row(draft_prob_RkV, last_R)
        residual_RV = residual(weight_RV, drafted_RV)
        is_rejected_R = num_accepted_R < num_drafts_R
        weight_RV = jnp.where(is_rejected_R[:, None], residual_RV, weight_RV)
    keys_R2 = gumbel.row_keys(seed_R2, position_R + num_accepted_R, Purpose.RESIDUAL)
    token_R1 = sampler.draw(weight_RV, keys_R2)[:, None]
    tokens_RW = jnp.pad(draft_Rk, ((0, 0), (0, 1)))
    tokens_RW = jnp.where(jnp.arange(width) < num_accepted_R[:, None], tokens_RW, token_R1)
    return tokens_RW, num_accepted_R + 1


def residual(prob_RV: jax.Array, draft_prob_RV: jax.Array) -> jax.Array:
    """(q - p)+, not normalized: the target's distribution once a draft is rejected."""
    residual_RV = jnp.maximum(prob_RV - draft_prob_RV, 0)
    # Rounding may reject a draft though p equals q; and a proposer's p may be NaN.
    is_some_R1 = collectives.maximum(residual_RV.max(axis=-1, keepdims=True)) > 0
    return jnp.where(is_some_R1, residual_RV, prob_RV)


def _row(x_RW: jax.Array, index_R: jax.Array) -> jax.Array:
    """One entry of the second axis a row: [R, W, ...] -> [R, ...]."""
    index = index_R.reshape(-1, *[1] * (x_RW.ndim - 1))
    return jnp.take_along_axis(x_RW, index, axis=1)[:, 0]
