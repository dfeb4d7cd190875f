"""What a step is said to do, and what all of them have done."""

import collections
from types import SimpleNamespace

import pytest

from inference.request import SamplingParams
from inference.scheduling.sequence import Sequence
from inference.scheduling.step_schedule import (
    Counters,
    ScheduledChunk,
    ShardSchedule,
    StepSchedule,
)
from inference.scheduling.step_shapes import StepShape

pytestmark = pytest.mark.quick_code


def test_acceptance_is_that_of_drafts_behind_accepted_ones():
    verified = {(2, 0): 3, (2, 1): 1, (2, 2): 4, (1, 1): 2}
    counters = Counters(verified=collections.Counter(verified))
    assert counters.num_accepted == 1 + 8 + 2 and counters.acceptance == [7 / 10, 4 / 5]
    assert Counters().num_accepted == 0 and Counters().acceptance == []


@pytest.mark.parametrize("num_awaited, room, emits, awaits", [
    (3, 0, True, False), (4, 0, True, True), (4, None, True, False), (4, 0, False, False),
    (4, 3, True, True), (4, 4, True, False),
])  # fmt: skip
def test_a_constraint_waits_for_tokens_of_earlier_steps_alone(num_awaited, room, emits, awaits):
    """Of three that the row may emit, one behind two drafts; `room` of them may be any."""
    constraint = None if room is None else SimpleNamespace(room=room)
    sequence = Sequence(1, SamplingParams(), [5], 1, constraint=constraint)
    sequence.in_flight.num_tokens = num_awaited
    chunk = ScheduledChunk(sequence, 0, 0, 0, 3, emits, num_drafts=2, most_accepted=2)
    shards = ShardSchedule(), ShardSchedule(decode=(chunk,))
    assert StepSchedule(StepShape((1, 3), (0, 4)), shards).awaits_tokens == awaits
