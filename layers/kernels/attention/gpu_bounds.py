"""Upper bounds of the scores of pages on Hopper GPUs (Pallas, Mosaic GPU): `contract.PageBounds`
(Quest, Tang et al. 2024, arXiv 2406.10774).

An element's product with a query is largest with the largest key where the query is positive, else
with the smallest. So a bound is a sum of two products: of the queries' negative parts with a page's
smallest keys, and of their positive parts with the largest. A block of threads (one warpgroup)
belongs to some query tokens of a row, a KV head and a split of the row's pages. It gathers the
head's extremes of 64 pages as two tiles for the tensor core (wgmma), once for all tokens.

U counts query tokens of a tile, J tiles of 64 pages.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from configs.cache import PageFormat
from layers import page_rows
from layers.kernels.attention import gpu_gather, hopper
from layers.kernels.attention.contract import PLAIN, Options
from layers.kernels.attention.hopper import ROWS
from layers.kernels.device import target_device

_MOVED_ROWS = 8  # of a tile in shared memory: what is copied comes in multiples
_SIGNS = 2  # negative parts meet the smallest keys, positive ones the largest


def page_bounds(
    q_YWNH: jax.Array,
    extremes: jax.Array,
    table_YP: jax.Array,
    count_Y: jax.Array,
    page_format: PageFormat,
    options: Options = PLAIN,
    *,
    interpret: object = None,
) -> jax.Array:
    """`contract.PageBounds`; `interpret` takes `InterpretGPUParams`."""
    (Y, W, N, H), K, num_pages = q_YWNH.shape, page_format.kv_heads, table_YP.shape[1]
    q_YWKGH = q_YWNH.astype(jnp.float32).reshape(Y, W, K, N // K, H)
    signed = jnp.minimum(q_YWKGH, 0), jnp.maximum(q_YWKGH, 0)
    q_YKSWH = jnp.stack([part.sum(3).swapaxes(1, 2) for part in signed], axis=2)
    tiles = -(-W // ROWS)
    width = -(-W // (tiles * _MOVED_ROWS)) * _MOVED_ROWS
    q_YKSWH = jnp.pad(q_YKSWH, (*((0, 0),) * 3, (0, tiles * width - W), (0, 0)))
    table_YP = jnp.pad(table_YP, ((0, 0), (0, -num_pages % ROWS)))
    num_tiles_Y = -(-jnp.minimum(count_Y, num_pages) // ROWS)
    bounds_YKWP = _bounds(
        q_YKSWH.astype(q_YWNH.dtype), page_rows.decode(extremes), table_YP, num_tiles_Y, width,
        interpret,
    )  # fmt: skip
    return bounds_YKWP[:, :, :W, :num_pages].swapaxes(1, 2)


def _bounds(
    q_YKSWH: jax.Array,
    extremes: jax.Array,
    table_YP: jax.Array,
    num_tiles_Y: jax.Array,
    width: int,
    interpret: object,
) -> jax.Array:
    """Bounds of each row's first tiles of 64 pages, float32 [Y, K, W, P]."""
    (Y, K, _, W, H), P, dtype = q_YKSWH.shape, table_YP.shape[1], extremes.dtype
    blocks = target_device().num_cores // (Y * K * (W // width))
    num_splits = min(max(1, blocks), P // ROWS)

    def kernel(
        q_ref, extremes_ref, table_ref, num_tiles_ref, bounds_ref,
        q_smem, extremes_smem, bounds_smem, q_arrived,
    ):  # fmt: skip
        hopper.begin(interpret)
        y, head, tile, split = (lax.axis_index(name) for name in ("row", "head", "tile", "split"))
        num_tiles, tokens = num_tiles_ref[y], pl.ds(tile * width, width)
        for sign in range(_SIGNS):
            target = q_smem.at[sign, pl.ds(0, width)]
            plgpu.copy_gmem_to_smem(q_ref.at[y, head, sign, tokens], target, q_arrived)
        plgpu.barrier_wait(q_arrived)

        @pl.loop(split, num_tiles, step=num_splits)
        def _(j):
            pages = pl.ds(j * ROWS, ROWS)
            for sign in range(_SIGNS):
                source = extremes_ref.at[:, sign, pl.ds(head * H, H)]
                ids = table_ref.at[y, pages]
                gpu_gather.start(ids, (source,), extremes_smem.at[sign], interpret)
            gpu_gather.wait(0, interpret)
            negative_UP, positive_UP = (
                hopper.scores(q_smem.at[sign], extremes_smem.at[sign], interpret)
                for sign in range(_SIGNS)
            )
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last bounds have left
            bounds_smem[...] = negative_UP + positive_UP
            plgpu.commit_smem()
            target = bounds_ref.at[y, head, tokens, pages]
            plgpu.copy_smem_to_gmem(bounds_smem.at[pl.ds(0, width)], target)

        plgpu.wait_smem_to_gmem(0)

    operand = plgpu.SMEM((_SIGNS, ROWS, H), dtype, transforms=hopper.operand_layout(dtype))
    scratch: dict[str, pl.MemoryRef | plgpu.Barrier] = dict(
        q_smem=operand,
        extremes_smem=operand,
        bounds_smem=plgpu.SMEM((ROWS, ROWS), jnp.float32),
        q_arrived=plgpu.Barrier(num_arrivals=_SIGNS),
    )
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((Y, K, W, P), jnp.float32),
        scratch_types=scratch,
        grid=(Y, K, W // width, num_splits),
        grid_names=("row", "head", "tile", "split"),
        kernel_name="page_bounds",
        compiler_params=hopper.compiler_params(None),
        interpret=interpret,
    )(q_YKSWH, extremes, table_YP, num_tiles_Y)
