"""Slots of adapters under random traffic: running sequences keep theirs, others make room in the
order of their last use.
"""

import dataclasses
import gc
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.settings.adapters import NO_SLOT
from inference.request import SamplingParams
from inference.scheduling.adapter_slots import AdapterSlots
from inference.scheduling.sequence import AdapterUse, Sequence


@dataclasses.dataclass(frozen=True, eq=False)
class _Adapter:
    digest: str


def _sequence(id, adapter):
    params = SamplingParams(max_new_tokens=1)
    return Sequence(id, params, [1], 1, adapter=AdapterUse(adapter))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=60))
def test_what_runs_stays_and_what_is_loaded_is_where_it_is_said(num_slots, events):
    slots, adapters = AdapterSlots(num_slots), [None, *(_Adapter(str(n)) for n in range(6))]
    running, loaded, last_use = [], {}, {}
    for time, (choice, starts) in enumerate(events):
        if not starts and running:
            slots.give_back(running.pop(choice % len(running)))
            continue
        sequence = _sequence(time, adapters[choice])
        pinned = {s.adapter.weights for s in running} - {None}
        adapter = sequence.adapter.weights
        has_room = adapter is None or adapter in pinned or len(pinned) < num_slots
        assert slots.can_take(sequence) == has_room
        if not has_room:
            continue
        slots.take(sequence)
        running.append(sequence)
        idle = {a for a in loaded.values() if a not in pinned and a is not adapter}
        for slot, new in slots.take_loads():
            if len(loaded) == num_slots:
                assert loaded[slot] is min(idle, key=last_use.__getitem__)
            loaded[slot] = new
        slots.check_integrity(running)
        if adapter is None:
            assert sequence.adapter.slot == NO_SLOT
        else:
            last_use[adapter] = time
            assert loaded[sequence.adapter.slot] is adapter
        for other in running:
            if other.adapter.weights is not None:
                assert loaded[other.adapter.slot] is other.adapter.weights


def test_an_adapter_that_nothing_has_any_more_is_freed():
    slots = AdapterSlots(1)
    adapters = [_Adapter(str(n)) for n in range(3)]
    alive = [weakref.ref(adapter) for adapter in adapters]
    while adapters:
        sequence = _sequence(1, adapters.pop(0))
        slots.take(sequence)
        slots.take_loads()
        slots.give_back(sequence)
    del sequence
    gc.collect()
    assert [each() for each in alive] == [None, None, None]  # the last one's copy is in the slot
    assert not slots._users


def test_books_that_do_not_add_up_are_found_out():
    slots, sequence = AdapterSlots(2), _sequence(1, _Adapter("a"))
    slots.take(sequence)
    with pytest.raises(RuntimeError, match="adapters are counted that no sequence"):
        slots.check_integrity([])
    sequence.adapter.slot += 1
    with pytest.raises(RuntimeError, match="lies in another slot"):
        slots.check_integrity([sequence])
