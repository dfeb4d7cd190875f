"""Drafts one after the other, each drawn in view of those before it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs.heads import Heads
from inference.sampling import gumbel, sampler
from inference.sampling.gumbel import Purpose
from inference.speculation.proposer import Asked, Drafts
from layers import topk
from layers.kernels.device import target_is_cpu
from layers.linear import linear
from layers.params import Params
from layers.ragged import Rectangle

# (what it keeps, i32[R] tokens, one column of the decode rectangle) -> (what it keeps, f32[R, V]).
Feed = Callable[[Any, jax.Array, Rectangle], tuple[Any, jax.Array]]


def one_by_one(
    feed: Feed, kept: Any, asked: Asked, decode: Rectangle, num_runs: int, vocab_size: int
) -> tuple[Any, Drafts]:
    """Feeds each row's newest token, then what is drawn.

    Args:
        feed: a run of the model that drafts; the logits are those of the token after.
        kept: what its first run takes.
        asked: the step.
        decode: its rows.
        num_runs: k, or more, to feed drafts without drawing after them.
        vocab_size: V.

    Returns:
        What the last run returned, and k drafts.
    """
    rows, width = decode.position_YW.shape
    has_law = asked.needs_law

    def run(nth: jax.Array | int, held: Any) -> Any:
        kept, token_R, draft_RW, law_RWV = held
        column = _column(decode, nth)
        kept, logits_RV = feed(kept, token_R, column)
        token_R, law_RV = draw(logits_RV, asked, column.position_YW[:, 0] + 1)
        if law_RV is not None:
            law_RWV = law_RWV.at[:, nth].set(law_RV)
        return kept, token_R, draft_RW.at[:, nth].set(token_R), law_RWV

    no_law = jnp.zeros((rows, num_runs, vocab_size * has_law), jnp.float32)
    held = kept, asked.token_R, jnp.zeros((rows, num_runs), jnp.int32), no_law
    if target_is_cpu():  # unrolled, XLA's CPU backend copies the pages once a token
        held = jax.lax.fori_loop(0, num_runs, run, held)
    else:
        for nth in range(num_runs):
            held = run(nth, held)
    kept, _, draft_RW, law_RWV = held
    num_drafts = width - 1
    law_RkV = law_RWV[:, :num_drafts] if has_law else None
    return kept, Drafts(draft_RW[:, :num_drafts], law_RkV)


def draw(
    logits_RV: jax.Array, asked: Asked, position_R: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """One draft a row, with the request's own filters: i32[R], and where it is needed the law that
    it was drawn from, f32[R, V]. Where acceptance is coupled, the noise is the request's too, so
    that drafts are right wherever both laws are close.
    """
    if asked.needs_law:
        law_RV = sampler.law(logits_RV, asked.sampling, position_R, asked.counts)
        keys_R2 = gumbel.row_keys(asked.sampling.seed, position_R, Purpose.DRAFT)
        return sampler.draw(law_RV, keys_R2), law_RV
    summary = topk.summarize(logits_RV)
    if asked.greedy or asked.acceptance == "typical":
        return summary.best_Q, None
    return sampler.sample(logits_RV, summary, asked.sampling, position_R, asked.counts), None


def ranked(
    logits_RV: jax.Array, asked: Asked, position_R: jax.Array, n: int
) -> tuple[jax.Array, jax.Array]:
    """The n drafts that `draw` would find one after the other, each without those before it:
    i32[R, n], -1 where there are fewer, and the logs of their shares, f32[R, n]. Where acceptance
    is not coupled, the likeliest.
    """
    if asked.greedy:
        summary = topk.summarize(logits_RV)
        values_Rn, ids_Rn = topk.top_n(logits_RV, summary.maxima_QG, n)
        is_some_Rn = values_Rn > -jnp.inf
        share_Rn = values_Rn - summary.total_Q[:, None]
        return jnp.where(is_some_Rn, ids_Rn, -1), jnp.where(is_some_Rn, share_Rn, -jnp.inf)
    return sampler.best(
        logits_RV,
        asked.sampling,
        position_R,
        asked.counts,
        n,
        is_drawn=asked.acceptance == "coupled",
    )


def _column(rectangle: Rectangle, nth: jax.Array | int) -> Rectangle:
    """One token of each row."""
    position_Y1, valid_Y1 = (
        jax.lax.dynamic_slice_in_dim(x_YW, nth, 1, axis=1)
        for x_YW in (rectangle.position_YW, rectangle.valid_YW)
    )
    return Rectangle(rectangle.slot_Y, position_Y1, valid_Y1, rectangle.tables)


def logits(weights: Params, config: Heads, hidden_QD: jax.Array) -> jax.Array:
    """Of heads, over the whole vocabulary, f32[Q, V]: -inf where a token is never proposed."""
    own_QX = linear(hidden_QD, weights["head"]["table"])
    if not config.proposed_ids:
        return own_QX
    nothing_QV = jnp.full((hidden_QD.shape[0], config.vocab_size), -jnp.inf)
    return nothing_QV.at[:, np.array(config.proposed_ids)].set(own_QX)
