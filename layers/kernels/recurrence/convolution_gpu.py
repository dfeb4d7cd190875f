"""Causal convolutions of decode rows on Hopper GPUs (Pallas, Mosaic GPU): the tails of rows are
read, moved on and written in place by the launch that convolves.

A thread belongs to a row and a channel. Its newest inputs stay in registers from one token of the
row to the next. Rows of padding write no tail.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from layers.ragged import Rectangle

_CHANNELS = 128  # of a block of threads


def can_convolve(widths: tuple[int, ...]) -> bool:
    """Whether the kernel takes parts of so many channels."""
    return all(width % _CHANNELS == 0 for width in widths)


def convolve(
    x_YWX: jax.Array,
    taps_Xw: jax.Array,
    bias_X: jax.Array | None,
    tails: jax.Array,
    rectangle: Rectangle,
    widths: tuple[int, ...],
    has_silu: bool,
    interpret: object = False,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """A causal convolution of each channel, with silu or without: parts of `widths` channels,
    float32 [Y, W, width] each, and the tails, written in place. `rows.convolve` is its oracle.

    Args:
        x_YWX: float32 [Y, W, X], the newest inputs; X is the sum of `widths`.
        taps_Xw: [X, w], the newest token's last.
        bias_X: [X].
        tails: float32 [slots + 1, 1 + k, w - 1, X].
        widths: channels of each part, which `can_convolve` allows.
        interpret: takes `InterpretGPUParams`.
    """
    Y, W, X = x_YWX.shape
    num_states, num_taps = tails.shape[1], taps_Xw.shape[1]
    edges = [width // _CHANNELS for width in itertools.accumulate(widths, initial=0)]  # of parts
    biases = [] if bias_X is None else [bias_X]

    def kernel(x_ref, slot_ref, start_ref, length_ref, taps_ref, *refs):
        *bias_refs, tails_ref = refs[: len(biases) + 1]
        out_refs = refs[len(biases) + 1 :]
        if not interpret:  # which runs launches one after another
            plgpu.griddepcontrol_wait()
            plgpu.griddepcontrol_launch_dependents()
        y, block = lax.axis_index("row"), lax.axis_index("block")
        slot, start, length = slot_ref[y], start_ref[y], length_ref[y]
        channels = pl.ds(block * _CHANNELS, _CHANNELS)

        def place(after, nth):
            at = lax.rem(start + after, jnp.int32(num_states))
            return tails_ref.at[slot, at, nth, channels]

        def write(out_ref, first_block, w, out):
            part_channels = pl.ds((block - first_block) * _CHANNELS, _CHANNELS)
            out_ref[y, w, part_channels] = out

        def leave(w, window):
            for nth, value in enumerate(window):
                place(w, nth)[...] = value

        taps = [taps_ref[channels, nth].astype(jnp.float32) for nth in range(num_taps)]
        window = [place(num_states - 1, nth)[...] for nth in range(num_taps - 1)]
        for w in range(W):
            window.append(x_ref[y, w, channels])
            out = sum(tap * value for tap, value in zip(taps, window, strict=True))
            for ref in bias_refs:
                out += ref[channels].astype(jnp.float32)
            if has_silu:
                out /= 1 + jnp.exp(-out)
            for out_ref, first, last in zip(out_refs, edges, edges[1:], strict=False):
                is_in_part = (first <= block) & (block < last)
                pl.when(is_in_part)(functools.partial(write, out_ref, first, w, out))
            window = window[1:]
            pl.when(w < length)(functools.partial(leave, w, window))

    tails_ref = jax.new_ref(tails, memory_space=plgpu.GMEM)
    run = pl.kernel(  # `plgpu.kernel` takes no arrays to be written in place
        kernel,
        out_type=[jax.ShapeDtypeStruct((Y, W, width), jnp.float32) for width in widths],
        mesh=plgpu.Mesh(grid=(Y, X // _CHANNELS), grid_names=("row", "block")),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        name="causal_convolution",
        interpret=interpret,
    )
    outs = run(
        x_YWX, rectangle.slot_Y, rectangle.position_YW[:, 0],
        rectangle.valid_YW.sum(1, dtype=jnp.int32), taps_Xw, *biases, tails_ref,
    )  # fmt: skip
    return tuple(outs), jax.freeze(tails_ref)
