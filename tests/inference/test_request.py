"""What a request may ask, and how far a sequence says it has come."""

import math

import pytest

from configs.errors import InputError
from inference.request import MAX_STOP_IDS, SamplingParams, Sequence

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    "name, good, bad",
    [
        ("max_new_tokens", [0, 1, 10**9], [-1, NAN, INF, 1.5, "8", None]),
        ("temperature", [0, 0.7, 100], [-0.1, NAN, INF, 100.1, "1", None]),
        ("top_k", [0, 1, 2**31 - 1], [-1, 2**31, 1.0, NAN]),
        ("top_p", [1, 0.5, 1e-9], [0, 0.0, -0.5, 1.1, NAN, INF]),
        ("min_p", [0, 0.5, 1], [-0.1, 1.1, NAN]),
        ("repetition", [1, 0.5, 100], [0, -1, 101, NAN, INF]),
        ("presence", [-2, 0, 2], [-2.1, 2.1, NAN, -INF]),
        ("frequency", [-2, 0, 2], [-2.1, 2.1, NAN, INF]),
        ("min_tokens", [0, 5], [-1, NAN, 0.5]),
        ("seed", [None, 0, -(2**63), 2**64 - 1], [2**64, -(2**63) - 1, 1.0, NAN, "1"]),
        ("stop", [(), ("a", "\n")], [("",), ("a", ""), "abc"]),
        ("stop_ids", [(), tuple(range(8))], [tuple(range(9))]),
        ("logit_bias", [(), ((3, -100.0),)], [((3, NAN),), ((3, INF),)]),
    ],
)
def test_ranges(name, good, bad):
    for value in good:
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in bad:
        with pytest.raises(InputError) as error:
            SamplingParams(**{name: value})
        text = str(error.value)
        assert "\n" not in text and name.split("_")[0] in text


@pytest.mark.parametrize(
    "asked, is_greedy, needs_counts",
    [
        ({}, True, False),
        ({"top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 3}, True, False),
        ({"stop": ("x",), "stop_ids": (1,), "ignore_eos": True}, True, False),
        ({"temperature": 0.1}, False, False),
        ({"logit_bias": ((1, 2.0),)}, False, False),
        ({"allowed_ids": (1,)}, False, False),
        ({"allowed_ids": ()}, False, False),
        ({"banned_ids": (1,)}, False, False),
        ({"min_tokens": 1}, False, False),
        ({"repetition": 1.1}, False, True),
        ({"presence": -0.1}, False, True),
        ({"frequency": 0.1}, False, True),
    ],
)
def test_what_the_sampler_must_do(asked, is_greedy, needs_counts):
    params = SamplingParams(**asked)
    assert params.is_greedy is is_greedy and params.needs_counts is needs_counts


def test_counters():
    params = SamplingParams(max_new_tokens=4, stop_ids=(7,))
    sequence = Sequence(1, params, [5, 6, 8], 3, eos_ids=frozenset({2}))
    assert sequence.num_pending_tokens == 3 and sequence.is_prefilling and not sequence.scores
    assert sequence.max_tokens == 7 and sequence.num_output_tokens == 0
    sequence.num_scheduled_tokens = 2
    assert sequence.num_pending_tokens == 1 and not sequence.is_prefilling
    sequence.num_scheduled_tokens = 3
    sequence.tokens.append(9)
    assert sequence.output_tokens == [9] and sequence.num_pending_tokens == 1
    assert [sequence.is_end(token) for token in (2, 7, 9)] == [True, True, False]


def test_a_scored_prompt_feeds_all_but_its_last_token():
    sequence = Sequence(1, SamplingParams(max_new_tokens=0), [5, 6, 8], 3)
    assert sequence.scores and sequence.num_pending_tokens == 2 and sequence.is_prefilling
    sequence.num_scheduled_tokens = 1
    assert sequence.num_pending_tokens == 1 and sequence.is_prefilling
    sequence.num_scheduled_tokens = 2
    assert sequence.num_pending_tokens == 0


def test_end_tokens_are_few():
    eos_ids = frozenset(range(MAX_STOP_IDS - 1))
    fits = Sequence(1, SamplingParams(stop_ids=(0, 90)), [1], 1, eos_ids)
    assert fits.end_ids == eos_ids | {90} and fits.is_end(90) and fits.is_end(0)
    with pytest.raises(InputError, match="at most 16 tokens end a sequence, .* not 17") as error:
        Sequence(1, SamplingParams(stop_ids=(90, 91)), [1], 1, eos_ids)
    assert "\n" not in str(error.value)
