"""Drafts from a suffix tree of all that an engine has read and written: agents repeat each other.

Oliaro et al. 2024 (arXiv 2411.04975). The tree is bounded in depth and size, and lies in one table:
a node is a hashed suffix of a few depths, which names the token that follows it most often.
"""

import jax
import jax.numpy as jnp
import numpy as np

from inference.speculation.ngram import NGramProposer
from inference.speculation.proposer import DraftInputs, Drafts, SampledStep
from layers.backends import backends
from layers.kv_cache import Cache
from layers.params import Params

_DEPTHS = np.array((2, 3, 4, 6, 8, 12, 16, 24))  # suffixes of so many tokens have nodes
_NODES = 1 << 20  # of 12 bytes, a power of two
_MOST_VOTES = 4  # few, so that new text soon outvotes old
_FACTOR, _SPREAD = np.uint32(0x01000193), np.uint32(0x9E3779B1)  # FNV's and Fibonacci's

_HASH, _TOKEN, _VOTES = range(3)


# i32[B+1, S], tokens by position; i32[N, 3], nodes of all slots: hash of a suffix, the token that
# follows, its votes.
SuffixState = tuple[jax.Array, jax.Array]


class SuffixProposer:
    """Drafts, one after another, the likeliest token behind the longest suffix that has a node."""

    features: tuple[int, ...] = ()

    def __init__(self, max_seqs: int, max_context: int, num_nodes: int = _NODES):
        self._text, self._num_nodes = NGramProposer(max_seqs, max_context), num_nodes

    def init(self) -> tuple[np.ndarray, np.ndarray]:
        return self._text.init(), np.zeros((self._num_nodes, 3), np.int32)

    def admit(
        self, state: SuffixState, slot_A: jax.Array, source_A: jax.Array, history_AS: jax.Array
    ) -> SuffixState:
        history, nodes = state
        return self._text.admit(history, slot_A, source_A, history_AS), nodes

    def propose(
        self, params: Params, cache: Cache, state: SuffixState, inputs: DraftInputs
    ) -> tuple[Cache, Drafts | None]:
        if inputs.decode is None:
            return cache, None
        history, nodes = state
        newest_R1 = inputs.decode.position_YW[:, :1]
        suffix_R1D = _suffixes(history, inputs.decode.slot_Y, newest_R1 + 1)
        num_drafts = inputs.decode.position_YW.shape[1] - 1
        return cache, Drafts(_walk(nodes, suffix_R1D[:, 0], num_drafts))

    def observe(
        self, params: Params, cache: Cache, state: SuffixState, step: SampledStep
    ) -> tuple[Cache, SuffixState]:
        """Each token that was fed and stays votes at the nodes of the suffixes before it."""
        (history, nodes), first = state, 0
        cache, history = self._text.observe(params, cache, history, step)
        tokens = step.ragged.split(step.tokens_T)
        for rectangle, token_YW in zip(step.ragged.rectangles, tokens, strict=True):
            num_rows, width = token_YW.shape
            num_kept_Y1 = step.num_kept_Y[first : first + num_rows, None]
            suffix_YWD = _suffixes(history, rectangle.slot_Y, rectangle.position_YW)
            is_vote_YW = rectangle.valid_YW & (jnp.arange(width) < num_kept_Y1)
            place_YWN, node_YWN3 = votes(nodes, suffix_YWD, token_YW, is_vote_YW)
            nodes = nodes.at[place_YWN].set(node_YWN3, mode="drop")
            first += num_rows
        return cache, (history, nodes)


def _suffixes(history: jax.Array, slot_Y: jax.Array, end_YW: jax.Array) -> jax.Array:
    """i32[Y, W, D], the deepest suffix before each position, its last token first; -1 before a
    text's first token.
    """
    position_YWD = end_YW[..., None] - 1 - np.arange(_DEPTHS[-1])
    token_YWD = history[slot_Y[:, None, None], jnp.maximum(position_YWD, 0)]
    return jnp.where(position_YWD >= 0, token_YWD, -1)


def _nodes_of(suffix_XD: jax.Array, num_nodes: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns place i32, hash i32, and whether there are as many tokens, at each of `_DEPTHS`."""
    hash_X, hashes = jnp.zeros(suffix_XD.shape[:-1], jnp.uint32), []
    for depth in range(_DEPTHS[-1]):
        hash_X = (hash_X ^ (suffix_XD[..., depth].astype(jnp.uint32) + 1)) * _FACTOR
        hash_X ^= hash_X >> 15
        if depth + 1 in _DEPTHS:
            hashes.append(hash_X ^ np.uint32(depth + 1))
    hash_XN = jnp.stack(hashes, axis=-1)
    place_XN = (hash_XN * _SPREAD) >> np.uint32(33 - num_nodes.bit_length())
    is_whole_XN = suffix_XD[..., _DEPTHS - 1] >= 0
    return place_XN.astype(jnp.int32), hash_XN.astype(jnp.int32), is_whole_XN


def _walk(nodes: jax.Array, suffix_RD: jax.Array, num_drafts: int) -> jax.Array:
    """i32[R, k], down the tree from each row's suffix; -1 from where no suffix has a node."""

    def draft(
        nth: jax.Array | int, state: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        suffix_RD, draft_Rk = state
        place_RN, hash_RN, is_whole_RN = _nodes_of(suffix_RD, nodes.shape[0])
        node_RN3 = nodes[place_RN]
        is_node_RN = is_whole_RN & (node_RN3[..., _HASH] == hash_RN) & (node_RN3[..., _VOTES] > 0)
        deepest_R = jnp.where(is_node_RN, np.arange(len(_DEPTHS)), -1).max(-1)
        token_RN = node_RN3[..., _TOKEN]
        token_R = jnp.take_along_axis(token_RN, jnp.maximum(deepest_R, 0)[:, None], axis=1)[:, 0]
        token_R = jnp.where(deepest_R >= 0, token_R, -1)
        suffix_RD = jnp.concatenate([token_R[:, None], suffix_RD[:, :-1]], axis=1)
        return suffix_RD, draft_Rk.at[:, nth].set(token_R)

    draft_Rk = jnp.full((suffix_RD.shape[0], num_drafts), -1, jnp.int32)
    return backends.current().repeated(num_drafts, draft, (suffix_RD, draft_Rk))[1]


def votes(
    nodes: jax.Array, suffix_YWD: jax.Array, token_YW: jax.Array, is_vote_YW: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Nodes after the votes of these tokens: one for the token that a node names, one against it
    from another, which takes its place when no vote is left (Boyer and Moore 1981). A node of
    another suffix at the same place goes.

    Returns:
        i32[Y, W, N], places, and i32[Y, W, N, 3], the nodes there. Of votes for one place the last
        counts; places of the others, and of what does not vote, are behind the table.
    """
    place_YWN, hash_YWN, is_whole_YWN = _nodes_of(suffix_YWD, nodes.shape[0])
    node_YWN3, token_YW1 = nodes[place_YWN], token_YW[..., None]
    votes_YWN = jnp.where(node_YWN3[..., _HASH] == hash_YWN, node_YWN3[..., _VOTES], 0)
    is_same_YWN = node_YWN3[..., _TOKEN] == token_YW1
    stays_YWN = is_same_YWN | (votes_YWN > 1)
    votes_YWN = jnp.where(stays_YWN, votes_YWN + jnp.where(is_same_YWN, 1, -1), 1)
    token_YWN = jnp.where(stays_YWN, node_YWN3[..., _TOKEN], token_YW1)
    voted_YWN3 = jnp.stack([hash_YWN, token_YWN, jnp.minimum(votes_YWN, _MOST_VOTES)], axis=-1)
    nowhere = nodes.shape[0]
    place_YWN = jnp.where(is_vote_YW[..., None] & is_whole_YWN, place_YWN, nowhere)
    return _distinct(place_YWN, nowhere), voted_YWN3


def _distinct(place_X: jax.Array, nowhere: int) -> jax.Array:
    """Places of which only the last of equal ones stays, the others are `nowhere`: accelerators
    scatter in no order.
    """
    nth_X = jnp.arange(place_X.size, dtype=jnp.int32).reshape(place_X.shape)
    last_P = jnp.full(nowhere + 1, -1, jnp.int32).at[place_X].max(nth_X)
    return jnp.where(last_P[place_X] == nth_X, place_X, nowhere)
