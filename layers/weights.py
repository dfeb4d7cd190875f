"""What a leaf of the parameters does, by its type: products with a matrix [F, D] or with a stack of
matrices [E, F, D], and rows of a table. Model code asks `of` and never the type.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from configs.precision import OUTLIER_SIZE
from layers.backends import backends
from layers.kernels.linear import adapted_cpu, grouped, low_bit, low_bit_product, packed
from layers.kernels.linear.adapted import Adapted, AdaptedStack, AdaptedTable
from layers.kernels.linear.low_bit import Quantized
from layers.kernels.linear.observed import Observed
from layers.kernels.linear.packed import Packed
from layers.params import looked_up
from layers.reduce import row_sum
from layers.stacks import group_of_rows, in_blocks

_LANES = 128  # of a TPU's tiles

Leaf = jax.Array | Packed | Quantized | Observed
# A stack whose parts have different formats is a tuple of them, a matrix with outliers a mapping.
Weight = Leaf | Adapted | AdaptedStack | AdaptedTable | tuple[Leaf, ...] | Mapping[str, Leaf]


class Operations:
    """What a leaf does, unless it is one matrix without groups or rows; sums are float32's.

    Attributes:
        array: the matrix or stack as a plain array, where the leaf is one.
    """

    array: jax.Array | None = None

    def product(self, x_TD: jax.Array) -> jax.Array:
        """x w^T of a matrix: float32 [T, F]."""
        raise NotImplementedError

    def grouped(self, x_XD: jax.Array, sizes_E: jax.Array, deterministic: bool) -> jax.Array:
        """Rows sorted by group times each group's matrix of a stack: float32 [X, F], 0 behind the
        last group. `sizes_E` (i32) counts their rows; if `deterministic`, their bits are
        independent.
        """
        raise ValueError("this weight is one matrix: it multiplies no groups of rows")

    def stacked(self, x_ETD: jax.Array) -> jax.Array:
        """Equally many rows for each matrix of a stack: float32 [E, T, F]."""
        raise ValueError("this weight is one matrix: it has none for each head")

    def rows(self, ids_T: jax.Array) -> jax.Array:
        """Rows of a table: float32 [T, D]."""
        raise ValueError("this weight is no table: it has no rows to look up")


def of(weight: Weight) -> Operations:
    """The operations of a leaf."""
    return _OPERATIONS.get(type(weight), _OfArray)(weight)


@dataclasses.dataclass(frozen=True)
class _OfArray(Operations):
    """An array, multiplied in its own precision."""

    array: jax.Array

    def product(self, x_TD: jax.Array) -> jax.Array:
        rows, backend = x_TD.shape[0], backends.current()
        if kernel := backend.skinny_product(rows, self.array):
            return kernel(x_TD[None], self.array, None)[0]
        if (missing := backend.least_rows - rows) > 0:
            x_TD = jnp.pad(x_TD, ((0, missing), (0, 0)))
        y_TF = jax.lax.dot_general(
            x_TD.astype(self.array.dtype), self.array, (((1,), (1,)), ((), ())),
            precision=_precision(self.array), preferred_element_type=jnp.float32,
        )  # fmt: skip
        return y_TF[:rows]

    def grouped(self, x_XD: jax.Array, sizes_E: jax.Array, deterministic: bool) -> jax.Array:
        x_XD, backend = x_XD.astype(self.array.dtype), backends.current()
        if backend.copies_in_blocks:
            return in_blocks(self._with_matrix, x_XD, sizes_E, deterministic)
        if backend.looks_up_in_products and len(x_XD) <= len(sizes_E):
            return self._touched(x_XD, sizes_E)
        kernel = backend.grouped_product(self.array)
        return grouped.grouped_product(x_XD, self.array, sizes_E, kernel)

    def stacked(self, x_ETD: jax.Array) -> jax.Array:
        return _batched(x_ETD.astype(self.array.dtype), self.array)

    def rows(self, ids_T: jax.Array) -> jax.Array:
        table_VD, has_free_views = self.array, backends.current().has_free_views
        if not has_free_views and table_VD.dtype == jnp.bfloat16 and table_VD.shape[1] % _LANES:
            # A TPU lays such a table out by columns, and would copy it whole to look rows up.
            # Exact.
            is_row_TV = ids_T[:, None] == jnp.arange(table_VD.shape[0])
            return jax.lax.dot(
                is_row_TV.astype(table_VD.dtype), table_VD, preferred_element_type=jnp.float32
            )
        rows_TD = looked_up(table_VD, ids_T) if has_free_views else table_VD[ids_T]
        return rows_TD.astype(jnp.float32)

    def _with_matrix(self, x_BWD: jax.Array, matrix_B: jax.Array) -> jax.Array:
        last = self.array.shape[0] - 1
        return _batched(x_BWD, looked_up(self.array, jnp.minimum(matrix_B, last)))

    def _touched(self, x_XD: jax.Array, sizes_E: jax.Array) -> jax.Array:
        """Few rows: each reads its own matrix, which XLA looks up within the product."""
        group_X = group_of_rows(sizes_E, len(x_XD))
        y_X1F = _batched(x_XD[:, None], self.array[jnp.minimum(group_X, len(sizes_E) - 1)])
        return jnp.where((group_X < len(sizes_E))[:, None], y_X1F[:, 0], 0)


@dataclasses.dataclass(frozen=True)
class _OfPacked(Operations):
    leaf: Packed

    def product(self, x_TD: jax.Array) -> jax.Array:
        return packed.product(x_TD, self.leaf)

    def grouped(self, x_XD: jax.Array, sizes_E: jax.Array, deterministic: bool) -> jax.Array:
        return packed.grouped_product(x_XD, self.leaf, sizes_E)

    def stacked(self, x_ETD: jax.Array) -> jax.Array:
        E, T, D = x_ETD.shape
        sizes_E = jnp.full(E, T, jnp.int32)
        y_XF = packed.grouped_product(x_ETD.reshape(E * T, D), self.leaf, sizes_E)
        return y_XF.reshape(E, T, -1)

    def rows(self, ids_T: jax.Array) -> jax.Array:
        return packed.rows(self.leaf, ids_T)


@dataclasses.dataclass(frozen=True)
class _OfQuantized(Operations):
    """Numbers of few bits, by XLA or by an accelerator's kernels."""

    leaf: Quantized

    def product(self, x_TD: jax.Array) -> jax.Array:
        return low_bit_product.product(x_TD, self.leaf)

    def grouped(self, x_XD: jax.Array, sizes_E: jax.Array, deterministic: bool) -> jax.Array:
        return in_blocks(self._with_matrix, x_XD, sizes_E, deterministic)

    def stacked(self, x_ETD: jax.Array) -> jax.Array:
        return self._with_matrix(x_ETD, jnp.arange(len(x_ETD)))

    def rows(self, ids_T: jax.Array) -> jax.Array:
        return low_bit.rows(self.leaf, ids_T)

    def _with_matrix(self, x_BWD: jax.Array, matrix_B: jax.Array) -> jax.Array:
        return low_bit_product.products(x_BWD, self.leaf, matrix_B)


@dataclasses.dataclass(frozen=True)
class _OfObserved(Operations):
    leaf: Observed

    def product(self, x_TD: jax.Array) -> jax.Array:
        self.leaf.note(x_TD, None)
        return of(self.leaf.weight).product(x_TD)

    def grouped(self, x_XD: jax.Array, sizes_E: jax.Array, deterministic: bool) -> jax.Array:
        self.leaf.note(x_XD, sizes_E)
        return of(self.leaf.weight).grouped(x_XD, sizes_E, deterministic)

    def stacked(self, x_ETD: jax.Array) -> jax.Array:
        E, T, D = x_ETD.shape
        self.leaf.note(x_ETD.reshape(E * T, D), jnp.full(E, T, jnp.int32))
        return of(self.leaf.weight).stacked(x_ETD)

    def rows(self, ids_T: jax.Array) -> jax.Array:
        return of(self.leaf.weight).rows(ids_T)


@dataclasses.dataclass(frozen=True)
class _OfAdapted(Operations):
    leaf: Adapted

    def product(self, x_TD: jax.Array) -> jax.Array:
        """Tokens' bits are independent of each other where a mixture's are."""
        leaf, order = self.leaf, self.leaf.order
        if adapted_cpu.takes(leaf):
            if packed.is_packed(leaf.weight) and not packed.is_in_parts(leaf.weight):
                return packed.product(x_TD, leaf.weight, adapted_cpu.operands(x_TD, leaf))
            return of(leaf.weight).product(x_TD) + adapted_cpu.added(x_TD, leaf)
        if order is None:
            low_TX = of(leaf.down).product(x_TD).astype(x_TD.dtype)
            added_TF = leaf.by_module(low_TX, leaf.up, lambda low_TR, up: of(up).product(low_TR))
            return of(leaf.weight).product(x_TD) + added_TF
        if add := backends.current().addition(leaf):
            return add(of(leaf.weight).product(x_TD), x_TD, leaf)
        sizes_N = order.sizes_N
        low_TX = of(leaf.down).grouped(x_TD[order.token_T], sizes_N, True).astype(x_TD.dtype)
        added_TF = leaf.by_module(
            low_TX, leaf.up, lambda low_TR, up: of(up).grouped(low_TR, sizes_N, True)
        )
        return of(leaf.weight).product(x_TD) + added_TF[order.place_T]


@dataclasses.dataclass(frozen=True)
class _OfAdaptedStack(Operations):
    leaf: AdaptedStack

    def grouped(self, x_XD: jax.Array, sizes_E: jax.Array, deterministic: bool) -> jax.Array:
        matrix_X = group_of_rows(sizes_E, len(x_XD))
        added_XF = self._added(x_XD, self.leaf.slot_X, matrix_X, len(sizes_E))
        return of(self.leaf.weight).grouped(x_XD, sizes_E, deterministic) + added_XF

    def stacked(self, x_ETD: jax.Array) -> jax.Array:
        E, T, D = x_ETD.shape
        slot_X, matrix_X = jnp.tile(self.leaf.slot_X, E), jnp.repeat(jnp.arange(E), T)
        added_XF = self._added(x_ETD.reshape(E * T, D), slot_X, matrix_X, E)
        return of(self.leaf.weight).stacked(x_ETD) + added_XF.reshape(E, T, -1)

    def _added(
        self, x_XD: jax.Array, slot_X: jax.Array, matrix_X: jax.Array, num_matrices: int
    ) -> jax.Array:
        order = self.leaf.order_of(slot_X, matrix_X, num_matrices)
        low_XR = of(self.leaf.down).grouped(x_XD[order.token_T], order.sizes_N, True)
        added_XF = of(self.leaf.up).grouped(low_XR.astype(x_XD.dtype), order.sizes_N, True)
        return added_XF[order.place_T]


@dataclasses.dataclass(frozen=True)
class _OfAdaptedTable(Operations):
    leaf: AdaptedTable

    def rows(self, ids_T: jax.Array) -> jax.Array:
        up, order = self.leaf.up, self.leaf.order
        low_TR = up[jnp.maximum(order.slot_T, 0), ids_T]
        added_TD = of(self.leaf.down).grouped(low_TR[order.token_T], order.sizes_N, True)
        return of(self.leaf.weight).rows(ids_T) + added_TD[order.place_T]


class _OfParts(Operations):
    """Matrices over the same inputs, one below the other."""

    def __init__(self, parts: tuple[Leaf, ...]):
        self._parts = parts

    def product(self, x_TD: jax.Array) -> jax.Array:
        return jnp.concatenate([of(part).product(x_TD) for part in self._parts], axis=-1)


class _WithOutliers(Operations):
    """LLM.int8() (Dettmers et al. 2022, arXiv 2208.07339): features of the activations that are far
    larger than others are multiplied in bfloat16, and so do not make the scale that all others of
    their token are rounded by. Which ones is a constant of the matrix: the paper's threshold reads
    the batch, so a token's result would depend on its neighbors. Of the others those that are large
    in this token alone get a scale of their own, as a row of the same product.
    """

    def __init__(self, parts: Mapping[str, Leaf]):
        self._features, self._int8, self._outliers = (
            parts[name] for name in ("features", "int8", "outliers")
        )

    def product(self, x_TD: jax.Array) -> jax.Array:
        features_O = of(self._features).array  # -1: one that another chip has
        assert features_O is not None
        is_outlier_D = (jnp.arange(x_TD.shape[1])[:, None] == features_O).any(1)
        outlier_TO = jnp.where(features_O >= 0, x_TD[:, jnp.maximum(features_O, 0)], 0)
        usual_TD = jnp.where(is_outlier_D, 0, x_TD).astype(jnp.float32)
        size_T1 = jnp.sqrt(row_sum(jnp.square(usual_TD)) / usual_TD.shape[1])
        is_large_TD = jnp.abs(usual_TD) > OUTLIER_SIZE * size_T1
        both = jnp.where(is_large_TD, 0, usual_TD), jnp.where(is_large_TD, usual_TD, 0)
        usual_TF, large_TF = jnp.split(of(self._int8).product(jnp.concatenate(both)), 2)
        outliers_FO, array = self._outliers, of(self._outliers).array
        if array is not None and not backends.current().multiplies_all_types:
            outliers_FO = array.astype(jnp.float32)
        return usual_TF + large_TF + of(outliers_FO).product(outlier_TO)


_OPERATIONS: dict[type, Callable[[Any], Operations]] = {
    Packed: _OfPacked,
    Quantized: _OfQuantized,
    Observed: _OfObserved,
    Adapted: _OfAdapted,
    AdaptedStack: _OfAdaptedStack,
    AdaptedTable: _OfAdaptedTable,
    tuple: _OfParts,
    dict: _WithOutliers,
}


def _batched(x_XWD: jax.Array, w_XFD: jax.Array) -> jax.Array:
    """x w^T for each of a batch: float32 [X, W, F]."""
    return jax.lax.dot_general(
        x_XWD, w_XFD, (((2,), (2,)), ((0,), (0,))), precision=_precision(w_XFD),
        preferred_element_type=jnp.float32,
    )  # fmt: skip


def _precision(w: jax.Array) -> jax.lax.Precision | None:
    """A GPU's default for float32 operands is TF32, ten bits of mantissa."""
    return jax.lax.Precision.HIGHEST if w.dtype == jnp.float32 else None
