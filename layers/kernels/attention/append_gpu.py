"""From the product of queries, keys and values to attention in one launch on Hopper GPUs (Pallas,
Mosaic GPU): heads are normed and rotated, and keys and values written to their pages.

A block of threads (one warpgroup) has the heads of a token that share a key, or two such keys of 64
elements. The other number of a pair that rotates comes by way of shared memory.

U counts elements that the threads have side by side: of one head, or of two of 64.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_THREADS = 128


def can_append(shape: tuple[int, int, int], has_norms: bool) -> bool:
    """Whether the kernel takes N query and K key heads of H elements."""
    _, K, H = shape
    return H in (_THREADS, 2 * _THREADS) or (2 * H == _THREADS and K % 2 == 0 and not has_norms)


def append(
    qkv_TX: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    norms: tuple[jax.Array, jax.Array] | None,
    place: tuple[jax.Array, jax.Array],
    pages: jax.Array,
    *,
    shape: tuple[int, int, int],
    dtype: str,
    scale: float,
    eps: float = 0.0,
    offset: float = 0.0,
    bias_X: jax.Array | None = None,
    interpret: object = False,
) -> tuple[jax.Array, jax.Array]:
    """Queries for attention, of `dtype` [T, N, H], and the pages with the keys and values of their
    tokens, written in place: `kernels.cpu.rows.append` of what `can_append` allows, except that
    queries of padding are arbitrary.

    Args:
        qkv_TX: float32 [T, (N + 2 K) H], with a bias [(N + 2 K) H] or none.
        angles: cos and sin, float32 [T, pairs that rotate].
        norms: weights of RMSNorm of each query and each key head, [H].
        place: page and offset of each token, i32[T]; padding has page 0.
        pages: [pages, page tokens, 2 K H], 16 bits an element.
        shape: N, K and H.
        interpret: takes `InterpretGPUParams`.
    """
    (T, _), (N, K, H), pairs = qkv_TX.shape, shape, angles[0].shape[1]
    G, U = N // K, max(H, _THREADS)
    key_blocks = K * H // U
    biases = () if bias_X is None else (bias_X,)
    weights = () if norms is None else norms
    turns = _of_heads(angles, H, U) if pairs else ()

    def kernel(x_ref, page_ref, offset_ref, *refs, turned_smem=None):
        bias_refs, refs = refs[: len(biases)], refs[len(biases) :]
        weight_refs, refs = refs[: len(weights)], refs[len(weights) :]
        turn_refs, (pages_ref, q_ref) = refs[: len(turns)], refs[len(turns) :]
        if not interpret:  # which runs launches one after another
            plgpu.griddepcontrol_wait()
            plgpu.griddepcontrol_launch_dependents()
        t, k = lax.axis_index("token"), lax.axis_index("keys")
        page, nth = page_ref[t], offset_ref[t]

        def heads(n):
            """The nth U elements of the product."""
            x_U = x_ref[t, pl.ds(n * U, U)]
            for bias_ref in bias_refs:
                x_U += bias_ref[pl.ds(n * U, U)].astype(jnp.float32)
            return x_U

        value_U = heads((G + 1) * key_blocks + k).astype(dtype)
        parts = [heads(k * G + g) for g in range(G)] + [heads(G * key_blocks + k)]
        if weights:
            weight_U, key_weight_U = (ref[...].astype(jnp.float32) + offset for ref in weight_refs)
            scales = [lax.rsqrt(jnp.sum(x_U * x_U) / H + eps) for x_U in parts]
            *queries, key_U = (x_U * scale for x_U, scale in zip(parts, scales, strict=True))
            parts = [*(query_U * weight_U for query_U in queries), key_U * key_weight_U]
        if turns:
            cos_U, sin_U = (ref[t] for ref in turn_refs)
            index_U = lax.rem(lax.broadcasted_iota(jnp.int32, (U,), 0), jnp.int32(H))
            for g, x_U in enumerate(parts):
                turned_smem[g, pl.ds(H // 2, U)] = x_U
            plgpu.commit_smem()
            for g, x_U in enumerate(parts):
                later_U = turned_smem[g, pl.ds(H // 2 + pairs, U)]
                earlier_U = turned_smem[g, pl.ds(H // 2 - pairs, U)]
                other_U = jnp.where(index_U < pairs, later_U, earlier_U)
                other_U = jnp.where(index_U < 2 * pairs, other_U, 0)
                parts[g] = x_U * cos_U + other_U * sin_U
        *queries, key_U = parts
        for g, query_U in enumerate(queries):
            q_ref[t, pl.ds((k * G + g) * U, U)] = (query_U * scale).astype(dtype)

        def write():
            is_finite_U = jnp.abs(value_U.astype(jnp.float32)) < jnp.inf
            stored_U = jnp.where(is_finite_U, key_U, jnp.nan).astype(dtype)
            pages_ref[page, nth, pl.ds(k * U, U)] = stored_U
            zeros_U = jnp.zeros_like(value_U)
            written = pl.ds((key_blocks + k) * U, U)
            pages_ref[page, nth, written] = jnp.where(is_finite_U, value_U, zeros_U)

        pl.when(page > 0)(write)  # padding has page 0

    scratch = {"turned_smem": plgpu.SMEM((G + 1, U + H), jnp.float32)} if pairs else {}
    pages_ref = jax.new_ref(lax.bitcast_convert_type(pages, dtype), memory_space=plgpu.GMEM)
    run = pl.kernel(  # `plgpu.kernel` takes no arrays to be written in place
        lambda *refs: pl.run_scoped(functools.partial(kernel, *refs), **scratch),
        out_type=jax.ShapeDtypeStruct((T, N * H), dtype),
        mesh=plgpu.Mesh(grid=(T, key_blocks), grid_names=("token", "keys")),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, reduction_scratch_bytes=4096
        ),
        name="append",
        interpret=interpret,
    )
    q_TX = run(qkv_TX, *place, *biases, *weights, *turns, pages_ref)
    return q_TX.reshape(T, N, H), lax.bitcast_convert_type(jax.freeze(pages_ref), pages.dtype)


def _of_heads(angles: tuple[jax.Array, jax.Array], H: int, U: int) -> tuple[jax.Array, jax.Array]:
    """What elements of heads are multiplied by, and the others of their pairs: [T, U] each."""
    cos_TX, sin_TX = angles
    unrotated_TX = jnp.zeros((len(cos_TX), H - 2 * cos_TX.shape[1]))
    cos_TH = jnp.concatenate([cos_TX, cos_TX, 1 + unrotated_TX], axis=1)
    sin_TH = jnp.concatenate([-sin_TX, sin_TX, unrotated_TX], axis=1)
    return jnp.tile(cos_TH, (1, U // H)), jnp.tile(sin_TH, (1, U // H))
