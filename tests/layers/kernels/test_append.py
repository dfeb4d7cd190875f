"""Hopper's kernel from the product of queries, keys and values to attention, interpreted, beside
float64.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers import page_rows
from layers.backends import backends
from layers.kernels.attention import append_gpu
from tests import compiling
from tests.interpreted import HOPPER, check_races, threads_are_compiled_once  # noqa: F401

pytestmark = pytest.mark.quick_code

_EPS, _OFFSET, _SCALE, _PAGE_TOKENS = 1e-3, 1.0, 0.3, 8


def _headed(x_TNH, weight_H, angles):
    """Heads in float64 after norm and rotation."""
    if weight_H is not None:
        x_TNH = x_TNH / np.sqrt((x_TNH**2).mean(-1, keepdims=True) + _EPS) * (weight_H + _OFFSET)
    cos_T1X, sin_T1X = (turn_TX[:, None].astype(np.float64) for turn_TX in angles)
    pairs = cos_T1X.shape[-1]
    first, second = x_TNH[..., :pairs], x_TNH[..., pairs : 2 * pairs]
    turned = first * cos_T1X - second * sin_T1X, second * cos_T1X + first * sin_T1X
    return np.concatenate([*turned, x_TNH[..., 2 * pairs :]], axis=-1)


def check(T, N, K, H, pairs, has_norms, has_bias, seed=0, interpret=HOPPER):
    """Queries and rows of pages are float64's within the rounding of bfloat16; padding, and what
    lies beside the tokens, is written nowhere.
    """
    generator = np.random.default_rng(seed)
    draw = functools.partial(generator.standard_normal, dtype=np.float32)
    qkv_TX = 2 * draw((T, (N + 2 * K) * H))
    qkv_TX[0, -5], qkv_TX[0, -H] = np.nan, 3.4e38  # infinite in bfloat16
    turn_TX = generator.uniform(0, 6.3, (T, pairs)).astype(np.float32)
    angles = np.cos(turn_TX), np.sin(turn_TX)
    norms = tuple(jnp.asarray(draw(H), jnp.bfloat16) for _ in "qk") if has_norms else None
    spots = generator.permutation(np.arange(_PAGE_TOKENS, 9 * _PAGE_TOKENS))[:T]
    page_T, offset_T = (part.astype(np.int32) for part in np.divmod(spots, _PAGE_TOKENS))
    page_T[1::4] = 0  # padding
    pages = jnp.asarray(draw((9, _PAGE_TOKENS, 2 * K * H)), jnp.bfloat16)
    bias_X = jnp.asarray(draw(qkv_TX.shape[1]), jnp.bfloat16) if has_bias else None
    q_TNH, after = compiling.call(
        append_gpu.append, qkv_TX, angles, norms, (page_T, offset_T),
        jax.lax.bitcast_convert_type(pages, jnp.uint16), shape=(N, K, H), dtype="bfloat16",
        scale=_SCALE, eps=_EPS, offset=_OFFSET, bias_X=bias_X,
        interpret=interpret,
    )  # fmt: skip
    if bias_X is not None:
        qkv_TX = qkv_TX + np.asarray(bias_X, np.float32)
    heads_TXH = qkv_TX.astype(np.float64).reshape(T, -1, H)
    weights = (None, None) if norms is None else (np.asarray(w, np.float64) for w in norms)
    parts = heads_TXH[:, :N], heads_TXH[:, N : N + K]
    query_TNH, key_TKH = (_headed(x, w, angles) for x, w in zip(parts, weights, strict=True))
    near = dict(rtol=2**-7, atol=1e-5)
    is_token = page_T > 0
    np.testing.assert_allclose(
        np.asarray(q_TNH, np.float64)[is_token], _SCALE * query_TNH[is_token], **near
    )
    value_TKH = np.asarray(jnp.asarray(qkv_TX, jnp.bfloat16), np.float64).reshape(T, -1, H)[:, -K:]
    is_finite = np.isfinite(value_TKH)
    row_TX = np.concatenate(
        [np.where(is_finite, key_TKH, np.nan), np.where(is_finite, value_TKH, 0)], axis=1
    ).reshape(T, -1)
    expected = np.asarray(pages, np.float64)
    expected[page_T[is_token], offset_T[is_token]] = row_TX[is_token]
    stored = np.asarray(page_rows.decode(after), np.float64)
    np.testing.assert_allclose(stored, expected, **near)
    unwritten = np.ones(stored.shape[:2], bool)
    unwritten[page_T[is_token], offset_T[is_token]] = False
    np.testing.assert_array_equal(stored[unwritten], expected[unwritten])
    check_races(interpret)


CASES = [  # N, K, H, pairs, has_norms, has_bias
    (4, 2, 128, 64, True, False), (2, 2, 128, 16, False, True), (2, 1, 256, 128, True, False),
    (1, 1, 128, 0, True, True), (6, 2, 64, 32, False, True), (4, 4, 64, 8, False, False),
]  # fmt: skip


@pytest.mark.parametrize("N, K, H, pairs, has_norms, has_bias", CASES)
def test_a_gpus_kernel_equals_float64(N, K, H, pairs, has_norms, has_bias):
    assert append_gpu.can_append((N, K, H), has_norms)
    check(3, N, K, H, pairs, has_norms, has_bias)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(500))
def test_random_tokens_of_a_gpu(seed):
    generator = np.random.default_rng(seed)
    H, has_norms = 64 << int(generator.integers(3)), bool(generator.integers(2))
    K = 2 * int(generator.integers(1, 3)) if H == 64 else int(generator.integers(1, 3))
    N, pairs = K * int(generator.integers(1, 4)), int(generator.integers(0, H // 4 + 1)) * 2
    has_norms, has_bias = has_norms and H > 64, bool(generator.integers(2))
    check(int(generator.integers(1, 6)), N, K, H, pairs, has_norms, has_bias, seed)


@pytest.mark.parametrize("backend, attention, shape, has_norms, has_kernel", [
    (backends.HOPPER, "pallas_gpu", (8, 2, 128), True, True),
    (backends.HOPPER, "pallas_gpu", (8, 2, 64), False, True),
    (backends.HOPPER, "pallas_gpu", (8, 2, 64), True, False),
    (backends.HOPPER, "pallas_gpu", (9, 3, 64), False, False),
    (backends.HOPPER, "reference", (8, 2, 128), False, False),
    (backends.CPU, "ffi_cpu", (9, 3, 64), True, True),
    (backends.CPU, "reference", (8, 2, 64), False, False),
    (backends.TPU, "pallas_tpu", (8, 2, 128), False, False),
])  # fmt: skip
def test_who_has_a_kernel(backend, attention, shape, has_norms, has_kernel):
    assert (backend.append(attention, shape, has_norms) is not None) == has_kernel
