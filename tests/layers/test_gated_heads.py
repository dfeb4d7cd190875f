"""Attention whose heads have gates and narrow values, once more in numpy."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from configs.cache import keys_values
from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from inference.benchmark.kernels import attention_case
from layers import rope
from layers.mixers import attention
from layers.params import init
from layers.ragged import contiguous
from layers.registry import StepContext
from tests.layers import paged_case

pytestmark = pytest.mark.quick_code

KIND = Attention(4, 2, 6, rope=Rope(), scale=0.3, biases=("qkv", "out"))
CONFIG = ModelConfig(
    "tiny", "llama", 31, width=12, num_layers=1, max_context=64, dtype="float32",
    pattern=(LayerSpec(KIND, Gated(20)),),
)  # fmt: skip
GATES = {"sigmoid": lambda z: 1 / (1 + np.exp(-z)), "softplus": lambda z: np.log1p(np.exp(z))}


@pytest.mark.parametrize(
    "changes",
    [
        {"head_gate": "sigmoid"},
        {"value_width": 4, "value_scale": 0.7},
        {"head_gate": "softplus", "value_width": 2},
        {"head_gate": "sigmoid", "gates_elements": True, "value_width": 4},
    ],
)
def test_apply_is_project_rotate_attend_gate_project(changes):
    kind = dataclasses.replace(KIND, **changes)
    params = init(kind.parameters(CONFIG), 5)
    params = {name: leaf + 0.1 if leaf.ndim == 1 else leaf for name, leaf in params.items()}
    x_TD = np.random.default_rng(0).standard_normal((9, 12)).astype(np.float32)
    ragged = contiguous(1, 9)
    angles = rope.angles(kind.rope, 6, ragged.position_T)
    context = StepContext(ragged, angles, keys_values(2, 6), 0, True, False)
    apply = jax.jit(lambda x: attention.apply(params, CONFIG, kind, x, None, context)[0])
    weights = {name: np.asarray(leaf, np.float64) for name, leaf in params.items()}
    V = kind.value_width or 6
    assert weights["qkv"].shape == (36 + 2 * V, 12) and weights["out"].shape == (12, 4 * V)
    projected = x_TD @ weights["qkv"].T + weights["qkv_bias"]
    heads, v = projected[:, :36].reshape(9, 6, 6), projected[:, 36:].reshape(9, 2, V)
    turns = np.exp(1j * np.arange(9)[:, None, None] * 10_000.0 ** (-np.arange(0, 6, 2) / 6))
    z = (heads[..., :3] + 1j * heads[..., 3:]) * turns
    q, k = np.split(np.concatenate([z.real, z.imag], -1), [4], axis=1)
    seen = functools.partial(paged_case.seen, window=None, num_keys=9)
    padded = np.concatenate([v * kind.value_scale, np.zeros((9, 2, 6 - V))], -1)
    out = np.array([attention_case.exact(q[t] * 0.3, k, padded, seen(t))[0] for t in range(9)])
    out = out[..., :V]
    if kind.head_gate is not None:
        out *= GATES[kind.head_gate](x_TD @ weights["gate"].T).reshape(9, 4, -1)
    expected = out.reshape(9, 4 * V) @ weights["out"].T + weights["out_bias"]
    np.testing.assert_allclose(apply(x_TD), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"head_gate": "tanh"}, "head_gate"),
        ({"gates_elements": True}, "gates_elements goes with a head_gate"),
        ({"value_width": 6}, "value_width=6: must be below head_width=6"),
        ({"value_width": 4, "has_values": False}, "of a layer with values and no owner"),
        ({"value_scale": 0.0}, "value_scale"),
    ],
)
def test_what_contradicts_itself_is_named(changes, cause):
    with pytest.raises(InputError, match=cause):
        dataclasses.replace(KIND, **changes)


def test_the_planner_counts_narrow_values():
    """Their rows and columns as stored, the cache and sums over it with the zeros behind them."""
    narrow = dataclasses.replace(KIND, value_width=4, head_gate="sigmoid")
    whole, small = (
        dataclasses.replace(CONFIG, pattern=(LayerSpec(kind, Gated(20)),))
        for kind in (KIND, narrow)
    )
    assert small.cache_specs == whole.cache_specs
    matrices = [
        sum(spec.shape[0] * spec.shape[1] for spec in kind.parameters(CONFIG).values()
            if len(spec.shape) == 2)
        for kind in (KIND, narrow)
    ]  # fmt: skip
    assert matrices[0] - matrices[1] == 2 * 2 * 12 + 4 * 2 * 12 - 4 * 12
