"""Products of few rows with planes of bits on Hopper GPUs (Pallas, Mosaic GPU): a byte of the
matrix is read once, and its numbers exist in registers only.

XLA expands int8 and fp8 with a scale a row within its own products there, and needs no kernel. Of
fewer bits, or where groups have scales, it writes the whole matrix expanded.

A block of threads (one warpgroup) belongs to 64 features of a matrix, and to a share of their rows'
bytes where features are few. 128 bytes of each come by the copy engine (TMA) beside the activations
they meet, further ones on their way while these are used. Their integers, less the zero point, are
one operand of the tensor core (wgmma), in registers, the activations the other, in shared memory:
[64 features, W rows]. A group is one product, whose sums its scale weighs.

X counts shares.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from configs.precision import FORMATS
from layers import quantized
from layers.kernels.device import target_device
from layers.kernels.linear import low_bit
from layers.kernels.linear.low_bit import LANES, Quantized

_FEATURES = 64  # of a wgmma tile
_ROWS = 8  # of activations come in multiples
# Without spilled registers: fewer for groups of 32, and for planes of two bits and one, which meet
# more activations at once.
_MOST_ROWS, _SMALL_GROUP_ROWS, _THIN_PLANE_ROWS = 64, 48, 32
_MOST_STAGES = 4
_SHARED_BYTES = 200 << 10  # of stages, of 227 KiB
_BLOCKS_A_CORE = 2


def can_multiply(num_rows: int, w: Quantized) -> bool:
    """Whether the kernel multiplies such rows with (a matrix of) w."""
    *_, F, D = w.shape
    least = min(low_bit.planes(w.format))
    max_rows = _SMALL_GROUP_ROWS if w.scale.shape[-2] * 64 > D else _MOST_ROWS
    return (
        low_bit.has_groups(w)
        and w.dtype == "bfloat16"
        and F % _FEATURES == D % (LANES * 8 // least) == 0
        and num_rows <= (max_rows if least >= 4 else _THIN_PLANE_ROWS)
    )


def products(
    x_BWD: jax.Array, w: Quantized, matrix_B: jax.Array, interpret: object = None
) -> jax.Array:
    """`low_bit_product.products`, of rows that `can_multiply` allows."""

    def product(x_BWD: jax.Array, bits: int, shift: int) -> jax.Array:
        return _plane(x_BWD, w, matrix_B, bits, shift, interpret)

    return low_bit.times_rows(low_bit.sum_of_planes(product, x_BWD, w, _ROWS), w, matrix_B)


def _plane(
    x_BWD: jax.Array, w: Quantized, matrix_B: jax.Array, bits: int, shift: int, interpret: object
) -> jax.Array:
    """Products with one plane's integers, float32 [B, W, F]; zero points belong to the first."""
    (B, W, D), (E, F, _) = x_BWD.shape, w.shape
    K, first, size = LANES * 8 // bits, D * shift // 8 // LANES, D // w.scale.shape[1]
    groups, num_steps, dtype = K // size, D // K, x_BWD.dtype
    num_tiles = F // _FEATURES
    target_shares = -(-target_device().num_cores * _BLOCKS_A_CORE // (B * num_tiles))
    num_shares = max(1, min(target_shares, num_steps))
    stored_zero = w.zero if w.zero is not None and shift == 0 else None
    middle = 0.0 if w.zero is not None or shift else low_bit.middle(w.format)
    weights = [w.scale] if stored_zero is None else [w.scale, stored_zero]
    num_scales = _FEATURES // FORMATS[w.format].rows  # of a group
    elements = low_bit.elements(w) if bits == 8 else lax.bitcast_convert_type(w.data, jnp.int8)
    stage_bytes = _FEATURES * (LANES + 5 * groups) + W * K * dtype.itemsize
    num_stages = min(_MOST_STAGES, _SHARED_BYTES // stage_bytes)

    def kernel(
        x_ref, data_ref, *refs, data_smem, x_smem, scale_smem, out_smem, data_arrived, x_arrived,
        scale_arrived, zero_smem=None, zero_arrived=None,
    ):  # fmt: skip
        *weight_refs, matrix_ref, out_ref = refs
        b, tile, share = (lax.axis_index(name) for name in ("block", "tile", "share"))
        e = matrix_ref[b]
        features = pl.ds(tile * _FEATURES, _FEATURES)
        tile_scales = pl.ds(tile * num_scales, num_scales)
        start = share * num_steps // num_shares
        stop = jnp.where(e < E, (share + 1) * num_steps // num_shares, start)

        def fetch(k):
            stage = lax.rem(k - start, jnp.int32(num_stages))
            own_groups = pl.ds(k * groups, groups)
            copies = [
                (data_ref.at[e, features, pl.ds((first + k) * LANES, LANES)], data_smem,
                 data_arrived),
                (x_ref.at[b, :, pl.ds(k * K, K)], x_smem, x_arrived),
                (weight_refs[0].at[e, own_groups, tile_scales], scale_smem, scale_arrived),
            ]  # fmt: skip
            if stored_zero is not None:
                box = weight_refs[1].at[e, own_groups, features]
                copies.append((box, zero_smem, zero_arrived))
            for source, target, arrived in copies:
                plgpu.copy_gmem_to_smem(source, target.at[stage], arrived.at[stage])

        def fold(k, sum_FW):
            stage = lax.rem(k - start, jnp.int32(num_stages))
            plgpu.barrier_wait(data_arrived.at[stage])
            plgpu.barrier_wait(x_arrived.at[stage])
            plgpu.barrier_wait(scale_arrived.at[stage])
            if stored_zero is not None:
                plgpu.barrier_wait(zero_arrived.at[stage])
            byte_FL = data_smem[stage]
            for part in range(8 // bits):
                shifted = part * bits
                number_FL, bias = _numbers(byte_FL, bits, shifted, w.format, dtype)
                for j in range(LANES // size):
                    group = part * (LANES // size) + j
                    columns = slice(group * size, (group + 1) * size)
                    number_FK = number_FL[:, j * size : (j + 1) * size]
                    if stored_zero is not None:
                        zero_F = zero_smem[stage, group].astype(jnp.float32)
                        zero_F = ((zero_F - bias) * (1 << shifted)).astype(dtype)
                        number_FK -= lax.broadcast_in_dim(zero_F, number_FK.shape, (0,))
                    elif middle != bias:
                        number_FK -= jnp.asarray((middle - bias) * (1 << shifted), dtype)
                    group_FW = _product(number_FK, x_smem.at[stage, :, columns], interpret)
                    scale_F = low_bit.as_float(_of_features(scale_smem.at[stage, group]), w.format)
                    scale_F *= 2.0**-shifted
                    sum_FW += group_FW * lax.broadcast_in_dim(scale_F, group_FW.shape, (0,))
            plgpu.commit_smem()  # every warp has read
            pl.when(k + num_stages < stop)(lambda: fetch(k + num_stages))
            return sum_FW

        pl.loop(start, jnp.minimum(stop, start + num_stages))(fetch)
        sum_FW = lax.fori_loop(start, stop, fold, jnp.zeros((_FEATURES, W), jnp.float32))
        out_smem[...] = sum_FW
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_ref.at[share, b, features])
        plgpu.wait_smem_to_gmem(0)

    def arrived() -> plgpu.Barrier:
        return plgpu.Barrier(num_barriers=num_stages)

    def stage_buffer(
        shape: tuple[int, int], dtype: jax.typing.DTypeLike, swizzled: int | None = None
    ) -> pl.MemoryRef:
        """A stage's arrays, plain or in tiles of 8 rows with swizzled 16-byte parts."""
        transforms: tuple[plgpu.TilingTransform | plgpu.SwizzleTransform, ...] = ()
        if swizzled is not None:
            tile = 8, swizzled // jnp.dtype(dtype).itemsize
            transforms = plgpu.TilingTransform(tile), plgpu.SwizzleTransform(swizzled)
        return plgpu.SMEM((num_stages, *shape), dtype, transforms=transforms)

    scratch: dict[str, pl.MemoryRef | plgpu.Barrier] = dict(
        data_smem=stage_buffer((_FEATURES, LANES), elements.dtype, LANES),
        x_smem=stage_buffer((W, K), dtype, min(128, 2 * size)),  # a group's columns are whole tiles
        scale_smem=stage_buffer((groups, num_scales), w.scale.dtype),
        out_smem=plgpu.SMEM((_FEATURES, W), jnp.float32),
        data_arrived=arrived(), x_arrived=arrived(), scale_arrived=arrived(),
    )  # fmt: skip
    if stored_zero is not None:
        scratch |= dict(
            zero_smem=stage_buffer((groups, _FEATURES), stored_zero.dtype), zero_arrived=arrived()
        )
    partial_XBFW = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((num_shares, B, F, W), jnp.float32),
        scratch_types=scratch,
        grid=(B, num_tiles, num_shares),
        grid_names=("block", "tile", "share"),
        kernel_name="low_bit_product",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )(x_BWD, elements, *weights, matrix_B)
    return partial_XBFW.sum(0).swapaxes(1, 2)


def _numbers(
    byte_FL: jax.Array, bits: int, shifted: int, format: str, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, int]:
    """The bits from `shifted` on as multiples of 2^shifted, less the second number returned of
    them: where they are where they have a sign, they are taken as they are. Eight bits are a number
    of the format's type.
    """
    if bits == 8:
        return byte_FL.astype(jnp.float32).astype(dtype), 0
    if quantized.is_e2m1(format):
        size = (byte_FL & (7 << shifted)).astype(dtype) * 2.0**-shifted
        sign = (byte_FL & _int8(8 << shifted)).astype(dtype) * (2.0**-shifted / 4)
        # 0 to 7 become twice 0, 0.5, 1, 1.5, 2, 3, 4 and 6.
        size += jnp.maximum(size - 4, 0) + 2 * jnp.maximum(size - 6, 0)
        sign = 1 - sign if shifted == 0 else 1 + sign
        return sign * size * 2.0 ** (shifted - 1), 0
    mask = _int8((1 << bits) - 1 << shifted)
    if shifted + bits < 8:
        return (byte_FL & mask).astype(dtype), 0
    return ((byte_FL ^ _int8(1 << 7)) & mask).astype(dtype), 1 << bits - 1


def _of_features(scale_smem) -> jax.Array:
    """A group's scales, each of as many features, as [features]."""
    (num_scales,) = scale_smem.shape
    if num_scales == _FEATURES:
        return scale_smem[...]
    feature_F = lax.broadcasted_iota(jnp.int32, (_FEATURES,), 0)
    scale_F = jnp.full(_FEATURES, scale_smem[0])
    for n in range(1, num_scales):
        scale_F = jnp.where(feature_F < n * _FEATURES // num_scales, scale_F, scale_smem[n])
    return scale_F


def _int8(byte: int) -> jax.Array:
    return jnp.int8(byte - 256 if byte > 127 else byte)


def _product(number_FK: jax.Array, x_smem, interpret: object) -> jax.Array:
    if interpret:
        dims = (((1,), (1,)), ((), ()))
        return lax.dot_general(number_FK, x_smem[...], dims, preferred_element_type=jnp.float32)

    def product(sum_ref):
        plgpu.wgmma(sum_ref, number_FK, x_smem.transpose((1, 0)))
        return sum_ref[...]

    return pl.run_scoped(product, plgpu.ACC((_FEATURES, x_smem.shape[0]), jnp.float32))
