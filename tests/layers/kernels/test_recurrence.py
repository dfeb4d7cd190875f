"""Kernels that update recurrent states in place, interpreted, beside a loop in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreted_gpu
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # no public name in 0.10
from jax.experimental.pallas import tpu as pltpu

from layers.kernels.recurrence import api, gpu, tpu
from layers.ragged import Rectangle
from layers.recurrence import linear, rows
from layers.recurrence.rows import Recurrence
from tests import compiling
from tests.accelerators import primitives
from tests.interpreted import threads_are_compiled_once  # noqa: F401
from tests.layers.recurrence.forms import close

pytestmark = pytest.mark.quick_code

_SLOTS = 9
_ON_TPU = functools.partial(tpu.update, interpret=pltpu.InterpretParams(detect_races=True))
_INTERPRETER = InterpretGPUParams(detect_races=jax.__version_info__ >= (0, 11))
_ON_GPU = functools.partial(gpu.update, interpret=_INTERPRETER)
# N, K, M, H: heads that share keys, few and odd numbers of heads, either axis along the lanes.
_CASES = {
    "mamba2": (6, 1, 128, 64),
    "groups": (6, 3, 128, 8),
    "odd heads": (5, 5, 16, 128),
    "both fill lanes": (3, 1, 128, 128),
}


def _rows(num_drafts: int, counts: list[int], seed: int) -> Rectangle:
    """Rows of so many valid tokens, 0 for padding, at random slots and positions."""
    draw, counts = np.random.default_rng(seed), np.array(counts)
    slot_Y = np.where(counts > 0, draw.permutation(_SLOTS)[: len(counts)], _SLOTS)
    nth_W = np.arange(1 + num_drafts)
    start_Y = np.where(counts > 0, draw.integers(0, 50, len(counts)), 0)
    start_Y[0] = 0  # the state before lies at the last index
    position_YW = start_Y[:, None] + np.minimum(nth_W, np.maximum(counts[:, None] - 1, 0))
    valid_YW = nth_W < counts[:, None]
    int32 = (jnp.asarray(x, jnp.int32) for x in (slot_Y, position_YW))
    return Rectangle(*int32, jnp.asarray(valid_YW), ())


def _inputs(rectangle: Rectangle, sizes: tuple[int, int, int, int], has_beta: bool, seed: int):
    """What the kernel takes, with another number in every state; tokens of padding add nothing."""
    (Y, W), (N, K, M, H) = rectangle.position_YW.shape, sizes
    generator = np.random.default_rng(seed)
    draw = functools.partial(generator.standard_normal, dtype=np.float32)
    valid_YW1 = np.asarray(rectangle.valid_YW)[..., None]
    q, v = draw((Y, W, K, M)), draw((Y, W, N, H))
    k = draw((Y, W, K, M)) / np.sqrt(np.float32(M)) * valid_YW1[..., None]
    decay = np.where(valid_YW1, np.exp(-np.abs(draw((Y, W, N)))), np.float32(1))
    beta = generator.random((Y, W, N), np.float32) * valid_YW1 if has_beta else None
    return q, k, v, decay, beta, draw((_SLOTS + 1, W, N, M, H))


def _loop(q, k, v, decay, beta, states, rectangle):
    """Token by token, head by head, in float64: outputs, 0 of padding; states without the sink."""
    shared, kept = v.shape[2] // k.shape[2], states.shape[1]
    out, states = np.zeros(v.shape), states.astype(np.float64)
    slot_Y, position_YW, valid_YW = map(
        np.asarray, (rectangle.slot_Y, rectangle.position_YW, rectangle.valid_YW)
    )
    for y, w, n in np.ndindex(v.shape[:3]):
        if valid_YW[y, w]:
            p = position_YW[y, w]
            key, query = (x[y, w, n // shared].astype(np.float64) for x in (k, q))
            state = decay[y, w, n] * states[slot_Y[y], (p - 1) % kept, n]
            value = v[y, w, n].astype(np.float64)
            if beta is not None:
                value = beta[y, w, n] * (value - state.T @ key)
            state = state + np.outer(key, value)
            states[slot_Y[y], p % kept, n], out[y, w, n] = state, state.T @ query
    return out, states[:-1]


def _check(update, sizes, counts, num_drafts, has_beta, seed=0):
    rectangle = _rows(num_drafts, counts, seed)
    inputs = _inputs(rectangle, sizes, has_beta, seed)
    expected, states = _loop(*inputs, rectangle)
    out, after = jax.tree.map(np.asarray, compiling.call(update, *inputs, rectangle))
    close(np.where(rectangle.valid_YW[..., None, None], out, 0), expected, 3e-6)
    close(after[:-1], states, 3e-6)
    assert np.isfinite(out).all() and np.isfinite(after).all()
    return out, after


@pytest.mark.parametrize("num_drafts, counts", [
    (0, [1, 1, 0, 1, 0]), (2, [3, 0, 1, 2, 0]), pytest.param(0, [0], marks=pytest.mark.long),
])  # fmt: skip
@pytest.mark.parametrize("case, has_beta", [
    ("mamba2", False), ("groups", False), ("odd heads", True), ("both fill lanes", True),
    pytest.param("mamba2", True, marks=pytest.mark.long),
    pytest.param("odd heads", False, marks=pytest.mark.long),
])  # fmt: skip
def test_a_tpus_kernel_equals_a_loop_in_float64(case, has_beta, num_drafts, counts, monkeypatch):
    N, K, M, H = _CASES[case]
    monkeypatch.setattr(tpu, "_BLOCK_BYTES", 3 * 4 * M * H)  # several blocks of heads
    assert tpu.can_update(N, K, (M, H))
    _check(_ON_TPU, (N, K, M, H), counts, num_drafts, has_beta)
    assert not interpret_pallas_call.races.races_found


@pytest.mark.parametrize("num_drafts, counts", [(0, [1, 1, 0, 1, 0]), (2, [3, 0, 1, 2, 0])])
@pytest.mark.parametrize("sizes, has_beta", [
    ((6, 3, 64, 32), False), ((3, 3, 64, 64), True),
    pytest.param((4, 1, 128, 128), False, marks=pytest.mark.long),
    pytest.param((2, 2, 256, 64), True, marks=pytest.mark.long),
])  # fmt: skip
def test_a_gpus_kernel_equals_a_loop_in_float64(sizes, has_beta, num_drafts, counts):
    assert gpu.can_update(sizes[2:])
    _check(_ON_GPU, sizes, counts, num_drafts, has_beta)
    if _INTERPRETER.detect_races:
        assert not interpreted_gpu.get_races().races_found


_MAMBA = Recurrence((6, 128, 64), linear.recurrent, linear.chunked, api.update_linear)


def _step(is_sequential: bool, is_chained: bool = False):
    """A recurrence's step over decode rows, or over a chain, and what it is called with."""
    rectangle = dataclasses.replace(_rows(0, [1, 1, 0], 0), is_chained=is_chained)
    q, k, v, decay, _, states = _inputs(rectangle, _CASES["mamba2"], False, 0)

    def step(states, rectangle, *inputs):
        return rows.recur(_MAMBA, inputs, states, rectangle, is_sequential)

    return step, states, rectangle, q, k, v, np.log(decay)


def test_decode_rows_alone_get_a_kernel_and_none_on_a_cpu():
    """With `deterministic` a token has the bits of a prompt's, which XLA computes."""
    assert "pallas_call" in primitives(*_step(False), platform="tpu")
    assert "mpmd_map" in primitives(*_step(False), platform="cuda")
    assert "pallas_call" not in primitives(*_step(True), platform="tpu")
    assert "pallas_call" not in primitives(*_step(False, is_chained=True), platform="tpu")
    assert api.choose(1, 1, (_SLOTS + 1, 1, 6, 128, 64)) is None


@pytest.mark.parametrize("width, is_chained", [(1, False), (3, False), (64, True)])
def test_a_row_alone_leaves_the_states_of_others_where_they_are(width, is_chained):
    """A step whose time grows with the number of slots would copy them."""
    position_YW = jnp.arange(width, dtype=jnp.int32)[None]
    rectangle = Rectangle(
        jnp.zeros(1, jnp.int32), position_YW, jnp.ones((1, width), bool), (), is_chained=is_chained
    )
    q, k, v = (jnp.ones((1, width, heads, size)) for heads, size in ((1, 32), (1, 32), (2, 16)))
    log_decay, states = jnp.zeros((1, width, 2)), jnp.zeros((4000, 3, 2, 32, 16))

    def step(states, rectangle, *inputs):
        return rows.recur(_MAMBA._replace(shape=(2, 32, 16)), inputs, states, rectangle, False)

    jitted = jax.jit(step, donate_argnums=0)
    memory = jitted.lower(states, rectangle, q, k, v, log_decay).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= states.nbytes
    assert memory.temp_size_in_bytes < states.nbytes / 10


@pytest.mark.parametrize("kernel", [None, _ON_TPU, _ON_GPU], ids=["reference", "tpu", "gpu"])
def test_a_step_is_the_loop_with_a_kernel_and_without(kernel, monkeypatch):
    """Without one, states are gathered and scattered."""
    monkeypatch.setattr(api, "choose", lambda *_: kernel)
    step, states, rectangle, q, k, v, log_decay = _step(False)
    expected, after = _loop(q, k, v, np.exp(log_decay), None, states, rectangle)
    out, found = compiling.call(step, states, rectangle, q, k, v, log_decay)
    close(np.where(rectangle.valid_YW[..., None, None], out, 0), expected, 3e-6)
    close(found[:-1], after, 3e-6)


def test_decays_of_channels_are_left_to_xla(monkeypatch):
    monkeypatch.setattr(api, "choose", lambda *_: _ON_GPU)
    rectangle = _rows(0, [1, 1, 0], 0)
    q, k, v, decay, beta, states = _inputs(rectangle, _CASES["odd heads"], True, 0)
    by_channel = np.broadcast_to(np.log(decay)[..., None], q.shape)
    assert api.update(q, k, v, by_channel, beta, states, rectangle) is None


def test_what_kernels_leave_to_xla():
    """States that fill lanes with neither axis, or no tiles with the other, or no block."""
    for state in ((64, 64), (128, 60), (4096, 4096)):
        assert not tpu.can_update(4, 4, state)
    for state in ((16, 64), (64, 48), (512, 64)):
        assert not gpu.can_update(state)
