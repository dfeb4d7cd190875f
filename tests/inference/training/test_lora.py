"""Adapters that are trained: what the trainer computes is what an engine serves."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.engine import Config
from configs.errors import InputError
from configs.kinds.feed_forward import Gated
from configs.mesh import ONE_CHIP, Mesh
from configs.recipes.training import Recipe, TrainingConfig
from configs.settings.adapters import AdapterConfig
from inference.adapters import peft_directory
from inference.checkpoints import resolve, weight_formats
from inference.training import answer_losses, loop, lora, losses
from inference.training.answers import Answered
from inference.training.packing import PackedAnswers
from inference.training.step_folder import StepFolder
from layers import decoder, params
from layers.kernels.linear import api as linear
from tests import compiling, fakes
from tests.inference.adapters import peft_files
from tests.scripts import apps

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
    np.testing.assert_allclose(expected, _mean_loss(scores), rtol=1e-5)


@pytest.mark.parametrize("name", [
    "phi3-gqa-longrope-partial",  # a module is several of ours, one behind the other
    pytest.param("qwen3_next-gqa-shared-experts", marks=pytest.mark.long),  # or in two
])  # fmt: skip
def test_sums_are_those_of_the_adapter_that_is_written(tmp_path, name):
    golden = Path(__file__).parents[2] / "golden" / name
    model = dataclasses.replace(resolve.resolve(str(golden)).config, dtype="float32")
    recipe, generator = Recipe(model, _TRAINING), np.random.default_rng(0)
    factors, base = _drawn(recipe), jax.tree.map(
        lambda info: generator.standard_normal(info.shape, np.float32), decoder.param_infos(model),
        is_leaf=params.is_info,
    )  # fmt: skip
    lora.write(factors, recipe, "tiny", tmp_path / "adapter")
    loaded = peft_directory.read(tmp_path / "adapter", model, AdapterConfig(rank=8))
    expected = peft_files.merged(model, base, loaded)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        lora.merged(recipe)(factors, base), expected,
    )  # fmt: skip


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


def _few_bits(format, **changes):
    """A model whose rows are whole groups, with its weights in a format, or as they are."""
    layer = dataclasses.replace(fakes.llama().pattern[0], ffn=Gated(96))
    model = dataclasses.replace(fakes.llama(), width=64, pattern=(layer,), **changes)
    formats = {} if format is None else weight_formats.rounded(model, format)
    return dataclasses.replace(model, formats=tuple(formats.items()))


@pytest.mark.parametrize("format", ["int8", "int4", "mxfp4"])
def test_the_loss_above_few_bits_is_that_of_the_engine(tmp_path, format):
    model = _few_bits(format)
    recipe = Recipe(model, _TRAINING)
    factors, values = _drawn(recipe), fakes.real_params(model)
    config = Config(model).with_engine(linear="reference")
    base = linear.pack_params(config, values, decoder.param_infos(model))
    batch = PackedAnswers(_SEQUENCES, 32, 4, 0, False).batch(0)
    loss = compiling.jit(answer_losses.answers(model, lora.model(recipe)))(factors, base, batch)
    lora.write(factors, recipe, "tiny", tmp_path / "adapter")
    with fakes.no_draws():
        engine = fakes.engine(
            model, values, "one", False, slots=1, rank=8, max_seqs=4, activations="exact"
        )
        engine.adapters.load("tuned", tmp_path / "adapter")
        scores = engine.score([sequence.tokens for sequence in _SEQUENCES], "tuned")
    np.testing.assert_allclose(loss, _mean_loss(scores), rtol=1e-5)


def _mean_loss(scores):
    """The mean over the tokens of all answers, by scores of `_SEQUENCES`."""
    return np.mean([
        -logprob for score, sequence in zip(scores, _SEQUENCES, strict=True)
        for logprob, is_answer in zip(score.logprobs, sequence.is_answer[1:], strict=True)
        if is_answer
    ])  # fmt: skip


def _temporary_bytes(num_layers):
    """Of the gradient of an adapter above int4, of eight tokens."""
    layer = dataclasses.replace(fakes.llama().pattern[0], ffn=Gated(2048))
    model = dataclasses.replace(
        fakes.llama("bfloat16", num_layers=num_layers), width=256, pattern=(layer,)
    )
    model = dataclasses.replace(model, formats=tuple(weight_formats.rounded(model, "int4").items()))
    recipe = Recipe(model, dataclasses.replace(_TRAINING, batch=1, window=8))
    base = linear.abstract(Config(model).with_engine(linear="reference"), model.parameters())
    batch = PackedAnswers([_SEQUENCES[-1]], 8, 1, 0).batch(0)
    gradient = jax.jit(jax.grad(answer_losses.answers(model, lora.model(recipe))))
    compiled = gradient.lower(lora.masters(recipe), base, batch).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.quick_code(False)
def test_no_layer_of_few_bits_stays_dequantized():
    """Two more layers take less than the numbers of one, which are bfloat16."""
    num_numbers = 3 * 256 * 2048
    assert _temporary_bytes(3) - _temporary_bytes(1) < 2 * num_numbers


def _losses(recipe, checkpoint, weights, **more):
    """Of a training's steps, and what it leaves."""
    recipe = lora.with_base(recipe, checkpoint, weights)
    vocab_size, seen = recipe.model.vocab_size, []
    sequences = [
        Answered([token % vocab_size for token in sequence.tokens], sequence.is_answer)
        for sequence in _SEQUENCES * 3
    ]
    data = PackedAnswers(sequences, 32, 4, 0)
    values = loop.train(
        answer_losses.answers(recipe.model, lora.model(recipe)), lora.masters(recipe), data,
        recipe.training, frozen=lora.base(recipe, checkpoint), observe=seen.append, **more,
    )  # fmt: skip
    return seen[-1], jax.device_get(values)


@pytest.fixture(scope="module")
def tiny():
    return resolve.resolve(str(apps.TINY)).open(None)


def _of(checkpoint, mesh=ONE_CHIP):
    training = dataclasses.replace(_TRAINING, batch=4, accumulate=2, learning_rate=1e-2)
    return Recipe(checkpoint.config, training, mesh)


@pytest.mark.parametrize("weights", [None, "int8"])
def test_chips_train_what_one_chip_trains(tiny, weights):
    expected, _ = _losses(_of(tiny), tiny, weights)
    divided, _ = _losses(_of(tiny, Mesh(data=2, model=2)), tiny, weights)
    np.testing.assert_allclose(divided, expected, rtol=1e-3)


@pytest.mark.parametrize("weights", [None, "int8"])
def test_an_interrupted_training_ends_with_the_same_bits(tmp_path, tiny, weights):
    straight = _losses(_of(tiny), tiny, weights)
    stops = iter([False, False, True])
    folder = StepFolder(tmp_path / "steps", {})
    _losses(_of(tiny), tiny, weights, folder=folder, stop=lambda: next(stops))
    again = _losses(_of(tiny), tiny, weights, folder=StepFolder(tmp_path / "steps", {}))
    jax.tree.map(np.testing.assert_array_equal, again, straight)


def test_a_quantized_checkpoint_is_trained_on_as_it_is():
    checkpoint = resolve.resolve(str(apps.ROOT / "tests/golden/quantized/awq-g32")).open(None)
    recipe = lora.with_base(_of(checkpoint), checkpoint, None)
    assert recipe.model.formats == checkpoint.config.formats
    losses_of_steps, _ = _losses(_of(checkpoint), checkpoint, None)
    assert losses_of_steps[-1] < losses_of_steps[0]
    with pytest.raises(InputError, match="engine.weights=int8 would round them again"):
        lora.with_base(_of(checkpoint), checkpoint, "int8")
    rounding = resolve.resolve(str(apps.ROOT / "tests/golden/quantized/ct-w8a8")).open(None)
    with pytest.raises(InputError, match="has weights in w8a8, through whose products no grad"):
        lora.with_base(_of(rounding), rounding, None)


def test_modules_that_are_not_there_are_refused():
    with pytest.raises(InputError, match="tiny-llama has no module c_attn; valid: down_proj, "):
        lora.modules(fakes.llama(), ("q_proj", "c_attn"))
    assert {name.rpartition(".")[2] for name in lora.modules(fakes.llama(), ("q_proj",))} == {
        "q_proj"
    }
    with pytest.raises(InputError, match=r"training\.lora_rank"):
        dataclasses.replace(_TRAINING, lora_rank=257)
