"""Mixtures of experts beside plain numpy: who visits whom, what comes back, and whose bits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.kinds.attention import Attention
from configs.kinds.experts import Experts, Router
from configs.model import LayerSpec, ModelConfig
from layers import decoder, params
from layers.feed_forwards import experts, routing
from layers.kernels.linear import grouped, packed
from layers.linear import grouped_linear
from layers.ragged import Ragged, Rectangle, contiguous
from layers.registry import StepContext
from tests import compiling
from tests.layers import native

pytestmark = pytest.mark.quick_code

T, D = 13, 24
_ROUTERS = {
    "softmax": Router(),
    "as they are": Router(is_normalized=False, scale=3.0),
    "bias": Router(has_bias=True),
    "sigmoid": Router("sigmoid", has_offsets=True, scale=2.5),
    "roots": Router("sqrt_softplus", has_offsets=True, scale=1.5),
    "groups": Router(is_normalized=False, num_groups=3, top_groups=2),
    "groups by two": Router("sigmoid", num_groups=3, top_groups=2, group_best=2, has_offsets=True),
}


def model(kind: Experts, dtype: str = "float32") -> ModelConfig:
    layer = LayerSpec(Attention(4, 2, 6), kind)
    return ModelConfig("m", "llama", 31, D, 1, 64, (layer,), dtype=dtype)


def context(valid_T: np.ndarray, deterministic: bool = False) -> StepContext:
    position_YW = jnp.arange(len(valid_T), dtype=jnp.int32)[None]
    rectangle = Rectangle(jnp.zeros(1, jnp.int32), position_YW, jnp.asarray(valid_T)[None], ())
    spec = Attention(4, 2, 6).cache(model(Experts(2, 1, 8)))
    return StepContext(Ragged((rectangle,)), None, spec, 0, True, deterministic)


def weights(kind: Experts, seed: int = 0) -> dict:
    """Random, biases and offsets too."""
    found = params.init(kind.parameters(model(kind)), seed)
    rng = np.random.default_rng(seed)
    for name in ("router_bias", "router_offsets"):
        if name in found:
            found[name] = jnp.asarray(rng.standard_normal(kind.num_experts) * 0.3, jnp.float32)
    for name in ("gate_up_bias", "down_bias"):
        if name in found["experts"]:
            shape = found["experts"][name].shape
            found["experts"][name] = jnp.asarray(rng.standard_normal(shape) * 0.3, jnp.float32)
    return found


def chosen(
    own: dict, kind: Experts, x_TD: np.ndarray, ids: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Weights and ids of each token, or the weights of these, in float64."""
    router = kind.router
    logits = x_TD @ np.asarray(own["router"], np.float64).T + np.asarray(own.get("router_bias", 0))
    if router.scores == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    elif router.scores == "sqrt_softplus":
        scores = np.sqrt(np.log1p(np.exp(logits)))
    else:
        scores = np.exp(logits - logits.max(1, keepdims=True))
        scores /= scores.sum(1, keepdims=True)
    choice = scores + np.asarray(own.get("router_offsets", 0))
    for row in choice:
        groups = row.reshape(router.num_groups, -1)
        best = np.sort(groups, axis=1)[:, -router.group_best :].sum(1)
        for group in np.argsort(-best)[router.top_groups :]:
            groups[group] = -np.inf
    if ids is None:
        ids = np.argsort(-choice, axis=1, kind="stable")[:, : kind.top_k]
    found = np.take_along_axis(scores, ids, axis=1)
    if router.is_normalized:
        found /= found.sum(1, keepdims=True)
    return found * router.scale, ids


def by_hand(
    own: dict, kind: Experts, x_TD: np.ndarray, ids_TJ: np.ndarray | None = None
) -> np.ndarray:
    """Each token through its experts, or these, in float64."""

    def through(gate_up, down, x, gate_up_bias=0, down_bias=0):
        gate, up = np.split(gate_up @ x + gate_up_bias, 2)
        if kind.limit is not None:
            gate, up = np.minimum(gate, kind.limit), np.clip(up, -kind.limit, kind.limit)
        sharpness = 1.702 if kind.activation == "quick_gelu" else 1.0
        gate = gate / (1 + np.exp(-sharpness * gate))
        return down @ (gate * (up + kind.up_offset)) + down_bias

    own = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), own)
    (scale_TJ, ids_TJ), each = chosen(own, kind, x_TD, ids_TJ), own["experts"]
    out_TD = np.zeros((len(x_TD), D))
    for t, x in enumerate(x_TD):
        for scale, e in zip(scale_TJ[t], ids_TJ[t], strict=True):
            biases = (
                (each["gate_up_bias"][e].ravel(), each["down_bias"][e]) if kind.has_bias else ()
            )
            before, behind = (scale, 1) if kind.weighs_inputs else (1, scale)
            out = through(each["gate_up"][e], each["down"][e], before * x, *biases)
            out_TD[t] += behind * out
        if kind.shared_width:
            gate = 1 / (1 + np.exp(-own["shared_gate"] @ x)) if kind.has_shared_gate else 1
            out_TD[t] += gate * through(own["shared"]["gate_up"], own["shared"]["down"], x)
    return out_TD


def tokens(seed: int = 1, count: int = T) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, D)).astype(np.float32)


def applied(own: dict, kind: Experts, x_TD, valid_T=None, dtype="float32", deterministic=False):
    """A mixture's output, and the tokens routed to each expert; in one program, whatever it has."""
    valid_T = np.ones(len(x_TD), bool) if valid_T is None else valid_T

    def apply(own, x_TD, valid_T):
        told = context(valid_T, deterministic)
        return experts.apply(own, model(kind, dtype), kind, x_TD, told)

    return compiling.call(apply, own, x_TD, valid_T)


@pytest.mark.parametrize("name", _ROUTERS)
def test_a_router_chooses_and_weighs(name):
    kind = Experts(9, 4, 8, _ROUTERS[name])
    own, x_TD = weights(kind), tokens()

    def route(own, x_TD):
        logits_TE = routing.logits(own, x_TD)
        return routing.route(own, kind.router, kind.top_k, logits_TE)

    scale_TJ, ids_TJ, _ = compiling.call(route, own, x_TD)
    expected, expected_ids = chosen(own, kind, x_TD.astype(np.float64))
    np.testing.assert_array_equal(np.sort(ids_TJ), np.sort(expected_ids))
    np.testing.assert_allclose(np.sort(scale_TJ), np.sort(expected), rtol=2e-6)


def test_experts_are_chosen_one_by_one():
    """Each counts among those that are left and not far below it."""
    kind = Experts(9, 3, 8, Router(is_normalized=False, jitter=0.6))
    own, x_TD = weights(kind), tokens()
    result = compiling.call(
        lambda own, x: routing.route(own, kind.router, 3, routing.logits(own, x)), own, x_TD
    )
    for logits, scales, ids in zip(
        x_TD.astype(np.float64) @ np.asarray(own["router"], np.float64).T, *result[:2], strict=True
    ):
        remaining = list(range(9))
        for expert, scale in zip(ids, scales, strict=True):
            best = logits[remaining].max()
            near = [e for e in remaining if best - logits[e] <= 0.6 * max(abs(logits[e]), best)]
            assert logits[expert] == best
            assert scale == pytest.approx(1 / np.exp(logits[near] - best).sum(), rel=2e-6)
            remaining.remove(expert)


def test_ids_of_tokens_choose_experts():
    kind = Experts(
        9, 4, 8, Router("sqrt_softplus", scale=1.5, table_rows=31), shared_width=10, limit=0.3
    )
    own, x_TD, rng = weights(kind), tokens(), np.random.default_rng(5)
    table = np.stack([rng.permutation(9)[:4] for _ in range(31)])
    own["router_table"] = jnp.asarray(table, jnp.float32)
    ids_T = rng.integers(0, 31, T)

    def apply(own, x_TD, ids_T):
        told = dataclasses.replace(context(np.ones(T, bool)), tokens_T=ids_T)
        return experts.apply(own, model(kind), kind, x_TD, told)

    found, routed = compiling.call(apply, own, x_TD, ids_T)
    np.testing.assert_allclose(found, by_hand(own, kind, x_TD, table[ids_T]), atol=1e-5)
    counts = np.bincount(table[ids_T].ravel(), minlength=9)
    np.testing.assert_array_equal(routed.num_tokens, counts)


_KINDS = {
    "one of five": Experts(5, 1, 10),
    "weighed inputs": Experts(
        5, 2, 10, Router("sigmoid", is_normalized=False), shared_width=6, weighs_inputs=True
    ),
    "three of five": Experts(5, 3, 10),
    "all": Experts(3, 3, 10),
    "shared": Experts(5, 2, 10, shared_width=14, has_shared_gate=True),
    "biases and a limit": Experts(
        5, 2, 10, Router(has_bias=True), activation="quick_gelu", has_bias=True, limit=0.5,
        up_offset=1.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _KINDS)
def test_a_mixture_is_the_sum_of_its_experts(name):
    kind = _KINDS[name]
    own, x_TD = weights(kind), tokens()
    out_TD, visits = applied(own, kind, x_TD)
    np.testing.assert_allclose(out_TD, by_hand(own, kind, x_TD.astype(np.float64)), atol=2e-5)
    ids_TJ = chosen(own, kind, x_TD.astype(np.float64))[1]
    np.testing.assert_array_equal(
        visits.num_tokens, np.bincount(ids_TJ.ravel(), minlength=kind.num_experts)
    )


def test_all_tokens_may_visit_one_expert_and_none_another():
    kind = Experts(4, 1, 10)
    own = weights(kind)
    own["router"] = jnp.zeros((4, D)).at[2].set(1.0)
    x_TD = np.abs(tokens())
    out_TD, visits = applied(own, kind, x_TD)
    assert visits.num_tokens.tolist() == [0, 0, T, 0]
    np.testing.assert_allclose(out_TD, by_hand(own, kind, x_TD.astype(np.float64)), atol=2e-5)


def test_padding_visits_nobody():
    """Not even where it is not finite: no expert's sum sees it."""
    kind = Experts(5, 2, 10)
    own, x_TD, valid_T = weights(kind), tokens(), np.arange(T) % 3 > 0
    x_TD[~valid_T] = np.nan
    out_TD, visits = applied(own, kind, x_TD, valid_T)
    assert visits.num_tokens.sum() == 2 * valid_T.sum()
    expected = by_hand(own, kind, x_TD[valid_T].astype(np.float64))
    np.testing.assert_allclose(np.asarray(out_TD)[valid_T], expected, atol=2e-5)


@pytest.mark.quick_code(False)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.long)])
def test_bits_do_not_depend_on_neighbours(dtype):
    """Nor on how many there are, or where each stands."""
    kind = Experts(6, 2, 10)
    own = jax.tree.map(lambda leaf: leaf.astype(dtype), weights(kind)["experts"])
    own = weights(kind) | {"experts": own}
    x_TD = tokens(count=64)
    order = np.random.default_rng(0).permutation(64)[:21]

    def run(x_TD):
        return np.asarray(applied(own, kind, x_TD, None, dtype, deterministic=True)[0])

    np.testing.assert_array_equal(run(x_TD)[order], run(x_TD[order]))


@pytest.mark.parametrize("rows, groups", [(1, 8), (7, 3), (200, 5), (64, 64)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_in_groups_meet_their_matrices(rows, groups, dtype):
    rng = np.random.default_rng(rows)
    w_EFD = jnp.asarray(rng.standard_normal((groups, 10, D)), dtype)
    x_XD = jnp.asarray(rng.standard_normal((rows, D)), dtype)
    sizes_E = np.bincount(rng.integers(0, groups, rows - rows // 4), minlength=groups)
    group_X = np.repeat(np.arange(groups), sizes_E)
    expected = np.zeros((rows, 10))
    for row, e in enumerate(group_X):
        expected[row] = np.asarray(w_EFD[e], np.float64) @ np.asarray(x_XD[row], np.float64)
    sizes_E = jnp.asarray(sizes_E, jnp.int32)
    products = compiling.call(grouped_linear, x_XD, w_EFD, sizes_E, deterministic=False)
    np.testing.assert_allclose(products, expected, atol=1e-5 if dtype == "float32" else 2e-2)
    assert not np.asarray(products)[len(group_X) :].any()


@pytest.mark.parametrize("rows, groups, depth", [(5, 8, 128), (200, 5, 128), (200, 5, 72)])
def test_a_tpus_kernel_gives_the_same(rows, groups, depth):
    """Interpreted; groups without rows among them, and rows behind the last group; matrices that
    lie there by rows, and by columns.
    """
    rng = np.random.default_rng(rows)
    w_EFD = jnp.asarray(rng.standard_normal((groups, 256, depth)), jnp.float32)
    x_XD = jnp.asarray(rng.standard_normal((rows, depth)), jnp.float32)
    sizes_E = np.bincount(rng.integers(0, groups, rows - rows // 4), minlength=groups)
    sizes_E = jnp.asarray(sizes_E, jnp.int32)
    by_xla = compiling.call(grouped.grouped_product, x_XD, w_EFD, sizes_E)  # no kernel

    def with_slope(product):
        def loss(w_EFD):
            found = product(w_EFD)
            return (found**2).sum(), found

        slope, found = compiling.call(jax.grad(loss, has_aux=True), w_EFD)
        return found, slope

    kernel = functools.partial(grouped.on_tpu, interpret=True)
    found, by_kernel = with_slope(lambda w: grouped.grouped_product(x_XD, w, sizes_E, kernel))
    expected, by_blocks = with_slope(
        lambda w: grouped_linear(x_XD, w, sizes_E, deterministic=False)
    )
    np.testing.assert_allclose(found, expected, atol=1e-4)
    np.testing.assert_allclose(by_xla, expected, atol=1e-4)
    np.testing.assert_allclose(by_kernel, by_blocks, rtol=1e-3, atol=1e-2)


def test_packed_experts_give_what_plain_ones_give():
    native.need()
    kind = _KINDS["biases and a limit"]
    own, x_TD = weights(kind), jnp.asarray(tokens())
    matrices = {name: packed.pack(own["experts"][name]) for name in ("gate_up", "down")}
    packed_own = own | {"experts": own["experts"] | matrices}
    expected, _ = applied(own, kind, x_TD)
    found, _ = applied(packed_own, kind, x_TD)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_reach_router_and_experts(dtype):
    """The router's, every expert's and the embedding's, in the type that a checkpoint has."""
    kind = _KINDS["shared"]
    whole = model(kind, dtype)
    own = params.init(decoder.param_infos(whole), 1)

    def loss(own):
        hidden_TD, _ = decoder.forward(own, whole, jnp.arange(T), contiguous(1, T))
        return (decoder.logits(own, whole, hidden_TD) ** 2).mean()

    for path, leaf in params.flatten(compiling.call(jax.grad(loss), own)).items():
        assert np.isfinite(np.asarray(leaf, np.float32)).all() and leaf.any(), path


def test_a_step_along_the_gradients_lowers_the_loss():
    kind = dataclasses.replace(_KINDS["shared"], top_k=2)
    own, x_TD = weights(kind), jnp.asarray(tokens())

    def loss(own):
        valid = context(np.ones(T, bool))
        return (experts.apply(own, model(kind), kind, x_TD, valid)[0] ** 2).sum()

    gradients = compiling.call(jax.grad(loss), own)
    step = jax.tree.map(lambda leaf: 1e-3 * leaf, gradients)
    slope = sum(float((g * g).sum()) for g in jax.tree.leaves(gradients)) * 1e-3
    losses = compiling.jit(loss)
    moved = losses(jax.tree.map(jnp.subtract, own, step)) - losses(jax.tree.map(jnp.add, own, step))
    assert abs(float(moved) / (-2 * slope) - 1) < 0.2
