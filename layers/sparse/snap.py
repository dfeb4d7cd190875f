"""What the end of a prompt reads of it (SnapKV, Li et al. 2024, arXiv 2404.14469): the attention
that its last tokens give to each token before them, by which whoever keeps the prompt's pages
chooses some.

The tokens are fed again over their pages, which hold their keys already: nothing is written, and
each layer attends as it did. Beside that it sums the weights of its softmax, which no kernel
returns.
"""

import dataclasses
from typing import ClassVar, Self

import jax
import jax.numpy as jnp

from configs.cache import BLOCK_TOKENS, PageFormat
from layers import page_rows
from layers.kernels.attention.contract import AttendPages, Options
from layers.kernels.attention.mask import mask_bounds, visible
from layers.kernels.attention.reference import dot
from layers.kv_cache import Paged
from layers.linear import soft_cap
from layers.ragged import Rectangle

_MASKED = -1e30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ObservedPages(Paged):
    """Token-major pages of a sequence, which attention only reads; `weight_S` (float32, S = table
    entries x page tokens) sums each token's softmax weights over the queries and heads of layers.
    """

    weight_S: jax.Array
    is_read_only: ClassVar[bool] = True

    def attend(
        self,
        attend_pages: AttendPages,
        q_YWNH: jax.Array,
        rectangle: Rectangle,
        group: int,
        page_format: PageFormat,
        options: Options,
    ) -> tuple[jax.Array, Self]:
        """Adds the weights of one sequence's row; a layer with a window adds nothing."""
        arguments = rectangle, group, page_format, options
        out, leaf = super().attend(attend_pages, q_YWNH, *arguments)
        if options.window is not None:
            return out, leaf
        weight_S = self.weight_S + _weights(q_YWNH, self.pages, *arguments)
        return out, dataclasses.replace(leaf, weight_S=weight_S)


def _weights(
    q_1WNH: jax.Array,
    pages: jax.Array,
    rectangle: Rectangle,
    group: int,
    page_format: PageFormat,
    options: Options,
) -> jax.Array:
    """Softmax weights of a sequence's tokens, summed over queries and heads: float32 [S].

    Scores are computed twice, a block at a time: first for their maximum and mass, then for the
    weights, which the mass divides. U are the query rows of a KV head.
    """
    _, W, N, H = q_1WNH.shape
    K, table_P = page_format.kv_heads, rectangle.tables[group][0]
    block_pages = BLOCK_TOKENS // pages.shape[1]
    q_KUH = q_1WNH.reshape(W, K, N // K, H).swapaxes(0, 1).reshape(K, -1, H)
    last_W = jnp.where(rectangle.valid_YW, mask_bounds(rectangle, None).last_YW, -1)[0]
    last_U1 = jnp.repeat(last_W, N // K)[:, None]

    def scores(j: jax.Array) -> jax.Array:
        ids_P = jax.lax.dynamic_slice_in_dim(table_P, j * block_pages, block_pages)
        stored_SX = pages.at[ids_P].get(mode="promise_in_bounds").reshape(BLOCK_TOKENS, -1)
        row_SX = page_rows.numbers(stored_SX, page_format, q_1WNH.dtype)
        k_KSH = row_SX[:, page_format.keys].reshape(BLOCK_TOKENS, K, H).swapaxes(0, 1)
        scores_KUS = soft_cap(dot(q_KUH, k_KSH, 2), options.score_cap)
        kv_position_S = j * BLOCK_TOKENS + jnp.arange(BLOCK_TOKENS, dtype=jnp.int32)
        return jnp.where(visible(kv_position_S, last_U1), scores_KUS, _MASKED)

    def add_mass(j: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        maximum_KU1, mass_KU1 = carry
        scores_KUS = scores(j)
        new_KU1 = jnp.maximum(maximum_KU1, scores_KUS.max(-1, keepdims=True))
        mass_KU1 *= jnp.exp(maximum_KU1 - new_KU1)
        return new_KU1, mass_KU1 + jnp.exp(scores_KUS - new_KU1).sum(-1, keepdims=True)

    sinks_N = jnp.full(N, _MASKED) if options.sinks_N is None else options.sinks_N
    sinks_KU1 = jnp.tile(sinks_N.astype(jnp.float32).reshape(K, N // K), (1, W))[:, :, None]
    stop = jnp.max(last_W) // BLOCK_TOKENS + 1
    start = sinks_KU1, jnp.ones_like(sinks_KU1)  # without a sink its mass of 1 fades to nothing
    maximum_KU1, mass_KU1 = jax.lax.fori_loop(0, stop, add_mass, start)

    def add_weights(j: jax.Array, weight_S: jax.Array) -> jax.Array:
        weight_KUS = jnp.exp(scores(j) - maximum_KU1) / mass_KU1
        block_S = weight_KUS.sum((0, 1))
        return jax.lax.dynamic_update_slice_in_dim(weight_S, block_S, j * BLOCK_TOKENS, axis=0)

    empty_S = jnp.zeros(table_P.size * pages.shape[1], jnp.float32)
    return jax.lax.fori_loop(0, stop, add_weights, empty_S)
