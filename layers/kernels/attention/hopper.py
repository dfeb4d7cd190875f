"""What the kernels for Hopper GPUs share: a tile of 64 query rows, its two products on the tensor
core (wgmma) and the online softmax between them (Milakov & Gimelshein 2018, arXiv 1805.02867).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from layers.kernels.attention.mask import MaskBounds, visible
from layers.linear import soft_cap

ROWS = 64  # of a wgmma tile
SHARED_BYTES = 227 << 10  # of one block (CUDA C++ programming guide, compute capability 9.0)
LOG2_E = math.log2(math.e)
MASKED = -1e30  # a score of what is not seen

T = TypeVar("T")


class Operand(Protocol):
    """A matrix in shared memory, a reference within a kernel."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[np.generic]: ...
    def __getitem__(self, index: object) -> jax.Array: ...
    def transpose(self, axes: tuple[int, ...]) -> "Operand": ...


class Sums(NamedTuple):
    """A softmax over the keys so far: f32[U] each, and the weighted values f32[U, H]."""

    maximum_U: jax.Array  # base 2
    mass_U: jax.Array
    values_UH: jax.Array


def no_sums(width: int) -> Sums:
    """Before the first key, of values of a width."""
    return Sums(
        jnp.full((ROWS,), MASKED, jnp.float32),
        jnp.zeros((ROWS,), jnp.float32),
        jnp.zeros((ROWS, width), jnp.float32),
    )


def operand_layout(
    dtype: np.dtype[np.generic],
) -> tuple[plgpu.TilingTransform | plgpu.SwizzleTransform, ...]:
    """Tiles of 8 rows x 128 bytes with swizzled 16-byte parts: wgmma's layout in shared memory."""
    return plgpu.TilingTransform((8, 128 // dtype.itemsize)), plgpu.SwizzleTransform(128)


def compiler_params(score_cap: float | None) -> plgpu.CompilerParams:
    """An approximate tanh is off by up to 2^-11, which a soft cap would multiply."""
    return plgpu.CompilerParams(
        approx_math=score_cap is None,
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup,  # jax 0.10's default is another
    )


def launch(
    body: Callable[..., None], out_types: object, mesh: plgpu.Mesh,
    scratch: dict[str, pl.MemoryRef | plgpu.Barrier], score_cap: float | None, interpret: object,
) -> Callable[..., Any]:  # fmt: skip
    """The kernel of a body. Unlike `plgpu.kernel` it takes a `jax.Ref`, and writes it in place."""
    scoped = pl.with_scoped(collective_axes=mesh.thread_name or (), **scratch)(body)
    return pl.kernel(
        scoped, out_types, mesh=mesh, compiler_params=compiler_params(score_cap),
        interpret=interpret or False, name=mesh.kernel_name,
    )  # fmt: skip


def begin(interpret: object) -> None:
    """Waits for all that earlier kernels of the program write, and has the next one begin."""
    if not interpret:  # whose kernels run one after another
        plgpu.griddepcontrol_wait()
        plgpu.griddepcontrol_launch_dependents()


def visible_keys(shape: tuple[int, ...], kv_position: jax.Array, bounds: MaskBounds) -> jax.Array:
    """The mask bool[U, S] of keys from a KV position on. `bounds` are i32[U] each."""
    kv_position_US = kv_position + lax.broadcasted_iota(jnp.int32, shape, 1)
    bounds_US = jax.tree.map(lambda x_U: lax.broadcast_in_dim(x_U, shape, (0,)), bounds)
    return visible(kv_position_US, *bounds_US)


def weigh(
    sums: Sums, scores_US: jax.Array, kv_position: jax.Array, bounds: MaskBounds,
    score_cap: float | None,
) -> tuple[Sums, jax.Array]:  # fmt: skip
    """New sums, and weights of keys from a KV position on, of f32[U, S] scores; i32[U] bounds."""
    shape = scores_US.shape
    scores_US = soft_cap(scores_US, score_cap)
    visible_US = visible_keys(shape, kv_position, bounds)
    scores_US = jnp.where(visible_US, scores_US * LOG2_E, MASKED)
    maximum_U = jnp.maximum(sums.maximum_U, scores_US.max(1))
    decay_U = jnp.exp2(sums.maximum_U - maximum_U)
    weights_US = jnp.exp2(scores_US - lax.broadcast_in_dim(maximum_U, shape, (0,)))
    mass_U = sums.mass_U * decay_U + weights_US.sum(1)
    values_UH = sums.values_UH * lax.broadcast_in_dim(decay_U, sums.values_UH.shape, (0,))
    return Sums(maximum_U, mass_U, values_UH), weights_US


def joined(sums: Sums, others: Sums) -> Sums:
    """The softmax over the keys of both."""
    maximum_U = jnp.maximum(sums.maximum_U, others.maximum_U)
    decay_U = jnp.exp2(sums.maximum_U - maximum_U)
    other_decay_U = jnp.exp2(others.maximum_U - maximum_U)
    shape = sums.values_UH.shape
    values_UH = sums.values_UH * lax.broadcast_in_dim(decay_U, shape, (0,))
    values_UH += others.values_UH * lax.broadcast_in_dim(other_decay_U, shape, (0,))
    return Sums(maximum_U, sums.mass_U * decay_U + others.mass_U * other_decay_U, values_UH)


def with_sinks(
    sums: Sums, sinks_ref: jax.Ref, first_head: jax.Array, group: int, head_U: jax.Array
) -> Sums:
    """Adds the mass of each row's sink, one of f32[N] in device memory.

    Args:
        first_head, group: the heads of the tile: its first, and how many.
        head_U: i32[U], which of them a row belongs to.
    """
    sinks_U = jnp.full((ROWS,), MASKED, jnp.float32)
    for g in range(group):
        sinks_U = jnp.where(head_U == g, sinks_ref[first_head + g] * LOG2_E, sinks_U)
    maximum_U = jnp.maximum(sums.maximum_U, sinks_U)
    decay_U = jnp.exp2(sums.maximum_U - maximum_U)
    mass_U = sums.mass_U * decay_U + jnp.exp2(sinks_U - maximum_U)
    values_UH = sums.values_UH * lax.broadcast_in_dim(decay_U, sums.values_UH.shape, (0,))
    return Sums(maximum_U, mass_U, values_UH)


class Tokens(NamedTuple):
    """Query tokens of a tile in the result [Y, W, N, H], and the heads that its rows repeat."""

    row: jax.Array  # y
    first: jax.Array  # w
    num_tokens: int | jax.Array
    first_head: jax.Array
    group: int  # G

    def store(
        self, out_ref: jax.Ref, first_column: int | jax.Array, out_UH: jax.Array, smem: jax.Ref
    ) -> None:
        """Writes some columns of f32[U, H] by way of shared memory, [U, part], a part at a time; of
        a whole tile straight out of registers.
        """
        part, width = smem.shape[1], out_UH.shape[1]
        heads = pl.ds(self.first_head, self.group)
        if self.group == ROWS:
            columns = pl.ds(first_column, width)
            out_ref[self.row, self.first, heads, columns] = out_UH.astype(out_ref.dtype)
            return
        for start in range(0, width, part):
            if start:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last ones have left
            smem[...] = out_UH[:, start : start + part].astype(smem.dtype)
            plgpu.commit_smem()

            def store_token(w, start=start):
                columns = pl.ds(first_column + start, part)
                token = out_ref.at[self.row, self.first + w, heads, columns]
                plgpu.copy_smem_to_gmem(smem.at[pl.ds(w * self.group, self.group)], token)

            pl.loop(0, self.num_tokens)(store_token)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def quotient(sums: Sums) -> jax.Array:
    """Values over their mass; of nothing 0."""
    mass_U = jnp.where(sums.mass_U == 0, 1, sums.mass_U)
    return sums.values_UH / lax.broadcast_in_dim(mass_U, sums.values_UH.shape, (0,))


def log_sum_exp(maximum: jax.Array, mass: jax.Array) -> jax.Array:
    """That of scores, of their maximum (base 2) and the mass of their weights; of none `MASKED`."""
    return jnp.where(maximum <= MASKED, MASKED, (maximum + jnp.log2(mass)) / LOG2_E)


def scores(q_smem: Operand, keys_smem: Operand, interpret: object) -> jax.Array:
    """Products of queries [U, H] with keys [S, H]: float32 [U, S]."""
    if interpret:
        scores_US = dot(q_smem[...], keys_smem[...], 1)
        plgpu.commit_smem()  # later copies wait for plain reads; those of wgmma are in their order
        return scores_US
    shape = (q_smem.shape[0], keys_smem.shape[0])

    def product(sum_ref):
        plgpu.wgmma(sum_ref, q_smem, keys_smem.transpose((1, 0)))
        return sum_ref[...]

    return pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))


def add_values(sums: Sums, weights_US: jax.Array, values_smem: Operand, interpret: object) -> Sums:
    """The sums with what weights [U, S] make of values [S, H]."""
    weights_US = weights_US.astype(values_smem.dtype)
    if interpret:
        values_UH = sums.values_UH + dot(weights_US, values_smem[...], 0)
        plgpu.commit_smem()
        return sums._replace(values_UH=values_UH)

    def product(sum_ref):
        plgpu.wgmma(sum_ref, weights_US, values_smem)

    return sums._replace(values_UH=pl.run_state(product)(plgpu.ACC.init(sums.values_UH)))


def scores_and_values(
    q_smem: Operand, keys_smem: Operand, soften: Callable[[jax.Array], T],
    values_UH: jax.Array, weights_US: jax.Array, values_smem: Operand, interpret: object,
) -> tuple[T, jax.Array]:  # fmt: skip
    """What `soften` makes of `scores`, and values [U, H] with what weights [U, S] of other keys
    make of theirs, [S, H]: the latter product runs while `soften` does.
    """
    if interpret:
        softened = soften(scores(q_smem, keys_smem, interpret))
        values_UH = values_UH + dot(weights_US, values_smem[...], 0)
        plgpu.commit_smem()
        return softened, values_UH

    def products(scores_ref, values_ref):
        values_ref[...] = values_UH
        plgpu.wgmma(scores_ref, q_smem, keys_smem.transpose((1, 0)))
        plgpu.wgmma(values_ref, weights_US, values_smem)
        softened = soften(plgpu.wgmma_accumulator_load(scores_ref, wait_n=1))
        return softened, values_ref[...]

    U, H = values_UH.shape
    return pl.run_scoped(
        products, plgpu.ACC((U, keys_smem.shape[0]), jnp.float32), plgpu.ACC((U, H), jnp.float32)
    )


def dot(x: jax.Array, y: jax.Array, contract: int) -> jax.Array:
    """The tensor core's product, in interpret mode: contracts axis 1 of x, `contract` of y."""
    dims = (((1,), (contract,)), ((), ()))
    return lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)
