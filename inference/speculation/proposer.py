"""What proposes drafts, on the device and inside of the step that verifies them.

A proposer sees a step twice. Before the model runs it proposes tokens for the decode rows; after
the samples are known it takes them into its state, which lives in the slots. The host reads nothing
of either, so drafting does not end the overlap of host and device.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from inference.sampling.parameters import SlotSampling
from layers.kv_cache import Cache
from layers.params import Params
from layers.ragged import Ragged, Rectangle


@dataclasses.dataclass(frozen=True)
class Asked:
    """A step before its model runs."""

    decode: Rectangle | None  # [R, 1 + k], valid where a draft may be verified; None: no such rows
    token_R: jax.Array  # i32[R], the newest token, which stands first in each row
    sampling: SlotSampling  # [R, ...]
    counts: jax.Array | None  # u16[R, 2, V], the newest token and drafts not among them
    prompts: Rectangle | None  # chunks of prompts; None: there are none
    prompt_YW: jax.Array  # i32[Y, W], their tokens
    greedy: bool  # all rows are
    needs_law: bool  # by rejection, drafts are accepted in view of the law they were drawn from


@dataclasses.dataclass(frozen=True)
class Drafts:
    """What was proposed for the decode rows."""

    tokens_Rk: jax.Array  # i32[R, k], -1 where there are none; k may be 0
    law_RkV: jax.Array | None = None  # f32[R, k, V]; None: what came before alone decided on them


@dataclasses.dataclass(frozen=True)
class Fed:
    """A step after its tokens are sampled; rows are those of both rectangles."""

    ragged: Ragged
    tokens_T: jax.Array  # i32[T], those that were fed
    hidden_TD: jax.Array  # f32[T, D], the model's normalized last hidden states
    features: tuple[jax.Array, ...]  # f32[T, D] each, as `Proposer.features` asks for
    num_kept_Y: jax.Array  # i32[Y], how many of a row's fed tokens stay, the first ones
    slot_Y: jax.Array  # i32[Y]
    newest_Y: jax.Array  # i32[Y], position of the newest token
    sampled_YW: jax.Array  # i32[Y, 1 + k]
    num_emitted_Y: jax.Array  # i32[Y], how many of these count


class Proposer(Protocol):
    """One way to propose; without state of its own, so that it may be made anew in each step."""

    @property
    def features(self) -> tuple[int, ...]:
        """Numbers of the model's layers whose outputs it reads, from 1 on."""

    def init(self) -> Any:
        """The state of empty slots: numpy arrays [B+1, ...]."""

    def admit(self, state: Any, slot_A: jax.Array, history_AS: jax.Array) -> Any:
        """State after sequences were given slots; `history_AS` holds their tokens by position."""

    def propose(
        self, params: Params, cache: Cache, state: Any, asked: Asked
    ) -> tuple[Cache, Drafts]:
        """The cache with what the proposer keeps there, and its drafts."""

    def observe(self, params: Params, cache: Cache, state: Any, fed: Fed) -> tuple[Cache, Any]:
        """Cache and state after a step."""


def last_of_rows(parts: Sequence[jax.Array], num_kept_Y: jax.Array) -> jax.Array:
    """Of each row the last token that stays: one [Y, W, D] a rectangle -> [Y, D]."""
    found, first = [], 0
    for x_YWD in parts:
        own_Y = num_kept_Y[first : first + len(x_YWD)]
        index_Y11 = jnp.maximum(own_Y - 1, 0)[:, None, None]
        found.append(jnp.take_along_axis(x_YWD, index_Y11, axis=1)[:, 0])
        first += len(x_YWD)
    return jnp.concatenate(found)
