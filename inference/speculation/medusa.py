"""Medusa: heads on the target's last hidden state, the n-th of which proposes the n-th draft (Cai
et al. 2024, arXiv 2401.10774).
"""

import jax
import jax.numpy as jnp
import numpy as np

from configs import heads
from configs.settings.drafts import DraftConfig
from inference.speculation import draft_tree, drafting
from inference.speculation.draft_tree import DraftTree
from inference.speculation.proposer import DraftInputs, Drafts, HiddenStates, SampledStep
from layers.kv_cache import Cache
from layers.linear import linear
from layers.params import Params
from layers.ragged import Rectangle
from layers.weights import Weight


class MedusaProposer(HiddenStates):
    """Drafts with heads."""

    features: tuple[int, ...] = ()

    def __init__(self, draft: heads.Medusa, drafts: DraftConfig, max_seqs: int):
        super().__init__(max_seqs, draft.width)
        self._heads, self._drafts = draft, drafts

    def propose(
        self, params: Params, cache: Cache, state: jax.Array, inputs: DraftInputs
    ) -> tuple[Cache, Drafts | None]:
        if (decode := inputs.decode) is None:
            return cache, None
        hidden_RD, width = state[decode.slot_Y], decode.position_YW.shape[1]
        if tree := draft_tree.of(self._drafts, width):
            return cache, self._tree(params, inputs, tree, decode, hidden_RD)
        drawn = [
            drafting.draw(
                self._logits(params, nth, hidden_RD), inputs, decode.position_YW[:, nth] + 1
            )
            for nth in range(width - 1)
        ]
        tokens_Rk = jnp.stack([token_R for token_R, _ in drawn], 1)
        distributions = [prob_RV for _, prob_RV in drawn if prob_RV is not None]
        return cache, Drafts(tokens_Rk, jnp.stack(distributions, 1) if distributions else None)

    def _tree(
        self,
        params: Params,
        inputs: DraftInputs,
        tree: DraftTree,
        decode: Rectangle,
        hidden_RD: jax.Array,
    ) -> Drafts:
        """Each depth's head says the same behind all nodes."""
        token_Rk = jnp.zeros((len(hidden_RD), tree.num_nodes - 1), jnp.int32)
        for depth in range(1, 1 + tree.levels):
            logits_RV = self._logits(params, depth - 1, hidden_RD)
            position_R = decode.position_YW[:, 0] + depth
            best_Rn, _ = drafting.ranked(logits_RV, inputs, position_R, tree.num_ranks(depth))
            drafts = np.array(tree.level(depth)) - 1
            token_Rk = token_Rk.at[:, drafts].set(best_Rn[:, np.array(tree.rank)[drafts]])
        return tree.drafts(token_Rk)

    def _logits(self, params: Params, nth: int, hidden_RD: jax.Array) -> jax.Array:
        """Of the n-th head, from 0 on: f32[R, V]."""
        weights = params["draft"]
        return drafting.logits(weights, self._heads, block(weights["blocks"][nth], hidden_RD))

    def observe(
        self, params: Params, cache: Cache, state: jax.Array, step: SampledStep
    ) -> tuple[Cache, jax.Array]:
        return cache, self.advanced(state, step, step.hidden_TD)


def block(weight_DD: Weight, hidden_TD: jax.Array) -> jax.Array:
    """What a head reads its draft from: f32[T, D]."""
    return hidden_TD + jax.nn.silu(linear(hidden_TD, weight_DD))
