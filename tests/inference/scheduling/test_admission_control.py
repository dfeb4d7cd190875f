"""Pages of the coming steps, against a simulation step by step and against the scheduler itself."""

import dataclasses
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.cache import CacheSpec
from inference.scheduling.admission_control import (
    AdmissionControl,
    Demand,
    LengthStatistics,
    peak_pages,
)
from inference.scheduling.scheduler import Scheduler
from tests.inference.scheduling.test_scheduler import (
    CONTEXT,
    MODEL,
    config,
    fake_output,
    sequence,
    steps_of,
    tree,
)

WINDOWS = tuple(group.spec.window for group in MODEL.page_groups)

# --- lengths --------------------------------------------------------------------------------------


def recorded(*lengths, size=256):
    statistics = LengthStatistics(size)
    for length in lengths:
        statistics.record(length)
    return statistics


@pytest.mark.parametrize(
    "num_output_tokens, most, expected",
    [
        (0, 100, 14),  # (4 + 10 + 10 + 30) / 4 = 13.5
        (4, 100, 13),  # (6 + 6 + 26) / 3 = 12.7
        (9, 100, 8),  # (1 + 1 + 21) / 3 = 7.7
        (10, 100, 20),  # of the 30 alone
        (29, 100, 1),
        (30, 100, 100),  # nothing was longer
        (0, 5, 5),
        (30, 0, 0),
        (4, 0, 0),
    ],
)
def test_what_is_still_to_come(num_output_tokens, most, expected):
    assert recorded(10, 4, 30, 10).remaining(num_output_tokens, most) == expected


def test_without_records_all_is_expected():
    assert recorded().remaining(0, 77) == 77


def test_only_the_newest_lengths_count():
    statistics = recorded(50, 7, 7, 9, size=3)
    assert statistics.remaining(0, 100) == 8  # 23 / 3 = 7.7
    assert statistics.remaining(9, 100) == 100
    statistics.record(1)
    statistics.record(1)
    assert statistics.remaining(1, 100) == 8  # the 9 remains
    statistics.record(1)
    assert statistics.remaining(1, 100) == 100


@pytest.mark.parametrize("length, n, is_longest, speculates, expected", [
    (10, 20, True, False, Demand(14, 15, (3, 0))), (10, 20, False, False, Demand(14, 2, (3, 0))),
    (10, 20, True, True, Demand(17, 15, (3, 0))), (52, 20, True, True, Demand(57, 7, (3, 0))),
    (10, 4, True, False, Demand(14, 0, (3, 0))),
])  # fmt: skip
def test_what_a_sequence_will_hold(length, n, is_longest, speculates, expected):
    """Two tokens behind its prompt and two in flight, 13 tokens that are cached or given up; in
    trees three nodes beside the longest branch, within a context of 64.
    """
    scheduler = Scheduler(config(page_tokens=4, cache_bytes=1 << 20, **tree(5)))
    scheduler._lengths.record(5)
    one = sequence(1, [1] * length, max_new_tokens=n)
    one.max_length = min(one.max_length, CONTEXT)
    one.tokens += [1, 1]
    one.in_flight.num_tokens, one.budget.num_dropped_tokens, one.speculates = 2, 4, speculates
    control = scheduler.shards[0].admission_control
    assert control._demand(one, 9, is_longest) == expected


# --- against a simulation -------------------------------------------------------------------------


def live_pages(window, num_tokens, page_tokens):
    """Pages while the newest of the tokens is fed: those of what it sees, and its own."""
    spec = CacheSpec(1, 1, window=window)
    return range(spec.live_from(num_tokens - 1) // page_tokens, -(-num_tokens // page_tokens))


def simulated(demands, windows, page_tokens):
    """The same, one sequence, step and page at a time."""
    last = max((demand.remaining for demand in demands), default=0)
    peaks = []
    for group, window in enumerate(windows):
        totals = [0]
        for step in range(1 + last):
            total = 0
            for demand in demands:
                if step <= demand.remaining:
                    live = live_pages(window, demand.num_tokens + step, page_tokens)
                    shared = demand.num_shared_pages[group] if demand.num_shared_pages else 0
                    total += len([page for page in live if page >= shared])
            totals.append(total)
        peaks.append(max(totals))
    return tuple(peaks)


@st.composite
def situations(draw):
    page_tokens = draw(st.sampled_from([1, 2, 4, 16]))
    windows = draw(st.lists(st.none() | st.integers(1, 40), max_size=3))
    demands = []
    for _ in range(draw(st.integers(0, 8))):
        demand = Demand(draw(st.integers(1, 90)), draw(st.integers(0, 60)))
        if draw(st.booleans()):
            full = st.integers(0, demand.num_tokens // page_tokens)
            shared = tuple(draw(full) for _ in windows)
            demand = dataclasses.replace(demand, num_shared_pages=shared)
        demands.append(demand)
    return demands, windows, page_tokens


@settings(max_examples=1000, deadline=None)
@given(situations())
def test_peaks_are_those_of_a_simulation(situation):
    assert peak_pages(*situation) == simulated(*situation)


def test_pages_come_back_before_others_grow():
    """Pages of 4: the first holds 3 until it ends after step 2, the second grows from 1 to 3."""
    demands = [Demand(10, 2), Demand(4, 8)]
    assert peak_pages(demands, (None,), 4) == (5,)
    assert peak_pages([Demand(10, 5), Demand(4, 8)], (None,), 4) == (7,)
    assert peak_pages([Demand(10, 5, (2,)), Demand(4, 8)], (None,), 4) == (5,)


# --- against the scheduler ------------------------------------------------------------------------

PROMPTS = 6


def held(members, group):
    return sum(len([page for page in s.pages[group] if page]) for s in members if s.pages)


@settings(max_examples=200, deadline=None)
@given(
    page_tokens=st.sampled_from([1, 4, 16]),
    requests=st.lists(
        st.tuples(st.integers(0, 12), st.integers(1, 40), st.integers(1, 24)),
        min_size=1,
        max_size=PROMPTS,
    ),
)
def test_peaks_are_those_of_the_scheduler(page_tokens, requests):
    """Requests of known length, each prompt computed in one step: what is said whenever one is
    admitted is what those then running hold until they end.
    """
    sizes = {"max_seqs": PROMPTS, "chunk_tokens": 64, "prefill_chunks": (PROMPTS,)}
    scheduler = Scheduler(config(page_tokens, cache_bytes=1 << 20, **sizes))
    arrivals = sorted(requests)
    said = []  # (members, their peak, whether all decode, pages by step: of decoding ones, of all)
    for now in range(200):
        while arrivals and arrivals[0][0] <= now:
            _, length, n = arrivals.pop(0)
            scheduler.add(sequence(now, [1] * length, max_new_tokens=n, ignore_eos=True))
        schedule = scheduler.schedule()
        if schedule is None and not arrivals:
            break
        if schedule is None:
            continue
        decoding = {row.sequence for row in schedule.shards[0].decode}
        members = list(scheduler.running)
        peak = peak_pages(
            [Demand(len(s.tokens), s.max_length - len(s.tokens) - 1) for s in members],
            WINDOWS,
            page_tokens,
        )
        said.append((members, peak, not schedule.shards[0].prefill, [], []))
        for members, _, _, decoded, seen in said:
            decoded.append([held(decoding.intersection(members), g) for g in range(len(WINDOWS))])
            seen.append([held(members, g) for g in range(len(WINDOWS))])
        scheduler.commit(schedule, fake_output(schedule))
    assert not scheduler.has_work and not arrivals
    for _, peak, is_steady, decoded, seen in said:
        for g, window in enumerate(WINDOWS):
            assert max(step[g] for step in decoded) <= peak[g]
            if is_steady or window is None:
                assert max(step[g] for step in seen) == peak[g]


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
@pytest.mark.parametrize("num_steps", [1, 3, 8])
def test_shared_pages_are_those_of_a_fork(page_tokens, num_steps):
    """What a fork holds beside its parent, which outlives it."""
    scheduler = Scheduler(config(page_tokens, cache_bytes=1 << 20, chunk_tokens=16))
    parent = sequence(1, [1] * 9, max_new_tokens=40, ignore_eos=True)
    scheduler.add(parent)
    for _ in range(num_steps):
        scheduler.commit(schedule := scheduler.schedule(), fake_output(schedule))
    child = sequence(2, parent.tokens, max_new_tokens=20, ignore_eos=True)
    scheduler.fork(parent, child)
    shared = (parent.num_computed_tokens // page_tokens,) * len(WINDOWS)
    demands = [
        Demand(len(parent.tokens), parent.max_length - len(parent.tokens) - 1),
        Demand(len(child.tokens), child.max_length - len(child.tokens) - 1, shared),
    ]
    peak, seen = peak_pages(demands, WINDOWS, page_tokens), []
    while (schedule := scheduler.schedule()) is not None:
        pool = scheduler.shards[0].pages.pool
        seen.append(
            [n - m for n, m in zip(pool.num_usable_pages, pool.num_free_pages, strict=True)]
        )
        scheduler.commit(schedule, fake_output(schedule))
    assert tuple(map(max, zip(*seen, strict=True))) == peak


# --- time -----------------------------------------------------------------------------------------


@pytest.mark.timing
@pytest.mark.parametrize("num_demands, seconds", [(64, 0.1e-3), (256, 0.4e-3)])
def test_looking_ahead_is_cheap(num_demands, seconds):
    """Once an admission, of steps of milliseconds; the bound is for a busy machine."""
    demands = [Demand(17 * i % 4000 + 1, 31 * i % 2048) for i in range(num_demands)]
    best = float("inf")
    for _ in range(50):
        start = time.perf_counter()
        peak_pages(demands, (None, 512), 16)
        best = min(best, time.perf_counter() - start)
    assert best < 5 * seconds


def test_one_whose_drafts_find_no_room_waits_for_a_later_step(monkeypatch):
    """Within one step it would preempt itself and start again for ever."""
    size = int(1.2 * 8 * (64 + 32))
    scheduler = Scheduler(config(cache_bytes=size, proposer="ngram", num_drafts=8))
    monkeypatch.setattr(AdmissionControl, "will_fit", lambda *_: True)  # as it may believe
    for id, length in enumerate((40, 20)):
        scheduler.add(sequence(id, [1] * length, max_new_tokens=20))
    while scheduler.shards[0].pages.prefix_cache.num_available_pages[0] > 2:
        scheduler.commit(schedule := scheduler.schedule(), fake_output(schedule))
    young = sequence(2, [1], max_new_tokens=20)
    young.speculates = True
    scheduler.add(young)
    assert scheduler.schedule() is not None
    assert young.history.num_preemptions == 1
    steps_of(scheduler)
    assert young.num_output_tokens == 20
