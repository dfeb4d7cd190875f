"""The accelerators' kernels for planes of bits, interpreted, beside float64."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.precision import FORMATS, ROW_FORMATS
from layers.kernels.device import Device
from layers.kernels.linear import low_bit, low_bit_product, low_bit_tpu, skinny_gpu
from layers.linear import linear
from tests import compiling
from tests.accelerators import written_for
from tests.interpreted import HOPPER, sum_error, threads_are_compiled_once  # noqa: F401
from tests.layers.kernels.test_low_bit import drawn, tokens

# Format, rows, F and D; F is no multiple of a TPU's tile.
_CASES = [
    ("int4", 1, 40, 256), ("int4_asym_g32", 7, 600, 512), ("int3_asym_g64", 16, 130, 1024),
    ("mxfp4", 3, 40, 256), ("fp8_block", 9, 2608, 384), ("fp8_block", 1, 144, 128),
    ("mxfp8", 3, 40, 256), ("nvfp4", 3, 40, 256),
    pytest.param(("int3", 5, 600, 1024), marks=pytest.mark.long),
    pytest.param(("int4_g64", 33, 130, 768), marks=pytest.mark.long),
]  # fmt: skip
GPU_CASES = [  # of whole tiles
    ("bfloat16", 3, 128, 192), ("int8", 5, 64, 256), ("fp8", 9, 128, 128), ("int4", 1, 192, 768),
    ("int4_asym_g32", 7, 128, 256), ("int3_asym_g64", 16, 64, 1024), ("mxfp4", 3, 64, 256),
    ("fp8_block", 9, 128, 384), ("mxfp8", 3, 64, 256), ("nvfp4", 3, 64, 256),
    pytest.param(("int3", 5, 128, 1024), marks=pytest.mark.long),
    pytest.param(("int4_asym_g64", 33, 64, 768), marks=pytest.mark.long),
]  # fmt: skip
_H200 = Device("gpu", "NVIDIA H200", num_cores=132)
_ON_TPU = compiling.jit(functools.partial(low_bit_tpu.products, interpret=True))
_ON_GPU = compiling.jit(functools.partial(skinny_gpu.products, interpret=HOPPER))


def _multiply_matrix(x_TD, w):
    return skinny_gpu.products(x_TD[None], w, None, interpret=HOPPER)[0]


def _gate_matrix(x_TD, w, activation="silu"):
    gate = functools.partial(skinny_gpu.gated_products, interpret=HOPPER)
    return gate(x_TD[None], w, None, activation, "float32")[0]


@pytest.fixture(autouse=True)
def _target_is_a_gpu(monkeypatch):
    monkeypatch.setattr(skinny_gpu, "target_device", lambda: _H200)


def _drawn(format, *shape, dtype, word=np.uint8):
    if format != "bfloat16":
        return drawn(format, *shape, dtype=dtype, word=word)
    w = jnp.asarray(tokens(*shape, seed=0), jnp.bfloat16)
    return w, np.asarray(w, np.float64)


def check(multiply, case, dtype, word=np.uint8, interpret=HOPPER):
    """A block of no matrix is skipped."""
    format, T, F, D = case
    w, numbers = _drawn(format, 2, F, D, dtype=dtype, word=word)
    x_BTD, matrix_B = tokens(3, T, D), jnp.array([1, 0, 2], jnp.int32)
    found = multiply(x_BTD, w, matrix_B)
    chex.assert_shape(found, (3, T, F))
    chex.assert_type(found, jnp.float32)
    x_BTD = np.asarray(jnp.asarray(x_BTD, dtype), np.float64)
    for b, e in ((0, 1), (1, 0)):
        size = np.abs(x_BTD[b]) @ np.abs(numbers[e]).T
        error = np.abs(found[b] - x_BTD[b] @ numbers[e].T)
        assert (error < sum_error(interpret) * size).all()


@pytest.mark.quick_code
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.long)])
@pytest.mark.parametrize("case", _CASES, ids=str)
def test_a_tpus_kernel_is_exact_up_to_its_sums(case, dtype):
    """Of bfloat16 activations, too: integers are multiplied, and scales weigh sums."""
    assert low_bit_tpu.can_multiply(case[1], low_bit.abstract((2, *case[2:]), case[0], dtype))
    check(_ON_TPU, case, dtype)


@pytest.mark.quick_code
@pytest.mark.parametrize("format, F, D", [
    ("int4_asym_g32", 300, 512), ("int3", 40, 2048), ("mxfp4", 40, 256), ("int4_g64", 20, 3072),
])  # fmt: skip
def test_a_tpu_expands_a_matrix_as_xla_would(format, F, D):
    w, numbers = drawn(format, F, D, dtype="bfloat16")
    found = compiling.call(low_bit_tpu.expanded, w, interpret=True)
    np.testing.assert_array_equal(found, jnp.asarray(numbers, jnp.bfloat16))


@pytest.mark.quick_code
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_a_gpus_kernel_is_exact_up_to_its_sums(case):
    """Blocks share the steps of a tile, and their parts are summed."""
    check(_ON_GPU, case, "bfloat16", np.uint16)


@pytest.mark.quick_code
@pytest.mark.parametrize("activation, format", [("silu", "int4"), ("gelu_tanh", "bfloat16")])
def test_a_gate_is_applied_to_sums(activation, format):
    """Of the same features of both halves, by blocks that share the steps."""
    w, numbers = _drawn(format, 256, 512, dtype="bfloat16", word=np.uint16)
    x_TD = tokens(5, 512) / 16
    found = compiling.call(_gate_matrix, x_TD, w, activation=activation)
    chex.assert_shape(found, (5, 128))
    x_TD = np.asarray(jnp.asarray(x_TD, jnp.bfloat16), np.float64)
    gate_TF, up_TF = np.split(x_TD @ numbers.T, 2, axis=1)
    expected = np.asarray(skinny_gpu.GATES[activation](gate_TF, up_TF))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.long
@pytest.mark.quick_code
@pytest.mark.parametrize("seed", range(500))
def test_random_products_of_a_gpu(seed, monkeypatch):
    """Of any format, rows, sizes, and devices of few and of many cores; with a gate or without."""
    random = np.random.default_rng(seed)
    cores = int(random.choice([1, 4, 16, 132]))
    monkeypatch.setattr(skinny_gpu, "target_device", lambda: _H200._replace(num_cores=cores))
    format = str(random.choice(["bfloat16", *ROW_FORMATS]))
    F, D = 64 * int(random.integers(1, 7)), 1024 * int(random.integers(1, 3))
    w, numbers = _drawn(format, F, D, dtype="bfloat16", word=np.uint16)
    T = int(random.integers(1, 65))
    while T > 1 and not skinny_gpu.can_multiply(T, w):
        T -= 1
    if not skinny_gpu.can_multiply(T, w):
        assert FORMATS[format].activations is not None
        return
    x_TD = tokens(T, D, seed=seed) / 32
    found = compiling.call(_multiply_matrix, x_TD, w)
    x_TD = np.asarray(jnp.asarray(x_TD, jnp.bfloat16), np.float64)
    error_TF = 1e-6 * (np.abs(x_TD) @ np.abs(numbers).T)
    assert (np.abs(found - x_TD @ numbers.T) <= error_TF).all()
    if skinny_gpu.can_gate(T, w) and random.random() < 0.3:
        found = compiling.call(_gate_matrix, x_TD, w)
        gate_TF, up_TF = np.split(x_TD @ numbers.T, 2, axis=1)
        expected = gate_TF * (1 + np.tanh(gate_TF / 2)) / 2 * up_TF
        gate_error_TF, up_error_TF = np.split(error_TF, 2, axis=1)
        # No slope of silu is above 1.1, and no value above its argument's.
        bound = 1.1 * gate_error_TF * (np.abs(up_TF) + up_error_TF) + np.abs(gate_TF) * up_error_TF
        assert (np.abs(found - expected) <= bound + 1e-6 * np.abs(expected)).all()


@pytest.mark.quick_code
def test_derivatives_of_arrays_are_xlas():
    """They are rounded to bfloat16 once, of sums whose float32 roundings differ twice a side."""
    w_FD, x_TD = jnp.asarray(tokens(128, 64, seed=0), jnp.bfloat16), jnp.asarray(tokens(3, 64))

    def loss(multiply, x_TD, w_FD):
        return jnp.square(multiply(x_TD, w_FD)).sum()

    def multiply(x_TD, w_FD):
        return _multiply_matrix(x_TD, w_FD)

    found = jax.grad(functools.partial(loss, multiply), (0, 1))(x_TD, w_FD)
    expected = jax.grad(functools.partial(loss, linear), (0, 1))(x_TD, w_FD)
    x_size_TD, w_size_FD = (np.abs(np.asarray(array, np.float64)) for array in (x_TD, w_FD))
    size_TF = 2 * x_size_TD @ w_size_FD.T
    for of_kernel, of_xla, size in zip(
        found, expected, (size_TF @ w_size_FD, size_TF.T @ x_size_TD), strict=True
    ):
        bound = 2**-7 * np.abs(np.asarray(of_xla, np.float64)) + 4 * sum_error(HOPPER) * size
        assert (np.abs(np.asarray(of_kernel, np.float64) - of_xla) <= bound).all()


@pytest.mark.quick_code
def test_a_cluster_of_a_gpu_has_several_tiles(monkeypatch):
    """Three or two, on a device with room for two clusters of two."""
    monkeypatch.setattr(skinny_gpu, "target_device", lambda: _H200._replace(num_cores=2))
    check(_ON_GPU, ("int4_asym", 9, 640, 512), "bfloat16", np.uint16)


@pytest.mark.parametrize(
    "multiply, word", [(_ON_TPU, np.uint8), (_ON_GPU, np.uint16)], ids=["tpu", "gpu"]
)
@pytest.mark.parametrize("format", ["int4_asym"])
def test_a_row_has_the_same_bits_in_any_company(format, multiply, word):
    w, _ = drawn(format, 1, 64, 512, dtype="bfloat16", word=word)
    x_TD = tokens(40, 512)

    def run(x_TD):
        return np.asarray(multiply(x_TD[None], w, jnp.zeros(1, jnp.int32))[0])

    whole = run(x_TD)
    for some in (slice(1), slice(-33, None)):
        np.testing.assert_array_equal(run(x_TD[some]), whole[some])


def test_what_kernels_leave_to_xla():
    """Many rows, rows of the matrix that are no whole words' elements, and what is rounded."""
    for rows, format, D in (
        (129, "int4", 4096), (1, "int4_g32", 576), (128, "int3_g32", 4096), (1, "int3", 512),
        (1, "w8a8", 4096),
    ):  # fmt: skip
        w = low_bit.abstract((1, 256, D), format, "bfloat16")
        assert not low_bit_tpu.can_multiply(rows, w)
        w = low_bit.abstract((1, 256, D), format, "bfloat16", np.uint16)
        assert not skinny_gpu.can_multiply(rows, w)
    assert not skinny_gpu.can_multiply(1, low_bit.abstract((64, 256), "int4", "bfloat16"))
    assert not skinny_gpu.can_multiply(1, low_bit.abstract((64, 256), "int8", "float32"))


@pytest.mark.parametrize("format", ["fp8", "w8a8", "w8a8_fp8", "int4_asym_g64", "int3"])
def test_xlas_products_on_accelerators_are_those_of_a_cpu(format):
    w, _ = drawn(format, 2, 40, 384)
    x_BTD, matrix_B = tokens(3, 9, 384), jnp.array([1, 0, 1], jnp.int32)
    found = written_for("cuda", low_bit_product.products)(x_BTD, w, matrix_B)
    expected = jax.jit(low_bit_product.products)(x_BTD, w, matrix_B)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)
