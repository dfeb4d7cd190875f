"""How many drafts a step verifies, chosen by what they bring and what they cost."""

import numpy as np
import pytest

from configs.engine import EngineConfig
from inference.request import SamplingParams
from inference.scheduling.adaptive_drafts import AdaptiveDrafts
from inference.scheduling.sequence import Sequence
from inference.scheduling.step_shapes import StepShape, choose, enumerate_shapes
from inference.speculation import draft_tree

pytestmark = pytest.mark.quick_code

ENGINE = EngineConfig.of(num_drafts=4, proposer="ngram", adapt_drafts=True, greedy_steps=False)
TREES = ENGINE.replace(num_drafts=31, proposer="eagle", **draft_tree.sizes(31))


def decoding(count):
    return [
        Sequence(i, SamplingParams(max_new_tokens=9), [1, 2], 2, speculates=True)
        for i in range(count)
    ]


def run(count, acceptance, cost, steps=4000, seed=0, engine=ENGINE, skip=0):
    """Tokens a second of a policy's steps, but for the first, and how many drafts they verified;
    `cost(rows, width)` in seconds.
    """
    rng, policy = np.random.default_rng(seed), AdaptiveDrafts(engine)
    sequences, seconds, tokens, chosen, ran = decoding(count), 0.0, 0, [], set()
    for step in range(steps):
        if step == skip:
            seconds, tokens = 0.0, 0
        k = policy.choose(sequences, count, True)
        shape = choose(policy._shapes, count, 0, False, width=1 + k)
        for sequence in sequences if k else ():
            num_drafts = min(k, engine.drafts.levels)
            accepted = int(np.cumprod(rng.random(num_drafts) < acceptance).sum())
            policy.verified(sequence, num_drafts, accepted)
            tokens += accepted
        tokens += count
        taken = cost(count, shape.decode[1])
        late = 25 * (shape not in ran)  # the first step starts a program
        ran.add(shape)
        policy.took(shape, taken * rng.uniform(0.9, 1.1) + late)
        seconds += taken
        chosen.append(k)
    return tokens / seconds, chosen


def rides_free(rows, width):
    return 1.0 + 0.002 * rows * width


def pays_by_token(rows, width):
    return 1.0 + rows * width


@pytest.mark.parametrize("count, acceptance, cost, expected", [
    (1, 0.8, rides_free, 4), (1, 0.02, pays_by_token, 0), (32, 0.3, pays_by_token, 0),
    (32, 0.9, rides_free, 4), (1, 0.5, lambda rows, width: 1 + 0.4 * (width > 3), 2),
])  # fmt: skip
def test_it_finds_what_brings_most_tokens_a_second(count, acceptance, cost, expected):
    _, chosen = run(count, acceptance, cost)
    assert np.mean(np.array(chosen[200:]) == expected) > 0.9


@pytest.mark.parametrize("seed", range(8))
def test_where_drafts_do_not_pay_nearly_nothing_is_lost(seed):
    """Batch 32, a = 0.3, a wide step of five times the arithmetic."""
    rate, _ = run(32, 0.3, pays_by_token, seed=seed)
    assert rate * pays_by_token(32, 1) / 32 > 0.99


@pytest.mark.parametrize("engine, growth", [(ENGINE, 1.0), (ENGINE, 0.2), (TREES, 0.1)])
def test_trials_lose_less_than_one_step_in_200(engine, growth):
    """Once every width has a time, whatever a wide step costs."""
    rate, chosen = run(
        4, 0.1, lambda rows, width: 1 + growth * width, 12_000, engine=engine, skip=50
    )
    assert 0.995 < rate * (1 + growth) / 4 < 0.9999
    assert set(chosen[50:]) == {shape.decode[1] - 1 for shape in enumerate_shapes(engine)}


def test_what_changes_is_noticed():
    policy = AdaptiveDrafts(ENGINE)
    sequences = decoding(1)
    for acceptance, expected in ((0, 0), (4, 4), (0, 0)):
        chosen = []
        for _ in range(400):
            k = policy.choose(sequences, 1, True)
            policy.verified(sequences[0], k, min(k, acceptance))
            shape = choose(policy._shapes, 1, 0, False, width=1 + k)
            policy.took(shape, 1.0 + 0.1 * k)
            chosen.append(k)
        assert np.mean(np.array(chosen[200:]) == expected) > 0.9


def test_rates_follow_a_sequence_faster_than_all():
    """By an eighth of what was seen of it, and a 64th; drafts not verified say nothing."""
    policy, (one, other) = AdaptiveDrafts(ENGINE), decoding(2)
    assert policy.acceptance == [32768, 16384, 8192, 4096]
    policy.choose([one, other], 2, True)
    policy.verified(one, 3, 2)
    assert policy._rates == {0: [36864, 22528, 7168, 4096], 1: [32768, 16384, 8192, 4096]}
    assert policy.acceptance == [33280, 17152, 8064, 4096]
    policy.verified(decoding(3)[2], 9, 0)  # one that no step drafted for, of more than there are
    assert policy.acceptance == [32760, 16884, 7938, 4032] and len(policy._rates) == 2


def test_a_late_step_says_little():
    policy, shape = AdaptiveDrafts(ENGINE), enumerate_shapes(ENGINE)[0]
    for seconds, expected in [
        (9.0, None), (1.0, 1_000_000_000), (5.0, 1_062_500_000), (0.5, 781_250_000),
        (0.8, 800_000_000), (0.8, 800_000_000), (0.0, 400_000_000),
    ]:  # fmt: skip
        policy.took(shape, seconds)
        assert policy._cost.get(shape) == expected
    other = StepShape((2, 1), (1, 64))
    policy.took(other, 1.0)
    policy.took(other, 1.0)
    assert list(policy._cost) == [shape]  # beside prompts no time counts


def test_without_anything_to_draft_for_there_are_no_drafts():
    policy = AdaptiveDrafts(ENGINE)
    (sequence,) = decoding(1)
    sequence.speculates = False
    assert policy.choose([sequence], 1, True) == policy.choose([], 0, True) == 0


def test_a_step_that_never_comes_is_not_waited_for():
    policy = AdaptiveDrafts(ENGINE)
    assert {policy.choose(decoding(3), 3, True) for _ in range(40)} == {0, 2, 4}
    assert policy.choose(decoding(3), 3, True) == 4


def test_beside_prompts_drafts_cost_what_they_cost_alone():
    policy, sequences = AdaptiveDrafts(ENGINE), decoding(32)
    assert policy.choose(sequences, 32, False) == 4  # nothing is known
    for _ in range(40):
        k = policy.choose(sequences, 32, True)
        for sequence in sequences if k else ():
            policy.verified(sequence, k, 0)
        policy.took(StepShape((32, 1 + k), (0, 64)), 1.0 + k)
    assert policy.choose(sequences, 32, False) == 0


def test_a_full_batch_without_drafts_rides_on_prompts_without():
    shapes = enumerate_shapes(ENGINE)
    assert choose(shapes, ENGINE.max_seqs, 1, False, width=1).decode == (ENGINE.max_seqs, 1)
    assert choose(shapes, ENGINE.max_seqs, 1, False, width=3).decode == (ENGINE.max_seqs, 5)
