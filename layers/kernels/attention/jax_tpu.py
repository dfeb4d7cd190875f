"""JAX's own ragged paged attention on TPUs (`pallas.ops.tpu.ragged_paged_attention`) behind the
contract: a peer of `tpu.py`, tuned by its authors for v5 and v6.

It takes packed queries of consecutive tokens, and pages in which a head's keys stand beside its
values, [pages, page tokens, 2 K, H]. It reads every page of a sequence, and adds to masked scores
where others replace them, so that a NaN in a page which slid out of a window would reach whoever
owns it now: windows are refused.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

from configs.errors import InputError
from layers.kernels.attention.contract import PLAIN, Demand, Options
from layers.kernels.attention.tpu import KINDS, table_limit
from layers.kernels.device import Device
from layers.ragged import Ragged, Rectangle

_HEAD_WIDTH = 128
# Its table of tuned sizes knows the default device only, which may be another than the target. Of
# its entries with pages of 128 tokens most read 8 or 16 pages for 32 queries.
_BLOCK_PAGES, _BLOCK_TOKENS, _BLOCK_QUERIES = 16, 1024, 32
_VMEM_BYTES = 32 << 20  # its blocks need more than XLA grants a kernel unasked on v5


def limit(demand: Demand, device: Device) -> str | None:
    """What the kernel cannot do: `contract.Limit`."""
    if device.kind not in KINDS:
        return f"runs on TPU v5e, v5p, v6e and 7x, not on {device.kind}"
    if demand.deterministic:
        return "has not been measured to be deterministic"
    if demand.dtype != "bfloat16":
        return f"reads pages of bfloat16, not {demand.dtype}: set model.dtype=bfloat16"
    if demand.has_windows:
        return "reads what slid out of a window: 'pallas_tpu' skips it"
    if demand.head_width != _HEAD_WIDTH:
        return f"has heads of {_HEAD_WIDTH}, not {demand.head_width}: 'pallas_tpu' has others"
    if demand.num_kv_heads not in (1, 2, 4) and demand.num_kv_heads % 8:
        return (
            f"has 1, 2, 4 or a multiple of 8 KV heads, not {demand.num_kv_heads}: 'pallas_tpu' "
            "has any number"
        )
    return table_limit(demand)


def layout(
    num_pages: int, page_tokens: int, num_kv_heads: int, head_width: int, dtype: str
) -> jax.ShapeDtypeStruct:
    """[pages, page tokens, 2 K, H], a head's key before its value, as numbers."""
    return jax.ShapeDtypeStruct((num_pages, page_tokens, 2 * num_kv_heads, head_width), dtype)


def write(
    pages: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, ragged: Ragged, group: int
) -> jax.Array:
    """Scatters whole tokens, which XLA does in place on TPUs in this layout."""
    page_T, offset_T = ragged.page_T(group, pages.shape[1])
    kv_TXH = jnp.stack([k_TKH, v_TKH], axis=2).reshape(-1, *pages.shape[2:])
    return pages.at[page_T, offset_T].set(kv_TXH.astype(pages.dtype), mode="promise_in_bounds")


def attend_pages(
    q_CWNH: jax.Array,
    pages: jax.Array,
    rectangle: Rectangle,
    group: int,
    options: Options = PLAIN,
) -> jax.Array:
    """`contract.AttendPages`, of rows that are chains and see all before them.

    Raises:
        InputError: a window, sinks, a tree or a canvas.
    """
    unknown = [options.window, options.sinks_N, rectangle.ancestors_CW, rectangle.causal_C]
    if any(x is not None for x in unknown):
        raise InputError(
            "attention 'jax_tpu' knows no windows, sinks, trees or canvases: 'pallas_tpu' does"
        )
    (C, W), table_CP = rectangle.valid_CW.shape, rectangle.tables[group]
    # Only valid tokens are packed, and one of a row without any, since every row must have one.
    count_C = jnp.maximum(rectangle.valid_CW.sum(1, dtype=jnp.int32), 1)
    start_X = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(count_C, dtype=jnp.int32)])
    nth_T = jnp.arange(C * W, dtype=jnp.int32)
    row_T = jnp.clip(jnp.searchsorted(start_X, nth_T, side="right") - 1, 0, C - 1)
    source_T = row_T * W + jnp.minimum(nth_T - start_X[row_T], W - 1)
    last_C = jnp.take_along_axis(rectangle.position_CW, count_C[:, None] - 1, axis=1)[:, 0]
    out_TNH = kernel.ragged_paged_attention(
        q_CWNH.reshape(C * W, *q_CWNH.shape[2:])[source_T], pages,
        jnp.where(rectangle.valid_CW.any(1), last_C + 1, 1), table_CP, start_X,
        jnp.array([C], jnp.int32), soft_cap=options.score_cap,
        num_kv_pages_per_block=min(
            table_CP.shape[1], _BLOCK_PAGES, max(1, _BLOCK_TOKENS // pages.shape[1])
        ),
        num_queries_per_block=min(C * W, _BLOCK_QUERIES), vmem_limit_bytes=_VMEM_BYTES,
    )  # fmt: skip
    packed_CW = start_X[:-1, None] + jnp.minimum(jnp.arange(W), count_C[:, None] - 1)
    return out_TNH[packed_CW].astype(jnp.float32)
