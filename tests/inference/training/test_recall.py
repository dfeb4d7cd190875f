"""Recall: what sequences ask, what is learned of them, and what states begin with."""

import dataclasses

import numpy as np
import pytest

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.combined import Parallel
from configs.kinds.recurrent.delta_net import DeltaNet
from configs.kinds.recurrent.mamba import Mamba2
from configs.kinds.recurrent.selective import Mamba
from configs.kinds.recurrent.short_conv import ShortConv
from configs.model import LayerSpec
from configs.recipes.training import Recipe, TrainingConfig
from inference.training import loop, start
from scripts.reports.recall import answers, recipes, sequences
from scripts.reports.recall.recipes import Task
from tests import compiling, fakes

pytestmark = pytest.mark.quick_code

TASKS = Task(48, 3), Task(48, 12)
DATA = sequences.Sequences(TASKS, 6, seed=1)
LAYERS = ShortConv(32), Attention(1, num_kv_heads=1, head_width=32, rope=None)
MODEL = dataclasses.replace(
    recipes.MODELS["attention"], name="tiny", width=32, num_layers=2,
    pattern=tuple(LayerSpec(mixer, None) for mixer in LAYERS),
)  # fmt: skip


def rows_of(found):
    """(tokens, {position: answer}, weights) of each row."""
    for tokens, positions, own, weights in zip(*found, strict=True):
        asked = weights > 0
        yield tokens, dict(zip(positions[asked], own[asked], strict=True)), weights[asked]


@pytest.mark.parametrize("found", [
    sequences.Rows(**DATA.batch(5)), sequences.held_out(Task(256, 64), 3),
])  # fmt: skip
def test_each_key_was_shown_with_its_answer(found):
    for tokens, asked, weights in rows_of(found):
        count = len(asked)
        shown = dict(zip(tokens[: 2 * count : 2], tokens[1 : 2 * count : 2], strict=True))
        assert len(shown) == len(set(shown.values())) == count, "keys and values are distinct"
        assert all(0 < key <= recipes.NUM_KEYS < value for key, value in shown.items())
        assert min(asked) >= 2 * count
        assert {tokens[at]: value for at, value in asked.items()} == shown
        rest = np.delete(tokens[2 * count :], np.array(list(asked)) - 2 * count)
        assert (rest == recipes.FILLER).all(), "no answer is shown where it is asked for"
        np.testing.assert_allclose(weights, 1 / count)


def test_rows_have_the_pairs_of_their_tasks_in_turn():
    counts = (DATA.batch(0)["weights"] > 0).sum(1)
    assert counts.tolist() == [3, 12] * 3


@pytest.mark.parametrize("length, most", [(48, 12), (51, 12), (1024, 128)])
def test_a_task_has_a_place_and_a_key_for_each_pair(length, most):
    assert (sequences.held_out(Task(length, most), 2).weights > 0).all()
    for count in (0, most + 1):
        with pytest.raises(
            InputError, match=f"has at most {most} pairs, and at least 1, not {count}$"
        ):
            Task(length, count)


def test_most_keys_are_asked_for_soon():
    found = sequences.held_out(Task(1024, 8), 256)
    assert np.median(found.positions) < 1024 / 4 < found.positions.max() / 2


def test_batches_are_a_function_of_the_step_and_no_others_are_held_out():
    again = sequences.Sequences(TASKS, 6, seed=1)
    assert all(np.array_equal(DATA.batch(3)[name], x) for name, x in again.batch(3).items())
    first = [DATA.batch(0), DATA.batch(1), sequences.Sequences(TASKS, 6, seed=2).batch(0)]
    rows = [row.tobytes() for batch in first for row in batch["tokens"]]
    rows += [row.tobytes() for task in TASKS for row in sequences.held_out(task, 8).tokens]
    assert len(set(rows)) == len(rows)
    assert np.array_equal(*(sequences.held_out(TASKS[0], 8).tokens for _ in range(2)))


def test_the_loss_is_of_answers_alone():
    values = start.masters(Recipe(MODEL, TrainingConfig(steps=1, batch=6, window=48)))
    lose, batch = compiling.jit(answers.loss(MODEL)), DATA.batch(0)
    whole = float(lose(values, None, batch))
    assert whole == pytest.approx(np.log(MODEL.vocab_size), abs=1)
    behind = batch["tokens"].copy()
    for tokens, positions, weights in zip(
        behind, batch["positions"], batch["weights"], strict=True
    ):
        tokens[positions[weights > 0].max() + 1 :] = 7
    assert float(lose(values, None, batch | {"tokens": behind})) == whole
    no_row = np.where(batch["weights"] > 0, batch["answers"], 9)
    assert float(lose(values, None, batch | {"answers": no_row})) == whole
    others = batch | {"answers": np.roll(batch["answers"], 1, axis=0)}
    assert float(lose(values, None, others)) != whole
    halves = [{name: np.tile(x[n : n + 3], (2, 1)) for name, x in batch.items()} for n in (0, 3)]
    found = [float(lose(values, None, half)) for half in halves]
    assert np.mean(found) == pytest.approx(whole, rel=1e-5), "a mean over rows"


def test_accuracy_is_the_share_of_likeliest_answers(monkeypatch):
    rows = sequences.held_out(TASKS[0], 24)
    right = rows.answers.copy()
    right[:6] = 0
    told = iter((right[:16], right[16:]))
    monkeypatch.setattr(answers, "_likeliest", lambda *_: next(told))
    assert answers.accuracy(None, MODEL, TASKS[0], 24) == 0.75


def test_answers_are_learned():
    """Those of one batch, by heart."""

    class Same:
        def batch(self, step):
            return DATA.batch(0)

    training = TrainingConfig(steps=40, batch=6, window=48, learning_rate=2e-2, warmup_steps=2)
    values, seen = start.masters(Recipe(MODEL, training)), []
    loop.train(
        answers.loss(MODEL), values, Same(), training,
        observe=lambda found: seen.append(float(found[-1])),
    )  # fmt: skip
    assert seen[-1] < 0.5 * seen[0]


@pytest.mark.parametrize("mixer", [
    Mamba(8, state_width=4, step_rank=2), Mamba2(4, 8, 4), DeltaNet(4, 2, 8, 8),
    DeltaNet(4, 4, 8, 8, decay_rank=2), Parallel(LAYERS[1], Mamba2(4, 8, 4)),
])  # fmt: skip
def test_states_begin_with_long_and_short_memories(mixer):
    """Of what is left of a state after a token, the most is close to 1, the least far from it."""
    model = fakes.llama(num_layers=1)
    model = dataclasses.replace(model, pattern=(LayerSpec(mixer, None),))
    training = TrainingConfig(steps=1, batch=1, window=16)
    own = start.masters(Recipe(model, training))["layers"][0]["mixer"]
    if isinstance(mixer, Parallel):
        own = own[mixer.recurrent.name]
    rates = np.exp(own.get("rate", own.get("decay")))
    steps = np.log1p(np.exp(own["step_bias"]))
    steps = steps.reshape(len(rates), -1)
    left = np.exp(-rates.reshape(len(rates), -1) * steps)
    assert left.max() > 0.99 and left.min() < 0.8
    assert 1e-3 < steps.min() < steps.max() < 1e-1
