"""Hopper's sums of adapters, interpreted, beside float64 and by themselves."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.backends import backends
from layers.backends.backend import Backend
from layers.backends.gpu import Hopper
from layers.kernels.device import Device
from layers.kernels.linear import adapted_gpu
from layers.kernels.linear.adapted import NO_SLOT, SlotOrder
from layers.linear import linear
from tests.interpreted import HOPPER, check_races, threads_are_compiled_once  # noqa: F401
from tests.layers.kernels.adapted_case import Case, drawn

pytestmark = pytest.mark.quick_code

_RANKS = 1, 8, 37, 64, 0


@dataclasses.dataclass(frozen=True)
class _Sums(Backend):
    """Hopper's sums of adapters, and XLA for the rest."""

    interpret: object = HOPPER

    def addition(self, leaf):
        if Hopper().addition(leaf) is None:
            return None
        return functools.partial(adapted_gpu.add, interpret=self.interpret)


@pytest.fixture(autouse=True)
def few_cores(monkeypatch):
    """A block has several units of work then, and a cluster several blocks."""
    monkeypatch.setattr(adapted_gpu, "target_device", lambda: Device("gpu", "NVIDIA H200", 2))


@functools.partial(jax.jit, static_argnums=2)
def _product(x_TD, leaf, backend):
    with backends.use(backend):
        return linear(x_TD, leaf)


def check(case, dtype="bfloat16", interpret=HOPPER):
    """A product with the adapters of its rows, which it returns."""
    w = jnp.asarray(drawn(9, case.ends[-1], case.x_TD.shape[1], dtype=dtype))
    x_TD = jnp.asarray(case.x_TD)
    base_TF = np.asarray(_product(x_TD, w, _Sums(interpret=interpret)))
    leaf = case.leaf(w, packs=False)
    sums_TF = np.asarray(_product(x_TD, leaf, _Sums(interpret=interpret)))
    case.check(sums_TF, base_TF, dtype)
    check_races(interpret)
    return sums_TF


CASES = [  # rows, D, ends of modules, ranks, room for them, dtype
    (1, 64, (64,), (16,), 16, "bfloat16"),
    (7, 512, (64, 128, 192), (1, 8, 0), 16, "bfloat16"),
    (150, 576, (128, 384), (37, 0, 48), 48, "bfloat16"),
    (70, 128, (128,), _RANKS, 64, "float32"),
    pytest.param(65, 2048, (256,), (256, 3), 256, "bfloat16", marks=pytest.mark.long),
]


@pytest.mark.parametrize("T, D, ends, ranks, room, dtype", CASES)
def test_adapters_are_added_to_their_rows(T, D, ends, ranks, room, dtype):
    case = Case.of(T, D, ends, dtype, ranks=ranks, room=room)
    leaf = case.leaf(None, packs=False)
    assert adapted_gpu.can_add(leaf) == (dtype == "bfloat16")
    check(case, dtype)


def _groupings(T):
    """Slots of rows: of one adapter, of all in turn, in order, at random, and of none."""
    generator, N = np.random.default_rng(7), len(_RANKS)
    yield np.full(T, 2)
    yield np.arange(T) % N
    yield np.sort(generator.integers(-1, N, T))
    for share in (0.2, 0.7, 1.0):
        has_slot_T = generator.random(T) < share
        yield np.where(has_slot_T, generator.integers(0, N, T), NO_SLOT)
    yield np.full(T, NO_SLOT)


def test_one_program_adds_any_mixture_and_a_row_has_the_same_bits_in_all():
    T, bits = 100, {}
    before = _product._cache_size()
    for slot_T in _groupings(T):
        case = Case.of(T, 256, (128, 192), "bfloat16", slot_T, _RANKS, 64)
        sums_TF = check(case)
        for t, slot in enumerate(slot_T):
            first_F = bits.setdefault((t, slot), sums_TF[t])
            np.testing.assert_array_equal(sums_TF[t], first_F)
    assert _product._cache_size() - before == 2  # with adapters, and the base without


def test_a_row_has_the_same_bits_at_any_place_and_beside_any_number():
    case = Case.of(150, 512, (64, 192), "bfloat16", ranks=_RANKS, room=64)
    sums_TF = check(case)
    for rows in (slice(3), slice(64), slice(-71, None), slice(None, None, -1)):
        part = dataclasses.replace(case, x_TD=case.x_TD[rows], slot_T=case.slot_T[rows])
        np.testing.assert_array_equal(check(part), sums_TF[rows])


def test_what_is_no_number_stays_in_its_row():
    """Rows of a tile are multiplied with adapters of others, and those without any with some."""
    case = Case.of(40, 128, (64,), "bfloat16", ranks=_RANKS, room=64)
    y_TF, x_TD = jnp.asarray(drawn(1, 40, 64)), jnp.asarray(case.x_TD)
    add = jax.jit(functools.partial(adapted_gpu.add, interpret=HOPPER))
    leaf = case.leaf(None, packs=False)
    clean_TF = np.asarray(add(y_TF, x_TD, leaf))
    dirty_TF = np.asarray(add(y_TF, x_TD.at[::3].set(jnp.nan), leaf))
    is_clean_T = np.arange(40) % 3 > 0
    np.testing.assert_array_equal(dirty_TF[is_clean_T], clean_TF[is_clean_T])
    has_one_T = (case.slot_T >= 0) & (case.ranks_N[case.slot_T] > 0)
    assert np.isnan(dirty_TF[~is_clean_T & has_one_T]).all()
    np.testing.assert_array_equal(dirty_TF[~has_one_T], np.asarray(y_TF)[~has_one_T])


def test_a_unit_of_work_is_a_tile_and_a_slot_that_it_has():
    slot_T = np.full(130, NO_SLOT)
    slot_T[[3, 70, 129]], slot_T[64] = 2, 0
    order = SlotOrder.of(jnp.asarray(slot_T), 3)
    work = adapted_gpu._work(order.slot_T, jnp.ones(3, jnp.int32))
    count, *units = np.asarray(work.units)
    assert count == 4 and units[:4] == [0 * 3 + 2, 1 * 3 + 0, 1 * 3 + 2, 2 * 3 + 2]


@pytest.mark.parametrize("D, ends, room, dtype", [
    (128, (64,), 16, "float32"), (96, (64,), 16, "bfloat16"), (128, (32, 64), 16, "bfloat16"),
    (128, (64,), 272, "bfloat16"), (128, (64,), 24, "bfloat16"),
])  # fmt: skip
def test_other_shapes_and_types_are_xlas(D, ends, room, dtype):
    case = Case.of(2, D, ends, dtype, ranks=(4, 8), room=room)
    assert Hopper().addition(case.leaf(None, packs=False)) is None
