"""Sequences that share windows: none sees another, and each token of an answer counts alike."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.mesh import Mesh
from configs.recipes.training import Recipe, TrainingConfig
from inference.training import answer_losses, loop, losses, packing, start
from inference.training.answers import Answered
from inference.training.packing import PackedAnswers, Pairs
from inference.training.step_folder import StepFolder
from layers import decoder, ragged
from tests import compiling, fakes

pytestmark = pytest.mark.quick_code

WINDOW = 64


def sequences(lengths=(11, 11, 27, 11, 11, 27, 11), vocab=131, seed=0):
    """Of so many inputs, with answers of very different lengths."""
    rng = np.random.default_rng(seed)
    made = []
    for nth, length in enumerate(lengths):
        first = length - 1 if nth % 2 else 2
        is_answer = [False] * first + [True] * (length + 1 - first)
        is_answer[-2] &= nth % 3 > 0  # with a gap
        made.append(Answered(rng.integers(0, vocab, length + 1).tolist(), is_answer))
    return made


SEQUENCES = sequences()


def masters(model, mesh=None):
    values = start.masters(Recipe(model, TRAINING, mesh or Mesh()))
    return jax.tree.map(lambda x: x + 0.05 * (x.ndim == 1), values)


TRAINING = TrainingConfig(
    steps=4, batch=4, window=WINDOW, learning_rate=1e-2, warmup_steps=1, checkpoint_every=2
)


def alone(values, model):
    """The loss of sequences one by one, without a mask, a window or padding; those of a length at
    once.
    """
    lost = 0.0
    for length in {len(sequence.tokens) for sequence in SEQUENCES}:
        alike = [sequence for sequence in SEQUENCES if len(sequence.tokens) == length]
        tokens = np.array([sequence.tokens for sequence in alike])
        rows = ragged.contiguous(len(alike), length - 1)
        hidden_TD, _ = decoder.forward(values, model, tokens[:, :-1].reshape(-1), rows)
        logprobs_TV = jax.nn.log_softmax(decoder.logits(values, model, hidden_TD))
        chosen_T1 = jnp.take_along_axis(logprobs_TV, tokens[:, 1:].reshape(-1, 1), axis=1)
        is_answer = np.array([sequence.is_answer[1:] for sequence in alike])
        lost -= (chosen_T1[:, 0] * is_answer.reshape(-1)).sum()
    return lost / sum(sum(sequence.is_answer) for sequence in SEQUENCES)


LAYER = fakes.llama().pattern[0]
MASKS = tuple(fakes.every_cache().pattern[n] for n in (2, 3, 6))  # windows, chunks, latents
MODELS = {
    "every mask": (fakes.llama(pattern=MASKS, num_layers=3), True),
    "states": (fakes.llama(pattern=(fakes.hybrid().pattern[1], LAYER)), False),
    "pooled": (fakes.llama(pattern=fakes.compressed().pattern[:1], num_layers=1), False),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", ["every mask", "states", pytest.param("pooled", marks=pytest.mark.long)]
)
def test_the_loss_and_its_gradient_are_those_of_sequences_alone(name):
    model, shares_rows = MODELS[name]
    assert packing.can_share_rows(model) == shares_rows
    data = PackedAnswers(SEQUENCES, WINDOW, 1, 0, shares_rows)
    data = PackedAnswers(SEQUENCES, WINDOW, data.count, 0, shares_rows)
    batch, values = data.batch(0), masters(model)
    assert batch["tokens"].shape == (data.count, 1, WINDOW)
    assert data.count == (2 if shares_rows else len(SEQUENCES))
    expected = compiling.call(jax.value_and_grad(alone), values, model=model)
    loss = compiling.jit(jax.value_and_grad(answer_losses.answers(model)))
    chex.assert_trees_all_close(loss(values, None, batch), expected, rtol=2e-4, atol=1e-5)


def test_latents_share_rows_unless_an_indexer_chooses():
    assert packing.can_share_rows(fakes.deepseek())
    assert not packing.can_share_rows(fakes.deepseek_v32())


def test_the_loss_is_that_of_float64():
    """A plain log-softmax of the logits that the decoder has for each sequence alone."""
    model, lost = fakes.llama(num_layers=1), []
    values = masters(model)
    forward = compiling.jit(
        lambda tokens: decoder.logits(
            values, model,
            decoder.forward(values, model, tokens, ragged.contiguous(1, len(tokens)))[0],
        )
    )  # fmt: skip
    for sequence in SEQUENCES:
        tokens = np.array(sequence.tokens)
        logits_TV = np.asarray(forward(tokens[:-1]), np.float64)
        logprobs_TV = logits_TV - np.log(np.exp(logits_TV).sum(1, keepdims=True))
        chosen_T = logprobs_TV[np.arange(len(tokens) - 1), tokens[1:]]
        lost += (-chosen_T[np.array(sequence.is_answer[1:])]).tolist()
    batch = PackedAnswers(SEQUENCES, WINDOW, 2, 0).batch(0)
    found = compiling.call(answer_losses.answers(model), values, None, batch)
    assert float(found) == pytest.approx(np.mean(lost), rel=1e-6)


def test_every_sequence_is_in_one_window_whole():
    lengths = np.random.default_rng(1).integers(1, 65, 300).tolist()
    bins = packing.packed(lengths, 64)
    assert sorted(sum(bins, [])) == list(range(300))
    assert all(sum(lengths[index] for index in row) <= 64 for row in bins)
    assert len(bins) <= 1.05 * sum(lengths) / 64


def test_batches_are_functions_of_their_step():
    one, two = (PackedAnswers(SEQUENCES, WINDOW, 2, seed) for seed in (3, 3))
    for step in (5, 0, 5):
        chex.assert_trees_all_equal(one.batch(step), two.batch(step))
    seen = [row.tobytes() for step in range(3) for row in one.batch(step)["tokens"]]
    assert len(set(seen[:2])) == 2  # an epoch


def run(data, loss, frozen=None, folder=None, steps=99, mesh=None, **changes):
    training = dataclasses.replace(TRAINING, **changes)
    seen = []
    values = loop.train(
        loss, masters(fakes.llama(num_layers=1), mesh), data, training, frozen=frozen,
        folder=folder, observe=lambda so_far: seen.append(so_far.copy()),
        stop=lambda: len(seen) >= steps,
    )  # fmt: skip
    return jax.device_get(values), seen[-1]


MODEL = fakes.llama(num_layers=1)
DATA = PackedAnswers(sequences((20, 30, 9, 12, 31, 25, 14, 3)), WINDOW, 4, 0)
PAIRS = Pairs(list(zip(SEQUENCES[:3], SEQUENCES[3:6], strict=True)), WINDOW, 4, 0)


def reference():
    return masters(MODEL)


CASES = {
    "sft": lambda **more: run(DATA, answer_losses.answers(MODEL), **more),
    "dpo": lambda **more: run(
        PAIRS, answer_losses.preference(answer_losses.reward_margins(MODEL, 0.5)),
        frozen=reference(), **more,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return CASES[request.param], CASES[request.param]()


def test_interrupted_and_resumed_it_is_the_same_bit_for_bit(case, tmp_path):
    train, straight = case
    train(folder=StepFolder(tmp_path / "run", {}), steps=3)
    chex.assert_trees_all_equal(train(folder=StepFolder(tmp_path / "run", {})), straight)


def test_in_parts_and_over_chips_it_is_the_same_up_to_rounding(case):
    """However unequal the answers of the parts are."""
    train, straight = case
    parts = DATA.batch(0)["weight"].reshape(4, -1)
    assert len({(part > 0).sum() for part in parts}) > 1
    for changes in ({"accumulate": 4}, {"mesh": Mesh(data=2, model=2)}):
        chex.assert_trees_all_close(train(**changes), straight, rtol=2e-4, atol=2e-5)


BETA = 0.3


def moved(values):
    return jax.tree.map(lambda x: x + 0.05 * jnp.sin(jnp.arange(x.size)).reshape(x.shape), values)


def logprob(values, model, tokens, is_answer):
    """Of an answer in a sequence alone."""
    hidden_TD, _ = decoder.forward(
        values, model, tokens[:-1], ragged.contiguous(1, len(tokens) - 1)
    )
    logprobs_TV = jax.nn.log_softmax(decoder.logits(values, model, hidden_TD))
    chosen_T = jnp.take_along_axis(logprobs_TV, tokens[1:, None], axis=1)[:, 0]
    return (chosen_T * is_answer[1:]).sum()


def test_at_the_start_a_preference_is_worth_the_logarithm_of_two():
    model = fakes.llama("bfloat16", num_layers=1)
    values = moved(masters(model))
    frozen, margins = losses.whole(model)(values, None), answer_losses.reward_margins(model, BETA)
    loss = answer_losses.preference(margins)
    found = compiling.call(loss, values, frozen, PAIRS.batch(0))
    assert float(found) == pytest.approx(np.log(2), abs=1e-6)


def test_the_gradient_of_a_preference_is_that_of_its_formula():
    """Equation 7 of the paper: the likelihood of the chosen answer rises and that of the other one
    falls, the more so the more wrongly the model orders them.
    """
    model = fakes.llama(num_layers=1)
    values, frozen = moved(masters(model)), masters(model)
    pairs = [SEQUENCES[:2], SEQUENCES[3:5]]
    batch = Pairs(pairs, WINDOW, 2, 0).batch(0)
    margins = answer_losses.reward_margins(model, BETA)
    loss = jax.value_and_grad(answer_losses.preference(margins))
    found, slopes = compiling.jit(loss)(values, frozen, batch)
    expected, total = [], 0.0
    of = compiling.jit(jax.value_and_grad(functools.partial(logprob, model=model)))
    for pair in pairs:
        trained, ((start_won, _), (start_lost, _)) = (
            [of(v, tokens=np.array(s.tokens), is_answer=np.array(s.is_answer)) for s in pair]
            for v in (values, frozen)
        )
        (won, up), (lost, down) = trained
        margin = BETA * float(won - start_won - (lost - start_lost))
        total += np.log1p(np.exp(-margin)) / 2
        factor = -BETA / (1 + np.exp(margin)) / 2
        expected.append(jax.tree.map(lambda a, b, f=factor: f * (a - b), up, down))
    assert float(found) == pytest.approx(total, rel=1e-5)
    chex.assert_trees_all_close(slopes, jax.tree.map(jnp.add, *expected), rtol=2e-3, atol=1e-5)
    measured = answer_losses.measured(margins, values, frozen, [batch])
    assert np.log1p(np.exp(-measured)).mean() == pytest.approx(total, rel=1e-4)
