"""Products of few rows with planes of bits on TPUs (Pallas): a byte of the matrix is read once, and
its numbers exist in VMEM only. For products of many rows, by XLA, it is expanded once.

XLA expands int8 and fp8 with a scale a row within its own products there, and needs no kernel. Of
fewer bits, or where groups have scales, it writes the whole matrix expanded.

128 lanes of bytes have the numbers of whole groups, side by side (`low_bit.py`). They are
multiplied before their scales: each row of activations is there once for each group, the other
groups' numbers being 0, so that one product has the sums of each group, [rows of all groups, F],
which scales and zero points, rows of F, then weigh. That is work by F a group and row, and not by
element.

R counts rows of activations, one a group, K the numbers of 128 lanes of bytes.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from configs.precision import FORMATS
from layers import quantized
from layers.kernels.linear import low_bit
from layers.kernels.linear.low_bit import LANES, Quantized

_ROWS = 16  # of a tile of bfloat16
_BLOCK_FEATURES, _BLOCK_LANES = 512, (1024, 512, 256, 128)
_MOST_ROWS, _MOST_GROUP_ROWS = 128, 512
_EXPANDED_ROWS, _EXPANDED_COLUMNS = 256, (2048, 1024)
_ACTIVATION_BYTES = 8 << 20  # of a block of rows
_VMEM_BYTES = 48 << 20  # of 64 MiB (7x) or 128


def can_multiply(num_rows: int, w: Quantized) -> bool:
    """Whether the kernel multiplies such rows with (a matrix of) w."""
    D, widest = w.shape[-1], _widest(w)
    return (
        low_bit.has_groups(w)
        and D % widest == 0
        and num_rows <= _MOST_ROWS
        and num_rows * widest * w.scale.shape[-2] <= _MOST_GROUP_ROWS * D
        and num_rows * D * 4 <= _ACTIVATION_BYTES
    )


def products(
    x_BWD: jax.Array, w: Quantized, matrix_B: jax.Array | None, interpret: bool = False
) -> jax.Array:
    """`Backend.skinny_product`'s, of rows that `can_multiply` allows."""
    if matrix_B is None:
        w, matrix_B = low_bit.stack_of(w), jnp.zeros(1, jnp.int32)

    def product(x_BWD: jax.Array, bits: int, shift: int) -> jax.Array:
        return _plane(x_BWD, w, matrix_B, bits, shift, interpret)

    return low_bit.times_rows(low_bit.sum_of_planes(product, x_BWD, w), w, matrix_B)


def _plane(
    x_BWD: jax.Array, w: Quantized, matrix_B: jax.Array, bits: int, shift: int, interpret: bool
) -> jax.Array:
    """Products with one plane's integers, float32 [B, W, F]; zero points belong to the first."""
    (B, W, D), (E, F, _) = x_BWD.shape, w.shape
    X, first, G = D * bits // 8, D * shift // 8, w.scale.shape[1]
    K = LANES * 8 // bits
    groups = K * G // D
    lanes = next(n for n in _BLOCK_LANES if X % n == 0 == first % n)
    features, num_steps, num = min(F, _BLOCK_FEATURES), X // lanes, lanes // LANES
    tiled = -(-W // _ROWS) * _ROWS  # rows; those behind W have anything

    weights = [w.scale] if w.zero is None or shift else [w.scale, w.zero]
    middle = 0.0 if w.zero is not None or shift else low_bit.middle(w.format)
    has_zeros = len(weights) > 1 or middle > 0

    def own_block(b, f, k, matrix_ref):
        """Of no matrix the last one stays where it is."""
        is_one = matrix_ref[b] < E
        return (
            jnp.minimum(matrix_ref[b], E - 1),
            jnp.where(is_one, f, pl.cdiv(F, features) - 1),
            jnp.where(is_one, k, num_steps - 1),
        )

    def data_block(*at):
        e, f, k = own_block(*at)
        return e, f, k + first // lanes

    rows = FORMATS[w.format].rows
    block_scales = features if rows == 1 else min(w.scale.shape[-1], LANES)  # of a group and block

    def weight_block(*at):
        e, f, _ = own_block(*at)
        return e, 0, f * features // (block_scales * rows)

    def kernel(matrix_ref, x_ref, data_ref, *refs):
        stored_refs, (out_ref, tiled_ref, *weight_refs) = (
            refs[: len(weights)], refs[len(weights) :]
        )  # fmt: skip
        b, f, k = (pl.program_id(axis) for axis in range(3))

        @pl.when(k == 0)
        def _():
            out_ref[...] = jnp.zeros(out_ref.shape, jnp.float32)
            tiled_ref[:W] = x_ref[0]
            scale_GX = low_bit.as_float(stored_refs[0][0], w.format)
            weight_refs[0][...] = (
                scale_GX if rows == 1 else _of_rows(scale_GX, f * features, features, rows, F)
            )
            for zero_ref, weight_ref in zip(stored_refs[1:], weight_refs[1:], strict=True):
                weight_ref[...] = zero_ref[0].astype(jnp.float32)

        @pl.when(matrix_ref[b] < E)
        def _():
            sum_WF = jnp.zeros((tiled, features), jnp.float32)
            for c in range(num):
                start = pl.multiple_of((k * num + c) * K, K)
                x_RK = _of_each_group(tiled_ref[:, pl.ds(start, K)], groups)
                byte_FX = data_ref[0, :, c * LANES : (c + 1) * LANES]
                numbers = _numbers(byte_FX, bits, w.format, x_ref.dtype)
                sum_RF = _dot(x_RK, jnp.concatenate(numbers, axis=1))
                if has_zeros:
                    sum_R1 = x_RK.astype(jnp.float32).sum(1, keepdims=True)
                for j in range(groups):
                    rows = slice(j * tiled, (j + 1) * tiled)
                    group = pl.ds((k * num + c) * groups + j, 1)
                    scale_1F, *zeros = (ref[group] for ref in weight_refs)
                    group_WF = sum_RF[rows]
                    if has_zeros:
                        group_WF -= sum_R1[rows] * (zeros[0] if zeros else middle)
                    sum_WF += group_WF * scale_1F
            out_ref[0] += sum_WF[:W]

    of_rows = pl.BlockSpec((1, W, D), lambda b, f, k, _: (b, 0, 0))
    of_weights = pl.BlockSpec((1, G, block_scales), weight_block)
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B, pl.cdiv(F, features), num_steps),
            in_specs=[
                of_rows, pl.BlockSpec((1, features, lanes), data_block),
                *(of_weights for _ in weights),
            ],
            out_specs=pl.BlockSpec((1, W, features), lambda b, f, k, _: (b, 0, f)),
            scratch_shapes=[
                pltpu.VMEM((tiled, D), x_BWD.dtype),
                *(pltpu.VMEM((G, features), jnp.float32) for _ in weights),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((B, W, F), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "parallel", "arbitrary"),
            vmem_limit_bytes=_VMEM_BYTES,
        ),
        name="low_bit_product",
        interpret=interpret,
    )(matrix_B, x_BWD, w.data, *weights)  # fmt: skip


def can_expand(w: Quantized) -> bool:
    """Whether `expanded` takes a matrix."""
    return low_bit.has_groups(w) and w.shape[-1] % _widest(w) == 0


def expanded(w: Quantized, interpret: bool = False) -> jax.Array:
    """Expands a matrix that `can_expand` allows to its `dtype`, [F, D], for products with many
    rows; XLA would write several times as much.
    """
    (F, D), G, planes = w.shape, w.scale.shape[0], low_bit.planes(w.format)
    weights = [low_bit.scales(w)]
    if w.zero is not None:
        weights.append(w.zero.astype(jnp.float32))
    rows, group_size = min(F, _EXPANDED_ROWS), D // G
    columns = next((n for n in _EXPANDED_COLUMNS if D % n == 0 == n // group_size % 8), D)
    shifts = [sum(planes[:n]) for n in range(len(planes))]

    def kernel(*refs):
        data_refs, (*weight_refs, out_ref) = refs[: len(planes)], refs[len(planes) :]
        scale_FG, *zeros = (ref[...].T for ref in weight_refs)
        for first in range(0, columns, LANES):
            code_FL = jnp.zeros((rows, LANES), jnp.int32)
            for bits, shift, data_ref in zip(planes, shifts, data_refs, strict=True):
                at, part = divmod(first, LANES * 8 // bits)
                byte_FL = data_ref[:, at * LANES : (at + 1) * LANES].astype(jnp.int32)
                code_FL |= (byte_FL >> part // LANES * bits & (1 << bits) - 1) << shift
            number_FL = _number(w.format)(code_FL)

            def of_lanes(array_FG, first=first):
                """Of the group of each of the lanes."""
                group = first // group_size
                lanes_FL = jnp.broadcast_to(array_FG[:, group : group + 1], (rows, LANES))
                lane_FL = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
                for begin in range(group_size, LANES, group_size):
                    group += 1
                    lanes_FL = jnp.where(lane_FL < begin, lanes_FL, array_FG[:, group : group + 1])
                return lanes_FL

            number_FL -= of_lanes(zeros[0]) if zeros else low_bit.middle(w.format)
            out_ref[:, first : first + LANES] = (number_FL * of_lanes(scale_FG)).astype(w.dtype)

    def of_plane(bits, shift):
        first = D * shift // (columns * bits)
        return pl.BlockSpec((rows, columns * bits // 8), lambda f, k: (f, first + k))

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(F, rows), D // columns),
        in_specs=[
            *(of_plane(bits, shift) for bits, shift in zip(planes, shifts, strict=True)),
            *(pl.BlockSpec((columns // group_size, rows), lambda f, k: (k, f)) for _ in weights),
        ],
        out_specs=pl.BlockSpec((rows, columns), lambda f, k: (f, k)),
        out_shape=jax.ShapeDtypeStruct((F, D), w.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=_VMEM_BYTES
        ),
        name="low_bit_expanded",
        interpret=interpret,
    )(*[w.data] * len(planes), *weights)


def _of_rows(scale_GX: jax.Array, start: jax.Array, count: int, rows: int, F: int) -> jax.Array:
    """Scales of `count` features from `start` on, of a block with one for `rows` features each:
    float32 [G, count]. A product with ones moves them as they are, in three parts of bfloat16.
    """
    X = scale_GX.shape[1]
    first = start // (X * rows) * X
    lane_GX = lax.broadcasted_iota(jnp.int32, scale_GX.shape, 1)
    scale_GX = jnp.where(first + lane_GX < pl.cdiv(F, rows), scale_GX, 0)  # nothing lies behind
    lane_XF, feature_XF = (lax.broadcasted_iota(jnp.int32, (X, count), axis) for axis in (0, 1))
    is_own_XF = (start + feature_XF) // rows == first + lane_XF
    return lax.dot(
        scale_GX, is_own_XF.astype(jnp.float32), precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )  # fmt: skip


def _widest(w: Quantized) -> int:
    """Numbers of 128 bytes of the thinnest plane."""
    return LANES * 8 // min(low_bit.planes(w.format))


def _of_each_group(x_WK: jax.Array, groups: int) -> jax.Array:
    """Rows once for each of so many groups: [R, K], 0 where other groups are."""
    group_WK = lax.broadcasted_iota(jnp.int32, x_WK.shape, 1) // (x_WK.shape[1] // groups)
    parts = [jnp.where(group_WK == j, x_WK, 0) for j in range(groups)]
    return jnp.concatenate(parts, axis=0)


def _numbers(
    byte_FX: jax.Array, bits: int, format: str, dtype: jax.typing.DTypeLike
) -> list[jax.Array]:
    """What bytes hold of a plane, from its lowest bits on."""
    number = _number(format)
    if bits == 8:
        return [number(byte_FX).astype(dtype)]
    byte_FX = byte_FX.astype(jnp.int32)
    return [number(byte_FX >> n & ((1 << bits) - 1)).astype(dtype) for n in range(0, 8, bits)]


def _number(format: str) -> Callable[[jax.Array], jax.Array]:
    """What makes a code a number, float32."""
    if quantized.is_e2m1(format):
        return low_bit.of_e2m1
    return _of_e4m3 if "fp8" in format else lambda code: code.astype(jnp.float32)


def _of_e4m3(code: jax.Array) -> jax.Array:
    stored = lax.bitcast_convert_type(code.astype(jnp.uint8), jnp.float8_e4m3fn)
    return stored.astype(jnp.float32)


def _dot(x_RK: jax.Array, w_FK: jax.Array) -> jax.Array:
    exact = lax.Precision.HIGHEST if x_RK.dtype == jnp.float32 else None
    dims = (((1,), (1,)), ((), ()))
    return lax.dot_general(x_RK, w_FK, dims, precision=exact, preferred_element_type=jnp.float32)
