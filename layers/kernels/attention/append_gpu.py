"""From the product of queries, keys and values to attention in one launch on Hopper GPUs (Pallas,
Mosaic GPU): heads are normed and rotated, and keys and values written to their pages.

A block of threads (one warpgroup) has the heads of a token that share a key. The other number of a
pair that rotates comes by way of shared memory.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from layers import page_rows

_THREADS = 128  # each has as many of a head's elements


def can_append(head_width: int) -> bool:
    """Whether the kernel takes heads of so many elements."""
    return head_width in (_THREADS, 2 * _THREADS)


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
    interpret: object = False,
) -> tuple[jax.Array, jax.Array]:
    """`kernels.cpu.rows.append`, of what `can_append` allows; queries of padding are arbitrary."""
    (T, _), (N, K, H), pairs = qkv_TX.shape, shape, angles[0].shape[1]
    G = N // K
    weights = () if norms is None else norms
    turns = _of_heads(angles, H) if pairs else ()

    def kernel(x_ref, page_ref, offset_ref, *refs, turned_smem=None):
        weight_refs, refs = refs[: len(weights)], refs[len(weights) :]
        turn_refs, (pages_ref, q_ref) = refs[: len(turns)], refs[len(turns) :]
        if not interpret:  # which runs launches one after another
            plgpu.griddepcontrol_wait()
            plgpu.griddepcontrol_launch_dependents()
        t, k = lax.axis_index("token"), lax.axis_index("head")
        page, nth = page_ref[t], offset_ref[t]

        def head(n):
            return x_ref[t, pl.ds(n * H, H)]

        value_H = head(N + K + k).astype(dtype)
        heads = [head(k * G + g) for g in range(G)] + [head(N + k)]
        if weights:
            weight_H, key_weight_H = (ref[...].astype(jnp.float32) + offset for ref in weight_refs)
            scales = [lax.rsqrt(jnp.sum(x_H * x_H) / H + eps) for x_H in heads]
            heads = [x_H * scale * weight_H for x_H, scale in zip(heads, scales, strict=True)]
            heads[-1] = head(N + k) * scales[-1] * key_weight_H
        if turns:
            cos_H, sin_H = (ref[t] for ref in turn_refs)
            index_H = lax.broadcasted_iota(jnp.int32, (H,), 0)
            for g, x_H in enumerate(heads):
                turned_smem[g, pl.ds(H // 2, H)] = x_H
            plgpu.commit_smem()
            for g, x_H in enumerate(heads):
                later_H = turned_smem[g, pl.ds(H // 2 + pairs, H)]
                earlier_H = turned_smem[g, pl.ds(H // 2 - pairs, H)]
                other_H = jnp.where(index_H < pairs, later_H, earlier_H)
                other_H = jnp.where(index_H < 2 * pairs, other_H, 0)
                heads[g] = x_H * cos_H + other_H * sin_H
        *queries, key_H = heads
        for g, query_H in enumerate(queries):
            q_ref[t, k * G + g] = (query_H * scale).astype(dtype)

        def write():
            is_finite_H = jnp.abs(value_H.astype(jnp.float32)) < jnp.inf
            stored_H = jnp.where(is_finite_H, key_H, jnp.nan).astype(dtype)
            pages_ref[page, nth, pl.ds(k * H, H)] = stored_H
            zeros_H = jnp.zeros_like(value_H)
            pages_ref[page, nth, pl.ds((K + k) * H, H)] = jnp.where(is_finite_H, value_H, zeros_H)

        pl.when(page > 0)(write)  # padding has page 0

    scratch = {"turned_smem": plgpu.SMEM((G + 1, 2 * H), jnp.float32)} if pairs else {}
    pages_ref = jax.new_ref(page_rows.decode(pages), memory_space=plgpu.GMEM)
    run = pl.kernel(  # `plgpu.kernel` takes no arrays to be written in place
        lambda *refs: pl.run_scoped(functools.partial(kernel, *refs), **scratch),
        out_type=jax.ShapeDtypeStruct((T, N, H), dtype),
        mesh=plgpu.Mesh(grid=(T, K), grid_names=("token", "head")),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, reduction_scratch_bytes=4096
        ),
        name="append",
        interpret=interpret,
    )
    q_TNH = run(qkv_TX, *place, *weights, *turns, pages_ref)
    return q_TNH, page_rows.encode(jax.freeze(pages_ref), pages)


def _of_heads(angles: tuple[jax.Array, jax.Array], H: int) -> tuple[jax.Array, jax.Array]:
    """What each element of a head is multiplied by, and the other of its pair: [T, H] each."""
    cos_TX, sin_TX = angles
    unrotated_TX = jnp.zeros((len(cos_TX), H - 2 * cos_TX.shape[1]))
    cos_TH = jnp.concatenate([cos_TX, cos_TX, 1 + unrotated_TX], axis=1)
    return cos_TH, jnp.concatenate([-sin_TX, sin_TX, unrotated_TX], axis=1)
