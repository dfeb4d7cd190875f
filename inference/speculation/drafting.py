"""Drafts one after the other, each drawn in view of those before it."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from configs.heads import Heads
from inference.sampling import gumbel, sampler
from inference.sampling.gumbel import Purpose
from inference.speculation.proposer import DraftInputs, Drafts
from layers import topk
from layers.backends import backends
from layers.linear import linear
from layers.params import Params
from layers.ragged import Rectangle

C = TypeVar("C")
# (what it keeps, i32[R] tokens, one column of the decode rectangle) -> (what it keeps, f32[R, V]).
Feed = Callable[[C, jax.Array, Rectangle], tuple[C, jax.Array]]


def one_by_one(
    feed: Feed[C], carry: C, inputs: DraftInputs, decode: Rectangle, num_runs: int, vocab_size: int
) -> tuple[C, Drafts]:
    """Feeds each row's newest token, then what is drawn.

    Args:
        feed: a run of the model that drafts; the logits are those of the token after.
        carry: what its first run takes.
        num_runs: k, or more, to feed drafts without drawing after them.

    Returns:
        What the last run returned, and k drafts.
    """
    rows, width = decode.position_YW.shape
    has_probs = inputs.needs_distribution

    def run(
        nth: jax.Array | int, state: tuple[C, jax.Array, jax.Array, jax.Array]
    ) -> tuple[C, jax.Array, jax.Array, jax.Array]:
        carry, token_R, draft_RW, prob_RWV = state
        column = _column(decode, nth)
        carry, logits_RV = feed(carry, token_R, column)
        token_R, prob_RV = draw(logits_RV, inputs, column.position_YW[:, 0] + 1)
        if prob_RV is not None:
            prob_RWV = prob_RWV.at[:, nth].set(prob_RV)
        return carry, token_R, draft_RW.at[:, nth].set(token_R), prob_RWV

    no_probs = jnp.zeros((rows, num_runs, vocab_size * has_probs), jnp.float32)
    state = carry, inputs.token_R, jnp.zeros((rows, num_runs), jnp.int32), no_probs
    carry, _, draft_RW, prob_RWV = backends.current().repeated(num_runs, run, state)
    num_drafts = width - 1
    prob_RkV = prob_RWV[:, :num_drafts] if has_probs else None
    return carry, Drafts(draft_RW[:, :num_drafts], prob_RkV)


def draw(
    logits_RV: jax.Array, inputs: DraftInputs, position_R: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """Draws one draft a row with the request's own filters.

    Returns:
        i32[R], and f32[R, V], the distribution of the drafts, where acceptance needs it. Coupled
        acceptance shares the request's noise, so drafts are right where both distributions are
        close.
    """
    if inputs.needs_distribution:
        prob_RV = sampler.distribution(logits_RV, inputs.sampling, position_R, inputs.counts)
        keys_R2 = gumbel.row_keys(inputs.sampling.seed, position_R, Purpose.DRAFT)
        return sampler.draw(prob_RV, keys_R2), prob_RV
    summary = topk.summarize(logits_RV)
    if inputs.greedy or inputs.acceptance == "typical":
        return summary.best_Q, None
    return sampler.sample(logits_RV, summary, inputs.sampling, position_R, inputs.counts), None


def ranked(
    logits_RV: jax.Array, inputs: DraftInputs, position_R: jax.Array, n: int
) -> tuple[jax.Array, jax.Array]:
    """The n drafts that `draw` would find one after the other, each without those before it:
    i32[R, n], -1 where there are fewer, and the logs of their shares, f32[R, n]. Where acceptance
    is not coupled, the likeliest.
    """
    if inputs.greedy:
        summary = topk.summarize(logits_RV)
        values_Rn, ids_Rn = topk.top_n(logits_RV, summary.maxima_QG, n)
        is_some_Rn = values_Rn > -jnp.inf
        share_Rn = values_Rn - summary.total_Q[:, None]
        return jnp.where(is_some_Rn, ids_Rn, -1), jnp.where(is_some_Rn, share_Rn, -jnp.inf)
    is_drawn = inputs.acceptance == "coupled"
    return sampler.best(logits_RV, inputs.sampling, position_R, inputs.counts, n, is_drawn)


def _column(rectangle: Rectangle, nth: jax.Array | int) -> Rectangle:
    position_Y1, valid_Y1 = (
        jax.lax.dynamic_slice_in_dim(x_YW, nth, 1, axis=1)
        for x_YW in (rectangle.position_YW, rectangle.valid_YW)
    )
    return Rectangle(rectangle.slot_Y, position_Y1, valid_Y1, rectangle.tables)


def logits(weights: Params, config: Heads, hidden_QD: jax.Array) -> jax.Array:
    """Of heads, over the whole vocabulary, f32[Q, V]: -inf where a token is never proposed."""
    logits_QX = linear(hidden_QD, weights["head"]["table"])
    if not config.proposed_ids:
        return logits_QX
    nothing_QV = jnp.full((hidden_QD.shape[0], config.vocab_size), -jnp.inf)
    return nothing_QV.at[:, np.array(config.proposed_ids)].set(logits_QX)
