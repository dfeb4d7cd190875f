"""The loss is the decoder's own, and has a gradient whatever computes it."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import heads
from configs.kinds.layer_inputs import LayerInputs
from configs.model import ModelConfig
from configs.recipes.training import Recipe, TrainingConfig
from inference.speculation import medusa
from inference.training import losses, start
from layers import decoder, ragged
from layers import params as decoder_params
from layers.backends import backends
from layers.kernels.cpu import library
from layers.registry import RoutedTokens
from tests import compiling, fakes

pytestmark = pytest.mark.quick_code

TRAINING = TrainingConfig(steps=1, batch=2, window=24)


def by_hand(values, tokens, *, model):
    rows_ = ragged.contiguous(len(tokens), tokens.shape[1] - 1)
    hidden, _ = decoder.forward(values, model, tokens[:, :-1].reshape(-1), rows_)
    logprobs = jax.nn.log_softmax(decoder.logits(values, model, hidden))
    return -jnp.take_along_axis(logprobs, tokens[:, 1:].reshape(-1, 1), axis=1).mean()


def case(model):
    values = start.masters(Recipe(model, TRAINING))
    values = jax.tree.map(lambda x: x + 0.05 * (x.ndim == 1), values)
    tokens = np.random.default_rng(1).integers(0, model.vocab_size, (2, 25)).astype(np.int32)
    return values, tokens


def slopes(model, values, tokens):
    own = compiling.jit(jax.value_and_grad(losses.next_token(model)))
    return own(values, None, {"tokens": tokens})


@pytest.mark.parametrize("model", [
    fakes.gemma(layer_inputs=LayerInputs(6), has_layer_scales=True), fakes.quirks(),
], ids=lambda model: model.name)  # fmt: skip
def test_it_is_the_mean_over_all_targets(model, monkeypatch):
    values, tokens = case(model)
    wanted = compiling.call(jax.value_and_grad(by_hand), values, tokens, model=model)
    monkeypatch.setattr(losses, "_BLOCK_ROWS", 16)  # three blocks of eight positions
    found = slopes(model, values, tokens)
    chex.assert_trees_all_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_bfloat16_computes_and_float32_is_trained():
    values, tokens = case(fakes.llama("bfloat16"))
    chex.assert_type(jax.tree.leaves(values), jnp.float32)
    loss, found = slopes(fakes.llama("bfloat16"), values, tokens)
    exact, _ = slopes(fakes.llama(), values, tokens)
    assert loss == pytest.approx(float(exact), abs=0.05) and loss != exact
    chex.assert_type(jax.tree.leaves(found), jnp.float32)


def test_medusa_heads_learn_what_the_target_might_have_said(monkeypatch):
    """The law of the token that each head drafts, among those that are proposed."""
    target = fakes.gemma(tied=True)
    own = fakes_heads(target)
    frozen, tokens = case(target)
    values = {
        "blocks": tuple(
            jax.random.normal(key, (24, 24)) / 5 for key in jax.random.split(jax.random.key(1), 2)
        ),
        "head": {"table": frozen["embed"]["table"][np.array(own.proposed_ids)] * 1.5},
    }  # fmt: skip
    monkeypatch.setattr(losses, "_BLOCK_ROWS", 16)
    found = compiling.call(losses.medusa(target, own), values, frozen, {"tokens": tokens})
    every = ragged.contiguous(len(tokens), 24)
    hidden_TD, _ = decoder.forward(frozen, target, tokens[:, :-1].reshape(-1), every)
    law_TV = jax.nn.softmax(decoder.logits(frozen, target, hidden_TD)[:, list(own.proposed_ids)])
    law_YWV, wanted = law_TV.reshape(len(tokens), 24, -1), 0.0
    for nth, weight in enumerate(values["blocks"]):
        logits_TV = medusa.block(weight, hidden_TD) @ values["head"]["table"].T
        own_YWV = jax.nn.log_softmax(logits_TV).reshape(law_YWV.shape)
        lost = -(law_YWV[:, 1 + nth :] * own_YWV[:, : -1 - nth]).sum(-1).mean()
        wanted += 0.8**nth * lost
    assert float(found) == pytest.approx(float(wanted), rel=1e-4)


def fakes_heads(target):
    own = {field.name: getattr(target, field.name) for field in dataclasses.fields(ModelConfig)}
    own |= {"num_layers": 0, "pattern": ()}
    return heads.Medusa(**own, num_heads=2, proposed_ids=tuple(range(3, 131, 2)))


@pytest.mark.skipif(not library.is_loaded(), reason="the CPU's kernels are not there")
def test_gradients_beside_the_cpus_kernels():
    values, tokens = case(fakes.llama())
    wanted = slopes(fakes.llama(), values, tokens)
    with backends.use(backends.CPU):
        found = slopes(fakes.llama(), values, tokens)
    chex.assert_trees_all_close(found, wanted, rtol=1e-3, atol=1e-5)


def test_uneven_visits_cost_something():
    """Nothing where all experts are visited alike, E - 1 where one has all; its slope turns tokens
    away from what is visited most.
    """
    even = RoutedTokens(jnp.full((2, 4), 6), jnp.full((2, 4), 0.25))
    one = RoutedTokens(jnp.asarray([[24, 0, 0, 0]]), jnp.asarray([[1.0, 0, 0, 0]]))
    assert losses.unevenness(even) == 0 and losses.unevenness(one) == 3
    uneven = RoutedTokens(jnp.asarray([[12, 6, 6, 0]]), jnp.full((1, 4), 0.25))
    slope = jax.grad(lambda share: losses.unevenness(uneven._replace(share=share)))(uneven.share)
    assert (jnp.argsort(slope[0])[jnp.array([0, 3])] == jnp.array([3, 0])).all()


def test_a_mixture_is_trained_with_even_visits():
    model = fakes.gpt_oss()
    values = decoder_params.init(decoder.param_infos(model))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 131, (2, 17)))
    every = ragged.contiguous(2, 16)
    embedded_TD = decoder.embedded(values, model, tokens[:, :-1].reshape(-1), every)
    passed = decoder.layers(values, model, embedded_TD, every)
    own = losses.cross_entropy(
        functools.partial(decoder.logits, values, model),
        passed.hidden_TD.reshape(2, 16, -1), tokens[:, 1:],
    )  # fmt: skip
    found = losses.next_token(model)(values, None, {"tokens": tokens})
    np.testing.assert_allclose(found, own + 0.01 * losses.unevenness(passed.routed), rtol=1e-6)
