"""A sequence's counters, and which tokens end it."""

import pytest

from configs.errors import InputError
from inference.request import MAX_STOP_IDS, SamplingParams
from inference.sampling import parameters
from inference.scheduling.sequence import Sequence, Status


def test_counters():
    params = SamplingParams(max_new_tokens=4, stop_token_ids=(7,))
    sequence = Sequence(1, params, [5, 6, 8], 3, eos_ids=frozenset({2}))
    assert sequence.num_pending_tokens == 3 and sequence.is_prefilling and not sequence.scores
    assert sequence.max_length == 7 and sequence.num_output_tokens == 0
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


def test_a_leader_on_other_chips_sends_all_but_the_last_token():
    leader, follower = (Sequence(i, SamplingParams(), [5, 6, 8], 3) for i in range(2))
    assert follower.sender is None
    follower.leader, leader.sends_pages = leader, True
    leader.status = Status.RUNNING
    for num_tokens, is_sender in enumerate([False, False, True, False]):
        leader.num_computed_tokens = num_tokens
        assert (follower.sender is leader) == is_sender
    leader.num_computed_tokens, leader.status = 2, Status.FINISHED
    assert follower.sender is None
    leader.status, leader.sends_pages = Status.RUNNING, False
    assert follower.sender is None


def test_end_tokens_are_few():
    eos_ids = frozenset(range(MAX_STOP_IDS - 1))
    fits = Sequence(1, SamplingParams(stop_token_ids=(0, 90), min_tokens=1), [1], 1, eos_ids)
    assert fits.end_ids == eos_ids | {90} and fits.is_end(90) and fits.is_end(0)
    with pytest.raises(InputError, match="min_tokens bans at most 16 tokens, .* not 17") as error:
        Sequence(1, SamplingParams(stop_token_ids=(90, 91), min_tokens=1), [1], 1, eos_ids)
    assert "\n" not in str(error.value)


def test_end_tokens_that_nothing_bans_are_many():
    eos_ids = frozenset(range(MAX_STOP_IDS))
    many = Sequence(1, SamplingParams(stop_token_ids=tuple(range(100, 228))), [1], 1, eos_ids)
    assert len(many.end_ids) == 144 and many.is_end(227)
    row = parameters.request_row(many, 300)
    assert row.stop_token_ids.tolist() == list(range(MAX_STOP_IDS))
