"""EAGLE: a layer goes on from the target's hidden states, a token at a time (Li et al. 2024, arXiv
2401.15077; fused features: Li et al. 2025, arXiv 2503.01840).

Its entry for a token reads the token and the state of the one before it. Once the target has seen a
step's tokens, their entries are written with its states, over those of drafts. A sequence that
starts behind cached pages lacks one state, and reads zeros: its first drafts may be worse for it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs import heads
from configs.engine import Config
from inference.speculation import drafting
from inference.speculation.draft_tree import DraftTree
from inference.speculation.own_pages import OwnPages
from inference.speculation.proposer import Asked, Drafts, Fed, HiddenStates
from layers import decoder, norm
from layers.kv_cache import Cache
from layers.linear import linear
from layers.params import Params
from layers.ragged import Ragged, Rectangle


class Eagle(HiddenStates):
    """A `Proposer` that keeps, of each slot, the state before its newest token, f32[B+1, D]."""

    def __init__(self, config: Config, attention: str):
        """`attention`: the implementation that the cache is laid out for."""
        assert isinstance(config.draft, heads.Eagle)
        super().__init__(config.engine.max_seqs, config.draft.width)
        self._config, self._heads, self._attention = config, config.draft, attention
        self._pages = OwnPages(config)
        self.features = self._heads.features

    def propose(
        self, params: Params, cache: Cache, state: Any, asked: Asked
    ) -> tuple[Cache, Drafts]:
        """As `Proposer` says."""
        decode = asked.decode
        if decode is None or (width := decode.position_YW.shape[1]) == 1:
            return cache, Drafts(jnp.zeros((0, 0), jnp.int32))
        weights = params["draft"]

        def feed(kept: Any, token_R: jax.Array, column: Rectangle) -> Any:
            own, state_RD = kept
            ragged = self._pages.seen(Ragged((column,)))
            hidden_RD, own = self._layers(params, own, token_R, state_RD, ragged)
            return (own, hidden_RD), drafting.logits(weights, self._heads, hidden_RD)

        if asked.tree:
            return self._tree(params, cache, state, asked, asked.tree)
        kept = self._pages.of(cache), state[decode.slot_Y]
        (own, _), drafts = drafting.one_by_one(
            feed, kept, asked, decode, width - 1, self._heads.vocab_size
        )
        return self._pages.put(cache, own), drafts

    def _tree(
        self, params: Params, cache: Cache, state: Any, asked: Asked, tree: DraftTree
    ) -> tuple[Cache, Drafts]:
        """Level by level, each fed with those above it, whose entries are written anew."""
        weights, own, decode = params["draft"], self._pages.of(cache), asked.decode
        assert decode is not None
        parent, rank = np.array((0, *tree.parents)), np.array((0, *tree.rank))
        rows, nodes = decode.position_YW.shape
        token_RN = jnp.zeros((rows, nodes), jnp.int32).at[:, 0].set(asked.token_R)
        state_RND = state[decode.slot_Y][:, None]  # before each node
        for depth in range(1, tree.height):
            above, below = np.array(tree.level(depth - 1)), np.array(tree.level(depth))
            fed = slice(0, 1 + int(above[-1]))
            seen = self._pages.seen(Ragged((decode.first(fed.stop),)))
            token_T = jnp.maximum(token_RN[:, fed], 0).ravel()
            state_TD = state_RND.reshape(-1, state_RND.shape[-1])
            hidden_TD, own = self._layers(params, own, token_T, state_TD, seen)
            hidden_RND = hidden_TD.reshape(rows, fed.stop, -1)
            logits_QV = drafting.logits(
                weights, self._heads, hidden_RND[:, above].reshape(-1, hidden_TD.shape[-1])
            )
            each = jax.tree.map(
                lambda x: None if x is None else jnp.repeat(x, len(above), axis=0),  # noqa: B023
                (asked.sampling, asked.counts),
            )
            position_Q = decode.position_YW[:, above].ravel() + 1
            best_Qn = drafting.ranked(
                logits_QV, dataclasses.replace(asked, sampling=each[0], counts=each[1]),
                position_Q, tree.num_ranks(depth),
            )  # fmt: skip
            best_RPn = best_Qn.reshape(rows, len(above), -1)
            place = np.searchsorted(above, parent[below])
            token_RN = token_RN.at[:, below].set(best_RPn[:, place, rank[below]])
            state_RND = jnp.concatenate([state_RND, hidden_RND[:, parent[below]]], axis=1)
        return self._pages.put(cache, own), Drafts(token_RN[:, 1:])

    def observe(self, params: Params, cache: Cache, state: Any, fed: Fed) -> tuple[Cache, Any]:
        """As `Proposer` says. Of the last layer only what is cached is needed."""
        state_TD = fused(params["draft"], fed.hidden_TD, fed.features)
        _, own = self._layers(
            params, self._pages.of(cache), fed.tokens_T, self.before(state, fed, state_TD),
            self._pages.seen(fed.ragged),
        )  # fmt: skip
        return self._pages.put(cache, own), self.advanced(state, fed, state_TD)

    def _layers(
        self, params: Params, own: Cache, tokens_T: jax.Array, state_TD: jax.Array, ragged: Ragged
    ) -> tuple[jax.Array, Cache]:
        embedded_TD = decoder.embedded(params, self._config.chip_model, tokens_T, ragged)
        x_TD = inputs(params["draft"], self._heads, embedded_TD, state_TD)
        hidden_TD, _, own = decoder.layers(
            params["draft"], self._heads, x_TD, ragged, own, attention=self._attention
        )
        return hidden_TD, own


def fused(weights: Params, hidden_TD: jax.Array, features: tuple[jax.Array, ...]) -> jax.Array:
    """The target's states as the head reads them: f32[T, D]."""
    return linear(jnp.concatenate(features, -1), weights["fuse"]) if features else hidden_TD


def inputs(
    weights: Params, config: heads.Eagle, embedded_TD: jax.Array, state_TD: jax.Array
) -> jax.Array:
    """What the first layer reads of each token and of the state before it: f32[T, D]."""
    both = (
        norm.apply(embedded_TD, weights["token_norm"], config),
        norm.apply(state_TD, weights["state_norm"], config),
    )
    return linear(jnp.concatenate(both, -1), weights["input"])
