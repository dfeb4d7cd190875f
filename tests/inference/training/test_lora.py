"""Adapters that are trained: what the trainer computes is what an engine serves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.errors import InputError
from configs.mesh import Mesh
from configs.recipes.training import Recipe, TrainingConfig
from configs.settings.adapters import AdapterConfig
from inference.adapters import peft_directory
from inference.training import answer_losses, lora, losses
from inference.training.answers import Answered
from inference.training.packing import PackedAnswers
from tests import compiling, fakes
from tests.inference.adapters import peft_files

pytestmark = pytest.mark.quick_code

_TRAINING = TrainingConfig(steps=4, batch=2, window=32, lora_rank=3, lora_alpha=6.0)
_SEQUENCES = [
    Answered(tuple(tokens), tuple(n > 3 for n in range(len(tokens))))
    for tokens in fakes.prompts([20, 11, 30, 9], 131, seed=3)
]


def _drawn(recipe, seed=1):
    """Factors as some training would leave them: both are random."""
    generator = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(generator.normal(0, 0.2, x.shape), jnp.float32), lora.masters(recipe)
    )


@pytest.mark.parametrize("name", ["llama", "deepseek", "jamba"])
def test_the_loss_is_that_of_merged_weights_and_of_the_engine(tmp_path, name):
    model = getattr(fakes, name)()
    recipe = Recipe(model, _TRAINING)
    factors, base = _drawn(recipe), fakes.real_params(model)
    batch = PackedAnswers(_SEQUENCES, 32, 4, 0, False).batch(0)
    adapted = compiling.jit(answer_losses.answers(model, lora.model(recipe)))
    lora.write(factors, recipe, "tiny", tmp_path / "adapter")
    loaded = peft_directory.read(tmp_path / "adapter", model, AdapterConfig(rank=8))
    merged = peft_files.merged(model, base, loaded)
    expected = compiling.call(answer_losses.answers(model), merged, None, batch)
    np.testing.assert_allclose(adapted(factors, base, batch), expected, rtol=1e-5)
    if name != "llama":
        return
    with fakes.no_draws():
        engine = fakes.engine(model, None, "one", False, slots=1, rank=8, max_seqs=4)
        engine.adapters.load("tuned", tmp_path / "adapter")
        scores = engine.score([sequence.tokens for sequence in _SEQUENCES], "tuned")
    lost = [
        -logprob for score, sequence in zip(scores, _SEQUENCES, strict=True)
        for logprob, is_answer in zip(score.logprobs, sequence.is_answer[1:], strict=True)
        if is_answer
    ]  # fmt: skip
    np.testing.assert_allclose(expected, np.mean(lost), rtol=1e-5)


def test_an_adapter_begins_as_the_model_and_its_gradient_is_that_of_the_weights():
    model = fakes.llama()
    recipe, base = Recipe(model, _TRAINING), fakes.real_params(model)
    batch = PackedAnswers(_SEQUENCES, 32, 4, 0, False).batch(0)
    loss = answer_losses.answers(model, lora.model(recipe))
    begun = lora.masters(recipe)
    whole = compiling.jit(jax.value_and_grad(answer_losses.answers(model)))(base, None, batch)
    value, gradient = compiling.jit(jax.value_and_grad(loss))(begun, base, batch)
    assert float(value) == float(whole[0])
    name = "model.layers.1.self_attn.o_proj"
    dense_FD = whole[1]["layers"][1]["mixer"]["out"]
    expected = 2.0 * dense_FD @ begun[name][lora.DOWN].T  # alpha / rank
    np.testing.assert_allclose(gradient[name][lora.UP], expected, rtol=1e-4, atol=1e-7)
    assert not np.asarray(gradient[name][lora.DOWN]).any()  # B is 0


def test_preferences_begin_at_their_reference():
    model = fakes.llama(num_layers=1)
    recipe, base = Recipe(model, _TRAINING), fakes.real_params(model)
    margins = answer_losses.reward_margins(model, 0.5, lora.model(recipe))
    batch = PackedAnswers(_SEQUENCES, 32, 4, 0, False).batch(0)
    assert not np.asarray(compiling.call(margins, lora.masters(recipe), base, batch)).any()
    assert np.abs(compiling.call(margins, _drawn(recipe), base, batch)).min() > 0


def test_a_mesh_trains_what_one_chip_trains():
    model = fakes.llama(num_heads=8, num_kv_heads=4)
    recipe = Recipe(model, _TRAINING, Mesh(model=2))
    factors = _drawn(recipe)
    batch = PackedAnswers(_SEQUENCES, 32, 4, 0, False).batch(0)
    base = losses.whole(model)(fakes.real_params(model), None)
    loss = compiling.jit(jax.value_and_grad(answer_losses.answers(model, lora.model(recipe))))
    expected = loss(jax.device_get(factors), base, batch)
    found = loss(factors, base, batch)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6), found, expected
    )


def test_modules_that_are_not_there_are_refused():
    with pytest.raises(InputError, match="tiny-llama has no module c_attn; valid: down_proj, "):
        lora.modules(fakes.llama(), ("q_proj", "c_attn"))
    assert {name.rpartition(".")[2] for name in lora.modules(fakes.llama(), ("q_proj",))} == {
        "q_proj"
    }
    with pytest.raises(InputError, match=r"training\.lora_rank"):
        dataclasses.replace(_TRAINING, lora_rank=257)
