"""Kernels that update recurrent states in place, interpreted, beside a loop in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from layers.backends import backends
from layers.kernels.recurrence import api, convolution_gpu, ffi_cpu, gpu, tpu
from layers.ragged import Rectangle
from layers.recurrence import linear, rows
from layers.recurrence.rows import Recurrence
from tests import compiling
from tests.accelerators import mesh, primitives
from tests.interpreted import HOPPER, check_races, threads_are_compiled_once  # noqa: F401
from tests.layers.kernels import recurrent_case
from tests.layers.native import instruction_set, need, refused  # noqa: F401
from tests.layers.recurrence.forms import close

pytestmark = pytest.mark.quick_code

_ON_TPU = functools.partial(tpu.update, interpret=pltpu.InterpretParams(detect_races=True))
_ON_GPU = functools.partial(gpu.update, interpret=HOPPER)
_on_tpu, _on_gpu = (functools.partial(compiling.call, each) for each in (_ON_TPU, _ON_GPU))
# N, K, M, H: heads that share keys, few and odd numbers of heads, either axis along the lanes.
_CASES = {
    "mamba2": (6, 1, 128, 64),
    "groups": (6, 3, 128, 8),
    "odd heads": (5, 5, 16, 128),
    "both fill lanes": (3, 1, 128, 128),
}


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
    recurrent_case.check(_on_tpu, (N, K, M, H), counts, num_drafts, has_beta)
    assert not interpret_pallas_call.races.races_found


@pytest.mark.parametrize("num_drafts, counts", [(0, [1, 1, 0, 1, 0]), (2, [3, 0, 1, 2, 0])])
@pytest.mark.parametrize("sizes, has_beta", [
    ((6, 3, 64, 32), False), ((3, 3, 64, 64), True),
    pytest.param((4, 1, 128, 128), False, marks=pytest.mark.long),
    pytest.param((2, 2, 256, 64), True, marks=pytest.mark.long),
])  # fmt: skip
def test_a_gpus_kernel_equals_a_loop_in_float64(sizes, has_beta, num_drafts, counts):
    assert gpu.can_update(sizes[2:])
    recurrent_case.check(_on_gpu, sizes, counts, num_drafts, has_beta)
    check_races(HOPPER)


def check_convolution(
    counts, num_drafts, widths, num_taps, has_bias, has_silu, seed, interpret=HOPPER
):
    """The kernel's outputs and tails are those of a loop in float64; it writes no other tail."""
    draw = functools.partial(np.random.default_rng(seed).standard_normal, dtype=np.float32)
    rectangle, X = recurrent_case.rows(num_drafts, counts, seed), sum(widths)
    taps = jnp.asarray(draw((X, num_taps)), jnp.bfloat16)
    bias = jnp.asarray(draw(X), jnp.bfloat16) if has_bias else None
    tails = draw((recurrent_case.SLOTS + 1, 1 + num_drafts, num_taps - 1, X))
    x = draw((*rectangle.position_YW.shape, X))
    outs, after = compiling.call(
        convolution_gpu.convolve,
        x,
        taps,
        bias,
        tails,
        rectangle,
        widths=widths,
        has_silu=has_silu,
        interpret=interpret,
    )
    assert tuple(out.shape[2] for out in outs) == widths
    out, expected = np.concatenate(outs, axis=2), tails.astype(np.float64)
    for y, w in np.ndindex(rectangle.valid_YW.shape):
        if rectangle.valid_YW[y, w]:
            slot, p = rectangle.slot_Y[y], rectangle.position_YW[y, w]
            window = np.concatenate([expected[slot, (p - 1) % (1 + num_drafts)], x[y, w][None]])
            total = (window * np.asarray(taps, np.float64).T).sum(0)
            total += 0 if bias is None else np.asarray(bias, np.float64)
            close(out[y, w], total / (1 + np.exp(-total)) if has_silu else total, 3e-6)
            expected[slot, p % (1 + num_drafts)] = window[1:]
    np.testing.assert_array_equal(after, expected)
    check_races(interpret)


CONVOLUTIONS = [((256, 128, 128), 4, True, True), ((128,), 2, False, False)]


@pytest.mark.parametrize("num_drafts, counts", [(0, [1, 1, 0, 1, 0]), (2, [3, 0, 1, 2, 0])])
@pytest.mark.parametrize("widths, num_taps, has_bias, has_silu", CONVOLUTIONS)
def test_a_gpus_convolution_equals_a_loop_in_float64(
    widths, num_taps, has_bias, has_silu, num_drafts, counts
):
    assert convolution_gpu.can_convolve(widths)
    assert not convolution_gpu.can_convolve((*widths, 64))
    check_convolution(counts, num_drafts, widths, num_taps, has_bias, has_silu, 0)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(500))
def test_random_convolutions_of_a_gpu(seed):
    generator = np.random.default_rng(seed)
    num_drafts = int(generator.integers(0, 3))
    counts = generator.integers(0, num_drafts + 2, generator.integers(1, 6)).tolist()
    widths = tuple((128 * generator.integers(1, 3, generator.integers(1, 4))).tolist())
    has_bias, has_silu = generator.integers(0, 2, 2) > 0
    num_taps = int(generator.integers(2, 5))
    check_convolution(counts, num_drafts, widths, num_taps, has_bias, bool(has_silu), seed)


@pytest.mark.parametrize("decays", ["of heads", "of keys"])
@pytest.mark.parametrize("has_beta", [False, True])
def test_a_cpus_kernel_equals_a_loop_in_float64(instruction_set, has_beta, decays):  # noqa: F811
    """Of widths that fill no vector, and of rows that no block of keys divides."""
    update = jax.jit(ffi_cpu.update)
    for sizes in ((6, 3, 10, 7), (5, 5, 16, 33), (2, 1, 3, 100), (3, 1, 64, 64)):
        for num_drafts, counts in ((0, [1, 1, 0, 1, 0]), (2, [3, 0, 1, 2, 0])):
            recurrent_case.check(
                update, sizes, counts, num_drafts, has_beta, sum(sizes), decays == "of keys"
            )


def _scanned(counts: list[int], num_drafts: int, M: int, X: int):
    """Rows, what a scan takes of them, and how it ends in float64."""
    rectangle = recurrent_case.rows(num_drafts, counts, X)
    (Y, W), num_states = rectangle.position_YW.shape, 1 + num_drafts
    draw = functools.partial(np.random.default_rng(X).standard_normal, dtype=np.float32)
    dt_YWX = np.abs(draw((Y, W, X))) * np.asarray(rectangle.valid_YW)[..., None]
    inputs = draw((Y, W, X)), dt_YWX, -np.exp(draw((M, X))), draw((Y, W, M)), draw((Y, W, M))
    states = draw((recurrent_case.SLOTS + 1, num_states, M, X))
    x, dt, A, B, C, after = (array.astype(np.float64) for array in (*inputs, states))
    out = np.zeros((Y, W, X))
    for y, w in np.ndindex(Y, W):
        if rectangle.valid_YW[y, w]:
            slot, p = rectangle.slot_Y[y], rectangle.position_YW[y, w]
            before, added = after[slot, (p - 1) % num_states], np.outer(B[y, w], dt[y, w] * x[y, w])
            state = after[slot, p % num_states] = np.exp(dt[y, w] * A) * before + added
            out[y, w] = C[y, w] @ state
    return rectangle, inputs, states, out, after


def test_a_cpus_scan_equals_a_loop_in_float64(instruction_set):  # noqa: F811
    for M, X in ((1, 3), (5, 33), (16, 700)):
        for num_drafts, counts in ((0, [1, 1, 0, 1, 0]), (2, [3, 0, 1, 2, 0])):
            rectangle, inputs, states, expected, states_after = _scanned(counts, num_drafts, M, X)
            out, after = jax.jit(ffi_cpu.scan)(*inputs, states, rectangle)
            close(out, expected, 3e-6)
            close(after, states_after, 3e-6)


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_cpus_convolution_has_xlas_bits(instruction_set, has_bias):  # noqa: F811
    """So that `deterministic`, whose prompts XLA convolves, need not do without it."""
    draw = functools.partial(np.random.default_rng(0).standard_normal, dtype=np.float32)
    for X, num_taps in ((3, 2), (40, 4), (1100, 3)):
        bias = jnp.asarray(draw(X), jnp.bfloat16) if has_bias else None
        for num_drafts, counts in ((0, [1, 1, 0, 1, 0]), (2, [3, 0, 1, 2, 0])):
            rectangle = recurrent_case.rows(num_drafts, counts, X)
            tails = draw((recurrent_case.SLOTS + 1, 1 + num_drafts, num_taps - 1, X))
            inputs = draw((*rectangle.position_YW.shape, X)), draw((X, num_taps)), bias, tails
            convolve = functools.partial(rows.convolve, widths=(X,), has_silu=False)
            (expected,), states = jax.jit(convolve)(*inputs, rectangle)
            with backends.use(backends.CPU):
                (out,), after = jax.jit(convolve)(*inputs, rectangle)
            is_token = rectangle.valid_YW[..., None]
            np.testing.assert_array_equal(out, np.where(is_token, expected, 0))
            np.testing.assert_array_equal(after[:-1], states[:-1])


def _decoding(counts: list[int]):
    """A CPU's kernels, what each takes of rows, the states before, and the rows."""
    rectangle = recurrent_case.rows(2, counts, 0)
    *of_heads, heads_states = recurrent_case.inputs(rectangle, (4, 2, 32, 40), True, 0)
    *of_keys, _ = recurrent_case.inputs(rectangle, (4, 2, 32, 40), False, 0, True)
    scan_rows, (x, dt, A, B, C), channels_states, *_ = _scanned(counts, 2, 16, 1100)
    draw = functools.partial(np.random.default_rng(0).standard_normal, dtype=np.float32)
    taps, tails = draw((1100, 4)), draw((recurrent_case.SLOTS + 1, 3, 3, 1100))

    def scan(x, dt, B, C, states, rectangle):
        return ffi_cpu.scan(x, dt, A, B, C, states, rectangle)

    def convolve(x, tails, rectangle):
        (out,), tails = ffi_cpu.convolve(x, taps, None, tails, rectangle, (1100,), False)
        return out, tails

    yield ffi_cpu.update, of_heads, heads_states, rectangle
    yield ffi_cpu.update, of_keys, heads_states, rectangle
    yield scan, [x, dt, B, C], channels_states, scan_rows
    yield convolve, [x], tails, scan_rows


def test_a_cpus_row_has_the_same_bits_in_any_company(instruction_set):  # noqa: F811
    for function, arrays, states, rectangle in _decoding([3, 2, 0, 1, 3, 1]):
        whole, after = jax.jit(function)(*arrays, states, rectangle)
        for part in (slice(1), slice(1, 4), slice(4, None)):
            of_part = jax.tree.map(lambda x: x[part], (arrays, rectangle))  # noqa: B023
            out, after_part = jax.jit(function)(*of_part[0], states, of_part[1])
            np.testing.assert_array_equal(out, whole[part])
            for slot in of_part[1].slot_Y:
                np.testing.assert_array_equal(after_part[slot], after[slot])


def test_a_cpu_touches_no_state_that_is_not_there(instruction_set):  # noqa: F811
    for function, arrays, states, rectangle in _decoding([3, 2, 1]):
        wild_Y = jnp.array([-1, recurrent_case.SLOTS + 1, 1 << 30], jnp.int32)
        before_YW = jnp.full_like(rectangle.position_YW, -5)
        for wild in ({"slot_Y": wild_Y}, {"position_YW": before_YW}):
            hostile = dataclasses.replace(rectangle, **wild)
            out, after = jax.jit(function)(*arrays, states, hostile)
            assert not np.any(out)
            np.testing.assert_array_equal(after, states)
        with refused("do not go together"):
            jax.block_until_ready(function(*arrays, states[..., :-1], rectangle))
        with refused("do not go together"):
            fewer = dataclasses.replace(rectangle, slot_Y=rectangle.slot_Y[:-1])
            jax.block_until_ready(function(*arrays, states, fewer))


_MAMBA = Recurrence((6, 128, 64), linear.recurrent, linear.chunked, api.update_linear)


def _step(is_sequential: bool, is_chained: bool = False):
    """A recurrence's step over decode rows, or over a chain, and what it is called with."""
    rectangle = dataclasses.replace(recurrent_case.rows(0, [1, 1, 0], 0), is_chained=is_chained)
    q, k, v, decay, _, states = recurrent_case.inputs(rectangle, _CASES["mamba2"], False, 0)

    def step(states, rectangle, *inputs):
        return rows.recur(_MAMBA, inputs, states, rectangle, is_sequential)

    return step, states, rectangle, q, k, v, np.log(decay)


def test_decode_rows_alone_get_a_kernel():
    """On a CPU only where the native library computes. With `deterministic` a token has the bits of
    a prompt's, which XLA computes.
    """
    assert "pallas_call" in primitives(*_step(False), platform="tpu")
    assert "mpmd_map" in primitives(*_step(False), platform="cuda")
    assert "pallas_call" not in primitives(*_step(True), platform="tpu")
    assert "pallas_call" not in primitives(*_step(False, is_chained=True), platform="tpu")
    sizes = recurrent_case.SLOTS + 1, 1, 6, 128, 64
    assert api.choose(1, 1, sizes) is None
    with backends.use(backends.CPU):
        assert api.choose(1, 1, sizes) is ffi_cpu.update
        assert api.choose(2, 1, sizes) is None
        need()
        for is_sequential in (False, True):
            step, *arrays = _step(is_sequential)
            assert ("ffi_call" in str(jax.make_jaxpr(step)(*arrays))) == (not is_sequential)


@pytest.mark.parametrize("width, is_chained, is_native", [
    (1, False, False), (3, False, False), (64, True, False), (1, False, True), (3, False, True),
])  # fmt: skip
def test_a_row_alone_leaves_the_states_of_others_where_they_are(width, is_chained, is_native):
    """A step whose time grows with the number of slots would copy them."""
    if is_native:
        need()
    position_YW = jnp.arange(width, dtype=jnp.int32)[None]
    rectangle = Rectangle(
        jnp.zeros(1, jnp.int32), position_YW, jnp.ones((1, width), bool), (), is_chained=is_chained
    )
    q, k, v = (jnp.ones((1, width, heads, size)) for heads, size in ((1, 32), (1, 32), (2, 16)))
    log_decay, states = jnp.zeros((1, width, 2)), jnp.zeros((4000, 3, 2, 32, 16))

    def step(states, rectangle, *inputs):
        return rows.recur(_MAMBA._replace(shape=(2, 32, 16)), inputs, states, rectangle, False)

    with backends.use(backends.CPU if is_native else None):
        lowered = jax.jit(step, donate_argnums=0).lower(states, rectangle, q, k, v, log_decay)
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= states.nbytes
    assert memory.temp_size_in_bytes < states.nbytes / 10


@pytest.mark.parametrize(
    "kernel", [None, _ON_TPU, _ON_GPU, ffi_cpu.update], ids=["reference", "tpu", "gpu", "cpu"]
)
def test_a_step_is_the_loop_with_a_kernel_and_without(kernel, monkeypatch):
    """Without one, states are gathered and scattered."""
    if kernel is ffi_cpu.update:
        need()
    monkeypatch.setattr(api, "choose", lambda *_: kernel)
    step, states, rectangle, q, k, v, log_decay = _step(False)
    expected, after = recurrent_case.loop(q, k, v, np.exp(log_decay), None, states, rectangle)
    out, found = compiling.call(step, states, rectangle, q, k, v, log_decay)
    close(np.where(rectangle.valid_YW[..., None, None], out, 0), expected, 3e-6)
    close(found[:-1], after, 3e-6)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_accelerators_leave_decays_of_channels_to_xla(platform):
    rectangle = recurrent_case.rows(0, [1, 1, 0], 0)
    q, k, v, decay, _, states = recurrent_case.inputs(rectangle, _CASES["mamba2"], False, 0)
    by_channel = np.broadcast_to(np.log(decay)[..., None], (*v.shape[:3], q.shape[-1]))
    with jax.sharding.use_abstract_mesh(mesh(platform)):
        assert api.choose(1, k.shape[2], states.shape) is not None
        assert api.update(q, k, v, by_channel, None, states, rectangle) is None


def test_what_kernels_leave_to_xla():
    """States that fill lanes with neither axis, or no tiles with the other, or no block."""
    for state in ((64, 64), (128, 60), (4096, 4096)):
        assert not tpu.can_update(4, 4, state)
    for state in ((16, 64), (64, 48), (512, 64)):
        assert not gpu.can_update(state)
