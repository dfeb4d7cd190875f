"""A leaf of the parameters with low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685): each
token of a step may have another one, or none.

An adapter adds B A x to a product W x. The matrices A and B of all adapters are stacks of one
matrix a slot, and multiply tokens as a mixture's experts do: sorted by slot, each by its own. To a
token without an adapter zeros are added, so its result is the weight's.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from configs import adapters
from configs.kinds.params import ParamInfo
from configs.settings.adapters import NO_SLOT
from layers.params import Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotOrder:
    """The tokens of a step, sorted by the slots of their adapters, those without one last.

    Attributes:
        slot_T: i32[T], the slot of each token, `NO_SLOT` without one.
        token_T: i32[T], the token at each place.
        place_T: i32[T], the place of each token.
        sizes_N: i32[N], tokens of each slot.
    """

    slot_T: jax.Array
    token_T: jax.Array
    place_T: jax.Array
    sizes_N: jax.Array

    @classmethod
    def of(cls, slot_T: jax.Array, num_slots: int) -> "SlotOrder":
        """The order of tokens with these slots, i32[T]."""
        key_T = jnp.where(slot_T == NO_SLOT, num_slots, slot_T)
        token_T = jnp.argsort(key_T, stable=True).astype(jnp.int32)
        sizes_N = (slot_T[:, None] == jnp.arange(num_slots)).sum(0, dtype=jnp.int32)
        place_T = jnp.argsort(token_T).astype(jnp.int32)
        return cls(slot_T.astype(jnp.int32), token_T, place_T, sizes_N)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("weight", "down", "up", "order", "ranks_N"), meta_fields=("module_ends",),
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A matrix [F, D] of P modules, the stacks A [N, P R, D] and B [N, F, R], whose rows meet the
    ranks of their own module, and which slot each token has; or A [P R, D] and B [F, R], which all
    tokens have.

    Attributes:
        module_ends: rows before the end of each module.
        ranks_N: i32[N], how many of its ranks each slot uses.
    """

    weight: Any
    down: Any
    up: Any
    module_ends: tuple[int, ...]
    order: SlotOrder | None = None
    ranks_N: jax.Array | None = None

    def by_module(
        self,
        low_TX: jax.Array,
        up: jax.Array,
        multiply: Callable[[jax.Array, jax.Array], jax.Array],
    ) -> jax.Array:
        """What `multiply` makes of the ranks and of the rows of each module: [T, F], of [T, P R]
        and [..., F, R].
        """
        starts = 0, *self.module_ends[:-1]
        ranks = jnp.split(low_TX, len(starts), axis=1)
        parts = [
            multiply(low_TR, up[..., start:end, :])
            for low_TR, start, end in zip(ranks, starts, self.module_ends, strict=True)
        ]
        return jnp.concatenate(parts, axis=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaptedStack:
    """A stack of matrices [E, F, D], and those of its slots, A [N E, R, D] and B [N E, F, R].

    Attributes:
        slot_X: i32[X], the slot of each row that a matrix multiplies; of heads that of each token.
    """

    weight: Any
    down: Any
    up: Any
    slot_X: jax.Array

    def order_of(self, slot_X: jax.Array, matrix_X: jax.Array, num_matrices: int) -> SlotOrder:
        """The order of rows by the N E matrices of all slots.

        Args:
            slot_X, matrix_X: of each row; `num_matrices` of one that none multiplies.
        """
        E, num = num_matrices, self.down.shape[0]
        has_one_X = (slot_X != NO_SLOT) & (matrix_X < E)
        stacked_X = slot_X * E + matrix_X
        key_X = jnp.where(has_one_X, stacked_X, num)
        row_X = jnp.argsort(key_X, stable=True).astype(jnp.int32)
        ends = jnp.searchsorted(key_X[row_X], jnp.arange(num + 1), method="scan_unrolled")
        place_X = jnp.argsort(row_X).astype(jnp.int32)
        slots = jnp.where(has_one_X, stacked_X, NO_SLOT)
        return SlotOrder(slots, row_X, place_X, jnp.diff(ends).astype(jnp.int32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaptedTable:
    """A table [V, D] whose rows are looked up, and its slots: A transposed, [N, D, R], and tables B
    [N, V, R].
    """

    weight: Any
    down: Any
    up: jax.Array
    order: SlotOrder


def for_rows(params: Params, slots: Callable[[jax.Array], jax.Array]) -> Params:
    """Parameters whose stacks multiply other rows, which have the slots, i32[X], that a function
    makes of those of tokens, i32[T].
    """
    return {
        name: dataclasses.replace(leaf, slot_X=slots(leaf.slot_X))
        if isinstance(leaf, AdaptedStack)
        else leaf
        for name, leaf in params.items()
    }


def bound(
    params: Params,
    stacks: Mapping[str, tuple[Any, ...]],
    infos: Mapping[str, ParamInfo],
    slot_T: jax.Array | None = None,
) -> Params:
    """Parameters whose leaves at the paths of `stacks`, A and B of each and the ranks of its slots,
    have the adapters of a step's tokens, which are in these slots, i32[T]; None: the one adapter
    that there is, A and B.

    Args:
        infos: declarations of what has adapters, by path.
    """
    order = None
    if slot_T is not None:
        order = SlotOrder.of(slot_T, len(next(iter(stacks.values()))[2]))

    def bind(path: str, node: Any) -> Any:
        if path in stacks:
            down, up, *ranks = stacks[path]
            if order is not None and infos[path].is_table:
                return AdaptedTable(node, down, up, order)
            if slot_T is not None and len(infos[path].shape) > 2:
                return AdaptedStack(node, down, up, slot_T)
            return Adapted(node, down, up, adapters.module_ends(infos[path]), order, *ranks)
        if isinstance(node, Mapping):
            return {name: bind(f"{path}/{name}", part) for name, part in node.items()}
        if isinstance(node, list | tuple):
            return type(node)(bind(f"{path}/{n}", part) for n, part in enumerate(node))
        return node

    return {name: bind(name, part) for name, part in params.items()}
