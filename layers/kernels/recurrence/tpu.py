"""Matrix states of recurrences on TPUs (Pallas, Mosaic): read once, updated and written in place.

A step of the grid is a token of a row, and some of its heads. Their states come from where the row
stands, by the pipeline's copies, stay in VMEM from one token of the row to the next, and leave
after each for that token's place. Tokens that are padding leave for the sink, which takes one copy
for all of those that follow one another.

A state [M, H] is seen with the axis along the lanes that fills them, which is also how XLA lays it
out: H, or else M. What belongs to the other axis comes as columns.

B counts blocks of heads, A and L what lies along sublanes and lanes.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from layers.ragged import Rectangle

_LANES, _SUBLANES = 128, 8
_BLOCK_BYTES = 2 << 20  # of states; five blocks lie in VMEM
_VMEM_BYTES = 48 << 20  # of 64 MiB (7x) or 128


def can_update(num_heads: int, num_keys: int, state: tuple[int, int]) -> bool:
    """Whether the kernel takes N heads of states [M, H] whose keys have K heads."""
    across = _across(state)
    fills = across is not None and state[1 - across] % _SUBLANES == 0
    return fills and _block_heads(num_heads, num_keys, state) > 0


def update(
    q_YWKM: jax.Array,
    k_YWKM: jax.Array,
    v_YWNH: jax.Array,
    decay_YWN: jax.Array,
    beta_YWN: jax.Array | None,
    states: jax.Array,
    rectangle: Rectangle,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array]:
    """`api.update`, of what `can_update` allows."""
    (Y, W, N, H), (K, M) = v_YWNH.shape, k_YWKM.shape[2:]
    sink, num_states = states.shape[0] - 1, states.shape[1]
    is_of_values = _across((M, H)) == 1
    heads = _block_heads(N, K, (M, H))
    shared = N // K
    keys = max(1, heads // shared)
    key_axis = 0 if is_of_values else 1  # of a state as it is seen

    def in_blocks(x_YWN: jax.Array, block_size: int) -> jax.Array:
        """[Y, W, N, ...] -> [Y, W, B, heads, ...]."""
        return x_YWN.reshape(Y, W, -1, block_size, *x_YWN.shape[3:])

    of_heads = [decay_YWN] if beta_YWN is None else [decay_YWN, beta_YWN]
    factors = in_blocks(jnp.stack(of_heads, axis=-1), heads).swapaxes(-1, -2)
    q, k, v = in_blocks(q_YWKM, keys), in_blocks(k_YWKM, keys), in_blocks(v_YWNH, heads)
    kernel_states = states if is_of_values else jnp.swapaxes(states, -1, -2)
    kernel_states = pltpu.with_memory_space_constraint(kernel_states, pltpu.HBM)

    def kernel(
        slot_ref, start_ref, length_ref, q_ref, k_ref, v_ref, factor_ref, before_ref, out_ref,
        after_ref, *scratch_refs,
    ):  # fmt: skip
        w = pl.program_id(2)
        q_ref, k_ref, v_ref, out_ref = (x.at[0, 0, 0] for x in (q_ref, k_ref, v_ref, out_ref))
        first_ref, second_ref, *carried_refs = scratch_refs
        if is_of_values:
            of_key, of_value = _column, _row
            first_ref[...], second_ref[...] = q_ref[...].T, k_ref[...].T
            q_ref, k_ref = first_ref, second_ref
        else:
            of_key, of_value = _row, _column
            first_ref[...] = v_ref[...].T
            v_ref, turned_ref, out_ref = first_ref, out_ref, second_ref
        for n in range(heads):
            state_AL = before_ref[0, 0, n]
            for carried_ref in carried_refs:
                state_AL = jnp.where(w == 0, state_AL, carried_ref[n])
            state_AL = factor_ref[0, 0, 0, 0:1, n : n + 1] * state_AL
            key, value = k_ref[of_key(n // shared)], v_ref[of_value(n)]
            if beta_YWN is not None:
                predicted = jnp.sum(state_AL * key, axis=key_axis, keepdims=True)
                value = factor_ref[0, 0, 0, 1:2, n : n + 1] * (value - predicted)
            state_AL += key * value
            after_ref[0, 0, n] = state_AL
            for carried_ref in carried_refs:
                carried_ref[n] = state_AL
            query = q_ref[of_key(n // shared)]
            out_ref[of_value(n)] = jnp.sum(state_AL * query, axis=key_axis, keepdims=True)
        if not is_of_values:
            turned_ref[...] = out_ref[...].T

    def before(b, y, w, slot_ref, start_ref, length_ref):
        """Of a row of padding another place of the sink than is written, where there is one."""
        is_row = length_ref[y] > 0
        at = lax.rem(start_ref[y] + (num_states - 1), jnp.int32(num_states))
        return jnp.where(is_row, slot_ref[y], sink), jnp.where(is_row, at, num_states - 1), b, 0, 0

    def after(b, y, w, slot_ref, start_ref, length_ref):
        is_token = w < length_ref[y]
        at = lax.rem(start_ref[y] + w, jnp.int32(num_states))
        return jnp.where(is_token, slot_ref[y], sink), jnp.where(is_token, at, 0), b, 0, 0

    def of_block(array: jax.Array) -> pl.BlockSpec:
        """The matrix of a token and block of heads; neighbours may share one."""
        blocks = array.shape[2]
        return pl.BlockSpec(
            (1, 1, 1, *array.shape[3:]),
            lambda b, y, w, *_: (y, w, b * blocks // (N // heads), 0, 0),
        )

    block = (1, 1, heads, *kernel_states.shape[3:])
    scratch = [(M, keys) if is_of_values else (H, heads)] * 2 + [block[2:]] * (W > 1)
    out, kernel_states = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(N // heads, Y, W),
            in_specs=[*(of_block(x) for x in (q, k, v, factors)), pl.BlockSpec(block, before)],
            out_specs=[of_block(v), pl.BlockSpec(block, after)],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(v.shape, jnp.float32),
            # XLA would fetch and return those of all slots.
            pltpu.HBM(kernel_states.shape, jnp.float32),
        ],
        input_output_aliases={7: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary", "arbitrary"),
            vmem_limit_bytes=_VMEM_BYTES,
        ),
        name="recurrent_update",
        interpret=interpret,
    )(
        rectangle.slot_Y, rectangle.position_YW[:, 0],
        rectangle.valid_YW.sum(1, dtype=jnp.int32), q, k, v, factors, kernel_states,
    )  # fmt: skip
    return out.reshape(Y, W, N, H), kernel_states if is_of_values else jnp.swapaxes(
        kernel_states, -1, -2
    )


def _across(state: tuple[int, int]) -> int | None:
    """Which axis of a state [M, H] lies along the lanes; None: neither fills them."""
    return next((axis for axis in (1, 0) if state[axis] % _LANES == 0), None)


def _block_heads(num_heads: int, num_keys: int, state: tuple[int, int]) -> int:
    """Heads of a block: those of whole keys, or such as share one."""
    shared, max_heads = num_heads // num_keys, _BLOCK_BYTES // (4 * state[0] * state[1])
    fitting = (
        heads
        for heads in range(min(num_heads, max_heads), 0, -1)
        if num_heads % heads == 0 and (heads % shared == 0 or shared % heads == 0)
    )
    return next(fitting, 0)


def _row(n: int) -> tuple[slice, slice]:
    return slice(n, n + 1), slice(None)


def _column(n: int) -> tuple[slice, slice]:
    return slice(None), slice(n, n + 1)
