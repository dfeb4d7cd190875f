"""Scores of an indexer's keys on Hopper GPUs (Pallas, Mosaic GPU): `contract.IndexScores` (the
lightning indexer, DeepSeek-AI 2025, DeepSeek-V3.2).

A score is the sum over heads of weight x relu(q.k), and all heads share a token's key. So keys are
the 64 rows of a tensor-core tile (wgmma) and heads its columns: a thread has whole parts of a row,
whose weighted sum stays in registers. A block of threads (one warpgroup) belongs to some query
tokens of a row and a split of the row's keys. Each key comes once for all of them, by the copy
engine (TMA), while earlier ones are multiplied. Keys that no query sees are not read.

Z counts tiles of query tokens, J tiles of 64 keys.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from configs.cache import PageFormat
from layers import page_rows
from layers.kernels.attention import hopper
from layers.kernels.attention.contract import PLAIN, Options
from layers.kernels.attention.hopper import ROWS, SHARED_BYTES
from layers.kernels.device import target_device

_KEY_PARTS = 64  # elements of a key come in multiples
_MOST_WIDTH = 256  # of keys, four stages of which fit
_HEAD_PARTS = 8  # columns of a product come in multiples
_MOST_TOKENS = 4  # of a tile, whose queries lie in shared memory
_NUM_STAGES = 4
_BLOCKS_A_CORE = 2  # that shared memory has room for


def limit(index_width: int, page_entries: int) -> str | None:
    """Which keys of an indexer the kernel does not read: a phrase as `contract.Limit`'s."""
    if index_width % _KEY_PARTS or index_width > _MOST_WIDTH:
        return (
            f"scores keys of an indexer of a multiple of {_KEY_PARTS} elements, at most "
            f"{_MOST_WIDTH}, not {index_width}"
        )
    if page_entries % 8 or max(page_entries, ROWS) % min(page_entries, ROWS):
        return f"scores an indexer's keys in pages of 8, 16, 32, 64 or 128, not {page_entries}"
    return None


def most_tokens(num_heads: int, index_width: int) -> int:
    """Query tokens of a tile, whose queries shared memory has room for beside the stages."""
    room = SHARED_BYTES - 2 * _NUM_STAGES * ROWS * index_width - (8 << 10)
    return max(1, min(_MOST_TOKENS, room // (2 * num_heads * index_width)))


def index_scores(
    q_YWIX: jax.Array,
    weights_YWI: jax.Array,
    pages: jax.Array,
    table_YP: jax.Array,
    count_Y: jax.Array,
    index_format: PageFormat,
    options: Options = PLAIN,
    *,
    num_splits: int | None = None,
    interpret: object = None,
) -> jax.Array:
    """`contract.IndexScores`.

    Args:
        num_splits: blocks that share a row's keys; None: as many as fill the device.
        interpret: `InterpretGPUParams`: interpreted, on any device.
    """
    (Y, W, num_heads, _), page_tokens = q_YWIX.shape, pages.shape[1]
    tiles = -(-W // most_tokens(*q_YWIX.shape[2:]))
    width = -(-W // tiles)
    padding = -W % width, -num_heads % _HEAD_PARTS
    tokens_heads = (0, 0), (0, padding[0]), (0, padding[1])
    q_YWIX = jnp.pad(q_YWIX, (*tokens_heads, (0, 0)))
    weights_YWI = jnp.pad(weights_YWI, tokens_heads)
    num_keys = table_YP.shape[1] * page_tokens
    num_tiles_Y = -(-jnp.minimum(count_Y, num_keys) // ROWS)
    num_splits = num_splits or max(1, _BLOCKS_A_CORE * target_device().num_cores // (Y * tiles))
    scores_YWS = _scores(
        q_YWIX, weights_YWI, page_rows.decode(pages), table_YP, num_tiles_Y, width,
        min(num_splits, -(-num_keys // ROWS)), interpret,
    )  # fmt: skip
    return scores_YWS[:, :W]


def _scores(
    q_YWIX: jax.Array,
    weights_YWI: jax.Array,
    pages: jax.Array,
    table_YP: jax.Array,
    num_tiles_Y: jax.Array,
    width: int,
    num_splits: int,
    interpret: object,
) -> jax.Array:
    """Scores of each row's first tiles of 64 keys, `width` query tokens at a time."""
    (Y, W, num_heads, X), page_tokens, dtype = q_YWIX.shape, pages.shape[1], pages.dtype
    box = min(page_tokens, ROWS)  # keys of one copy
    page_boxes = page_tokens // box
    num_keys = table_YP.shape[1] * page_tokens

    def kernel(
        q_ref, weights_ref, boxes_ref, table_ref, num_tiles_ref, scores_ref,
        q_smem, weights_smem, keys_smem, scores_smem, q_arrived, weights_arrived, arrived,
    ):  # fmt: skip
        hopper.begin(interpret)
        y, tile, split = (lax.axis_index(name) for name in ("row", "tile", "split"))
        num_tiles = num_tiles_ref[y]
        share = lax.div(num_tiles + num_splits - 1, jnp.int32(num_splits))
        start = jnp.minimum(split * share, num_tiles)
        stop = jnp.minimum(start + share, num_tiles)
        tokens = pl.ds(tile * width, width)

        def fetch(j):
            stage = lax.rem(j - start, jnp.int32(_NUM_STAGES))
            for part in range(ROWS // box):
                nth = j * (ROWS // box) + part
                page = table_ref[y, lax.div(nth, jnp.int32(page_boxes))]
                keys = boxes_ref.at[page * page_boxes + lax.rem(nth, jnp.int32(page_boxes))]
                target = keys_smem.at[stage, pl.ds(part * box, box)]
                plgpu.copy_gmem_to_smem(keys, target, arrived.at[stage])

        for w in range(width):
            plgpu.copy_gmem_to_smem(q_ref.at[y, tile * width + w], q_smem.at[w], q_arrived)
        plgpu.copy_gmem_to_smem(weights_ref.at[y, tokens], weights_smem, weights_arrived)
        pl.loop(start, jnp.minimum(stop, start + _NUM_STAGES))(fetch)
        plgpu.barrier_wait(q_arrived)
        plgpu.barrier_wait(weights_arrived)

        @pl.loop(start, stop)
        def _(j):
            stage = lax.rem(j - start, jnp.int32(_NUM_STAGES))
            plgpu.barrier_wait(arrived.at[stage])
            sums = []
            for w in range(width):
                products_SI = hopper.scores(keys_smem.at[stage], q_smem.at[w], interpret)
                weights_SI = lax.broadcast_in_dim(weights_smem[w], products_SI.shape, (1,))
                sums.append((jnp.maximum(products_SI, 0) * weights_SI).sum(1))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last scores have left
            for w, sum_S in enumerate(sums):
                scores_smem[w] = sum_S
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(scores_smem, scores_ref.at[y, tokens, pl.ds(j * ROWS, ROWS)])
            pl.when(j + _NUM_STAGES < stop)(lambda: fetch(j + _NUM_STAGES))

        plgpu.wait_smem_to_gmem(0)

    operand = hopper.operand_layout(dtype)
    scratch: dict[str, pl.MemoryRef | plgpu.Barrier] = dict(
        q_smem=plgpu.SMEM((width, num_heads, X), dtype, transforms=operand),
        weights_smem=plgpu.SMEM((width, num_heads), jnp.float32),
        keys_smem=plgpu.SMEM((_NUM_STAGES, ROWS, X), dtype, transforms=operand),
        scores_smem=plgpu.SMEM((width, ROWS), jnp.float32),
        q_arrived=plgpu.Barrier(num_arrivals=width),
        weights_arrived=plgpu.Barrier(),
        arrived=plgpu.Barrier(num_arrivals=ROWS // box, num_barriers=_NUM_STAGES),
    )
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((Y, W, num_keys), jnp.float32),
        scratch_types=scratch,
        grid=(Y, W // width, num_splits),
        grid_names=("row", "tile", "split"),
        kernel_name="index_scores",
        compiler_params=hopper.compiler_params(None),
        interpret=interpret,
    )(q_YWIX.astype(dtype), weights_YWI, pages.reshape(-1, box, X), table_YP, num_tiles_Y)
