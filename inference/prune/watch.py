"""What is noted of a layer's activations: how large they are, unit by unit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from configs.model import LayerSpec
from inference.layerwise.stream import Note, Watch
from inference.prune import axes
from layers import stacks

AGGREGATES = "mean", "l2"


@dataclasses.dataclass(frozen=True)
class Aggregate:
    """How activations of many tokens become one number (Muralidharan et al. 2024, arXiv
    2407.14679, section 2.2): first over a window's tokens, then over windows.

    Attributes:
        of_windows, of_tokens: 'mean' of absolute values, or 'l2', the root of their squares' sum.
    """

    of_windows: str = "l2"
    of_tokens: str = "mean"

    def over_tokens(self, x_YWN: jax.Array) -> jax.Array:
        """Returns the activations of windows, [Y, N], of those of their tokens, which are >= 0."""
        if self.of_tokens == "l2":
            return jnp.sqrt(jnp.square(x_YWN).sum(1))
        return x_YWN.mean(1)

    def partial(self, x_YN: jax.Array) -> jax.Array:
        """Returns what batches of windows add up, [N]."""
        return (jnp.square(x_YN) if self.of_windows == "l2" else x_YN).sum(0)

    def whole(self, total_N: np.ndarray) -> np.ndarray:
        """Returns the score of the sum of all batches."""
        return np.sqrt(total_N) if self.of_windows == "l2" else total_N


@dataclasses.dataclass(frozen=True)
class ImportanceWatch(Watch):
    """Notes of a layer what each of its units makes, and how far the layer turns the stream.

    Attributes:
        layer: the layer.
        readers: matrices whose inputs are the model's channels.
        aggregate: see `Aggregate`.
        counts_visits: whether experts matter by tokens that are routed to them, not by how large
            their results are.
        eps: of the norms of latent vectors.
    """

    layer: LayerSpec
    readers: frozenset[str]
    aggregate: Aggregate
    counts_visits: bool
    eps: float

    @functools.cached_property
    def scored(self) -> dict[str, list[tuple[axes.Axis, axes.Part]]]:
        """Axes of the layer by the matrix that scores them."""
        scored: dict[str, list[tuple[axes.Axis, axes.Part]]] = {}
        for axis, part in axes.of_layer(self.layer):
            scored.setdefault(f"{part.prefix}/{axis.scored}", []).append((axis, part))
        return scored

    def of_product(
        self,
        path: str,
        weight: jax.Array,
        x_XD: jax.Array,
        sizes_E: jax.Array | None,
        shape: tuple[int, int],
    ) -> Note:
        noted: dict[str, jax.Array] = {}
        x_XD = x_XD.astype(jnp.float32)
        if path in self.readers:
            noted[axes.WIDTH] = self._of_channels(jnp.abs(x_XD), sizes_E is not None, shape)
        for axis, part in self.scored.get(path, ()):
            if sizes_E is not None:
                noted[axis.name] = self._of_stack(axis, weight, x_XD, sizes_E)
                continue
            _, unit_D = axis.places(part.kind)[axis.scored]
            if axis.of_results:
                x_XD = jax.lax.dot(x_XD, weight.T, precision=jax.lax.Precision.HIGHEST)
            norm_XN = _norms(x_XD, unit_D, axis.size(part.kind))
            if axis.of_results:
                norm_XN /= jnp.sqrt(jnp.square(norm_XN).mean(-1, keepdims=True) + self.eps)
            noted[axis.name] = self._of_tokens(norm_XN, shape)
        return noted

    def of_layer(self, before_TD: jax.Array, behind_TD: jax.Array) -> Note:
        """Block influence (Men et al. 2024, arXiv 2403.03853): 1 - the mean cosine."""
        length_T = jnp.linalg.norm(before_TD, axis=-1) * jnp.linalg.norm(behind_TD, axis=-1)
        cosine_T = (before_TD * behind_TD).sum(-1) / jnp.maximum(length_T, 1e-12)
        return {axes.LAYERS: (1 - cosine_T).sum()}

    def _of_tokens(self, norm_TN: jax.Array, shape: tuple[int, int]) -> jax.Array:
        return self.aggregate.partial(self.aggregate.over_tokens(norm_TN.reshape(*shape, -1)))

    def _of_channels(self, x_XD: jax.Array, is_stack: bool, shape: tuple[int, int]) -> jax.Array:
        """Of the model's channels [D]. Experts' inputs lie in no windows: each window of the batch
        counts as their mean.
        """
        if not is_stack:
            return self._of_tokens(x_XD, shape)
        mean_1D = self.aggregate.over_tokens(x_XD[None])
        if self.aggregate.of_tokens == "l2":  # of as many tokens as a window has
            mean_1D *= (shape[1] / len(x_XD)) ** 0.5
        return shape[0] * self.aggregate.partial(mean_1D)

    def _of_stack(
        self, axis: axes.Axis, weight: jax.Array, x_XF: jax.Array, sizes_E: jax.Array
    ) -> jax.Array:
        """Of experts [E], or of their channels [E, F]: each sees tokens of all windows alike."""
        if axis.name == "experts" and self.counts_visits:
            return sizes_E.astype(jnp.float32)
        norm_XN = jnp.abs(x_XF)
        if axis.name == "experts":
            norm_XN = _result_norms(x_XF, weight, sizes_E)
        end_E = jnp.cumsum(sizes_E)
        expert_X = jnp.searchsorted(end_E, jnp.arange(len(x_XF)), side="right")
        if self.aggregate.of_windows == "l2":
            norm_XN = jnp.square(norm_XN)
        total_EN = jax.ops.segment_sum(norm_XN, expert_X, num_segments=len(sizes_E))
        return total_EN[:, 0] if axis.name == "experts" else total_EN


def _result_norms(x_XF: jax.Array, weight_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """L2 norms of experts' results [X, 1], a block of rows at a time: `jax.lax.ragged_dot` holds
    the rows of all experts for each of them.
    """

    def of_block(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        x_WF, matrix = block
        out_WD = jax.lax.dot(x_WF, weight_EDF[matrix].T, precision=jax.lax.Precision.HIGHEST)
        return jnp.linalg.norm(out_WD, axis=-1, keepdims=True)

    def products(x_BWF: jax.Array, matrix_B: jax.Array) -> jax.Array:
        norms: jax.Array = jax.lax.map(of_block, (x_BWF, jnp.minimum(matrix_B, len(sizes_E) - 1)))
        return norms

    return stacks.in_blocks(products, x_XF, sizes_E, deterministic=False)


def _norms(x_XD: jax.Array, unit_D: np.ndarray, num_units: int) -> jax.Array:
    """L2 norms of each unit's elements, [X, N]."""
    columns = np.flatnonzero(unit_D != axes.ALWAYS)
    if len(columns) == num_units:
        return jnp.abs(x_XD[:, columns])
    squares_DX = jnp.square(x_XD[:, columns]).T
    total_NX = jax.ops.segment_sum(squares_DX, unit_D[columns], num_segments=num_units)
    return jnp.sqrt(total_NX).T
