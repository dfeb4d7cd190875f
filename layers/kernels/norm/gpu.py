"""The norm of a sum of two rows, and that sum, in one launch on Hopper GPUs (Pallas, Mosaic GPU).

A row belongs to a block of threads (one warpgroup), which has it in registers from the first read
to the last write: what a layer adds to the residual stream is read once, and no other launch reads
the stream to norm it.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_THREADS = 128  # each has as many of a row's elements
_MOST_WIDTH = 16384  # 128 registers a thread
_WORD = 4  # elements that a thread reads at once, at most, from where they are aligned


def can_normalize(width: int) -> bool:
    """Whether the kernel takes rows of so many elements."""
    return _THREADS <= width <= _MOST_WIDTH and width % _WORD == 0


def of_sum(
    x_TD: jax.Array,
    addend_TD: jax.Array | None,
    weight_D: jax.Array,
    bias_D: jax.Array | None,
    eps: float,
    offset: float,
    dtype: str,
    interpret: object = None,
) -> tuple[jax.Array, jax.Array]:
    """The norm of x + addend, `dtype` [T, D], and that sum, float32 [T, D], of rows that
    `can_normalize` allows. Without an addend the sum is x.

    Args:
        weight_D: the norm's weights less `offset`.
        bias_D: LayerNorm's (arXiv 1607.06450); None: RMSNorm (arXiv 1910.07467).
    """
    T, D = x_TD.shape
    whole = D // _THREADS * _THREADS
    # The last elements of a width that threads do not divide, and some before them once more.
    spans = [(0, whole)] + [(D - _THREADS, _THREADS)] * (D % _THREADS > 0)
    inputs = [x_TD] if addend_TD is None else [x_TD, addend_TD]
    terms = [weight_D] if bias_D is None else [weight_D, bias_D]

    def kernel(*refs):
        input_refs, term_refs = refs[: len(inputs)], refs[len(inputs) : len(inputs) + len(terms)]
        normed_ref, *sum_refs = refs[len(inputs) + len(terms) :]
        if not interpret:  # which runs launches one after another
            plgpu.griddepcontrol_wait()
            plgpu.griddepcontrol_launch_dependents()
        t = lax.axis_index("row")

        def read(ref, first, size):
            return ref[t, pl.ds(first, size)].astype(jnp.float32)

        def mean(parts):
            """Of the row, each of whose elements counts once."""
            total = jnp.sum(parts[0])
            for part in parts[1:]:
                index = lax.broadcasted_iota(jnp.int32, part.shape, 0)
                total += jnp.sum(jnp.where(index < whole + _THREADS - D, 0, part))
            return total / D

        parts = []
        for span in spans:
            part = read(input_refs[0], *span)
            for ref in input_refs[1:]:
                part += read(ref, *span)
            for ref in sum_refs:
                ref[t, pl.ds(*span)] = part
            parts.append(part)
        if bias_D is not None:
            middle = mean(parts)
            parts = [part - middle for part in parts]
        scale = lax.rsqrt(mean([part * part for part in parts]) + eps)
        for (first, size), part in zip(spans, parts, strict=True):
            weight, *bias = (ref[pl.ds(first, size)].astype(jnp.float32) for ref in term_refs)
            part *= scale * (weight + offset)
            normed_ref[t, pl.ds(first, size)] = (part + bias[0] if bias else part).astype(dtype)

    outs = [jax.ShapeDtypeStruct((T, D), dtype)]
    if addend_TD is not None:
        outs.append(jax.ShapeDtypeStruct((T, D), jnp.float32))
    normed_TD, *sums = plgpu.kernel(
        kernel,
        out_type=outs,
        grid=(T,),
        grid_names=("row",),
        kernel_name="norm_of_sum",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, reduction_scratch_bytes=4096
        ),
        interpret=interpret,
    )(*inputs, *terms)
    return normed_TD, *(sums or [x_TD])
