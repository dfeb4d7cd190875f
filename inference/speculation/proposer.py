"""What proposes drafts, on the device and inside of the step that verifies them.

A proposer sees a step twice. Before the model runs it proposes tokens for the decode rows; after
the samples are known it takes them into its state, which lives in the slots. The host reads nothing
of either, so drafting does not end the overlap of host and device.
"""

import dataclasses
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from inference.sampling.parameters import SlotSampling
from layers.kv_cache import Cache
from layers.params import Params
from layers.ragged import Ragged, Rectangle

State = jax.Array | tuple[jax.Array, ...] | None  # None: there is no proposer
S = TypeVar("S", bound=State)


@dataclasses.dataclass(frozen=True)
class DraftInputs:
    """A step before its model runs."""

    # [R, 1 + k], k >= 1, valid where a draft may be verified; None: no row verifies any
    decode: Rectangle | None
    token_R: jax.Array  # i32[R], the newest token, which stands first in each row
    sampling: SlotSampling  # [R, ...]
    counts: jax.Array | None  # u16[R, 2, V], the newest token and drafts not among them
    prompts: Rectangle | None  # chunks of prompts; None: there are none
    prompt_YW: jax.Array  # i32[Y, W], their tokens
    greedy: bool  # all rows are
    acceptance: str = "coupled"  # `engine.drafts.acceptance`

    @property
    def needs_distribution(self) -> bool:
        """Whether drafts are accepted in view of the distribution that they were drawn from."""
        return self.acceptance == "rejection" and not self.greedy


@dataclasses.dataclass(frozen=True)
class Drafts:
    """What was proposed for the decode rows."""

    tokens_Rk: jax.Array  # i32[R, k], -1 where there are none
    # f32[R, k, V] of a chain; None: what came before alone decided on them
    prob_RkV: jax.Array | None = None
    # i32[R, k] of a tree: the node that each follows, 0 the newest token, n the n-th draft, and no
    # draft before the one that it follows. None: chains.
    parent_Rk: jax.Array | None = None
    levels: int = 0  # of a tree: the most drafts that follow each other


@dataclasses.dataclass(frozen=True)
class SampledStep:
    """A step after its tokens are sampled; rows are those of both rectangles, a tree's those of its
    accepted path.
    """

    ragged: Ragged
    tokens_T: jax.Array  # i32[T], those that were fed
    hidden_TD: jax.Array  # f32[T, D], the model's normalized last hidden states
    features: tuple[jax.Array, ...]  # f32[T, D] each, as `Proposer.features` asks for
    num_kept_Y: jax.Array  # i32[Y], how many of a row's fed tokens stay, the first ones
    slot_Y: jax.Array  # i32[Y]
    newest_Y: jax.Array  # i32[Y], position of the newest token
    sampled_YW: jax.Array  # i32[Y, W]
    num_emitted_Y: jax.Array  # i32[Y], how many of these count


class Proposer(Protocol[S]):
    """One way to propose; without state of its own, so that it may be made anew in each step."""

    @property
    def features(self) -> tuple[int, ...]:
        """Numbers of the model's layers whose outputs it reads, from 1 on."""

    def init(self) -> np.ndarray | tuple[np.ndarray, ...]:
        """The state before any sequence: numpy arrays, [B+1, ...] where they belong to slots."""

    def admit(self, state: S, slot_A: jax.Array, source_A: jax.Array, history_AS: jax.Array) -> S:
        """State after sequences were given slots; `history_AS` holds their tokens by position, and
        `source_A` the slot that a fork continues, -1 for others.
        """

    def propose(
        self, params: Params, cache: Cache, state: S, inputs: DraftInputs
    ) -> tuple[Cache, Drafts | None]:
        """The cache with what the proposer keeps there, and drafts for `inputs.decode`, if any."""

    def observe(self, params: Params, cache: Cache, state: S, step: SampledStep) -> tuple[Cache, S]:
        """Cache and state after a step."""


class Stateless:
    """What keeps nothing in the slots."""

    def init(self) -> tuple[()]:
        return ()

    def admit(
        self, state: tuple[()], slot_A: jax.Array, source_A: jax.Array, history_AS: jax.Array
    ) -> tuple[()]:
        return state


class HiddenStates:
    """What heads keep: the model's state before each slot's newest token, f32[B+1, D]."""

    def __init__(self, max_seqs: int, width: int):
        self._shape = max_seqs + 1, width

    def init(self) -> np.ndarray:
        return np.zeros(self._shape, np.float32)

    def admit(
        self, state: jax.Array, slot_A: jax.Array, source_A: jax.Array, history_AS: jax.Array
    ) -> jax.Array:
        """As `Proposer` says: of forks their source's, of others zeros."""
        return state.at[slot_A].set(jnp.where(source_A[:, None] >= 0, state[source_A], 0))

    def before(self, state: jax.Array, step: SampledStep, x_TD: jax.Array) -> jax.Array:
        """The state before each token that was fed, given those of all, f32[T, D]: of a row's first
        token the slot's, or in a later chunk of the same prompt the last of the chunk before.
        """
        before = []
        for rectangle, x_YWD in zip(step.ragged.rectangles, step.ragged.split(x_TD), strict=True):
            slot_Y, last_YD = rectangle.slot_Y, x_YWD[:, -1]
            goes_on_Y1 = (slot_Y == jnp.roll(slot_Y, 1)).at[0].set(False)[:, None]
            first_YD = jnp.where(goes_on_Y1, jnp.roll(last_YD, 1, axis=0), state[slot_Y])
            before.append(jnp.concatenate([first_YD[:, None], x_YWD[:, :-1]], axis=1))
        return step.ragged.pack(before)

    def advanced(self, state: jax.Array, step: SampledStep, x_TD: jax.Array) -> jax.Array:
        """States after a step: of the last token of each slot that stays. Only the last of a
        prompt's chunks writes it; others, like padding, write the sink.
        """
        sink, first = state.shape[0] - 1, 0
        for rectangle, x_YWD in zip(step.ragged.rectangles, step.ragged.split(x_TD), strict=True):
            slot_Y = rectangle.slot_Y
            goes_on_Y = (slot_Y == jnp.roll(slot_Y, -1)).at[-1].set(False)
            index_Y = jnp.maximum(step.num_kept_Y[first : first + len(slot_Y)] - 1, 0)
            last_YD = jnp.take_along_axis(x_YWD, index_Y[:, None, None], axis=1)[:, 0]
            state = state.at[jnp.where(goes_on_Y, sink, slot_Y)].set(last_YD)
            first += len(slot_Y)
        return state
