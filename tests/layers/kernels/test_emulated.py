"""AArch64's instruction sets by QEMU: which a processor has, and what BF16 sums in which order. All
else that instruction sets promise, their own tests ask of these too (`make test-long`).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.kernels.cpu import library
from layers.kernels.linear import packed
from layers.linear import linear
from tests.layers import emulated, native

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]  # the first compiles the library


@pytest.fixture(autouse=True)
def _a_library_that_packs():
    native.need()


@pytest.mark.parametrize(("processor", "names"), [
    ("cortex-a53", ("neon",)), ("neoverse-n1", ("neondotprod", "neon")),
    ("max", ("neonbf16", "neondotprod", "neon")),
])  # fmt: skip
def test_a_processor_has_what_its_system_says(processor, names):
    emulation = emulated.started(processor)
    seconds = {name: emulation.seconds(name) for name in library.INSTRUCTION_SETS}
    assert tuple(name for name in seconds if seconds[name] >= 0) == names
    assert all(emulation.use(name) == (name in names) for name in seconds)
    assert {seconds[name] for name in {*seconds} - {*names}} == {-1}


def _to_odd(exact):
    """Float64 as float32: towards 0, and where that is not exact its last bit is 1."""
    nearest = exact.astype(np.float32)
    is_beyond = np.abs(nearest.astype(np.float64)) > np.abs(exact)
    cut = np.where(is_beyond, np.nextafter(nearest, np.float32(0)), nearest)
    return (cut.view(np.uint32) | (cut.astype(np.float64) != exact)).view(np.float32)


def _summed(x_TD, w_FD):
    """Pair after pair: the sum of its products is rounded, then the accumulator."""
    products_TFD = x_TD[:, None].astype(np.float64) * w_FD.astype(np.float64)
    sums_TF = np.zeros(products_TFD.shape[:2], np.float32)
    for k in range(0, products_TFD.shape[2], 2):
        of_pair_TF = _to_odd(products_TFD[:, :, k] + products_TFD[:, :, k + 1])
        sums_TF = _to_odd(sums_TF.astype(np.float64) + of_pair_TF)
    return sums_TF


@pytest.mark.parametrize("rows", [1, 2, 3, 6, 7, 20])
def test_pairs_are_rounded_to_odd_in_the_order_of_depth(rows):
    """Also where many rows go through the depth in parts."""
    rng = np.random.default_rng(rows)
    x_TD = rng.standard_normal((rows, 2112)).astype(jnp.bfloat16)
    w_FD = rng.standard_normal((40, 2112)).astype(jnp.bfloat16)
    w = packed.pack(w_FD)
    with emulated.using("neonbf16"):
        y_TF = jax.jit(linear)(x_TD, w)
    np.testing.assert_array_equal(y_TF, _summed(x_TD, w_FD))


def test_denormals_count_as_0_and_what_is_not_finite_stays():
    """In one row and in several alike."""
    x_TD = np.ones((3, 32), jnp.bfloat16)
    x_TD[:, 0] = 1e-39
    w_FD = np.zeros((5, 32), jnp.bfloat16)
    w_FD[:, 0] = 1e38
    w_FD[1:, 1] = 1, np.nan, np.inf, -np.inf
    w = packed.pack(w_FD)
    with emulated.using("neonbf16"):
        for rows in (1, 3):
            y_TF = jax.jit(linear)(x_TD[:rows], w)
            np.testing.assert_array_equal(y_TF, [[0, 1, np.nan, np.inf, -np.inf]] * rows)
