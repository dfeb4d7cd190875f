"""S4D beside its formulas, state by state, in NumPy's complex numbers."""

import dataclasses

import numpy as np
import pytest

from configs.cache import CacheSpec
from configs.errors import InputError
from configs.kinds.feed_forward import Gated
from configs.kinds.recurrent.s4 import S4
from configs.model import LayerSpec, ModelConfig
from layers import params
from layers.mixers import s4
from layers.ragged import contiguous
from layers.registry import StepContext
from tests import compiling

WIDTH, STATES, ROWS, TOKENS = 6, 4, 2, 150  # two chunks of the recurrence, and a part of a third
KIND = S4(WIDTH, STATES)
CONFIG = ModelConfig(
    "s4", "minimax", 41, width=WIDTH, num_layers=1, max_context=256, dtype="float32",
    pattern=(LayerSpec(KIND, Gated(12)),),
)  # fmt: skip


def drawn():
    """Parameters none of which is what it begins as."""
    rng = np.random.default_rng(0)
    own = params.init(KIND.parameters(CONFIG), 3)
    return {
        name: leaf + rng.normal(size=leaf.shape, scale=0.3).astype(np.float32)
        for name, leaf in own.items()
    }


def inputs():
    return np.random.default_rng(1).normal(size=(ROWS * TOKENS, WIDTH)).astype(np.float32)


def erf(x):
    """By its series, which converges everywhere."""
    found, term = np.zeros_like(x), x.copy()
    for n in range(1, 120):
        found += term / (2 * n - 1)
        term *= -(x**2) / n
    return 2 / np.sqrt(np.pi) * found


def by_hand(p, x_TX):
    """Every channel and every state on its own, in complex128."""
    p = {name: np.asarray(value, np.float64) for name, value in p.items()}
    out_TX = np.zeros_like(x_TX)
    for channel in range(WIDTH):
        first = np.log(1e-3) + (np.log(1e-1) - np.log(1e-3)) * (channel + 0.5) / WIDTH
        step = np.exp(first + p["step"][channel])
        for n in range(STATES):
            rate = -0.5 * np.exp(p["rate"][channel, n])
            A = rate + 1j * (np.pi * n + p["frequency"][channel, n])
            a = np.exp(step * A)
            B = (a - 1) / A  # of an input that is held for a step
            real, imag = p["read"][channel, n], p["read"][channel, STATES + n]
            C = np.sqrt(STATES) * (real + 1j * imag)
            state = 0
            for t, x in enumerate(x_TX[:, channel]):
                state = a * state + B * x
                out_TX[t, channel] += 2 * (C * state).real
    out_TX += p["skip"] * x_TX
    out_TX *= (1 + erf(out_TX / np.sqrt(2))) / 2
    value, gate = np.split(out_TX @ p["out"].T + p["out_bias"], 2, axis=1)
    return value / (1 + np.exp(-gate))


@pytest.mark.parametrize("is_deterministic", [False, True], ids=["convolved", "token by token"])
def test_a_layer_by_hand(is_deterministic):
    own, x = drawn(), inputs()
    context = StepContext(contiguous(ROWS, TOKENS), None, CacheSpec(), 0, True, is_deterministic)

    def layer(own, x):
        return s4.apply(own, CONFIG, KIND, x, None, context)[0]

    found = np.asarray(compiling.jit(layer)(own, x)).reshape(ROWS, TOKENS, WIDTH)
    for x_TX, row in zip(x.astype(np.float64).reshape(found.shape), found, strict=True):
        expected = by_hand(own, x_TX)
        assert np.abs(expected).mean() > 0.1
        np.testing.assert_allclose(row, expected, atol=2e-5)


def test_states_begin_as_the_paper_has_them():
    kind = S4(64, 8)
    wide = dataclasses.replace(CONFIG, width=64, pattern=(LayerSpec(kind, Gated(12)),))
    own = params.init(kind.parameters(wide), 0)
    log_a, _, C = (np.asarray(x) for x in s4.discretized(own, kind))
    steps = -2 * log_a.real
    assert steps.min() == pytest.approx(1e-3, rel=0.05)
    assert steps.max() == pytest.approx(1e-1, rel=0.05)
    turns = np.pi * np.arange(8) * np.ones((64, 1))
    np.testing.assert_allclose(log_a.imag, steps * turns, rtol=1e-5)
    assert np.abs(C).std() < 1 and (np.abs(C) ** 2).mean() == pytest.approx(1, rel=0.15)


def test_the_cost_of_a_state_by_hand():
    """Decode of one token: the product, and states that are read and written."""
    stored = KIND.cache(CONFIG)
    assert stored.elements_per_sequence == WIDTH * STATES * 2
    found = {each.name: each for each in KIND.operations(CONFIG, stored)}
    assert found["s4.out"].flops == ((2 * 2 * WIDTH * WIDTH, ("tokens",)),)
    move, _ = found["recur"].moves
    assert move.amount == ((2 * 48, ("sequences",)), (48, ("drafts",)))
    assert found["recur"].flops == ((14 * WIDTH * STATES, ("queries",)),)
    assert found.keys() == {"s4.out", "recur"}


def test_what_is_no_s4_is_named():
    with pytest.raises(InputError, match="s4 channels is at least 1, not 0"):
        S4(0)
    with pytest.raises(InputError, match="s4 state_width is at least 1, not 0"):
        S4(6, 0)
    context = StepContext(contiguous(1, 4), None, CacheSpec(), 0, True, False)
    with pytest.raises(InputError, match="s4 channels=4 are those of the model, model.width=6"):
        s4.apply(drawn(), CONFIG, S4(4, 4), inputs()[:4], None, context)
