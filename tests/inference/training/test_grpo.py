"""Group-relative policy optimization: what it learns from, stale answers, and exact resumption."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.recipes.training import PolicyTraining
from inference.engine import Engine
from inference.training import answer_losses, grpo, loop, losses, packing, policy_loss, rollouts
from inference.training.answer_lines import Prompt
from inference.training.answers import Answered
from inference.training.engine_logprobs import EngineLogprobs
from inference.training.rewards import RewardError
from inference.training.rollouts import Rollouts
from inference.training.step_folder import StepFolder
from tests import compiling, fakes

pytestmark = pytest.mark.quick_code

MODEL = fakes.llama(num_layers=1, vocab_size=131)
PROMPTS = [Prompt(tokens, {}) for tokens in fakes.prompts([5, 9, 3, 7], 131, seed=1)]
TRAINING = PolicyTraining(
    steps=4, batch=2, window=32, learning_rate=3e-2, checkpoint_every=100, group_size=4,
    max_new_tokens=6, weight_decay=0.0,
)  # fmt: skip
ENGINE = EngineConfig.of(max_seqs=8, max_context=32, deterministic=True, decode_rows=(8,))


class Service:
    """An engine without a tokenizer, whose answers are their token ids in words."""

    def __init__(self):
        self._engine = Engine(Config(MODEL, ENGINE), _values())

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def generate(self, prompts, params):
        def worded(completion):
            text, others = " ".join(map(str, completion.token_ids)), map(worded, completion.others)
            return dataclasses.replace(completion, text=text, others=tuple(others))

        return list(map(worded, self._engine.generate(prompts, params)))


def small_ids(line, answer):
    """The share of ids in the lower half."""
    return float(np.mean([int(word) < 65 for word in answer.split()]))


def _values():
    return jax.tree.map(jnp.array, fakes.real_params(MODEL))


def run(tmp_path, training=TRAINING, reward=small_ids, stop=99, engine=None):
    """Parameters, iterations, and the files of answers that are left."""
    seen, iterations = [], []
    data = grpo.PolicyAnswers(
        PROMPTS, reward, training, engine or Service(),
        EngineLogprobs(Config(MODEL, ENGINE), 16), losses.whole(MODEL), _values(),
        tmp_path / "answers", True, iterations.append,
    )  # fmt: skip
    folder = StepFolder(tmp_path / "run", {})
    values = loop.train(
        policy_loss.clipped(MODEL, training), _values(), data, training, folder=folder,
        observe=seen.append, stop=lambda: len(seen) >= stop,
    )  # fmt: skip
    data.close()
    return jax.device_get(values), iterations, sorted((tmp_path / "answers").iterdir())


def test_rewards_rise_and_the_gap_is_0(tmp_path):
    _, iterations, files = run(tmp_path, dataclasses.replace(TRAINING, steps=8))
    assert [one.iteration for one in iterations] == list(range(8))
    assert iterations[-1].reward > iterations[0].reward + 0.2
    assert all(one.max_gap == one.mean_gap == 0 for one in iterations)
    assert iterations[0].divergence == 0 < iterations[-1].divergence
    assert {one.answer_tokens for one in iterations} == {6.0}
    first = Rollouts.read(files[0])
    assert [answer.prompt for answer in first.answers] == [first.answers[0].prompt] * 4 + [
        first.answers[4].prompt
    ] * 4
    assert len({tuple(answer.tokens) for answer in first.answers}) == 8
    assert all(np.array_equal(answer.policy, answer.logprobs) for answer in first.answers)


@pytest.mark.parametrize("updates, staleness, stop", [
    pytest.param(1, 0, 2, marks=pytest.mark.long), (2, 2, 5),
])  # fmt: skip
def test_interrupted_and_resumed_it_is_the_same_bit_for_bit(tmp_path, updates, staleness, stop):
    training = dataclasses.replace(
        TRAINING, steps=4 * updates, updates=updates, staleness=staleness
    )
    straight = run(tmp_path / "straight", training)
    _, before, _ = run(tmp_path / "broken", training, stop=stop)
    values, after, _ = run(tmp_path / "broken", training)
    chex.assert_trees_all_equal(values, straight[0])
    found = [one._replace(rollout_s=0, update_s=0) for one in (*before, *after)]
    expected = [one._replace(rollout_s=0, update_s=0) for one in straight[1]]
    assert list(dict.fromkeys(found)) == expected
    versions = [Rollouts.read(path).version for path in straight[2]]
    assert versions == [1 + max(0, number - staleness) for number in range(4)]


def test_what_has_no_reward_is_left_out(tmp_path):
    def fails(line, answer):
        if int(answer.split()[0]) % 2:
            raise RewardError("odd")
        return small_ids(line, answer)

    _, iterations, files = run(tmp_path, dataclasses.replace(TRAINING, steps=1), fails)
    answers = Rollouts.read(files[0]).answers
    dropped = [answer.reward is None for answer in answers]
    assert dropped == [bool(answer.tokens[0] % 2) for answer in answers] and any(dropped)
    assert iterations[0].dropped == np.mean(dropped)
    valid = [answer.reward for answer in answers if answer.reward is not None]
    assert iterations[0].reward == pytest.approx(np.mean(valid))


def test_a_reward_that_always_fails_is_one_line(tmp_path):
    def fails(line, answer):
        raise RewardError("no luck")

    with pytest.raises(InputError, match="none of 8 answers has a reward; the first: no luck"):
        run(tmp_path, dataclasses.replace(TRAINING, steps=1), fails)


def test_equal_rewards_change_nothing(tmp_path):
    training = dataclasses.replace(TRAINING, steps=1)
    values, *_ = run(tmp_path, training, lambda line, answer: 0.7)
    chex.assert_trees_all_equal(values, jax.device_get(_values()))


def test_answers_that_are_lost_are_missed(tmp_path):
    training = dataclasses.replace(TRAINING, staleness=1)
    run(tmp_path, training, stop=2)
    for path in (tmp_path / "answers").iterdir():
        path.unlink()
    with pytest.raises(InputError, match="00000002.jsonl: the answers of this iteration are missi"):
        run(tmp_path, training)


def test_advantages_are_of_what_has_a_reward():
    assert not rollouts.advantages([None, 0.3, 0.3]).any()
    assert not rollouts.advantages([None, 1.0]).any() and not rollouts.advantages([None]).any()
    np.testing.assert_allclose(rollouts.advantages([1, 0, None, 1, 0]), [1, -1, 0, 1, -1])
    np.testing.assert_allclose(rollouts.advantages([1e308, -1e308, 1e308, -1e308]), [1, -1, 1, -1])


def test_on_policy_the_ratio_is_1_and_the_gradient_is_that_of_the_policy():
    """Whatever the values are: those of an engine, here far away."""
    rng = np.random.default_rng(0)
    sequences = []
    for length, advantage in ((9, 1.0), (14, -0.5), (5, 0.25)):
        figures = {
            name: rng.normal(size=length - 1).astype(np.float32) for name in policy_loss.FIGURES
        }
        figures[policy_loss.POLICY] = figures[policy_loss.LOGPROB]
        figures[policy_loss.IMPORTANCE] = np.full(length - 1, 0.5, np.float32)
        figures[policy_loss.ADVANTAGE] = np.full(length - 1, advantage, np.float32)
        is_answer = [n > 2 for n in range(length)]
        sequences.append(Answered(rng.integers(0, 131, length).tolist(), is_answer, figures))
    batch = packing.policy_batch(sequences, 24, 1, True)
    assert batch["tokens"].shape == (2, 1, 24)
    training, values = dataclasses.replace(TRAINING, kl_coefficient=0.0), _values()

    def expected(masters):
        def lose(lost_Q, weight_Q, advantage_Q):
            return 0.5 * weight_Q * advantage_Q * lost_Q

        sums_Y, _ = answer_losses.target_sums(
            masters, MODEL, batch, lose, batch["weight"], batch[policy_loss.ADVANTAGE]
        )
        return sums_Y.sum() / batch["weight"].size

    loss = functools.partial(policy_loss.clipped(MODEL, training), frozen=None, batch=batch)
    value, gradient = compiling.jit(jax.value_and_grad(lambda masters: loss(masters)))(values)
    mean = (0.5 * batch["weight"] * batch[policy_loss.ADVANTAGE]).mean()
    assert float(value) == pytest.approx(-mean, rel=1e-6)
    chex.assert_trees_all_close(
        gradient, compiling.jit(jax.grad(expected))(values), rtol=1e-5, atol=1e-7
    )


def test_a_token_that_has_changed_enough_is_clipped_and_the_reference_holds():
    """A token of ratio 2 has no gradient where it was good; the divergence has that of k3."""
    figures = {name: np.zeros(1, np.float32) for name in policy_loss.FIGURES}
    figures |= {
        policy_loss.LOGPROB: np.full(1, np.log(2), np.float32),
        policy_loss.IMPORTANCE: np.ones(1, np.float32),
        policy_loss.ADVANTAGE: np.ones(1, np.float32),
    }
    batch = packing.policy_batch([Answered([5, 7], [False, True], figures)], 8, 1, True)
    values, found = _values(), {}
    for coefficient in (0.0, 1.0):
        training = dataclasses.replace(TRAINING, kl_coefficient=coefficient)
        loss = policy_loss.clipped(MODEL, training)
        found[coefficient] = compiling.jit(jax.value_and_grad(loss))(values, None, batch)
    assert float(found[0.0][0]) == pytest.approx(-1.2)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(found[0.0][1]))
    divergence = np.exp(-np.log(2)) + np.log(2) - 1
    assert float(found[1.0][0]) == pytest.approx(-1.2 + divergence, rel=1e-5)
    assert any(np.asarray(leaf).any() for leaf in jax.tree.leaves(found[1.0][1]))


def test_weights_that_diverge_are_one_line(tmp_path):
    training = dataclasses.replace(TRAINING, steps=2, learning_rate=1e30)
    with pytest.raises(
        InputError, match="learning_rate=1e.30: the weights that sample .*iteration 1"
    ):
        run(tmp_path, training)


def test_a_file_of_answers_holds_any_text(tmp_path):
    answer = rollouts.Answer(0, [1], "a\udc80\n\u2028", 1.0, np.float32([-0.1]), None)
    Rollouts(0, 1, 0.5, 0.0, 0.0, [answer]).write(tmp_path / "answers.jsonl")
    (again,) = Rollouts.read(tmp_path / "answers.jsonl").answers
    assert again == answer


@pytest.mark.parametrize("changes, message", [
    (dict(group_size=1), "training.group_size=1: an answer alone"),
    (dict(updates=3), r"training.updates=3: must divide training.batch \(2\)"),
    (dict(max_new_tokens=33), "training.max_new_tokens=33: must be at most training.window=32"),
    (dict(kl_coefficient=float("nan")), "training.kl_coefficient=nan"),
    (dict(clip_ratio=0.0), "training.clip_ratio is a finite number above 0"),
])  # fmt: skip
def test_what_cannot_be_trained_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(TRAINING, **changes)
