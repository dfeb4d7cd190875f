"""Linear attention with each map: token by token and all pairs at once, in NumPy and float64."""

import math

import chex
import jax
import numpy as np
import pytest

from configs.cache import CacheSpec
from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.kinds.feed_forward import Gated
from configs.kinds.recurrent.linear_attention import LinearAttention
from configs.model import LayerSpec, ModelConfig
from inference.planner import weights
from inference.runtime import model_runner
from layers import decoder, kv_cache, params
from layers.mixers import linear_attention
from layers.ragged import contiguous
from layers.registry import StepContext
from tests import compiling, fakes

KINDS = {
    "lightning": LinearAttention(3, 4, 5, decay=0.7, has_gated_norm=True),
    "silu": LinearAttention(3, 4, 5),
    "elu": LinearAttention(3, 4, 5, "elu"),
    "elu, decaying": LinearAttention(2, 5, 4, "elu", decay=1.0),
    "taylor": LinearAttention(3, 4, 5, "taylor"),
}
WIDTH, ROWS, TOKENS = 8, 2, 150  # two chunks of the recurrence, and a part of a third


def model(kind: LinearAttention, **changes) -> ModelConfig:
    return ModelConfig(
        "linear", "minimax", 41, width=WIDTH, num_layers=1, max_context=256, dtype="float32",
        pattern=(LayerSpec(kind, Gated(12)),), **changes,
    )  # fmt: skip


def applied(kind: LinearAttention, is_deterministic: bool = False):
    """(parameters in float64, inputs [rows, tokens, D], what the layer makes of them)."""
    config = model(kind)
    own = params.init(kind.parameters(config), 3)
    x = np.random.default_rng(1).normal(size=(ROWS * TOKENS, WIDTH)).astype(np.float32)
    context = StepContext(
        contiguous(ROWS, TOKENS), None, CacheSpec(), 0, True, is_deterministic
    )  # fmt: skip

    def layer(own, x):
        return linear_attention.apply(own, config, kind, x, None, context)[0]

    found = np.asarray(compiling.jit(layer)(own, x)).reshape(ROWS, TOKENS, WIDTH)
    shaped = {name: np.asarray(value, np.float64) for name, value in own.items()}
    return shaped, x.astype(np.float64).reshape(ROWS, TOKENS, WIDTH), found


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def heads(p, kind: LinearAttention, x_TD):
    """Queries, keys and values [N, T, ...] before any map."""
    N, M, H = kind.num_heads, kind.key_width, kind.value_width
    fed = x_TD @ p["in"].T
    if kind.feature_map == "silu":
        fed = fed * sigmoid(fed)
    parts = np.split(fed, [N * M, 2 * N * M], axis=1)
    widths = M, M, H
    return [
        part.reshape(len(x_TD), N, width).swapaxes(0, 1)
        for part, width in zip(parts, widths, strict=True)
    ]


def out_of(p, kind: LinearAttention, x_TD, read_NTH):
    """The layer behind what its heads read."""
    flat = read_NTH.swapaxes(0, 1).reshape(len(x_TD), -1)
    if kind.has_gated_norm:
        flat = flat / np.sqrt((flat**2).mean(1, keepdims=True) + 1e-6) * p["out_norm"]
        flat = flat * sigmoid(x_TD @ p["gate"].T)
    return flat @ p["out"].T


def slopes(kind: LinearAttention):
    """How much of the logarithm of a head's state is lost by a token."""
    N = kind.num_heads
    return [(kind.decay or 0) * 2 ** (-8 * (n + 1) / N) for n in range(N)]


def phi(x, kind: LinearAttention):
    """The map of one vector; of the Taylor series every product of two elements."""
    if kind.feature_map == "silu":
        return x
    if kind.feature_map == "elu":
        return np.array([1 + e if e > 0 else math.exp(e) for e in x])
    x = x / len(x) ** 0.25
    return np.concatenate([[1.0], x, np.outer(x, x).ravel() / math.sqrt(2)])


def score(q, k, kind: LinearAttention):
    """Of a query and a key, without a map."""
    if kind.feature_map == "taylor":
        logit = q @ k / math.sqrt(len(q))
        return 1 + logit + logit**2 / 2
    return phi(q, kind) @ phi(k, kind)


def token_by_token(p, kind: LinearAttention, x_TD):
    q, k, v = heads(p, kind, x_TD)
    read = np.zeros((kind.num_heads, len(x_TD), kind.value_width))
    for n, slope in enumerate(slopes(kind)):
        width = len(phi(k[n, 0], kind))
        state, mass = np.zeros((width, kind.value_width)), np.zeros(width)
        for t in range(len(x_TD)):
            key, query = phi(k[n, t], kind), phi(q[n, t], kind)
            state = state * math.exp(-slope) + np.outer(key, v[n, t])
            mass = mass * math.exp(-slope) + key
            read[n, t] = query @ state
            if kind.feature_map != "silu":
                read[n, t] /= query @ mass
    return out_of(p, kind, x_TD, read)


def all_pairs(p, kind: LinearAttention, x_TD):
    q, k, v = heads(p, kind, x_TD)
    read = np.zeros((kind.num_heads, len(x_TD), kind.value_width))
    for n, slope in enumerate(slopes(kind)):
        for t in range(len(x_TD)):
            weights = np.array([score(q[n, t], k[n, s], kind) for s in range(t + 1)])
            weights *= np.exp(-slope * (t - np.arange(t + 1)))
            if kind.feature_map != "silu":
                weights /= weights.sum()
            read[n, t] = weights @ v[n, : t + 1]
    return out_of(p, kind, x_TD, read)


@pytest.mark.parametrize("reference", [token_by_token, all_pairs])
@pytest.mark.parametrize("name", KINDS)
def test_a_layer_by_hand(name, reference):
    p, x_RTD, found = applied(KINDS[name])
    for x_TD, row in zip(x_RTD, found, strict=True):
        expected = reference(p, KINDS[name], x_TD)
        assert np.abs(expected).mean() > 0.05
        np.testing.assert_allclose(row, expected, atol=3e-5)


@pytest.mark.parametrize("name", ["lightning", "taylor"])
def test_prompts_token_by_token_by_hand(name):
    p, x_RTD, found = applied(KINDS[name], is_deterministic=True)
    np.testing.assert_allclose(found[1], token_by_token(p, KINDS[name], x_RTD[1]), atol=3e-5)


def test_a_pair_of_elements_has_one_feature():
    """Products of features are those of all pairs, of which there are twice as many."""
    x, y = np.random.default_rng(2).normal(size=(2, 1, 1, 7)).astype(np.float32)
    one, other = (np.asarray(linear_attention.mapped(v, "taylor"))[0, 0] for v in (x, y))
    kind = LinearAttention(1, 7, 1, "taylor")
    assert len(one) == kind.state[1] == 1 + 7 + 28
    assert one @ other == pytest.approx(score(x[0, 0], y[0, 0], kind), rel=1e-5)


def test_padding_returns_numbers():
    """Whose weights have no sum."""
    kind = KINDS["elu"]
    config = model(kind)
    own = params.init(kind.parameters(config), 3)
    ragged = contiguous(1, 4)
    nothing = jax.tree.map(np.zeros_like, ragged.rectangles[0].valid_YW)
    ragged = type(ragged)(
        tuple(type(r)(**{**vars(r), "valid_YW": nothing}) for r in ragged.rectangles)
    )
    context = StepContext(ragged, None, CacheSpec(), 0, True, False)
    x_TD = np.ones((4, WIDTH), np.float32)
    found, _ = linear_attention.apply(own, config, kind, x_TD, None, context)
    chex.assert_tree_all_finite(found)


@pytest.mark.parametrize("chips", [1, 2])
def test_what_is_planned_is_allocated(chips):
    """Of every kind whose states decay alike at every token."""
    whole = fakes.linear().per_chip(chips)
    config = Config(whole, EngineConfig.of(max_seqs=3, num_drafts=2, proposer="ngram"))
    cache = kv_cache.abstract(*model_runner.cache_arguments(config, "reference"))
    leaves = jax.tree.leaves(cache)
    assert config.pool_bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    own = params.init(decoder.param_infos(whole), 0)
    assert weights.num_parameters(whole) == sum(x.size for x in jax.tree.leaves(own))


def test_the_cost_of_a_state_by_hand():
    """Decode of one token: products of every matrix, and a state that is read and written."""
    kind = KINDS["lightning"]
    config = model(kind)
    found = {each.name: each for each in kind.operations(config, kind.cache(config))}
    rows = {"in": 3 * (4 + 4 + 5), "gate": 15, "out": 15}
    for name, count in rows.items():
        assert found[f"linear_attention.{name}"].flops == ((2 * count * WIDTH, ("tokens",)),)
    move, _ = found["recur"].moves
    assert move.amount == ((2 * 60, ("sequences",)), (60, ("drafts",)))
    assert found["recur"].flops == ((6 * 60, ("queries",)),)
    normalized = KINDS["taylor"].cache(config)
    assert normalized.elements_per_sequence == 3 * (1 + 4 + 10) * (5 + 1)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"num_heads": 0}, "linear_attention num_heads is at least 1, not 0"),
        ({"key_width": 0}, "linear_attention key_width is at least 1, not 0"),
        ({"feature_map": "relu"}, "feature_map is 'silu' or 'elu' or 'taylor', not 'relu'"),
        ({"decay": -1.0}, "decay is a finite number from 0 on, not -1.0"),
        ({"decay": math.inf}, "decay is a finite number from 0 on, not inf"),
    ],
)
def test_what_is_no_linear_attention_is_named(changes, cause):
    fields = {"num_heads": 3, "key_width": 4, "value_width": 5} | changes
    with pytest.raises(InputError, match=cause):
        LinearAttention(**fields)
