"""EAGLE: a layer goes on from the target's hidden states, a token at a time (Li et al. 2024, arXiv
2401.15077; fused features: Li et al. 2025, arXiv 2503.01840; the target's own layer for it:
DeepSeek-AI 2024, arXiv 2412.19437).

Its entry for a token reads the token and the state of the one before it. Once the target has seen a
step's tokens, their entries are written with its states, over those of drafts. A sequence that
starts behind cached pages lacks one state, and reads zeros, or with `omits_first` has no entry for
that token: its first drafts may be worse for it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from configs import heads
from configs.model import ModelConfig
from configs.settings.drafts import DraftConfig
from inference.speculation import draft_tree, drafting
from inference.speculation.draft_tree import DraftTree
from inference.speculation.own_pages import OwnPages
from inference.speculation.proposer import DraftInputs, Drafts, HiddenStates, SampledStep
from layers import decoder, norm
from layers.kv_cache import Cache
from layers.linear import linear
from layers.params import Params
from layers.ragged import Ragged, Rectangle


class EagleProposer(HiddenStates):
    """Drafts with layers that go on from the target's states."""

    def __init__(
        self,
        draft: heads.Eagle,
        target: ModelConfig,
        pages: OwnPages,
        drafts: DraftConfig,
        max_seqs: int,
        attention: str,
    ):
        """`target`: the model as one chip computes it; `attention`: the implementation that the
        cache is laid out for.
        """
        super().__init__(max_seqs, draft.width)
        self.heads, self._target, self.pages = draft, target, pages
        self._drafts, self._attention = drafts, attention
        self.features = draft.features_of(target)

    def propose(
        self, params: Params, cache: Cache, state: jax.Array, inputs: DraftInputs
    ) -> tuple[Cache, Drafts | None]:
        if (decode := inputs.decode) is None:
            return cache, None

        def feed(
            carry: tuple[Cache, jax.Array], token_R: jax.Array, column: Rectangle
        ) -> tuple[tuple[Cache, jax.Array], jax.Array]:
            draft_cache, state_RD = carry
            ragged = self.pages.view(Ragged((column,)))
            hidden_RD, draft_cache = self.layers(params, draft_cache, token_R, state_RD, ragged)
            return (draft_cache, hidden_RD), self.logits(params, hidden_RD)

        width = decode.position_YW.shape[1]
        if tree := draft_tree.of(self._drafts, width):
            return self._tree(params, cache, state, inputs, tree)
        if self._drafts.tree_levels:
            return self._sure_tree(params, cache, state, inputs, width - 1)
        carry = self.pages.of(cache), state[decode.slot_Y]
        (draft_cache, _), drafts = drafting.one_by_one(
            feed, carry, inputs, decode, width - 1, self.heads.vocab_size
        )
        return self.pages.put(cache, draft_cache), drafts

    def _tree(
        self, params: Params, cache: Cache, state: jax.Array, inputs: DraftInputs, tree: DraftTree
    ) -> tuple[Cache, Drafts]:
        """Level by level, each fed with those above it, whose entries are written anew."""
        growth = _Growth(self, params, cache, state, inputs)
        parent, rank = np.array((0, *tree.parents)), np.array((0, *tree.rank))
        levels: list[jax.Array] = []
        for depth in range(1, 1 + tree.levels):
            above, below = np.array(tree.level(depth - 1)), np.array(tree.level(depth))
            if levels:
                growth.feed(levels[-1], jnp.broadcast_to(parent[above], levels[-1].shape))
            best_RPn, _ = growth.next(len(above), tree.num_ranks(depth))
            levels.append(best_RPn[:, np.searchsorted(above, parent[below]), rank[below]])
        return self.pages.put(cache, growth.cache), tree.drafts(jnp.concatenate(levels, axis=1))

    def _sure_tree(
        self, params: Params, cache: Cache, state: jax.Array, inputs: DraftInputs, num_drafts: int
    ) -> tuple[Cache, Drafts]:
        """Of each level the surest nodes go on, and of all the surest are drafts (Li et al. 2024,
        arXiv 2406.16858): how sure a branch is, is the product of its shares. It falls along a
        branch, so that a node comes with those above it.
        """
        growth = _Growth(self, params, cache, state, inputs)
        levels, branches = self._drafts.tree_levels, self._drafts.tree_branches
        rows = inputs.token_R.shape[0]
        row_R1 = jnp.arange(rows)[:, None]
        token, sure, parent = [], [], []  # of all candidates, a level each; [R, M]
        last_R = jnp.zeros((rows, 1))  # how sure the newest nodes fed are, and which candidates
        nth_RP = jnp.full((rows, 1), -1, jnp.int32)
        for level in range(levels):
            best_RPn, share_RPn = growth.next(last_R.shape[1], branches)
            share_RPn = jnp.where(jnp.isnan(share_RPn), -jnp.inf, jnp.minimum(share_RPn, 0))
            token.append(best_RPn.reshape(rows, -1))
            sure.append((last_R[:, :, None] + share_RPn).reshape(rows, -1))
            parent.append(jnp.repeat(nth_RP, branches, axis=1))
            if level + 1 == levels:
                break
            first = sum(x.shape[1] for x in token[:-1])
            last_R, best_Rb = jax.lax.top_k(sure[-1], branches)
            fed = growth.num_fed - nth_RP.shape[1]  # the first of those that these follow
            growth.feed(token[-1][row_R1, best_Rb], fed + best_Rb // branches)
            nth_RP = first + best_Rb
        sure_RM, parent_RM = jnp.concatenate(sure, axis=1), jnp.concatenate(parent, axis=1)
        sure_Rk, nth_Rk = jax.lax.top_k(sure_RM, num_drafts)
        place_Rk = jnp.broadcast_to(1 + jnp.arange(num_drafts), nth_Rk.shape)
        place_RM = jnp.zeros_like(parent_RM).at[row_R1, nth_Rk].set(place_Rk)
        above_Rk = parent_RM[row_R1, nth_Rk]
        parent_Rk = jnp.where(above_Rk < 0, 0, place_RM[row_R1, jnp.maximum(above_Rk, 0)])
        token_Rk = jnp.concatenate(token, axis=1)[row_R1, nth_Rk]
        token_Rk = jnp.where(sure_Rk > -jnp.inf, token_Rk, -1)
        drafts = Drafts(token_Rk, parent_Rk=parent_Rk, levels=min(levels, num_drafts))
        return self.pages.put(cache, growth.cache), drafts

    def observe(
        self, params: Params, cache: Cache, state: jax.Array, step: SampledStep
    ) -> tuple[Cache, jax.Array]:
        """As `Proposer` says. Of the last layer only what is cached is needed."""
        state_TD = fused(params["draft"], self.heads, step.hidden_TD, step.features)
        _, draft_cache = self.layers(
            params, self.pages.of(cache), step.tokens_T, self.before(state, step, state_TD),
            self.pages.view(step.ragged),
        )  # fmt: skip
        return self.pages.put(cache, draft_cache), self.advanced(state, step, state_TD)

    def layers(
        self, params: Params, cache: Cache, tokens_T: jax.Array, state_TD: jax.Array, ragged: Ragged
    ) -> tuple[jax.Array, Cache]:
        """Its layers over tokens and the states before them: the states behind, f32[T, D], and its
        pages.
        """
        weights, config = params["draft"], self.heads
        source = params, self._target
        if config.omits_first:
            ragged, tokens_T, state_TD = _without_first(ragged, tokens_T, state_TD)
        if isinstance(config, heads.Eagle3):
            source = (weights, config) if config.has_embedding else source
        embedded_TD = decoder.embedded(*source, tokens_T, ragged)
        x_TD, mixed_TX = inputs(weights, config, embedded_TD, state_TD, ragged.position_T)
        output = decoder.layers(
            weights, config, x_TD, ragged, cache, mixed_TX=mixed_TX, attention=self._attention,
            features=(config.num_layers,),
        )  # fmt: skip
        return state_behind(config, output), output.cache

    def logits(self, params: Params, state_QD: jax.Array) -> jax.Array:
        """Of its own output table or the target's: f32[Q, V]."""
        weights, config = params["draft"], self.heads
        if config.shares_head:
            return decoder.logits(params, self._target, state_QD)
        if isinstance(config, heads.Eagle3) and not config.has_normed_state:
            state_QD = norm.apply(state_QD, weights["final_norm"], config)
        return drafting.logits(weights, config, state_QD)


class _Growth:
    """A tree of which more and more nodes are fed, always those above them once more, whose entries
    are written anew.

    Attributes:
        cache: the head's pages.
    """

    def __init__(
        self,
        eagle: EagleProposer,
        params: Params,
        cache: Cache,
        state: jax.Array,
        inputs: DraftInputs,
    ):
        assert inputs.decode is not None
        self._eagle, self._params, self._inputs, self._decode = eagle, params, inputs, inputs.decode
        self.cache = eagle.pages.of(cache)
        self._token_RN = inputs.token_R[:, None]
        self._state_RND = state[inputs.decode.slot_Y][:, None]
        self._parent_Rk = jnp.zeros((len(inputs.token_R), 0), jnp.int32)
        self._hidden_RND, self._depth = self._state_RND, 0

    @property
    def num_fed(self) -> int:
        """Nodes, the newest token among them."""
        return self._token_RN.shape[1]

    def next(self, num_last: int, n: int) -> tuple[jax.Array, jax.Array]:
        """Feeds all; of each of the last, the n best children: tokens i32[R, P, n], -1 where there
        are fewer, and the logs of their shares: -inf behind a node that its row has no place for.
        """
        eagle, inputs, (rows, nodes) = self._eagle, self._inputs, self._token_RN.shape
        branches = draft_tree.branching(self._decode.first(nodes), self._parent_Rk, self._depth)
        hidden_TD, self.cache = eagle.layers(
            self._params, self.cache, jnp.maximum(self._token_RN, 0).ravel(),
            self._state_RND.reshape(rows * nodes, -1), eagle.pages.view(Ragged((branches,))),
        )  # fmt: skip
        self._hidden_RND = hidden_TD.reshape(rows, nodes, -1)
        last_QD = self._hidden_RND[:, -num_last:].reshape(rows * num_last, -1)
        repeated = jax.tree.map(
            lambda x: jnp.repeat(x, num_last, axis=0), (inputs.sampling, inputs.counts)
        )
        self._depth += 1
        position_Q = jnp.repeat(self._decode.position_YW[:, 0] + self._depth, num_last)
        ranked = drafting.ranked(
            eagle.logits(self._params, last_QD),
            dataclasses.replace(inputs, sampling=repeated[0], counts=repeated[1]), position_Q, n,
        )  # fmt: skip
        best_RPn, share_RPn = (x.reshape(rows, num_last, n) for x in ranked)
        is_fed_RP = self._decode.valid_YW[:, nodes - num_last : nodes]
        return best_RPn, jnp.where(is_fed_RP[:, :, None], share_RPn, -jnp.inf)

    def feed(self, token_RP: jax.Array, parent_RP: jax.Array) -> None:
        """More nodes, each with the node that it follows."""
        state_RPD = jnp.take_along_axis(self._hidden_RND, parent_RP[:, :, None], axis=1)
        self._token_RN = jnp.concatenate([self._token_RN, token_RP], axis=1)
        self._state_RND = jnp.concatenate([self._state_RND, state_RPD], axis=1)
        self._parent_Rk = jnp.concatenate([self._parent_Rk, parent_RP.astype(jnp.int32)], axis=1)


def fused(
    weights: Params,
    config: heads.Eagle,
    hidden_TD: jax.Array,
    features: tuple[jax.Array, ...],
) -> jax.Array:
    """The target's states as the head reads them: f32[T, D]."""
    if not features:
        return hidden_TD
    kind = config.feature_norms if isinstance(config, heads.Eagle3) else None
    norms: tuple[jax.Array, ...] = weights["feature_norms"] if kind else ()
    if kind == "each":
        features = tuple(norm.apply(*pair, config) for pair in zip(features, norms, strict=True))
    state_TX = jnp.concatenate(features, -1)
    if kind == "all":
        state_TX = norm.apply(state_TX, norms[0], config)
    return linear(state_TX, weights["fuse"])


def inputs(
    weights: Params,
    config: heads.Eagle,
    embedded_TD: jax.Array,
    state_TD: jax.Array,
    position_T: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    """The residual stream of each token and of the state before it, f32[T, D], and what the first
    layer's mixer reads, f32[T, 2 D]; None: the normalized stream.
    """
    if config.skips_first:
        embedded_TD = jnp.where(position_T[:, None] > 0, embedded_TD, 0)
    token_TD = norm.apply(embedded_TD, weights["token_norm"], config)
    normed_TD = norm.apply(state_TD, weights["state_norm"], config)
    both_TX = jnp.concatenate([token_TD, normed_TD], -1)
    if isinstance(config, heads.Eagle3):
        return normed_TD if config.has_normed_stream else state_TD, both_TX
    return linear(both_TX, weights["input"]), None


def state_behind(config: heads.Eagle, output: decoder.LayersOutput) -> jax.Array:
    """What the next draft reads, f32[T, D]: the stream of published heads, else its norm."""
    is_stream = isinstance(config, heads.Eagle3) and not config.has_normed_state
    return output.streams[0] if is_stream else output.hidden_TD


def _without_first(
    ragged: Ragged, tokens_T: jax.Array, state_TD: jax.Array
) -> tuple[Ragged, jax.Array, jax.Array]:
    """The step without tokens before which no state is known: of each sequence the first, or the
    first behind cached pages, where other sequences may read. Each other token is one place
    earlier, as published heads are trained. Rows stay chains.
    """
    rectangles, tokens, states = [], [], []
    parts = zip(ragged.rectangles, ragged.split(tokens_T), ragged.split(state_TD), strict=True)
    for rectangle, token_YW, state_YWD in parts:
        width = token_YW.shape[1]
        is_first_Y1 = (state_YWD[:, :1] == 0).all(-1)
        column_YW = jnp.minimum(jnp.arange(width) + is_first_Y1, width - 1)
        along = functools.partial(jnp.take_along_axis, indices=column_YW, axis=1)
        is_there_YW = jnp.arange(width) < width - is_first_Y1
        rectangles.append(
            dataclasses.replace(
                rectangle,
                position_YW=jnp.maximum(along(rectangle.position_YW) - 1, 0),
                valid_YW=along(rectangle.valid_YW) & is_there_YW,
                is_chained=False,
            )
        )
        tokens.append(along(token_YW))
        states.append(jnp.take_along_axis(state_YWD, column_YW[:, :, None], axis=1))
    shifted = dataclasses.replace(ragged, rectangles=tuple(rectangles))
    return shifted, shifted.pack(tokens), shifted.pack(states)
