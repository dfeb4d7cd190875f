"""What every recurrence is held to: its forms agree, and a token's bits are its own."""

from collections.abc import Callable
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from layers.backends import backends
from tests import compiling


def compiled(form: Callable) -> Callable:
    """A form as one program for each of its shapes, which returns numpy's arrays."""
    run = compiling.jit(form, static_argnames="chunk" if "chunked" in form.__name__ else ())
    return lambda *inputs, **more: jax.tree.map(np.asarray, run(*inputs, **more))


def elsewhere(module: ModuleType) -> Callable:
    """A module's form in chunks, as devices compute it that are no CPU."""

    def chunked(*inputs, **more):
        with backends.use(backends.XLA):
            return module.chunked(*inputs, **more)

    return chunked


def close(found, expected, tolerance: float = 1e-5) -> None:
    """Equal up to `tolerance` times the largest of what is expected, or 1."""
    scale = max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=tolerance * scale)


def bits_are_its_own(recurrent: Callable, tokens: tuple, before: np.ndarray) -> None:
    """A token's output and state are the same bits in fewer rows and in parts of rows: tokens are
    arrays [5, 18, ...]. Activations and factors around it, as models have them, are compiled into
    one program with it.
    """

    @jax.jit
    def layer(*inputs):
        *tokens, before = inputs
        out, states = recurrent(*(jax.nn.silu(x) * 0.3 for x in tokens), before)
        return out * 0.7 + 0.1, states

    expected = [np.asarray(x) for x in layer(*tokens, before)]
    for rows, size in ((1, 9), (1, 1), (3, 2)):
        state, parts = before[:rows], []
        for start in range(0, 18, size):
            part = (x[:rows, start : start + size] for x in tokens)
            parts.append([np.asarray(x) for x in layer(*part, state)])
            state = parts[-1][1][:, -1]
        for found, whole in zip(zip(*parts, strict=True), expected, strict=True):
            np.testing.assert_array_equal(np.concatenate(found, axis=1), whole[:rows])


def chunks_resume(chunked: Callable, tokens: tuple, before: np.ndarray) -> None:
    """Three rows [3, 8, ...] one behind another in a single row equal three rows."""
    alone, states = chunked(*tokens, before, chunk=4)
    is_new = np.array([False, False, True, False, True, False])
    resumed = np.zeros((6, *before.shape[1:]), np.float32)
    resumed[2], resumed[4] = before[1], before[2]
    in_a_row = (x.reshape(1, -1, *x.shape[2:]) for x in tokens)
    out, after = chunked(*in_a_row, before[:1], resumes=(is_new, resumed), chunk=4)
    close(out.reshape(alone.shape), alone)
    close(after.reshape(states.shape), states)


def gradients_agree(recurrent: Callable, chunked: Callable, *cases: tuple) -> None:
    """Of outputs and of the last state, with regard to all inputs, in each of the cases."""

    def loss(form, *inputs):
        out, states = form(*inputs)
        weights = jnp.sin(jnp.arange(out.size)).reshape(out.shape)
        return jnp.sum(out * weights) + jnp.sum(states[:, -1] ** 2)

    def gradients(form):
        return compiling.jit(jax.grad(lambda inputs: loss(form, *inputs)))

    one_by_one, in_chunks = gradients(recurrent), gradients(lambda *x: chunked(*x, chunk=5))
    for inputs in cases:
        for found, expected in zip(in_chunks(inputs), one_by_one(inputs), strict=True):
            close(found, expected, 1e-4)
