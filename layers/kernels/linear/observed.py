"""A leaf whose inputs are noted: what calibration puts in the place of a matrix."""

import dataclasses
from collections.abc import Callable

import jax


@dataclasses.dataclass(frozen=True)
class Observed:
    """A matrix [F, D], or a stack of them [E, F, D], behind `linear` and the products with stacks.

    Attributes:
        note: called, while the product is traced, with its rows [X, D] and (of a stack, whose rows
            lie in groups) how many each group has, i32[E], else None.
    """

    weight: jax.Array
    note: Callable[[jax.Array, jax.Array | None], None]
