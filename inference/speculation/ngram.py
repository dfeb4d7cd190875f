"""Prompt lookup: the newest tokens have occurred before, and what followed them then is proposed.

Saxena 2023 (github.com/apoorvumang/prompt-lookup-decoding), n-grams of prompt and output.
"""

import jax
import jax.numpy as jnp
import numpy as np

from inference.speculation.proposer import DraftInputs, Drafts, SampledStep
from layers.kv_cache import Cache
from layers.params import Params

_LONGEST = 4  # tokens of the suffix that are compared
_SHORTEST = 2  # fewer are an accident too often


class NGramProposer:
    """Its state is each slot's tokens by position, i32[B+1, S]."""

    features: tuple[int, ...] = ()

    def __init__(self, max_seqs: int, max_context: int):
        self._shape = max_seqs + 1, max_context

    def init(self) -> np.ndarray:
        return np.zeros(self._shape, np.int32)

    def admit(
        self, state: jax.Array, slot_A: jax.Array, source_A: jax.Array, history_AS: jax.Array
    ) -> jax.Array:
        return state.at[slot_A].set(history_AS)

    def propose(
        self, params: Params, cache: Cache, state: jax.Array, inputs: DraftInputs
    ) -> tuple[Cache, Drafts | None]:
        if inputs.decode is None:
            return cache, None
        newest_R = inputs.decode.position_YW[:, 0]
        num_drafts = inputs.decode.position_YW.shape[1] - 1
        return cache, Drafts(continuation(state[inputs.decode.slot_Y], newest_R, num_drafts))

    def observe(
        self, params: Params, cache: Cache, state: jax.Array, step: SampledStep
    ) -> tuple[Cache, jax.Array]:
        nth_W, num_emitted_Y1 = jnp.arange(step.sampled_YW.shape[1]), step.num_emitted_Y[:, None]
        position_YW = step.newest_Y[:, None] + 1 - num_emitted_Y1 + nth_W
        nowhere = state.shape[1]
        position_YW = jnp.where(nth_W < num_emitted_Y1, position_YW, nowhere)
        return cache, state.at[step.slot_Y[:, None], position_YW].set(step.sampled_YW, mode="drop")


def continuation(history_YS: jax.Array, newest_Y: jax.Array, num_drafts: int) -> jax.Array:
    """What followed the latest of the longest earlier occurrences of each row's newest tokens.

    Args:
        history_YS: i32[Y, S], tokens by position.
        newest_Y: i32[Y], position of the newest.
        num_drafts: k.

    Returns:
        i32[Y, k]; -1 where nothing is proposed. Text that repeats itself does so in the drafts.
    """
    length = history_YS.shape[1]
    position_S, newest_Y1 = jnp.arange(length), newest_Y[:, None]
    is_match_YS = position_S < newest_Y1
    num_equal_YS = jnp.zeros_like(history_YS)
    for back in range(_LONGEST):
        suffix_Y1 = jnp.take_along_axis(history_YS, jnp.maximum(newest_Y1 - back, 0), axis=1)
        before_YS = jnp.pad(history_YS, ((0, 0), (back, 0)), constant_values=-1)[:, :length]
        is_match_YS &= before_YS == suffix_Y1
        num_equal_YS += is_match_YS
    score_YS = jnp.where(num_equal_YS >= _SHORTEST, num_equal_YS * length + position_S, -1)
    end_Y1 = jnp.argmax(score_YS, axis=1)[:, None]
    ahead_Yk = jnp.arange(num_drafts) % jnp.maximum(newest_Y1 - end_Y1, 1)
    draft_Yk = jnp.take_along_axis(history_YS, end_Y1 + 1 + ahead_Yk, axis=1)
    is_found_Y1 = jnp.take_along_axis(score_YS, end_Y1, axis=1) >= 0
    return jnp.where(is_found_Y1, draft_Yk, -1)
