"""Hopper's routing of few tokens, interpreted, beside the router by XLA."""

import functools

import jax
import numpy as np
import pytest

from configs.kinds.experts import Router
from layers.feed_forwards import routing
from layers.kernels.experts import routing_gpu
from tests.interpreted import HOPPER, check_races, threads_are_compiled_once  # noqa: F401

pytestmark = pytest.mark.quick_code

ROUTERS = {
    "softmax": Router(),
    "not normalized": Router(is_normalized=False, scale=3.0, has_bias=True),
    "sigmoid": Router("sigmoid", has_offsets=True, scale=2.5),
    "roots": Router("sqrt_softplus", has_offsets=True, scale=1.5),
    "factors": Router(has_factors=True),
    "groups": Router(is_normalized=False, num_groups=4, top_groups=2),
    "groups by two": Router("sigmoid", num_groups=4, top_groups=2, group_best=2, has_offsets=True),
}


@functools.partial(jax.jit, static_argnames=("router", "top_k", "interpret"))
def _by_kernel(params, x_TD, valid_T, router, top_k, interpret):
    return routing_gpu.route(
        x_TD @ params["router"].T + params.get("router_bias", 0), valid_T, router, top_k,
        params.get("router_offsets"), params.get("router_factors"), interpret,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("router", "top_k"))
def _by_xla(params, x_TD, router, top_k):
    return routing.route(params, router, top_k, routing.logits(params, x_TD))


def check(
    router: Router, num_tokens: int, num_experts: int, top_k: int, seed: int, interpret=HOPPER
) -> None:
    """The same experts and numbers of tokens, weights up to rounding; equal scores among them."""
    generator = np.random.default_rng(seed)
    # Sums of few small integers are exact in any order, and often equal.
    x_TD = generator.integers(-2, 3, (num_tokens, 4)).astype(np.float32)
    names = ["router_bias"] * router.has_bias + ["router_offsets"] * router.has_offsets
    params = {name: generator.integers(-2, 3, num_experts) * np.float32(0.25) for name in names}
    params["router"] = generator.integers(-2, 3, (num_experts, 4)).astype(np.float32) / 4
    if router.has_factors:
        params["router_factors"] = generator.random(num_experts, np.float32)
    valid_T = generator.random(num_tokens) < 0.7
    assert routing_gpu.can_route(router, num_tokens, num_experts, top_k)
    routed = _by_kernel(params, x_TD, valid_T, router, top_k, interpret)
    weights_TJ, ids_TJ, scores_TE = _by_xla(params, x_TD, router, top_k)
    expected_TE = np.zeros((num_tokens, num_experts), np.float32)
    np.put_along_axis(expected_TE, np.asarray(ids_TJ), np.asarray(weights_TJ), 1)
    expected_TE[~valid_T] = 0
    weights_TE = np.asarray(routed.weights_EW).T
    assert not weights_TE[num_tokens:].any()
    np.testing.assert_allclose(weights_TE[:num_tokens], expected_TE, rtol=3e-6, atol=1e-30)
    num_tokens_E = np.bincount(np.asarray(ids_TJ)[valid_T].ravel(), minlength=num_experts)
    np.testing.assert_array_equal(routed.num_tokens_E, num_tokens_E)
    (used,) = num_tokens_E.nonzero()
    assert routed.used[0] == len(used)
    np.testing.assert_array_equal(routed.used[1 : 1 + len(used)], used)
    assert (routed.used[1 + len(used) :] == num_experts).all()
    share_TE = np.asarray(scores_TE / scores_TE.sum(1, keepdims=True))
    share_E = share_TE[valid_T].sum(0) / max(1, valid_T.sum())
    np.testing.assert_allclose(routed.share_E, share_E, rtol=1e-5)
    check_races(interpret)


@pytest.mark.parametrize("name", [
    "groups by two", *(pytest.param(name, marks=pytest.mark.long)
                       for name in ROUTERS if name != "groups by two"),
])  # fmt: skip
def test_a_router_chooses_as_by_xla(name):
    """The number of experts fills no tile of registers."""
    check(ROUTERS[name], 5, 72, 6, 0)


def test_tokens_beyond_the_registers_go_in_blocks(monkeypatch):
    monkeypatch.setattr(routing_gpu, "_MOST_ELEMENTS", 1024)
    check(Router(), 17, 64, 3, 1)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(500))
def test_random_routing(seed):
    """Of 40 shapes."""
    generator = np.random.default_rng([45, seed % 40])
    router = ROUTERS[str(generator.choice(list(ROUTERS)))]
    num_experts = 4 * int(generator.integers(2, 40))
    num_eligible = num_experts // router.num_groups * router.top_groups
    top_k = int(generator.integers(1, min(8, num_eligible) + 1))
    check(router, int(generator.integers(1, 65)), num_experts, top_k, seed)
