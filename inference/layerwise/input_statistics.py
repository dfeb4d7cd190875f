"""What calibration saw of a matrix's inputs."""

import dataclasses
from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from inference.layerwise.stream import OF_LAYER, Stream, Values, Watch

_ROWS = 256  # inputs of a matrix that are kept as they are, about


@dataclasses.dataclass(frozen=True)
class InputStatistics:
    """The inputs of a matrix [F, D], or (with an axis E before all others) of each of a stack.

    Attributes:
        count: how many there were, int64 [].
        sum_D: of their absolute values, float64.
        largest_D: of their absolute values, float32.
        rows_RD: some of them, float32; zeros where there were fewer.
        products_DD: the sum of x x^T, float64; None where no method asks for it.
    """

    count: np.ndarray
    sum_D: np.ndarray
    largest_D: np.ndarray
    rows_RD: np.ndarray
    products_DD: np.ndarray | None

    def of(self, nth: int) -> "InputStatistics":
        whole = None if self.products_DD is None else self.products_DD[nth]
        return InputStatistics(
            self.count[nth], self.sum_D[nth], self.largest_D[nth], self.rows_RD[nth], whole
        )

    def scaled(self, factor_D: np.ndarray) -> "InputStatistics":
        """As they are where each element is multiplied by a factor: [D], or [E, D]."""
        products = self.products_DD
        if products is not None:
            products = products * factor_D[..., :, None] * factor_D[..., None, :]
        return InputStatistics(
            self.count,
            self.sum_D * factor_D,
            (self.largest_D * factor_D).astype(np.float32),
            (self.rows_RD * factor_D[..., None, :]).astype(np.float32),
            products,
        )


# The fields of `InputStatistics`, of one batch, on the device.
BatchStatistics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class _InputWatch(Watch):
    num_rows: int
    has_products: bool

    def of_product(
        self,
        path: str,
        weight: jax.Array,
        x_XD: jax.Array,
        sizes_E: jax.Array | None,
        shape: tuple[int, int],
    ) -> BatchStatistics:
        return of_batch(x_XD, sizes_E, self.num_rows, self.has_products)


def observed(
    stream: Stream, index: int, values: Values, paths: Collection[str], has_products: bool
) -> dict[str, InputStatistics]:
    """What a layer's matrices of these paths read, by path; `values` are the layer's, before they
    get few bits, and `has_products` asks for sums of x x^T.
    """
    statistics: dict[str, InputStatistics] = {}
    watch = _InputWatch(frozenset(paths), -(-_ROWS // stream.num_batches), has_products)
    for notes in stream.observe(index, values, watch):
        for path in notes.keys() - {OF_LAYER}:
            statistics[path] = merged(statistics.get(path), notes[path])
    return statistics


def of_batch(
    x_XD: jax.Array, sizes_E: jax.Array | None, num_rows: int, has_products: bool
) -> BatchStatistics:
    """Statistics of a batch of inputs, of which `num_rows` are kept as they are; of a stack
    `sizes_E` (i32) are the inputs of each matrix, one matrix behind the other.
    """
    x_XD = x_XD.astype(jnp.float32)
    if sizes_E is None:
        return _of_rows(x_XD, jnp.ones(len(x_XD), bool), 0, num_rows, has_products)
    first_E = jnp.cumsum(sizes_E) - sizes_E
    nth_X = jnp.arange(len(x_XD))

    def of_group(bounds: tuple[jax.Array, jax.Array]) -> BatchStatistics:
        first, size = bounds
        is_own_X = (nth_X >= first) & (nth_X < first + size)
        return _of_rows(x_XD, is_own_X, first, num_rows, has_products)

    # One at a time: D x D each.
    statistics: BatchStatistics = jax.lax.map(of_group, (first_E, sizes_E))
    return statistics


def _of_rows(
    x_XD: jax.Array, is_own_X: jax.Array, first: jax.Array | int, num_rows: int, has_products: bool
) -> BatchStatistics:
    count = is_own_X.sum()
    x_XD = jnp.where(is_own_X[:, None], x_XD, 0)
    step = jnp.maximum(count // num_rows, 1)
    place_R = first + jnp.arange(num_rows) * step
    is_there_R1 = (jnp.arange(num_rows) * step < count)[:, None]
    statistics = {
        "count": count,
        "sum_D": jnp.abs(x_XD).sum(0),
        "largest_D": jnp.abs(x_XD).max(0),
        "rows_RD": jnp.where(is_there_R1, x_XD[jnp.minimum(place_R, len(x_XD) - 1)], 0),
    }
    if has_products:
        statistics["products_DD"] = jax.lax.dot(x_XD.T, x_XD, precision=jax.lax.Precision.HIGHEST)
    return statistics


def merged(before: InputStatistics | None, batch: Mapping[str, np.ndarray]) -> InputStatistics:
    """With another batch, in float64 where there are sums."""
    products = batch.get("products_DD")
    latest = InputStatistics(
        batch["count"].astype(np.int64),
        batch["sum_D"].astype(np.float64),
        batch["largest_D"],
        batch["rows_RD"],
        None if products is None else products.astype(np.float64),
    )
    if before is None:
        return latest
    if before.products_DD is not None and latest.products_DD is not None:
        products = before.products_DD + latest.products_DD
    return InputStatistics(
        before.count + latest.count,
        before.sum_D + latest.sum_D,
        np.maximum(before.largest_D, latest.largest_D),
        np.concatenate([before.rows_RD, latest.rows_RD], axis=-2),
        products,
    )
