"""The order in which tokens of a row reach a state: one by one, or chunk by chunk."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from configs.errors import InputError
from layers.recurrence.sums import rounded

_UNROLLED = 8  # tokens; a loop over fewer would cost more than it saves

T = TypeVar("T")
Out = TypeVar("Out")
Step = Callable[..., tuple[jax.Array, Out]]  # state, token or chunk -> state after it, output
Resumes = tuple[jax.Array, jax.Array]  # is_new bool [C], states [C, ...]


def by_token(
    step: Step[jax.Array], before: jax.Array, tokens: object
) -> tuple[jax.Array, jax.Array]:
    """Feeds tokens [Y, W, ...] one by one into states [Y, ...]: the outputs [Y, W, ...], and the
    states after every token [Y, W, ...].

    Inputs and outputs are rounded: else a program with a loop and one without would place a factor
    on different sides of a product.
    """
    num_tokens = jax.tree.leaves(tokens)[0].shape[1]

    def feed(state: jax.Array, token: object) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        state, out = step(state, token)
        return state, (rounded(out), state)

    def settled(x: jax.Array) -> jax.Array:
        return rounded(x) if jnp.issubdtype(x.dtype, jnp.floating) else x

    tokens = jax.tree.map(settled, tokens)
    if num_tokens > _UNROLLED:
        _, fed = jax.lax.scan(feed, before, _swapped(tokens))
        return _swapped(fed)
    state, outputs = before, []
    for at in range(num_tokens):
        state, fed = feed(state, jax.tree.map(lambda x: x[:, at], tokens))  # noqa: B023
        outputs.append(fed)
    outs, states = zip(*outputs, strict=True)
    return jnp.stack(outs, axis=1), jnp.stack(states, axis=1)


def by_chunk(
    step: Step[Out], before: jax.Array, chunks: object, resumes: Resumes | None
) -> tuple[Out, jax.Array]:
    """Feeds chunks [Y, C, ...] one by one into states [Y, ...]: the other results of `step`
    [Y, C, ...], and the states after every chunk. `resumes`, bool [C] and float32 [C, ...], are a
    single row's chunks that begin with another state; raises InputError if there are several rows.
    """
    if resumes is not None and len(before) != 1:
        raise InputError(f"resumes are for a single row, not for {len(before)}")

    def feed(
        state: jax.Array, chunk: tuple[object, Resumes | None]
    ) -> tuple[jax.Array, tuple[Out, jax.Array]]:
        inputs, resume = chunk
        if resume is not None:
            is_new, other = resume
            state = jnp.where(is_new, other[None], state)
        state, out = step(state, inputs)
        return state, (out, state)

    _, fed = jax.lax.scan(feed, before, (_swapped(chunks), resumes))
    return _swapped(fed)


def in_chunks(x_YW: jax.Array, tokens: int) -> jax.Array:
    """[Y, W, ...] -> [Y, C, tokens, ...], zeros behind the last token."""
    rows, num_tokens = x_YW.shape[:2]
    padding = [(0, 0)] * (x_YW.ndim - 2)
    x_YW = jnp.pad(x_YW, [(0, 0), (0, -num_tokens % tokens), *padding])
    return x_YW.reshape(rows, -1, tokens, *x_YW.shape[2:])


def in_rows(x_YCT: jax.Array, num_tokens: int) -> jax.Array:
    """[Y, C, T, ...] -> [Y, W, ...] without what `in_chunks` appended."""
    rows, chunks, tokens = x_YCT.shape[:3]
    return x_YCT.reshape(rows, chunks * tokens, *x_YCT.shape[3:])[:, :num_tokens]


def _swapped(tree: T) -> T:
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), tree)
