"""Matrix states of recurrences on Hopper GPUs (Pallas, Mosaic GPU): read once, updated and written
in place.

A block of threads (one warpgroup) belongs to a row, a head and some columns of its state, which
come by the copy engine (TMA), stay in registers from one token of the row to the next, and leave
after each that is no padding for that token's place. Rows of padding write no state.

U counts columns, of H, that a block has.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from layers.ragged import Rectangle

_ROWS = 64  # of a tile of registers
_COLUMNS = (64, 32)
_MOST_ELEMENTS = 8192  # of a block: 64 registers a thread
_SWIZZLE = 128  # bytes


def can_update(state: tuple[int, int]) -> bool:
    """Whether the kernel takes states [M, H]."""
    return state[0] % _ROWS == 0 and _block_columns(state) > 0


def update(
    q_YWKM: jax.Array,
    k_YWKM: jax.Array,
    v_YWNH: jax.Array,
    decay_YWN: jax.Array,
    beta_YWN: jax.Array | None,
    states: jax.Array,
    rectangle: Rectangle,
    interpret: object = False,
) -> tuple[jax.Array, jax.Array]:
    """`api.update`, of what `can_update` allows; `interpret` takes `InterpretGPUParams`."""
    (Y, W, N, H), (K, M) = v_YWNH.shape, k_YWKM.shape[2:]
    num_states, columns = states.shape[1], _block_columns((M, H))
    of_heads = [decay_YWN] if beta_YWN is None else [decay_YWN, beta_YWN]

    def kernel(
        q_ref, k_ref, v_ref, slot_ref, start_ref, length_ref, *refs, q_smem, k_smem, v_smem,
        state_smem, out_smem, q_arrived, k_arrived, v_arrived, state_arrived,
    ):  # fmt: skip
        *factor_refs, states_ref, out_ref = refs
        y, n, block = (lax.axis_index(name) for name in ("row", "head", "block"))
        if not interpret:  # which runs launches one after another
            plgpu.griddepcontrol_wait()
            plgpu.griddepcontrol_launch_dependents()
        key, value_columns = n // (N // K), pl.ds(block * columns, columns)
        slot, start, length = slot_ref[y], start_ref[y], length_ref[y]

        def place(after):
            at = lax.rem(start + after, jnp.int32(num_states))
            return states_ref.at[slot, at, n, :, value_columns]

        plgpu.copy_gmem_to_smem(place(num_states - 1), state_smem, state_arrived)
        plgpu.copy_gmem_to_smem(k_ref.at[y, :, key], k_smem, k_arrived)
        plgpu.copy_gmem_to_smem(v_ref.at[y, :, n, value_columns], v_smem, v_arrived)
        plgpu.copy_gmem_to_smem(q_ref.at[y, :, key], q_smem, q_arrived)
        for arrived in (state_arrived, k_arrived, v_arrived, q_arrived):
            plgpu.barrier_wait(arrived)
        state_MU = state_smem[...]
        for w in range(W):
            decay, *beta = (ref[y, w, n] for ref in factor_refs)
            key_MU = lax.broadcast_in_dim(k_smem[w], (M, columns), (0,))
            query_MU = lax.broadcast_in_dim(q_smem[w], (M, columns), (0,))
            state_MU *= decay
            value_U = v_smem[w]
            if beta:
                value_U = beta[0] * (value_U - jnp.sum(state_MU * key_MU, axis=0))
            state_MU += key_MU * lax.broadcast_in_dim(value_U, (M, columns), (1,))
            out_smem[w] = jnp.sum(state_MU * query_MU, axis=0)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last one has left
            state_smem[...] = state_MU
            plgpu.commit_smem()
            leave = functools.partial(plgpu.copy_smem_to_gmem, state_smem, place(w))
            pl.when(w < length)(leave)
        plgpu.copy_smem_to_gmem(out_smem, out_ref.at[y, :, n, value_columns])
        plgpu.wait_smem_to_gmem(0)

    tiles = plgpu.TilingTransform((8, _SWIZZLE // 4)), plgpu.SwizzleTransform(_SWIZZLE)
    maps, values = plgpu.SMEM((W, M), jnp.float32), plgpu.SMEM((W, columns), jnp.float32)
    scratch = dict(
        q_smem=maps, k_smem=maps, v_smem=values, out_smem=values,
        state_smem=plgpu.SMEM((M, columns), jnp.float32, transforms=tiles),
        q_arrived=plgpu.Barrier(), k_arrived=plgpu.Barrier(), v_arrived=plgpu.Barrier(),
        state_arrived=plgpu.Barrier(),
    )  # fmt: skip
    states_ref = jax.new_ref(states, memory_space=plgpu.GMEM)
    run = pl.kernel(  # `plgpu.kernel` takes no arrays to be written in place
        lambda *refs: pl.run_scoped(functools.partial(kernel, *refs), **scratch),
        out_type=jax.ShapeDtypeStruct((Y, W, N, H), jnp.float32),
        mesh=plgpu.Mesh(grid=(Y, N, H // columns), grid_names=("row", "head", "block")),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, reduction_scratch_bytes=4096
        ),
        name="recurrent_update",
        interpret=interpret,
    )
    out_YWNH = run(
        q_YWKM, k_YWKM, v_YWNH, rectangle.slot_Y, rectangle.position_YW[:, 0],
        rectangle.valid_YW.sum(1, dtype=jnp.int32), *of_heads, states_ref,
    )  # fmt: skip
    return out_YWNH, jax.freeze(states_ref)


def _block_columns(state: tuple[int, int]) -> int:
    fitting = (n for n in _COLUMNS if state[1] % n == 0 and state[0] * n <= _MOST_ELEMENTS)
    return next(fitting, 0)
