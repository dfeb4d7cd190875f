"""JAX's own ragged paged attention on TPUs (`pallas.ops.tpu.ragged_paged_attention`) behind the
contract: a peer of `tpu.py`, tuned by its authors for v5 and v6.

It takes packed queries of consecutive tokens, and pages in which a head's keys stand beside its
values, [pages, page tokens, 2 K, H]. It reads every page of a sequence, and adds to masked scores
instead of replacing them, so a NaN in a page that slid out of a window would reach the page's next
owner: windows are refused.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

from configs.cache import PageFormat
from configs.errors import InputError
from layers.kernels.attention.contract import CHOICE, PLAIN, Demand, Options, uneven_limit
from layers.kernels.attention.tpu import KINDS, table_limit
from layers.kernels.device import Device
from layers.ragged import Ragged, Rectangle

_HEAD_WIDTH = 128
# Its table of tuned sizes covers only the default device, which may not be the target. Of its
# entries with pages of 128 tokens most read 8 or 16 pages for 32 queries.
_BLOCK_PAGES, _BLOCK_TOKENS, _BLOCK_QUERIES = 16, 1024, 32
_VMEM_BYTES = 32 << 20  # its blocks need more than XLA grants a kernel unasked on v5


def limit(demand: Demand, device: Device) -> str | None:
    """What the kernel cannot do: `contract.Limit`."""
    page_format = demand.page_format
    if device.kind not in KINDS:
        return f"runs on TPU v5e, v5p, v6e and 7x, not on {device.kind}"
    if demand.deterministic:
        return "has not been measured to be deterministic"
    if demand.has_choice:
        return CHOICE
    if demand.has_observers:
        return (
            "lays pages out as engine.requests.prompt_budgets does not read them: 'pallas_tpu' does"
        )
    K, H, dtype = page_format.kv_heads, page_format.key_width, page_format.dtype
    if page_format.is_quantized:
        return f"reads no {dtype} caches: leave model.cache_format out"
    if dtype != "bfloat16":
        return f"reads pages of bfloat16, not {dtype}: set model.dtype=bfloat16"
    if demand.has_window:
        return "reads what slid out of a window: 'pallas_tpu' skips it"
    if demand.has_trees:
        return "knows no trees of drafts: 'pallas_tpu' does"
    if (reason := uneven_limit(page_format)) is not None:
        return reason
    if H != _HEAD_WIDTH:
        return f"has heads of {_HEAD_WIDTH}, not {H}: 'pallas_tpu' has others"
    if K not in (1, 2, 4) and K % 8:
        return f"has 1, 2, 4 or a multiple of 8 KV heads, not {K}: 'pallas_tpu' has any number"
    return table_limit(demand)


def layout(num_pages: int, page_tokens: int, page_format: PageFormat) -> jax.ShapeDtypeStruct:
    """[pages, page tokens, 2 K, H], a head's key before its value, as numbers."""
    shape = num_pages, page_tokens, 2 * page_format.kv_heads, page_format.key_width
    return jax.ShapeDtypeStruct(shape, page_format.dtype)


def write(pages: jax.Array, row_TX: jax.Array, ragged: Ragged, group: int) -> jax.Array:
    """Scatters whole tokens, which XLA does in place on TPUs in this layout."""
    page_T, offset_T = ragged.page_T(group, pages.shape[1])
    row_T2KH = row_TX.reshape(-1, 2, pages.shape[2] // 2, pages.shape[3])
    row_TXH = row_T2KH.swapaxes(1, 2).reshape(-1, *pages.shape[2:])
    return pages.at[page_T, offset_T].set(row_TXH.astype(pages.dtype), mode="promise_in_bounds")


def attend_pages(
    q_YWNH: jax.Array,
    pages: jax.Array,
    rectangle: Rectangle,
    group: int,
    page_format: PageFormat,
    options: Options = PLAIN,
) -> jax.Array:
    """`contract.AttendPages`, of causal rows; raises InputError for a window, sinks, tree or
    canvas.
    """
    unknown = [options.window, options.sinks_N, rectangle.ancestors_YW, rectangle.causal_Y]
    if any(x is not None for x in unknown):
        raise InputError(
            "attention 'jax_tpu' knows no windows, sinks, trees or canvases: 'pallas_tpu' does"
        )
    (Y, W), table_YP = rectangle.valid_YW.shape, rectangle.tables[group]
    # Only valid tokens are packed, and one of a row without any, since every row must have one.
    count_Y = jnp.maximum(rectangle.valid_YW.sum(1, dtype=jnp.int32), 1)
    start_X = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(count_Y, dtype=jnp.int32)])
    nth_T = jnp.arange(Y * W, dtype=jnp.int32)
    row_T = jnp.clip(jnp.searchsorted(start_X, nth_T, side="right") - 1, 0, Y - 1)
    source_T = row_T * W + jnp.minimum(nth_T - start_X[row_T], W - 1)
    last_Y = jnp.take_along_axis(rectangle.kv_position_YW, count_Y[:, None] - 1, axis=1)[:, 0]
    out_TNH = kernel.ragged_paged_attention(
        q_YWNH.reshape(Y * W, *q_YWNH.shape[2:])[source_T], pages,
        jnp.where(rectangle.valid_YW.any(1), last_Y + 1, 1), table_YP, start_X,
        jnp.array([Y], jnp.int32), soft_cap=options.score_cap,
        num_kv_pages_per_block=min(
            table_YP.shape[1], _BLOCK_PAGES, max(1, _BLOCK_TOKENS // pages.shape[1])
        ),
        num_queries_per_block=min(Y * W, _BLOCK_QUERIES), vmem_limit_bytes=_VMEM_BYTES,
    )  # fmt: skip
    packed_YW = start_X[:-1, None] + jnp.minimum(jnp.arange(W), count_Y[:, None] - 1)
    return out_TNH[packed_YW].astype(jnp.float32)
