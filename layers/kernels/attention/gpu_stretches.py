"""Compressed attention on Hopper GPUs (DeepSeek-AI 2026, DeepSeek-V4, section 2.3): one softmax
over a query's newest tokens and over entries of several tokens each, chosen or all.

What a query sees of both becomes one table of single rows, which the kernel for latents gathers
(`gpu_latent.py`): of tokens by their index, of entries by its complement, as these lie in other
pages. A page of entries may be a single row, so tables of pages would gain nothing.

Q counts queries, J rows that a query reads.
"""

import jax
import jax.numpy as jnp

from configs.cache import PageFormat
from layers.kernels.attention import gpu
from layers.kernels.attention.contract import PLAIN, Options, Stretch
from layers.ragged import Rectangle


def attend_stretches(
    q_YWNH: jax.Array,
    stretches: tuple[Stretch, ...],
    valid_YW: jax.Array,
    page_format: PageFormat,
    options: Options = PLAIN,
    *,
    num_splits: int | None = None,
    interpret: object = None,
) -> jax.Array:
    """`contract.AttendStretches` of two stretches; further arguments are `gpu.attend_pages`'s."""
    (Y, W, N, H), (tokens, entries) = q_YWNH.shape, stretches
    (token_QJ, num_tokens_Q1), (entry_QJ, num_entries_Q1) = map(_visible_rows, stretches)
    count_Q1 = num_tokens_Q1 + num_entries_Q1
    num_columns = token_QJ.shape[1] + entry_QJ.shape[1]
    # What is behind the last row is the last row again: it is masked, and no row that others wrote.
    nth_QJ = jnp.clip(jnp.arange(num_columns, dtype=jnp.int32), 0, jnp.maximum(count_Q1 - 1, 0))
    token_QJ, entry_QJ = (
        jnp.take_along_axis(row_QJ, jnp.clip(at_QJ, 0, row_QJ.shape[1] - 1), axis=1)
        for row_QJ, at_QJ in ((token_QJ, nth_QJ), (entry_QJ, nth_QJ - num_tokens_Q1))
    )
    table_QJ = jnp.where(nth_QJ < num_tokens_Q1, token_QJ, ~entry_QJ)
    rectangle = Rectangle(
        jnp.zeros(Y * W, jnp.int32), count_Q1 - 1, valid_YW.reshape(-1, 1), (table_QJ,)
    )
    single, entry_pages = (stretch.pages.reshape(-1, 1, H) for stretch in (tokens, entries))
    out_Q1NH = gpu.attend_pages(
        q_YWNH.reshape(-1, 1, N, H), single, rectangle, 0, page_format, options,
        num_splits=num_splits, entry_pages=entry_pages, interpret=interpret,
    )  # fmt: skip
    return out_Q1NH.reshape(Y, W, N, -1)


def _visible_rows(stretch: Stretch) -> tuple[jax.Array, jax.Array]:
    """The rows that each query sees of a stretch, i32[Q, J], and how many they are, i32[Q, 1]."""
    page_tokens, (last_YW, first_YW, *_) = stretch.pages.shape[1], stretch.bounds
    num_columns, W = stretch.table_YP.shape[1] * page_tokens, last_YW.shape[1]
    last_Q1 = last_YW.reshape(-1, 1)
    first_Q1 = jnp.zeros_like(last_Q1) if first_YW is None else first_YW.reshape(-1, 1)
    nth_QJ = jnp.minimum(first_Q1 + jnp.arange(num_columns, dtype=jnp.int32), num_columns - 1)
    table_QP = jnp.repeat(stretch.table_YP, W, axis=0)
    page_QJ = jnp.take_along_axis(table_QP, nth_QJ // page_tokens, axis=1)
    return page_QJ * page_tokens + nth_QJ % page_tokens, last_Q1 - first_Q1 + 1
