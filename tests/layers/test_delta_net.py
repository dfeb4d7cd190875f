"""Gated DeltaNet and Kimi Delta Attention beside their formulas, token by token, in NumPy."""

import dataclasses

import jax
import numpy as np
import pytest

from configs.cache import CacheSpec
from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.kinds.recurrent.delta_net import DeltaNet
from configs.mesh import ONE_CHIP, Mesh
from configs.model import LayerSpec, ModelConfig
from inference.planner import weights
from layers import decoder, kv_cache, params
from layers.mixers import delta_net
from layers.ragged import contiguous
from layers.registry import StepContext
from tests import compiling, fakes

SHARED = DeltaNet(6, 3, key_width=4, value_width=5, conv_width=3)
KINDS = {
    "heads that share keys": SHARED,
    "overshooting": dataclasses.replace(SHARED, most_beta=2.0, norm_eps=0.1, conv_width=2),
    "a decay a channel": DeltaNet(3, 3, 4, 4, decay_rank=2, gate_rank=5, gate="sigmoid"),
    "a decay a channel, shared keys": dataclasses.replace(SHARED, decay_rank=2),
}


def model(kind: DeltaNet, **changes) -> ModelConfig:
    fields = {"norm_eps": 1e-3, "dtype": "float32"} | changes
    return ModelConfig(
        "delta", "qwen3_next", 41, width=8, num_layers=2, max_context=96,
        pattern=(LayerSpec(kind, Gated(12)), LayerSpec(Attention(6, 3, 4), Gated(12))), **fields,
    )  # fmt: skip


def drawn(config: ModelConfig, seed: int = 0):
    """Parameters none of which is the same in all heads, though some begin as zeros or ones."""
    rng = np.random.default_rng(seed)

    def noisy(leaf):
        return leaf + rng.normal(size=leaf.shape, scale=0.3).astype(np.float32)

    return jax.tree.map(noisy, params.init(decoder.param_infos(config), seed))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def by_hand(p, kind: DeltaNet, x_TD: np.ndarray, eps: float) -> np.ndarray:
    """Every token and every head on its own, in float64."""
    p = {name: np.asarray(value, np.float64) for name, value in p.items()}
    N, K, M, H = kind.num_heads, kind.num_key_heads, kind.key_width, kind.value_width
    fed, gates = x_TD @ p["in"].T, x_TD @ p["gates"].T
    padded = np.concatenate([np.zeros((kind.conv_width - 1, fed.shape[1])), fed])
    rank = kind.decay_rank or 0
    states, outs = np.zeros((N, M, H)), []
    for t, x_D in enumerate(x_TD):
        window = padded[t : t + kind.conv_width]
        mixed = (window * p["conv"].T).sum(0)
        mixed *= sigmoid(mixed)
        v, q, k = np.split(mixed, [N * H, N * H + K * M])
        if kind.decay_rank is None:
            decays = np.repeat(gates[t, -N:], M)
            bias = np.repeat(p["step_bias"], M)
        else:
            decays = p["decay_up"] @ (p["down"][:rank] @ x_D)
            bias = p["step_bias"]
        steps = np.log1p(np.exp(decays + bias)).reshape(N, M)
        if kind.gate_rank is None:
            gate, beta = gates[t, : N * H], gates[t, N * H : N * H + N]
        else:
            gate, beta = p["gate_up"] @ (p["down"][rank:] @ x_D), gates[t, :N]
        out = []
        for n in range(N):
            own = slice(n // (N // K) * M, (n // (N // K) + 1) * M)
            key = k[own] / np.sqrt((k[own] ** 2).sum() + 1e-6)
            query = q[own] / np.sqrt((q[own] ** 2).sum() + 1e-6) / np.sqrt(M)
            states[n] *= np.exp(-np.exp(p["rate"][n]) * steps[n])[:, None]
            wrong = v[n * H : (n + 1) * H] - key @ states[n]
            states[n] += np.outer(key, kind.most_beta * sigmoid(beta[n]) * wrong)
            read = query @ states[n]
            read = p["out_norm"] * read / np.sqrt((read**2).mean() + eps)
            opened = gate[n * H : (n + 1) * H]
            out.append(read * sigmoid(opened) * (opened if kind.gate == "silu" else 1))
        outs.append(p["out"] @ np.concatenate(out))
    return np.array(outs)


@pytest.mark.parametrize("name", KINDS)
def test_a_layer_by_hand(name):
    kind = KINDS[name]
    config = model(kind)
    own = drawn(config)["layers"][0]["mixer"]
    x_TD = np.random.default_rng(1).normal(size=(2 * 70, 8)).astype(np.float32)
    context = StepContext(contiguous(2, 70), None, CacheSpec(), 0, True, False)

    def layer(own, x_TD):
        return delta_net.apply(own, config, kind, x_TD, None, context)[0]

    found = np.asarray(compiling.jit(layer)(own, x_TD)).reshape(2, 70, 8)
    eps = config.norm_eps if kind.norm_eps is None else kind.norm_eps
    for row, x_WD in zip(found, x_TD.reshape(2, 70, 8), strict=True):
        np.testing.assert_allclose(row, by_hand(own, kind, x_WD, eps), atol=2e-5)


def serve(config: ModelConfig, own, mesh: Mesh = ONE_CHIP, **settings) -> list[list[int]]:
    """Greedy answers to prompts in chunks, of which more come than there are slots."""
    engine = fakes.engine(
        config, own, "one", False, mesh, max_seqs=3, max_context=64, decode_rows=(4,),
        prefill_chunks=(2,), chunk_tokens=16, **settings,
    )  # fmt: skip
    prompts = fakes.prompts((1, 5, 21, 40, 17), vocab=config.vocab_size)
    return [done.token_ids for done in engine.generate(prompts, fakes.greedy(6))]


def continued(config: ModelConfig, own) -> list[list[int]]:
    """What the same prompts go on with without a cache."""

    def forward(own, tokens_T):
        hidden_TD, _ = decoder.forward(own, config, tokens_T, contiguous(1, len(tokens_T)))
        return decoder.logits(own, config, hidden_TD)

    forward, found = compiling.jit(forward), []
    for prompt in fakes.prompts((1, 5, 21, 40, 17), vocab=config.vocab_size):
        text = list(prompt)
        for _ in range(6):
            tokens_T = np.pad(np.array(text, np.int32), (0, 46 - len(text)))
            text.append(int(forward(own, tokens_T)[len(text) - 1].argmax()))
        found.append(text[len(prompt) :])
    return found


@pytest.mark.quick_code
@pytest.mark.parametrize("name", [name for name in KINDS if "shar" in name])
def test_the_engine_beside_the_same_model_without_a_cache(name):
    """With drafts, of which some are refused, then token by token, then on three chips."""
    config = model(KINDS[name])
    own = drawn(config)
    expected = continued(config, own)
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    assert serve(config, own, proposer="ngram", num_drafts=2) == expected
    assert serve(config, own, deterministic=True) == expected
    assert serve(config, own, Mesh(model=3)) == expected


@pytest.mark.quick_code
def test_more_chips_than_key_heads_hold_copies():
    config = model(DeltaNet(6, 2, 4, 5))
    own = drawn(config)
    assert config.layers[0].mixer.per_chip(6) == DeltaNet(1, 1, 4, 5)
    assert serve(config, own, Mesh(model=6)) == continued(config, own)


def test_chips_divide_heads_in_whole_groups():
    assert [n for n in range(1, 9) if SHARED.can_divide(n)] == [1, 3, 6]
    assert [n for n in range(1, 9) if DeltaNet(8, 4, 4, 4).can_divide(n)] == [1, 2, 4, 8]


@pytest.mark.parametrize("name", KINDS)
def test_what_is_planned_is_allocated(name):
    config = Config(model(KINDS[name]), EngineConfig.of(max_seqs=3, num_drafts=2, proposer="ngram"))
    leaves = jax.tree.leaves(kv_cache.abstract(
        config.model, config.num_pages, config.page_tokens, 3, 2, num_snapshots=config.num_snapshots
    ))  # fmt: skip
    assert config.pool_bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    own = drawn(config.model)
    assert weights.num_parameters(config.model) == sum(x.size for x in jax.tree.leaves(own))


def test_the_cost_of_a_state_by_hand():
    """Decode of one token: products of every matrix, and a state that is read and written."""
    kind = dataclasses.replace(SHARED, decay_rank=2, gate_rank=7)
    config = model(kind)
    found = {each.name: each for each in kind.operations(config, kind.cache(config))}
    rows = {"in": 6 * 5 + 2 * 3 * 4, "gates": 6, "down": 9, "decay_up": 24, "gate_up": 30}
    for name, count in rows.items():
        width = {"decay_up": 2, "gate_up": 7}.get(name, 8)
        assert found[f"delta_net.{name}"].flops == ((2 * count * width, ("tokens",)),)
    assert not found["delta_net.down"].is_split and found["delta_net.decay_up"].is_split
    assert found["delta_net.in"].kv_rows == 2 * 3 * 4
    (move, _), channels = found["recur"].moves, 30 + 24
    state = 6 * 4 * 5 + 2 * channels
    assert move.amount == ((2 * state, ("sequences",)), (state, ("drafts",)))
    assert found["recur"].flops == ((7 * 6 * 4 * 5 + 2 * 3 * channels, ("queries",)),)
    assert found.keys() == {*(f"delta_net.{name}" for name in (*rows, "out")), "recur"}


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"num_heads": 7}, "num_heads=7 is not a multiple of num_key_heads=3"),
        ({"conv_width": 1}, "delta_net conv_width is at least 2, not 1"),
        ({"key_width": 0}, "delta_net key_width is at least 1, not 0"),
        ({"decay_rank": 0}, "delta_net decay_rank is at least 1, not 0"),
        ({"gate": "tanh"}, "delta_net gate is 'silu' or 'sigmoid', not 'tanh'"),
        ({"most_beta": 2.5}, "most_beta is above 0 and at most 2, beyond which states grow"),
        ({"norm_eps": 0.0}, "norm_eps is a finite number above 0, not 0.0"),
    ],
)
def test_what_is_no_delta_net_is_named(changes, cause):
    with pytest.raises(InputError, match=cause):
        dataclasses.replace(SHARED, **changes)
