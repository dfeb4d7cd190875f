"""A leaf of the parameters with low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685): each
token of a step may have another one, or none.

An adapter adds B A x to a product W x. The matrices A and B of all adapters are stacks of one
matrix a slot, and multiply tokens as a mixture's experts do: sorted by slot, each by its own. To a
token without an adapter zeros are added, so its result is the weight's.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from layers.params import Params

NO_SLOT = -1  # of a token without an adapter


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotOrder:
    """The tokens of a step, sorted by the slots of their adapters, those without one last.

    Attributes:
        token_T: i32[T], the token at each place.
        place_T: i32[T], the place of each token.
        sizes_N: i32[N], tokens of each slot.
    """

    token_T: jax.Array
    place_T: jax.Array
    sizes_N: jax.Array

    @classmethod
    def of(cls, slot_T: jax.Array, num_slots: int) -> "SlotOrder":
        """The order of tokens with these slots, i32[T]."""
        key_T = jnp.where(slot_T == NO_SLOT, num_slots, slot_T)
        token_T = jnp.argsort(key_T, stable=True).astype(jnp.int32)
        sizes_N = (slot_T[:, None] == jnp.arange(num_slots)).sum(0, dtype=jnp.int32)
        return cls(token_T, jnp.argsort(token_T).astype(jnp.int32), sizes_N)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A matrix [F, D], the stacks A [N, R, D] and B [N, F, R], and which slot each token has; or A
    [R, D] and B [F, R], which all tokens have.
    """

    weight: Any
    down: Any
    up: Any
    order: SlotOrder | None


def bound(
    params: Params, stacks: Mapping[str, tuple[Any, Any]], slot_T: jax.Array | None = None
) -> Params:
    """Parameters whose leaves at the paths of `stacks`, A and B of each, have the adapters of a
    step's tokens, which are in these slots, i32[T]; None: the one adapter that there is.
    """
    order = None
    if slot_T is not None:
        order = SlotOrder.of(slot_T, next(iter(stacks.values()))[0].shape[0])

    def bind(path: str, node: Any) -> Any:
        if path in stacks:
            return Adapted(node, *stacks[path], order)
        if isinstance(node, Mapping):
            return {name: bind(f"{path}/{name}", part) for name, part in node.items()}
        if isinstance(node, list | tuple):
            return type(node)(bind(f"{path}/{n}", part) for n, part in enumerate(node))
        return node

    return {name: bind(name, part) for name, part in params.items()}
