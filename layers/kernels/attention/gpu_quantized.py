"""Attention over quantized pages on Hopper GPUs (Pallas, Mosaic GPU): int8 and fp8, of which twice
as many arrive in the same time, and each costs instructions.

It differs from `gpu.py` in what the rows of the tensor core's tiles (wgmma) are. So

* 64 tokens' keys are the rows of one product, and 64 elements of all values those of the other:
  bytes become numbers in registers, where a first operand may be, and return to no memory;
* queries are columns, as many as there are (8 of one token and at most 8 query heads), where a
  tile of query rows would be 64: the softmax costs an eighth;
* scales multiply the scores of a group's keys, and weights on their way to a group's values.

K counts KV heads, Z rows of the kernel's grid, X splits, U query rows, G groups of a head's key
and of its value, S tokens of a page.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from configs.cache import PageFormat
from layers.kernels.attention import contract, hopper, hopper_pages
from layers.kernels.attention.contract import Demand, Options, Stretch
from layers.kernels.attention.hopper import LOG2_E, MASKED, SHARED_BYTES
from layers.kernels.attention.hopper_pages import BOX_SCALES, GROUP, WORDS
from layers.kernels.attention.mask import MaskBounds, visible
from layers.kernels.attention.tiles import Tiling, page_shares, visible_pages
from layers.kernels.device import Device, target_device
from layers.linear import soft_cap

TILE = 64  # tokens whose keys are rows of a product
_HEAD_WIDTHS = (64, 128, 256)
_BLOCKS_A_CORE = 3  # one converts while another waits
_MOVED_ROWS = 8  # of a tile in shared memory: what is copied comes in multiples
# Whose products run at once, because their operands are in registers: of heads, of latents.
_HEAD_GROUPS, _LATENT_GROUPS = 4, 2


def limit(demand: Demand) -> str | None:
    """What the kernel cannot do with quantized pages: a phrase as `contract.Limit`'s."""
    page_format, page_tokens = demand.page_format, demand.page_tokens
    K, H, format = page_format.kv_heads, page_format.key_width, page_format.dtype
    if format not in hopper_pages.FORMATS:
        return f"reads caches of int8 and fp8, not of {format}: set model.cache_format"
    if demand.has_first_tokens:
        return contract.FIRST_TOKENS
    if demand.has_choice or demand.index_width or demand.stride > 1:
        return contract.CHOICE
    if demand.query_dtype != "bfloat16":
        dtype = demand.query_dtype
        return f"reads {format} caches of bfloat16 models, not {dtype}: set model.dtype"
    if demand.has_observers:
        return (
            f"lays {format} caches out as engine.requests.prompt_budgets does not read them: leave "
            "one of them out"
        )
    if page_tokens not in (TILE, 2 * TILE):
        return (
            f"reads pages of {TILE} or {2 * TILE} tokens, not {page_tokens}: set "
            "engine.cache.page_tokens"
        )
    if page_format.values_in_keys:
        return _latent_limit(demand.num_heads, page_format)
    if (reason := contract.uneven_limit(page_format)) is not None:
        return reason
    if H not in _HEAD_WIDTHS:
        return f"has heads of 64, 128 or 256, not {H}"
    if demand.num_heads > most_rows(page_format) * K:
        most, heads = most_rows(page_format), demand.num_heads // K
        return f"has at most {most} query heads a KV head over {format} pages, not {heads}"
    return None


def _latent_limit(num_heads: int, page_format: PageFormat) -> str | None:
    C, H = page_format.value_width, page_format.key_width
    if C % (2 * GROUP) or C > 512:
        return f"has latents of a multiple of {2 * GROUP} up to 512, not {C}"
    if H - C != GROUP:
        return f"has latents with rotary keys of {GROUP}, not {H - C}"
    if num_heads % head_tiles(num_heads, page_format):
        most = most_rows(page_format)
        return f"divides query heads evenly over tiles of at most {most}, not {num_heads}"
    return None


def most_rows(page_format: PageFormat) -> int:
    """Query rows of a tile, as many as registers have room for."""
    return 32 if page_format.value_width < 256 else 16


def head_tiles(num_heads: int, page_format: PageFormat) -> int:
    """Tiles that the query heads of a latent are divided over."""
    return -(-num_heads // most_rows(page_format))


def default_sizes(
    num_blocks: int, page_tokens: int, page_format: PageFormat, num_rows: int, device: Device
) -> dict[str, int]:
    """Blocks that share a row's pages, for some on each multiprocessor, and pages that a block is
    loading or using, such that these fit.
    """
    H, C = page_format.key_width, page_format.value_width
    num_splits = max(1, _BLOCKS_A_CORE * device.num_cores // num_blocks)
    fixed_bytes = num_rows * (2 * H + (2 + 4) * min(C, _HEAD_GROUPS * GROUP)) + (8 << 10)
    token_bytes = (H if page_format.values_in_keys else H + C) + 4 * BOX_SCALES
    room = SHARED_BYTES // _BLOCKS_A_CORE - fixed_bytes
    num_stages = max(2, min(4, room // (page_tokens * token_bytes)))
    return {"num_splits": num_splits, "num_stages": num_stages}


def attend(
    q_YWNH: jax.Array,
    stretch: Stretch,
    valid_YW: jax.Array,
    page_format: PageFormat,
    options: Options,
    num_splits: int | None,
    num_stages: int | None,
    interpret: object,
    has_totals: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Attention over quantized pages, float32, and on demand log-sum-exps."""
    pages, table_YP, bounds = stretch
    (Y, W, N, _), page_tokens, K = q_YWNH.shape, pages.shape[1], page_format.kv_heads
    if page_format.values_in_keys:
        K = head_tiles(N, page_format)
    G = N // K
    width = min(W, most_rows(page_format) // G)  # query tokens of a tile
    tiling = Tiling(width, G, -(-width * G // _MOVED_ROWS) * _MOVED_ROWS)
    valid_ZW = tiling.split(valid_YW)
    bounds, Z = jax.tree.map(tiling.split, bounds), len(valid_ZW)
    sizes = default_sizes(Z * K, page_tokens, page_format, tiling.num_rows, target_device())
    num_splits = num_splits or sizes["num_splits"]
    is_whole = num_splits == 1 and options.sinks_N is None and not has_totals
    values_ZKXUC, stats_ZKX2U = _attend_splits(
        tiling.pack(q_YWNH), pages, jnp.repeat(table_YP, Z // Y, axis=0),
        jax.tree.map(tiling.spread, bounds),
        *page_shares(*visible_pages(bounds, valid_ZW, page_tokens), num_splits),
        page_format=page_format,
        out_rows=width * G if is_whole else tiling.num_rows, is_whole=is_whole,
        num_stages=num_stages or sizes["num_stages"], score_cap=options.score_cap,
        interpret=interpret,
    )  # fmt: skip
    shape = Y, W, N, page_format.value_width
    if stats_ZKX2U is None:
        return tiling.unpack(values_ZKXUC[:, :, 0], shape).astype(jnp.float32), None
    sinks_KU = None if options.sinks_N is None else tiling.sinks(options.sinks_N)
    out_ZKUC, total_ZKU = _combine(values_ZKXUC, stats_ZKX2U, sinks_KU)
    out_YWNC = tiling.unpack(out_ZKUC, shape)
    if not has_totals:
        return out_YWNC, None
    return out_YWNC, tiling.unpack(total_ZKU[..., None], (Y, W, N, 1))[..., 0]


# --- the kernel -----------------------------------------------------------------------------------


def _combine(
    values_ZKXUH: jax.Array, stats_ZKX2U: jax.Array, sinks_KU: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The softmax over a row's splits and its sink, float32 [Z, K, U, H], 0 if nothing was read;
    and log-sum-exps, [Z, K, U].
    """
    maximum_ZKXU, mass_ZKXU = stats_ZKX2U[:, :, :, 0], stats_ZKX2U[:, :, :, 1]
    maximum_ZKU = maximum_ZKXU.max(2)
    if sinks_KU is not None:
        maximum_ZKU = jnp.maximum(maximum_ZKU, sinks_KU * LOG2_E)
    decay_ZKXU = jnp.exp2(maximum_ZKXU - maximum_ZKU[:, :, None])
    mass_ZKU = (mass_ZKXU * decay_ZKXU).sum(2)
    if sinks_KU is not None:
        mass_ZKU += jnp.exp2(sinks_KU * LOG2_E - maximum_ZKU)
    out_ZKUH = (values_ZKXUH * decay_ZKXU[..., None]).sum(2) / mass_ZKU[..., None]
    out_ZKUH = jnp.where(mass_ZKU[..., None] == 0, 0, out_ZKUH)
    return out_ZKUH, hopper.log_sum_exp(maximum_ZKU, mass_ZKU)


def _attend_splits(
    q_ZKUH: jax.Array,
    pages: jax.Array,
    table_ZP: jax.Array,
    bounds: MaskBounds,  # i32[Z, U] each
    start_ZX: jax.Array,
    stop_ZX: jax.Array,
    *,
    page_format: PageFormat,
    out_rows: int,
    is_whole: bool,
    num_stages: int,
    score_cap: float | None,
    interpret: object,
) -> tuple[jax.Array, jax.Array | None]:
    """Attention of each split alone: weighted values, float32 [Z, K, X, out_rows, C], and maximum
    (base 2) and mass of their weights, float32 [Z, K, X, 2, U]. Where a split `is_whole`, nothing
    is left to combine: their quotient, in the queries' dtype, and None.
    """
    (Z, K, U, H), S, X = q_ZKUH.shape, pages.shape[1], start_ZX.shape[1]
    dtype, bounds_ZU, format = q_ZKUH.dtype, jax.tree.leaves(bounds), page_format.dtype
    out_dtype = dtype if is_whole else jnp.float32
    C, is_latent = page_format.value_width, page_format.values_in_keys
    num_keys, num_values = H // GROUP, C // GROUP  # groups of a head
    key_scales, value_scales = range(num_keys), range(num_values)
    if not is_latent:  # a key's and a value's in turn
        key_scales, value_scales = (range(i, 2 * num_keys, 2) for i in range(2))
    num_scales = max(*key_scales, *value_scales) + 1
    at_once = min(_LATENT_GROUPS if is_latent else _HEAD_GROUPS, num_values)
    num_boxes = -(-num_scales // BOX_SCALES)

    def kernel(
        q_ref, pages_ref, table_ref, bounds_ref, start_ref, stop_ref, out_ref, *stats_refs,
        q_smem, bounds_smem, keys_smem, scales_smem, weights_smem, out_smem, stats_smem,
        q_arrived, bounds_arrived, arrived, values_smem=None,
    ):  # fmt: skip
        hopper.begin(interpret)
        b, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
        start, stop = start_ref[b, split], stop_ref[b, split]
        kv_head = 0 if is_latent else head
        first_scale = kv_head * num_scales
        first_in_box = first_scale // BOX_SCALES * BOX_SCALES

        def fetch(page, j):
            stage = lax.rem(j - start, jnp.int32(num_stages))
            boxes = [(kv_head * (H // 2), H // 2, keys_smem.at[stage])]
            for n in range(num_boxes):
                first = page_format.row_width // 2 + first_in_box + n * BOX_SCALES
                boxes.append((first, BOX_SCALES, scales_smem.at[stage, n]))
            if values_smem is not None:
                first = K * (H // 2) + head * (C // 2)
                boxes.append((first, C // 2, values_smem.at[stage]))
            for first, width, target in boxes:
                box = pages_ref.at[page, :, pl.ds(first, width)]
                plgpu.copy_gmem_to_smem(box, target, arrived.at[stage])

        plgpu.copy_gmem_to_smem(q_ref.at[b, head], q_smem.at[0], q_arrived)
        plgpu.copy_gmem_to_smem(bounds_ref.at[b], bounds_smem, bounds_arrived)
        pl.loop(start, jnp.minimum(stop, start + num_stages))(lambda j: fetch(table_ref[b, j], j))
        plgpu.barrier_wait(q_arrived)
        plgpu.barrier_wait(bounds_arrived)
        fields_U = [bounds_smem[i] for i in range(len(bounds_ZU))]
        bounds_U = jax.tree.unflatten(jax.tree.structure(bounds), fields_U)
        stored_values = keys_smem if is_latent else values_smem

        def words(ref, stage, tokens, part):
            """Those of some groups, [S, 32] each."""
            columns = pl.ds(part.start * WORDS, (part.stop - part.start) * WORDS)
            stored_SX = ref[stage, tokens, columns]
            return [stored_SX[:, n : n + WORDS] for n in range(0, stored_SX.shape[1], WORDS)]

        def scale_SU(stage, tokens, nth):
            box, place = divmod(nth, BOX_SCALES)  # those of a head are in one
            column = pl.ds(first_scale - first_in_box + place, 1)
            scale_S = hopper_pages.column(scales_smem.at[stage, box, tokens, column], interpret)
            return lax.broadcast_in_dim(scale_S, (TILE, U), (0,))

        def fold(j, sums):
            stage = lax.rem(j - start, jnp.int32(num_stages))
            ahead = j + num_stages
            page = table_ref[b, jnp.minimum(ahead, stop - 1)]  # read long before it is used
            plgpu.barrier_wait(arrived.at[stage])
            for first in range(0, S, TILE):
                tokens = pl.ds(first, TILE)
                maximum_U, mass_SU, *values_HU = sums
                scores_SU = scores(stage, tokens, j * S + first)
                new_maximum_U = jnp.maximum(maximum_U, scores_SU.max(0))
                decay_U = jnp.exp2(maximum_U - new_maximum_U)
                decay_SU = lax.broadcast_in_dim(decay_U, (TILE, U), (1,))
                maximum_SU = lax.broadcast_in_dim(new_maximum_U, (TILE, U), (1,))
                weights_SU = jnp.exp2(scores_SU - maximum_SU)
                mass_SU = mass_SU * decay_SU + weights_SU
                values_HU = [x_HU * decay_SU for x_HU in values_HU]
                for at in range(0, num_values, at_once):
                    part = slice(at, min(at + at_once, num_values))
                    scaled = [weights_SU * scale_SU(stage, tokens, n) for n in value_scales[part]]
                    # What is masked may have a scale of NaN, which is another query's to see.
                    scaled = [jnp.where(scores_SU > MASKED, x_SU, 0) for x_SU in scaled]
                    scaled = [x_SU.astype(jnp.bfloat16) for x_SU in scaled]
                    values_SX = words(stored_values, stage, tokens, part)
                    columns = pl.ds(0, len(scaled) * TILE)
                    weights_smem[:, columns] = hopper_pages.transposed(scaled, False, interpret)
                    plgpu.commit_smem()  # and every warp has read the page
                    if part.stop == num_values and first + TILE == S:
                        pl.when(ahead < stop)(lambda: fetch(page, ahead))
                    values_HU[part] = _add_values(
                        values_HU[part], values_SX, weights_smem, format, is_latent, interpret
                    )
                sums = new_maximum_U, mass_SU, *values_HU
            return sums

        def scores(stage, tokens, kv_position):
            """Of keys from a KV position on, f32[S, U] (base 2); `MASKED` where it is not seen."""
            scores_SU = jnp.zeros((TILE, U), jnp.float32)
            # The compiler would keep the addresses of all parts of the queries in registers.
            unknown_0 = jnp.minimum(kv_position, 0)
            for at in range(0, num_keys, at_once):
                part = slice(at, min(at + at_once, num_keys))
                q_UX = q_smem.at[unknown_0, :, pl.ds(at * GROUP, (part.stop - at) * GROUP)]
                raw = _scores(words(keys_smem, stage, tokens, part), q_UX, format, interpret)
                for n, x_SU in zip(key_scales[part], raw, strict=True):
                    scores_SU += x_SU * scale_SU(stage, tokens, n)
            scores_SU = soft_cap(scores_SU, score_cap)
            visible_SU = _visible(scores_SU.shape, kv_position, bounds_U)
            return jnp.where(visible_SU, scores_SU * LOG2_E, MASKED)

        sums = (
            jnp.full((U,), MASKED, jnp.float32), jnp.zeros((TILE, U), jnp.float32),
            *[jnp.zeros((GROUP, U), jnp.float32)] * num_values,
        )  # fmt: skip
        maximum_U, mass_SU, *values_HU = lax.fori_loop(start, stop, fold, sums)
        mass_U = mass_SU.sum(0)
        if is_whole:
            divisor_U = jnp.where(mass_U == 0, 1, mass_U)
            divisor_HU = lax.broadcast_in_dim(divisor_U, (GROUP, U), (1,))
            values_HU = [x_HU / divisor_HU for x_HU in values_HU]
        stats_smem[0], stats_smem[1] = maximum_U, mass_U
        for stats_ref in stats_refs:
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(stats_smem, stats_ref.at[b, head, split])
        for at in range(0, num_values, at_once):
            if at:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last ones have left `out`
            part = [x_HU.astype(out_dtype) for x_HU in values_HU[at : at + at_once]]
            out_smem[...] = hopper_pages.transposed(part, is_latent, interpret)
            plgpu.commit_smem()
            columns = out_ref.at[b, head, split, :, pl.ds(at * GROUP, at_once * GROUP)]
            plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, out_rows)], columns)
        plgpu.wait_smem_to_gmem(0)

    def stages(columns: int) -> pl.MemoryRef:
        row_bytes = 128 if columns % 64 == 0 else 64
        tile = plgpu.TilingTransform((8, row_bytes // 2)), plgpu.SwizzleTransform(row_bytes)
        return plgpu.SMEM((num_stages, S, columns), pages.dtype, transforms=tile)

    tiles = hopper.operand_layout(dtype)
    num_copies = num_boxes + (1 if is_latent else 2)
    scratch: dict[str, pl.MemoryRef | plgpu.Barrier] = dict(
        q_smem=plgpu.SMEM((1, U, H), dtype, transforms=tiles),
        bounds_smem=plgpu.SMEM((len(bounds_ZU), U), jnp.int32),
        keys_smem=stages(H // 2),
        scales_smem=plgpu.SMEM((num_stages, num_boxes, S, BOX_SCALES), pages.dtype),
        weights_smem=plgpu.SMEM((U, at_once * TILE), jnp.bfloat16, transforms=tiles),
        out_smem=plgpu.SMEM((U, at_once * GROUP), out_dtype),
        stats_smem=plgpu.SMEM((2, U), jnp.float32),
        q_arrived=plgpu.Barrier(),
        bounds_arrived=plgpu.Barrier(),
        arrived=plgpu.Barrier(num_arrivals=num_copies, num_barriers=num_stages),
    )
    if not is_latent:
        scratch["values_smem"] = stages(C // 2)
    grid = {"row": Z, "head": K, "split": X}
    if is_latent:  # the last is the one whose neighbors run at the same time
        grid = {"row": Z, "split": X, "head": K}
    values = jax.ShapeDtypeStruct((Z, K, X, out_rows, C), out_dtype)
    stats = jax.ShapeDtypeStruct((Z, K, X, 2, U), jnp.float32)
    values_ZKXUC, *stats_ZKX2U = plgpu.kernel(
        kernel,
        out_type=(values,) if is_whole else (values, stats),
        scratch_types=scratch,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        kernel_name="paged_attention_of_bytes",
        compiler_params=hopper.compiler_params(score_cap),
        interpret=interpret,
    )(q_ZKUH, pages, table_ZP, jnp.stack(bounds_ZU, axis=1), start_ZX, stop_ZX)
    return values_ZKXUC, stats_ZKX2U[0] if stats_ZKX2U else None


def _visible(shape: tuple[int, ...], kv_position: jax.Array, bounds: MaskBounds) -> jax.Array:
    """The mask bool[S, U] of keys from a KV position on. `bounds` are i32[U] each."""
    kv_position_SU = kv_position + lax.broadcasted_iota(jnp.int32, shape, 0)
    bounds_SU = jax.tree.map(lambda x_U: lax.broadcast_in_dim(x_U, shape, (1,)), bounds)
    return visible(kv_position_SU, *bounds_SU)


def _scores(words: list[jax.Array], q_smem: Any, format: str, interpret: object) -> list[jax.Array]:
    """Products of the elements of groups of keys with queries [U, X]: float32 [S, U] of each."""
    (S, _), U = words[0].shape, q_smem.shape[0]

    def operands(n: int) -> tuple[jax.Array, Any]:
        keys_SX = hopper_pages.key_operand(words[n], format, interpret)
        return keys_SX, q_smem.at[:, pl.ds(n * GROUP, GROUP)]

    if interpret:
        return [hopper.dot(x_SX, q_UX[...], 1) for x_SX, q_UX in map(operands, range(len(words)))]

    def products(*sum_refs):
        for n, sum_ref in enumerate(sum_refs):
            keys_SX, q_UX = operands(n)
            plgpu.wgmma(sum_ref, keys_SX, q_UX.transpose((1, 0)))
        return [sum_ref[...] for sum_ref in sum_refs]

    return pl.run_scoped(products, *[plgpu.ACC((S, U), jnp.float32)] * len(words))


def _add_values(
    values_HU: list[jax.Array], words: list[jax.Array], weights_smem: Any, format: str,
    of_latents: bool, interpret: object,
) -> list[jax.Array]:  # fmt: skip
    """The sums [64, U] of groups with what weights [U, S of each] make of values' elements."""

    def operands(n: int) -> tuple[jax.Array, Any]:
        value_XS = hopper_pages.value_operand(words[n], format, of_latents, interpret)
        return value_XS, weights_smem.at[:, pl.ds(n * TILE, TILE)]

    if interpret:
        pairs = map(operands, range(len(words)))
        products = (hopper.dot(value_XS, weights_US[...], 1) for value_XS, weights_US in pairs)
        return [x_HU + y_HU for x_HU, y_HU in zip(values_HU, products, strict=True)]

    def product(sum_refs):
        for n, sum_ref in enumerate(sum_refs):
            value_XS, weights_US = operands(n)
            plgpu.wgmma(sum_ref, value_XS, weights_US.transpose((1, 0)))

    return pl.run_state(product)([plgpu.ACC.init(x_HU) for x_HU in values_HU])
