"""Verification of a tree of drafts, all fed in one pass: the acceptance rules along its branches.

Node 0 is the sequence's newest token, each other node a draft that follows its parent. Nodes come
after their parents, and a node's children in the order in which they are tried. The walk begins at
the root and goes to an accepted child until there is none; there it ends with a token of the
target's own.

Coupled acceptance is exact for any tree. By rejection, what decides on a node's children may be
anything before the root and whatever follows from it, never noise: a tree pruned by what was drawn
below a node would no longer be exact, unless that is accounted for as by `draft_prob_RNV`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from inference.sampling import gumbel, sampler
from inference.sampling.gumbel import Purpose
from inference.speculation.acceptance.rejection import residual
from layers.reduce import row_sum
from sharding import collectives

_LIKELY, _LIKELY_SHARE = 0.09, 0.3


class Accepted(NamedTuple):
    """What a pass adds to each of R sequences; W is the most that it can."""

    # i32[R, W]: the nodes whose key-value entries stay, the root first; each token was drawn after
    # the node at its place. What follows num_emitted entries is -1, in tokens anything.
    path_RW: jax.Array
    tokens_RW: jax.Array  # i32[R, W]: the drafts of path[1:], and the token after the last of them
    num_emitted_R: jax.Array  # i32[R], 1 .. W


def coupled(
    sampled_RN: jax.Array, token_RN: jax.Array, parent_RN: jax.Array, width: int
) -> Accepted:
    """Goes on where a child equals what the target draws (Daliri et al. 2024, arXiv 2408.07978;
    trees: Miao et al. 2023, arXiv 2305.09781): the tokens are plain decoding's.

    Args:
        sampled_RN: i32[R, N], the target's own draw after each node, with plain decoding's noise of
            its position.
        token_RN: i32[R, N], the nodes' tokens.
        parent_RN: i32[R, N] or [N]; -1 for the root, and for nodes that are not used.
        width: W, static; at most N. Branches of W nodes and more are cut off there.
    """
    rows, nodes = token_RN.shape
    parent_RN = jnp.broadcast_to(parent_RN, (rows, nodes))

    path = [jnp.zeros((rows, 1), jnp.int32)]
    for _ in range(1, width):
        node_R1 = path[-1]
        drawn_R1 = jnp.take_along_axis(sampled_RN, jnp.maximum(node_R1, 0), axis=1)
        is_next_RN = (parent_RN == node_R1) & (token_RN == drawn_R1) & (node_R1 >= 0)
        next_R = jnp.where(is_next_RN.any(1), jnp.argmax(is_next_RN, axis=1), -1)
        path.append(next_R[:, None].astype(jnp.int32))
    path_RW = jnp.concatenate(path, axis=1)
    tokens_RW = jnp.take_along_axis(sampled_RN, jnp.maximum(path_RW, 0), axis=1)
    return Accepted(path_RW, tokens_RW, (path_RW >= 0).sum(1, dtype=jnp.int32))


def by_rejection(
    prob_RNV: jax.Array,
    seed_R2: jax.Array,
    position_R: jax.Array,
    token_RN: jax.Array,
    parent_RN: jax.Array,
    width: int,
    draft_prob_RNV: jax.Array | None = None,
) -> Accepted:
    """Tries a node's children one after the other by `rejection`'s rule; each
    rejection takes p out of the target's q: q becomes (q - p)+, normalized, and p loses the token
    (Miao et al. 2023, arXiv 2305.09781; without replacement: Jeon et al. 2024, arXiv 2402.14160).

    Args:
        prob_RNV: f32[R, N, V], the target's distribution after each node; on a mesh the chip's part
            of the vocabulary, here and below.
        seed_R2: u32[R, 2], the requests' seeds.
        position_R: i32[R], absolute position of the first token sampled.
        token_RN: i32[R, N], the nodes' tokens.
        parent_RN: i32[R, N] or [N]; -1 for the root, and for nodes that are not used.
        width: W, static; at most N. Branches of W nodes and more are cut off there.
        draft_prob_RNV: f32[R, N, V], from which each node's children were drawn one by one
            without replacement (the largest of log p + Gumbel noise: Kool et al. 2019, arXiv
            1903.06059); None where what came before decides on them, as with the likeliest tokens.
    """
    rows, nodes = token_RN.shape
    parent_RN = jnp.broadcast_to(parent_RN, (rows, nodes))
    children_RNV = prob_RNV if draft_prob_RNV is None else draft_prob_RNV

    def attempt(n: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Tries node n in the rows whose walk has come to its parent."""
        node_R, path_RW, prob_RV, untried_RV = carry
        is_token_RV = sampler.ids_of(prob_RV) == token_RN[:, n, None]
        if draft_prob_RNV is None:
            draft_prob_RV = is_token_RV.astype(jnp.float32)
        else:
            draft_prob_RV = _normalized(untried_RV)
        drafted_R = sampler.at(draft_prob_RV, token_RN[:, n])
        length_R = (path_RW >= 0).sum(1)
        is_tried_R = (parent_RN[:, n] == node_R) & (length_R < width) & (drafted_R > 0)
        keys_R2 = gumbel.row_keys(seed_R2, position_R + length_R - 1, Purpose.ACCEPT)
        u_R = gumbel.uniform(keys_R2, n[None, None])[:, 0]
        is_accepted_R = is_tried_R & (u_R * drafted_R < sampler.at(prob_RV, token_RN[:, n]))
        is_place_RW = is_accepted_R[:, None] & (jnp.arange(width) == length_R[:, None])

        def chosen(accepted: jax.Array, rejected: jax.Array, untried: jax.Array) -> jax.Array:
            tried = jnp.where(is_accepted_R[:, None], accepted, rejected)
            return jnp.where(is_tried_R[:, None], tried, untried)

        return (
            jnp.where(is_accepted_R, n, node_R),
            jnp.where(is_place_RW, n, path_RW),
            chosen(prob_RNV[:, n], _normalized(residual(prob_RV, draft_prob_RV)), prob_RV),
            chosen(children_RNV[:, n], jnp.where(is_token_RV, 0, untried_RV), untried_RV),
        )

    path_RW = jnp.full((rows, width), -1, jnp.int32).at[:, 0].set(0)
    start = jnp.zeros(rows, jnp.int32), path_RW, prob_RNV[:, 0], children_RNV[:, 0]
    _, path_RW, prob_RV, _ = lax.fori_loop(1, nodes, attempt, start)
    return _ended(path_RW, token_RN, prob_RV, seed_R2, position_R)


def typical(
    prob_RNV: jax.Array,
    seed_R2: jax.Array,
    position_R: jax.Array,
    token_RN: jax.Array,
    parent_RN: jax.Array,
    width: int,
) -> Accepted:
    """Goes on where the target finds a child likely enough, and takes the longest branch of such
    nodes, of equals the first: with q its distribution, q(d) > min(0.09, 0.3 exp(-H(q))) (Cai et
    al. 2024, arXiv 2401.10774, section 2.3). It is not the target's distribution, except
    at temperature 0. Arguments are those of `by_rejection`.
    """
    rows, nodes, _ = prob_RNV.shape
    nth_1N = jnp.arange(nodes)[None]
    parent_RN = jnp.broadcast_to(parent_RN, (rows, nodes))
    above_RN, row_R1 = jnp.maximum(parent_RN, 0), jnp.arange(rows)[:, None]
    flat_prob = prob_RNV[row_R1, above_RN].reshape(rows * nodes, -1)
    target_Q = sampler.at(flat_prob, token_RN.ravel())
    surprise = jnp.where(flat_prob > 0, -flat_prob * jnp.log(flat_prob), 0)
    entropy_Q = collectives.total(row_sum(surprise))[:, 0]
    is_likely_Q = target_Q > jnp.minimum(_LIKELY, _LIKELY_SHARE * jnp.exp(-entropy_Q))
    is_likely_RN = is_likely_Q.reshape(rows, nodes) & (parent_RN >= 0)
    depth_RN = jnp.where(nth_1N == 0, 0, -1) + jnp.zeros_like(parent_RN)
    for depth in range(1, width):
        is_here_RN = is_likely_RN & (depth_RN[row_R1, above_RN] == depth - 1)
        depth_RN = jnp.where(is_here_RN, depth, depth_RN)
    node_R1, path = jnp.argmax(depth_RN, axis=1)[:, None].astype(jnp.int32), []
    prob_RV = prob_RNV[row_R1[:, 0], node_R1[:, 0]]
    for depth in reversed(range(width)):
        is_on_R1 = depth_RN[row_R1, node_R1] == depth
        path.append(jnp.where(is_on_R1, node_R1, -1))
        node_R1 = jnp.where(is_on_R1, above_RN[row_R1, node_R1], node_R1)
    return _ended(jnp.concatenate(path[::-1], axis=1), token_RN, prob_RV, seed_R2, position_R)


def _ended(
    path_RW: jax.Array,
    token_RN: jax.Array,
    prob_RV: jax.Array,
    seed_R2: jax.Array,
    position_R: jax.Array,
) -> Accepted:
    """A path's drafts, and a token of the distribution after them."""
    num_emitted_R = (path_RW >= 0).sum(1, dtype=jnp.int32)
    keys_R2 = gumbel.row_keys(seed_R2, position_R + num_emitted_R - 1, Purpose.RESIDUAL)
    last_R1 = sampler.draw(prob_RV, keys_R2)[:, None]
    next_RW = jnp.pad(path_RW[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    drafts_RW = jnp.take_along_axis(token_RN, jnp.maximum(next_RW, 0), axis=1)
    return Accepted(path_RW, jnp.where(next_RW >= 0, drafts_RW, last_R1), num_emitted_R)


def _normalized(weight_RV: jax.Array) -> jax.Array:
    """The distribution of weights; zeros where all are."""
    total_R1 = collectives.total(row_sum(weight_RV))
    return weight_RV / jnp.where(total_R1 > 0, total_R1, 1)
