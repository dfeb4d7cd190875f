"""When sequences start: policies, budgets, priorities, cached prefixes, memory that is short."""

import numpy as np
import pytest

from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.mesh import ONE_CHIP, Mesh
from configs.model import LayerSpec, ModelConfig
from inference.request import SamplingParams
from inference.scheduling import scheduler as schedulers
from inference.scheduling.queue import WaitingQueue
from inference.scheduling.scheduler import Scheduler
from inference.scheduling.sequence import FinishReason, History, Prefix, Sequence, Status
from tests.inference.scheduling.test_scheduler import fake_output

CONTEXT = 256
MODEL = ModelConfig(
    "host", "host", 10, width=1, num_layers=1, max_context=CONTEXT, dtype="float32",
    pattern=(LayerSpec(Attention(1, 1, 1, rope=None), None),),
)  # fmt: skip
BYTES_PER_TOKEN = 8


def scheduler(num_tokens=4096, mesh=ONE_CHIP, **settings):
    """Room for so many tokens."""
    sizes = dict(max_seqs=4, page_tokens=4, chunk_tokens=4, prefill_chunks=(1, 4)) | settings
    engine = EngineConfig.of(cache_bytes=BYTES_PER_TOKEN * num_tokens, **sizes)
    return Scheduler(Config(MODEL, engine, mesh))


def request(id, length=4, n=4, arrival_s=0.0, tokens=None, key="shared", **params):
    tokens = [1 + id % 9] * length if tokens is None else tokens
    params = SamplingParams(max_new_tokens=n, **params)
    return Sequence(
        id, params, list(tokens), len(tokens), prefix=Prefix(key), history=History(arrival_s)
    )


def step(scheduler, **when):
    """One step: the ids that decode, and the prompt tokens of those that prefill."""
    schedule = scheduler.schedule(**when)
    if schedule is None:
        return None
    fed: dict[int, int] = {}
    for row in schedule.shards[0].prefill:
        fed[row.sequence.id] = fed.get(row.sequence.id, 0) + row.length
    scheduler.commit(schedule, fake_output(schedule))
    scheduler.check_integrity()
    return [row.sequence.id for row in schedule.shards[0].decode], fed


def finish(scheduler, limit=3000):
    for _ in range(limit):
        if step(scheduler) is None:
            return
    raise AssertionError("it does not end")


def test_static_waits_for_a_full_batch_and_holds_it_to_the_end():
    one = scheduler(policy="static", decode_rows=(2, 4))
    for i in range(3):
        one.add(request(i, n=2 + 3 * i))
    assert step(one, is_open=True) is None
    one.add(request(3))
    one.add(request(4))
    assert step(one, is_open=True) == ([], {0: 4, 1: 4, 2: 4, 3: 4})
    shapes = []
    while one.running:
        schedule = one.schedule(is_open=True)
        assert all(row.sequence.id < 4 for row in schedule.shards[0].decode)
        shapes.append(schedule.shape.decode[0])
        one.commit(schedule, fake_output(schedule))
    assert set(shapes) == {4}  # rows of those that ended are computed to the end
    assert step(one, is_open=True) is None  # one alone is no full batch
    assert step(one) == ([], {4: 4})  # but no more will come


def test_a_full_batch_is_what_memory_holds():
    one = scheduler(num_tokens=40, policy="static")
    for i in range(3):
        one.add(request(i, length=10, n=10))
    assert step(one, is_open=True) == ([], {0: 10, 1: 4})


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("sizes, more, starts", [
    ((10, 10), (), False), ((10, 10), (1,), True), ((1, 1, 1), (), False), ((1, 1, 1, 1), (), True),
])  # fmt: skip
def test_a_batch_is_full_where_it_fills_the_slots_or_more_than_the_pages(
    num_shards, sizes, more, starts
):
    """10 pages a shard: 5 for 10 tokens and as many more, one for a token and its answer."""
    one = scheduler(num_tokens=40, policy="static", mesh=Mesh(data=num_shards))
    assert one.shards[0].pages.pool.num_usable_pages == (10,)
    for i, size in enumerate((*sizes * num_shards, *more)):
        one.add(request(i, length=size, n=size))
    assert (one.schedule(is_open=True) is not None) == starts


def test_dynamic_waits_only_so_long():
    one = scheduler(policy="dynamic", max_wait_s=0.5)
    one.add(request(0, arrival_s=10.0))
    assert step(one, now=10.4, is_open=True) is None
    assert step(one, now=10.5, is_open=True) == ([], {0: 4})
    one.add(request(1, arrival_s=10.6, n=1))
    assert step(one, now=20.0, is_open=True) == ([0], {})  # the batch is held


def test_continuous_starts_at_once_beside_others():
    one = scheduler()
    one.add(request(0))
    assert step(one, is_open=True) == ([], {0: 4})
    one.add(request(1))
    assert step(one, is_open=True) == ([0], {1: 4})


def test_a_budget_keeps_prompts_from_holding_up_tokens():
    one = scheduler(prefill_budget=8)
    one.add(request(0, n=30))
    step(one)
    one.add(request(1, length=30))
    fed = [step(one) for _ in range(4)]
    assert fed == [([0], {1: 8}), ([0], {1: 8}), ([0], {1: 8}), ([0], {1: 6})]
    alone = scheduler(prefill_budget=8)
    alone.add(request(1, length=30))
    assert step(alone) == ([], {1: 16})  # no sequence waits for a token


def test_without_chunks_prompts_stop_decoding():
    one = scheduler(chunked_prefill=False)
    one.add(request(0, n=30))
    step(one)
    one.add(request(1, length=30))  # longer, so that its row comes first
    assert [step(one) for _ in range(3)] == [([], {1: 16}), ([], {1: 14}), ([1, 0], {})]


def test_few_prompts_at_a_time():
    one = scheduler(max_prefill_seqs=1)
    for i in range(3):
        one.add(request(i))
    assert step(one) == ([], {0: 4})
    assert step(one) == ([0], {1: 4})


def test_the_lowest_priority_value_goes_first_and_stays_longest():
    one = scheduler(num_tokens=64)
    one.shards[0].admission_control.will_fit = lambda *who: True  # so that memory runs out
    for i, priority in enumerate((0, -5, 0)):
        one.add(request(i, length=8, n=40, priority=priority, key=None))
    assert list(step(one)[1]) == [1, 0]
    preempted = set()
    while one.has_work:
        step(one)
        preempted |= {s.id for s in one.waiting if s.history.num_preemptions}
    assert preempted == {0, 2}


def test_a_cached_prefix_does_not_overtake_another_priority():
    one = scheduler(max_seqs=1)
    known = [1, 2, 3, 4, 5, 6, 7, 8]
    one.add(request(0, tokens=[*known, 9], n=1))
    finish(one)
    one.add(request(1, tokens=[*known, 8], n=1))
    one.add(request(2, length=6, n=1, priority=-1))
    one.add(request(3, tokens=[*known, 7], n=1, priority=-1))
    order = []
    while one.has_work:
        decoded, fed = step(one)
        order += [*decoded, *fed]
    assert order == [3, 2, 1]


def test_pages_of_its_own_are_no_prefix_hits():
    """Of a request that is preempted, or computed again: only what its first slot found is."""
    one = scheduler()
    one.add(request(0, tokens=[1, 2, 3, 4, 5], n=1))
    finish(one)
    known, new = request(1, tokens=[1, 2, 3, 4, 6, 7, 8, 9, 1], n=20), request(2, length=9, n=20)
    for own in (known, new):
        one.add(own)
    for nth in range(8):
        step(one)
        if nth == 5:
            one.preempt(new)
            one.preempt(known)
    assert new.prefix.num_cached_tokens > new.num_prompt_tokens  # to admission, they are there
    assert (known.prefix.num_hit_tokens, new.prefix.num_hit_tokens) == (4, 0)
    counters = one.counters
    assert (counters.num_prompt_tokens, counters.num_cached_tokens) == (5 + 9 + 9, 4)
    one.start_over([known, new])
    finish(one)
    assert (counters.num_prompt_tokens, counters.num_cached_tokens) == (5 + 9 + 9, 4)
    assert (known.prefix.num_hit_tokens, new.prefix.num_hit_tokens) == (4, 0)


@pytest.mark.parametrize("num_preemptions, starts", [(1, True), (2, False)])
def test_after_two_preemptions_a_request_waits_for_room_to_its_end(num_preemptions, starts):
    """Before, where outputs as short as earlier ones would find it."""
    one = scheduler(num_tokens=52)
    for _ in range(5):
        one._lengths.record(2)
    one.add(request(0, length=8, n=20))
    step(one)
    waiting = request(1, length=8, n=40)
    waiting.history.num_preemptions = num_preemptions
    one.add(waiting)
    step(one)
    assert (waiting.status is Status.RUNNING) == starts


def test_a_cached_prefix_goes_first_but_not_for_ever():
    one = scheduler(max_seqs=1, max_overtakes=2)
    known = [1, 2, 3, 4, 5, 6, 7, 8]
    one.add(request(0, tokens=[*known, 9], n=1))
    finish(one)
    one.add(request(1, length=6, n=1))
    for i in range(2, 6):
        one.add(request(i, tokens=[*known, i], n=1))
    order = []
    while one.has_work:
        decoding, prompts = step(one)
        order += [*decoding, *prompts]  # a prompt with one token left is a decode row
    assert order == [2, 3, 1, 4, 5]
    assert one.counters.num_cached_tokens == 4 * 8


@pytest.mark.parametrize("first, next_id", [
    ({}, 1), ({"num_overtakes": 1}, 1), ({"num_overtakes": 2}, 0), ({"num_preemptions": 1}, 0),
])  # fmt: skip
def test_one_that_was_preempted_or_overtaken_often_goes_first(first, next_id):
    waiting = WaitingQueue(max_overtakes=2)
    for id in range(2):
        waiting.add(request(id))
    oldest = next(iter(waiting))
    for name, value in first.items():
        setattr(oldest.history, name, value)
    assert waiting.next(lambda sequence: sequence.id).id == next_id


def test_where_nobody_is_overtaken_no_prefix_is_looked_up():
    waiting = WaitingQueue(max_overtakes=0)
    for id in range(2):
        waiting.add(request(id))
    assert waiting.next(lambda sequence: 1 // 0).id == 0


@pytest.mark.parametrize("is_committed", [True, False])
@pytest.mark.parametrize("lengths, num_pages", [((9, 10), 14), ((10, 12), 16)])
def test_a_sequence_starts_where_the_last_page_is_enough(lengths, num_pages, is_committed):
    """The first ends after 28 or 29 tokens, as long as the second is by then: 7 or 8 pages each."""
    for usable in (num_pages - 1, num_pages):
        one = scheduler(num_tokens=4 * usable)
        assert one.shards[0].pages.pool.num_usable_pages == (usable,)
        one.add(request(0, lengths[0], n=20))
        schedule = one.schedule()
        if is_committed:
            one.commit(schedule, fake_output(schedule))
        one.add(second := request(1, lengths[1], n=40))
        one.schedule()
        assert (second.status is Status.RUNNING) == (usable == num_pages)


@pytest.mark.parametrize("usable", [14, 15])
def test_pages_that_a_running_sequence_shares_are_taken(usable):
    """Of 8 pages in the end it has 5 for itself, and the second 7 by then."""
    one, known = scheduler(num_tokens=4 * usable), [3] * 12
    one.add(gone := request(0, tokens=[*known, 4], n=9))
    step(one)
    one.finish(gone, FinishReason.ABORT)
    one.add(request(1, tokens=[*known, 5], n=20))
    step(one)
    one.add(second := request(4, 10, n=30))
    one.schedule()
    assert (second.status is Status.RUNNING) == (usable == 15)


def test_one_that_found_no_room_is_looked_at_again_though_none_leaves():
    """It would find it from the fifth step on: until the first ends it grows so much less."""
    one = scheduler(num_tokens=4 * 13)
    one.add(first := request(0, 9, n=20))
    step(one)
    one.add(second := request(1, 10, n=40))
    while second.status is Status.WAITING:
        step(one)
    assert one.counters.num_steps == schedulers._STEPS_TO_LOOK_AGAIN + 1
    assert first.status is Status.RUNNING


class Watching:
    """In place of `AdaptiveDrafts`; takes notes."""

    def __init__(self, most):
        self.most, self.choices, self.outcomes = most, [], []

    def choose(self, decoding, num_rows, is_alone):
        self.choices.append(([sequence.id for sequence in decoding], num_rows, is_alone))
        return self.most

    def verified(self, sequence, num_asked, num_accepted):
        self.outcomes.append((sequence.id, num_asked, num_accepted))


@pytest.mark.parametrize("most", [0, 1, 2])
def test_a_policy_of_drafts_hears_of_each_step_and_of_what_became_of_them(most):
    one = scheduler(num_drafts=2, proposer="ngram")
    one.draft_policy = policy = Watching(most)
    new = [request(0, n=30), request(1, length=30)]  # whose prompt takes two steps
    for sequence in new:
        sequence.speculates = True
        one.add(sequence)
        step(one)
    schedule = one.schedule()
    assert [row.length for row in schedule.shards[0].decode] == [1 + most]
    one.commit(schedule, fake_output(schedule))
    assert policy.choices == [([], 0, True), ([0], 1, True), ([0], 2, False)]
    assert policy.outcomes == [(0, most, most)] * (2 * bool(most))


def test_a_prefix_is_computed_once():
    one = scheduler()
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1]
    one.add(request(0, tokens=tokens))
    assert step(one) == ([], {0: 10})
    one.add(request(1, tokens=tokens))
    one.add(request(2, tokens=tokens, key=None))
    assert step(one) == ([0], {1: 2, 2: 10})
    pages = [s.pages[0][:2] for s in one.running]
    assert pages[0] == pages[1] != pages[2]


def test_usage_counts_a_shared_page_once():
    """(prompt pages of all, distinct ones, tokens that pages have room for, tokens in them)."""
    one = scheduler()
    [shard] = one.shards
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1]
    one.add(request(0, tokens=tokens, n=9))
    for _ in range(4):
        step(one)
    assert shard.usage() == (3, 3, 16, 13)
    one.add(request(1, tokens=tokens))
    one.add(request(2, length=12, key=None))
    step(one)
    step(one)
    assert shard.usage() == (9, 7, 4 * (4 + 1 + 4), 15 + 3 + 13)


def test_usage_counts_neither_pages_given_up_nor_tokens_to_come():
    one = scheduler()
    [shard] = one.shards
    one.add(request(0, length=13, n=9))
    for _ in range(5):
        step(one)
    [running] = shard.running
    assert shard.pages.allocate(running, 6) and shard.usage() == (4, 4, 24, 17)
    shard.pages.shorten(running, [1])
    assert shard.usage() == (3, 3, 20, 13)


def test_a_full_page_is_kept_once_though_computed_twice():
    """Both start before either is committed: the later one takes over the earlier one's pages."""
    one = scheduler()
    for i in range(2):
        one.add(request(i, tokens=[1, 2, 3, 4, 5, 6, 7, 8]))
    step(one)
    first, second = one.running
    assert first.pages[0][:2] == second.pages[0][:2]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("lengths", ["known", "guessed"])
def test_a_quarter_of_the_memory_serves_all(preemption, prefix_cache, lengths):
    """No request is lost or preempted more than four times, even where outputs end long
    before they may.
    """
    rng = np.random.default_rng(0)
    wanted = [(int(rng.integers(1, 60)), int(rng.integers(1, 60))) for _ in range(160)]
    one = scheduler(
        num_tokens=16 * 60 // 4, max_seqs=16, preemption=preemption, prefix_cache=prefix_cache,
        swap_bytes=1 << 12,
    )  # fmt: skip
    most = 150 if lengths == "guessed" else None
    ends = {}
    for i, (length, n) in enumerate(wanted):
        key = "shared" if prefix_cache else i if preemption == "swap" else None
        new = request(i, length=length, n=most or n, key=key, stop_token_ids=(0,))
        ends[i] = n
        one.add(new)
    everyone = list(one.waiting)
    for at in range(20_000):
        if (schedule := one.schedule()) is None:
            break

        def token(row, w):
            return 0 if row.sequence.num_output_tokens + 1 >= ends[row.sequence.id] else 1

        one.commit(schedule, fake_output(schedule, token))
        if at % 16 == 0:
            one.check_integrity()
    assert all(s.status is Status.FINISHED for s in everyone)
    assert [s.num_output_tokens for s in everyone] == [n for _, n in wanted]
    assert max(s.history.num_preemptions for s in everyone) <= 4


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"policy": "eager"},
            "engine.scheduling.policy=eager: must be one of continuous, static, dynamic",
        ),
        (
            {"preemption": "drop"},
            "preemption=drop: must be one of auto, recompute, swap",
        ),
        (
            {"prefill_budget": 3},
            "prefill_budget=3: must be at least engine.shapes.chunk_tokens .4.",
        ),
        ({"max_prefill_seqs": 0}, "engine.scheduling.max_prefill_seqs=0: must be at least 1"),
        ({"max_wait_s": -1.0}, "engine.scheduling.max_wait_s=-1.0: must be at least 0 and finite"),
        ({"max_wait_s": float("nan")}, "max_wait_s=nan: must be at least 0 and finite"),
        ({"swap_bytes": -1}, "engine.cache.swap_bytes=-1: must be at least 0"),
        ({"max_overtakes": -1}, "engine.scheduling.max_overtakes=-1: must be at least 0"),
        ({"page_tokens": 100}, "engine.cache.page_tokens=100: must divide 128 or be a multiple"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(InputError, match=message):
        scheduler(**settings)


def test_a_sequence_starts_where_least_is_left_to_compute():
    """On the data shard that has its prefix, unless another would be done with it sooner."""
    one, shared = scheduler(mesh=Mesh(data=2), max_seqs=8), [3] * 40

    def shard_of(id, tokens, n):
        own = request(id, tokens=tokens, n=n, ignore_eos=True)
        one.add(own)
        step(one)
        return own.shard

    assert shard_of(0, [1] * 30, 20) == 0 and shard_of(1, shared, 1) == 1
    finish(one)
    assert not one.counters.num_cached_tokens
    # Shard 1 has 40 of 41 tokens cached: it gets them until as many are left to compute there.
    shards = [shard_of(id, [*shared, 4 + id % 6], 16) for id in range(2, 8)]
    assert shards[:2] == [1, 1] and 0 in shards[2:5]
    assert one.counters.num_cached_tokens >= 40 * shards.count(1)
