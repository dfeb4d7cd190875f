"""The scheduler beside a fake device: random requests on pages of two sizes, in two groups."""

import contextlib
import dataclasses
import itertools
import types

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.heads import Medusa
from configs.kinds.attention import Attention
from configs.kinds.compressed import Compressed
from configs.kinds.latent import Latent
from configs.mesh import ONE_CHIP, Mesh
from configs.model import LayerSpec, ModelConfig
from inference.kv_pages import prompt_pages
from inference.request import SamplingParams
from inference.runtime.batch import build_batch
from inference.scheduling.scheduler import Scheduler
from inference.scheduling.sequence import FinishReason, Prefix, Sequence, Status
from inference.speculation import draft_tree

VOCAB, CONTEXT, WINDOW, DRAFTS = 10, 64, 6, 2
MODEL = ModelConfig(
    "host", "host", VOCAB, width=1, num_layers=2, max_context=CONTEXT, dtype="float32",
    pattern=tuple(LayerSpec(Attention(1, 1, 1, None, window), None) for window in (None, WINDOW)),
)  # fmt: skip
# Beside them first tokens that stay, chunks, and layers that read the caches of others.
EVERYTHING = dataclasses.replace(
    MODEL, num_layers=6, pattern=(
        *MODEL.pattern,
        *(LayerSpec(Attention(1, 1, 1, None, **more), None) for more in (
            {"window": WINDOW, "first_tokens": 3}, {"window": 8, "chunked": True},
            {"owner": 0}, {"owner": 2},
        )),
    ),
)  # fmt: skip
# And latents with a reader, and entries of four tokens beside the newest ones, all in eight bits.
STRIDED = dataclasses.replace(
    EVERYTHING, num_layers=9, cache_format="int8", pattern=(
        *EVERYTHING.pattern,
        *(LayerSpec(mixer, None) for mixer in (
            Latent(1, 1, 2, 1, 1), Latent(1, 1, 2, 1, 1, owner=6),
            Compressed(1, 2, 1, 2, 1, 1, window=WINDOW, stride=4, overlaps=True),
        )),
    ),
)  # fmt: skip
HEADS = Medusa(
    "heads", "heads", VOCAB, width=1, num_layers=0, max_context=CONTEXT, dtype="float32", pattern=()
)


def config(page_tokens=4, cache_bytes=400, mesh=ONE_CHIP, model=MODEL, **settings) -> Config:
    settings = {"max_seqs": 3, "chunk_tokens": 4, "prefill_chunks": (1, 3)} | settings
    engine = EngineConfig.of(page_tokens=page_tokens, cache_bytes=cache_bytes, **settings)
    return Config(model, engine, mesh, draft=HEADS if engine.drafts.proposer == "medusa" else None)


def tree(num_drafts, levels=2):
    """Settings of an engine whose rows are trees."""
    parents = draft_tree.likeliest(num_drafts, levels)
    return {"proposer": "medusa", "num_drafts": num_drafts, "draft_tree": parents}


def sequence(id, prompt, **params) -> Sequence:
    return Sequence(id, SamplingParams(**params), list(prompt), len(prompt), frozenset({0}))


def fake_output(schedule, token=lambda row, w: 1, is_finite=lambda row: True):
    """What a device would say of a schedule: tokens as asked, drafts accepted while they agree;
    its own are all 1.
    """
    shape, width = schedule.shape, schedule.shape.decode[1]
    num_shards, num_rows = len(schedule.shards), len(schedule.shards) * shape.num_rows
    tokens = np.zeros((num_rows, width), int)
    num_emitted, finite = np.zeros(num_rows, int), np.ones(num_rows, bool)
    chunks = (num_shards * shape.prefill[0], shape.prefill[1]) if shape.scored else (0, 0)
    pooled = np.zeros((num_shards * shape.prefill[0], 1), np.float32)
    for where, row in schedule.rows:
        if (pooling := row.sequence.params.pooling) is not None:
            is_last = row.start + row.length == row.sequence.num_prompt_tokens
            index, nth = divmod(where, shape.num_rows)
            index = index * shape.prefill[0] + nth - shape.decode[0]
            pooled[index] = row.length if pooling == "mean" else is_last
        finite[where] = is_finite(row)
        tokens[where] = [token(row, w) for w in range(width)]
        drafts = (1,) * row.most_accepted
        if not row.sequence.speculates:
            drafts = row.sequence.drafts[: row.num_drafts]
        agree = itertools.takewhile(
            bool, (d == t for d, t in zip(drafts, tokens[where], strict=False))
        )
        num_emitted[where] = row.emits * (1 + len(list(agree)))
    return types.SimpleNamespace(
        tokens=tokens, num_emitted=num_emitted, num_drafts=np.zeros(0, int),
        num_levels=np.zeros(0, int), finite=finite,
        logprobs=np.zeros(tokens.shape),
        top_ids=np.zeros((*tokens.shape, 0), int), top_logprobs=np.zeros((*tokens.shape, 0)),
        target_logprobs=np.zeros(chunks), target_top_ids=np.zeros((*chunks, 0), int),
        target_top_logprobs=np.zeros((*chunks, 0)), pooled=pooled,
    )  # fmt: skip


def check_schedule(scheduler, schedule):
    """What the device relies on: rows continue their sequences on pages of their own."""
    for index, shard in enumerate(schedule.shards):
        check_shard(scheduler, schedule.shape, index, shard)


def check_shard(scheduler, shape, index, schedule):
    fed: dict[int, int] = {}
    batch = build_batch(shape, schedule, scheduler._config)
    assert len(schedule.decode) <= shape.decode[0] and len(schedule.prefill) <= shape.prefill[0]
    for row in (*schedule.decode, *schedule.prefill):
        owner = row.sequence
        assert owner.status is Status.RUNNING and (owner.shard, owner.slot) == (index, row.slot)
        assert row.offset == fed.get(owner.id, 0) and row.length > 0
        fed[owner.id] = row.offset + row.length
        stop = row.start + row.length
        assert stop <= owner.max_positions <= CONTEXT
        assert not owner.is_whole or stop < owner.num_prompt_tokens
        assert row.num_dropped == owner.budget.num_dropped_tokens
        groups, page_tokens = scheduler._config.model.page_groups, scheduler._config.page_tokens
        for group, pages in zip(groups, owner.pages, strict=True):
            rejected = owner.in_flight.num_drafts - row.most_accepted  # by earlier steps, at most
            dead = group.spec.dead_pages(row.start - row.offset - rejected, page_tokens)
            num_cached = stop - row.num_dropped * (group.spec.window is None)
            live = range(-(-num_cached // page_tokens))
            assert all(pages[page] for page in live if page not in dead)
    assert batch.slot_Y[batch.query_length_Y == 0].tolist() == [
        scheduler._config.engine.max_seqs
    ] * (shape.num_rows - len(schedule.decode) - len(schedule.prefill))


class SchedulerMachine(RuleBasedStateMachine):
    """Admit, step, draft, abort, preempt, fork and lose the cache in any order."""

    @initialize(
        page_tokens=st.sampled_from([1, 4, 16]),
        sequences=st.one_of(st.just(1.0), st.floats(0.6, 3.5)),
        num_drafts=st.sampled_from([0, DRAFTS, WINDOW + 2]),
        proposer=st.sampled_from([None, "ngram", "medusa"]),
        chunks=st.sampled_from([(4, (1, 3)), (2, (1,))]),  # the latter is less than 1 + num_drafts
        chunked=st.booleans(),
        prefix_cache=st.booleans(),
        preemption=st.sampled_from(["recompute", "swap"]),
        policy=st.sampled_from(["continuous", "continuous", "static"]),
        in_flight=st.sampled_from([0, 1]),
        mesh=st.sampled_from([Mesh(), Mesh(), Mesh(data=2), Mesh(data=3)]),
        model=st.sampled_from([MODEL, EVERYTHING, STRIDED]),
        budgets=st.booleans(),
    )
    def build(
        self, page_tokens, sequences, num_drafts, proposer, chunks, chunked, prefix_cache,
        preemption, policy, in_flight, mesh, model, budgets,
    ):  # fmt: skip
        if model is STRIDED:  # a page has whole entries, and neither trees nor budgets go with them
            page_tokens, budgets = max(page_tokens, 4), False
            proposer = "ngram" if proposer == "medusa" else proposer
        more = {"model": model}
        more |= {"num_drafts": num_drafts, "chunk_tokens": chunks[0], "prefill_chunks": chunks[1]}
        more |= {"chunked_prefill": chunked, "prefix_cache": prefix_cache, "policy": policy}
        more |= {"preemption": preemption, "swap_bytes": 600}
        if num_drafts and proposer == "medusa":
            more, mesh = more | tree(num_drafts), ONE_CHIP
        elif num_drafts:
            more |= {"proposer": proposer}
        more |= {"prompt_budgets": budgets and mesh == ONE_CHIP and proposer != "medusa"}
        self.max_in_flight, self.in_flight = in_flight, []
        per_sequence = sum(
            n * group.bytes_per_page(model.cache_dtype, page_tokens)
            for n, group in zip(
                config(page_tokens, cache_bytes=4000, **more).peak_pages(CONTEXT),
                model.page_groups,
                strict=True,
            )
        )
        self.config = config(page_tokens, int(per_sequence * sequences), mesh, **more)
        self.scheduler = Scheduler(self.config)
        self.everyone: list[Sequence] = []
        self.ids = itertools.count()

    @rule(
        length=st.integers(1, CONTEXT - 1),
        n=st.one_of(st.just(0), st.integers(1, 6), st.just(CONTEXT)),
        temperature=st.sampled_from([0.0, 1.0]),
        ignore_eos=st.booleans(),
        budget=st.one_of(st.none(), st.integers(36, CONTEXT)),
        pooling=st.sampled_from([None, "last", "mean"]),
    )
    def add(self, length, n, temperature, ignore_eos, budget, pooling):
        if n:
            pooling = None
        elif pooling is None:
            n = int(length == 1)  # a single token has no score
        prompt = [1] * length
        params = SamplingParams(max_new_tokens=n, temperature=temperature, pooling=pooling)
        new = self.sequence(params, prompt, len(prompt), frozenset({0} - {0 * ignore_eos}))
        if self.config.engine.requests.prompt_budgets and n:
            with contextlib.suppress(InputError):
                new.budget.num_excess_tokens = prompt_pages.num_excess_tokens(
                    length, budget, self.config.page_tokens
                )
        try:
            self.scheduler.add(new)
        except InputError:
            peak = self.config.peak_pages(min(new.max_length, CONTEXT))
            usable = self.scheduler.shards[0].pages.pool.num_usable_pages
            assert any(n > m for n, m in zip(peak, usable, strict=True))
            return
        self.everyone.append(new)

    def sequence(self, params, tokens, num_prompt_tokens, eos_ids):
        id, drafts, cache = next(self.ids), self.config.engine.drafts, self.config.engine.cache
        key = id if cache.preemption == "swap" else None
        return Sequence(
            id, params, tokens, num_prompt_tokens, eos_ids,
            speculates=drafts.proposer is not None,
            needs_commit=drafts.num_drafts > 0 and drafts.proposer is None,
            prefix=Prefix("shared" if cache.prefix_cache else key),
        )  # fmt: skip

    def propose(self, size):
        for owner in self.scheduler.running:
            if not owner.is_prefilling:
                owner.drafts = (1,) * size

    def unfinished(self):
        return [s for s in self.everyone if s.status is not Status.FINISHED]

    def advance(self, choose, is_finite=lambda row: True):
        """Schedules a step, and commits the oldest in flight once there are more than may be."""
        for owner in self.scheduler.choosing:
            weight_S = np.random.default_rng(owner.id).random(CONTEXT, np.float32)
            self.scheduler.shorten(owner, weight_S)
            assert owner.budget.num_dropped_tokens == owner.budget.num_excess_tokens
            self.scheduler.check_integrity()
        schedule = self.scheduler.schedule()
        if schedule is not None:
            check_schedule(self.scheduler, schedule)
            self.in_flight.append(schedule)
        elif not self.in_flight:
            assert not self.scheduler.has_work
        if self.in_flight and len(self.in_flight) > (self.max_in_flight if schedule else 0):
            self.commit(self.in_flight.pop(0), choose, is_finite)

    def commit(self, schedule, choose, is_finite):
        lengths = {s.id: len(s.tokens) for s in self.everyone}
        decode = [row for shard in schedule.shards for row in shard.decode]
        was_running = any(row.sequence.status is not Status.FINISHED for row in decode)
        committed = self.scheduler.commit(schedule, fake_output(schedule, choose, is_finite))
        for commit in committed:
            owner = commit.sequence
            assert len(owner.tokens) == lengths[owner.id] + len(commit.tokens)
        assert committed or not was_running

    @rule(data=st.data())
    def step(self, data):
        self.propose(data.draw(st.integers(0, self.config.engine.drafts.num_drafts + 1)))
        self.advance(lambda row, w: data.draw(st.sampled_from([1, 1, 1, 1, 2, 0])))

    @rule(steps=st.integers(1, 12))
    def several_steps(self, steps):
        for _ in range(steps):
            self.propose(self.config.engine.drafts.num_drafts)
            self.advance(lambda row, w: 1)

    @rule(data=st.data())
    def fail_some(self, data):
        bad = data.draw(st.sets(st.integers(0, 5)))
        self.advance(lambda row, w: 1, lambda row: row.sequence.id % 6 not in bad)

    @precondition(lambda self: self.unfinished())
    @rule(data=st.data())
    def abort(self, data):
        victim = data.draw(st.sampled_from(self.unfinished()))
        self.scheduler.finish(victim, FinishReason.ABORT)

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data())
    def preempt(self, data):
        self.scheduler.preempt(data.draw(st.sampled_from(self.scheduler.running)))

    @rule()
    def lose_the_cache(self):
        order = list(self.scheduler.running)
        self.scheduler.start_over(self.unfinished())
        self.in_flight.clear()
        assert not self.scheduler.running and all(s in self.scheduler.waiting for s in order)

    @rule(data=st.data(), more=st.integers(1, 20))
    def fork(self, data, more):
        parents = [s for s in self.unfinished() if not s.is_only_read and not s.is_whole]
        if not parents:
            return
        parent = data.draw(st.sampled_from(parents))
        params = SamplingParams(max_new_tokens=parent.num_output_tokens + more)
        child = self.sequence(params, list(parent.tokens), parent.num_prompt_tokens, parent.eos_ids)
        child.budget.num_excess_tokens = parent.budget.num_excess_tokens
        try:
            self.scheduler.fork(parent, child)
        except InputError:
            return
        self.everyone.append(child)

    @invariant()
    def books_add_up(self):
        self.scheduler.check_integrity()
        states = [s for s in self.everyone if s.status is Status.FINISHED]
        assert len(states) + len(self.scheduler.waiting) + len(self.scheduler.running) == len(
            self.everyone
        )
        for s in self.everyone:
            assert (s.finish_reason is None) == (s.status is not Status.FINISHED)
            assert s.num_output_tokens <= s.params.max_new_tokens and len(s.tokens) <= CONTEXT
            assert s.num_computed_tokens < len(s.tokens) or s.status is Status.FINISHED

    def teardown(self):
        """Every request ends, and every page comes back."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(6 * (1 + len(self.everyone)) * CONTEXT):
            if not self.scheduler.has_work:
                break
            self.propose(self.config.engine.drafts.num_drafts)
            self.advance(lambda row, w: 1)
        assert not self.scheduler.has_work
        for shard in self.scheduler.shards:
            shard.pages.check_integrity([])
            available = shard.pages.prefix_cache.num_available_pages
            assert available == shard.pages.pool.num_usable_pages
        for s in self.everyone:
            if s.finish_reason is FinishReason.STOP:
                assert s.tokens[-1] == 0 and 0 in s.eos_ids
            if s.finish_reason is FinishReason.LENGTH and not s.scores:
                assert len(s.tokens) == min(s.max_length, CONTEXT)
            if s.finish_reason is FinishReason.LENGTH and s.pools:  # each token once
                num = s.num_prompt_tokens if s.params.pooling == "mean" else 1
                assert s.results.pooled == num and s.embedding == 1
            if s.finish_reason is FinishReason.LENGTH and s.scores:
                assert len(s.results.prompt_logprobs) == s.num_prompt_tokens - 1


class TestScheduler(SchedulerMachine.TestCase):
    settings = settings(max_examples=150, stateful_step_count=25, deadline=None)


@pytest.mark.long
@pytest.mark.timeout(900)
class TestSchedulerAtLength(SchedulerMachine.TestCase):
    settings = settings(max_examples=2000, stateful_step_count=25, deadline=None)


# --- single rules ---------------------------------------------------------------------------------


def steps_of(scheduler, limit=500):
    """Plans until nothing is left to do."""
    schedules = []
    while (schedule := scheduler.schedule()) is not None:
        schedules.append(schedule)
        scheduler.commit(schedule, fake_output(schedule))
        assert len(schedules) < limit
    return schedules


def test_decoding_goes_on_beside_prompts():
    scheduler = Scheduler(config(cache_bytes=1 << 20))
    first, second = sequence(1, [1] * 5, max_new_tokens=9), sequence(2, [1] * 30, max_new_tokens=2)
    scheduler.add(first)
    scheduler.commit(schedule := scheduler.schedule(), fake_output(schedule))
    scheduler.add(second)
    schedule = scheduler.schedule()
    assert [row.sequence for row in schedule.shards[0].decode] == [first]
    assert [(row.sequence, row.offset, row.length) for row in schedule.shards[0].prefill] == [
        (second, 0, 4), (second, 4, 4), (second, 8, 4),
    ]  # fmt: skip
    assert not any(row.emits for row in schedule.shards[0].prefill) and all(
        row.emits for row in schedule.shards[0].decode
    )
    scheduler.commit(schedule, fake_output(schedule))
    steps_of(scheduler)
    assert first.num_output_tokens == 9 and second.num_output_tokens == 2
    assert first.results.top_logprobs == []  # not an empty one a token


def test_chunks_of_one_step_belong_to_several_prompts():
    scheduler = Scheduler(config(cache_bytes=1 << 20))
    prompts = [sequence(i, [1] * n, max_new_tokens=1) for i, n in enumerate((6, 3, 4))]
    for prompt in prompts:
        scheduler.add(prompt)
    schedules = steps_of(scheduler)
    rows = [
        [(row.sequence.id, row.length, row.emits) for row in schedule.shards[0].prefill]
        for schedule in schedules
    ]
    assert rows == [[(0, 4, False), (0, 2, True), (1, 3, True)], [(2, 4, True)]]


def test_pages_that_left_the_window_come_back():
    scheduler = Scheduler(config(page_tokens=4, cache_bytes=1 << 20))
    one = sequence(1, [1] * 3, max_new_tokens=40)
    scheduler.add(one)
    for _ in range(30):
        scheduler.commit(schedule := scheduler.schedule(), fake_output(schedule))
    everything, windowed = one.pages
    assert all(everything)
    first = (one.num_computed_tokens + 1 - WINDOW) // 4
    assert not any(windowed[:first]) and all(windowed[first:])


def test_the_youngest_gives_its_pages_back():
    scheduler = Scheduler(config(page_tokens=4, cache_bytes=int(1.2 * 8 * (64 + 32))))
    old, young = (sequence(i, [1] * 8, max_new_tokens=50) for i in range(2))
    scheduler.add(old)
    scheduler.add(young)
    preempted = False
    while old.status is not Status.FINISHED:
        scheduler.commit(schedule := scheduler.schedule(), fake_output(schedule))
        assert old.status is not Status.WAITING
        preempted |= young.status is Status.WAITING
    assert preempted
    steps_of(scheduler)
    assert young.num_output_tokens == 50


def test_a_request_that_never_fits_is_refused():
    scheduler = Scheduler(config(page_tokens=4, cache_bytes=300))
    with pytest.raises(InputError, match="never fits .* engine.cache.cache_bytes") as error:
        scheduler.add(sequence(1, [1] * 40, max_new_tokens=10))
    assert "\n" not in str(error.value) and not scheduler.has_work


def test_a_scored_prompt_may_fill_the_last_page():
    """It never needs room for one more token."""
    scheduler = Scheduler(config(page_tokens=4, cache_bytes=200))
    usable = scheduler.shards[0].pages.pool.num_usable_pages
    fits = max(n for n in range(2, CONTEXT + 1) if all(
        peak <= m for peak, m in zip(scheduler._config.peak_pages(n), usable, strict=True)
    ))  # fmt: skip
    scored = sequence(1, [1] * fits, max_new_tokens=0)
    scheduler.add(scored)
    assert steps_of(scheduler) and scored.status is Status.FINISHED
    assert len(scored.results.prompt_logprobs) == fits - 1


def test_a_preempted_score_starts_over():
    scheduler = Scheduler(config(cache_bytes=1 << 20))
    scored = sequence(1, [1] * 30, max_new_tokens=0)
    scheduler.add(scored)
    scheduler.commit(schedule := scheduler.schedule(), fake_output(schedule))
    assert len(scored.results.prompt_logprobs) == 12
    scheduler.start_over([*scheduler.running, *scheduler.waiting])
    steps_of(scheduler)
    assert len(scored.results.prompt_logprobs) == 29


def test_drafts_never_pass_the_end():
    scheduler = Scheduler(config(cache_bytes=1 << 20, num_drafts=2))
    one = sequence(1, [1] * 4, max_new_tokens=6)
    scheduler.add(one)
    fed = []
    while (schedule := scheduler.schedule()) is not None:
        fed += [
            (
                row.length,
                *build_batch(schedule.shape, schedule.shards[0], scheduler._config).tokens_T[:3],
            )
            for row in schedule.shards[0].decode
        ]
        scheduler.commit(schedule, fake_output(schedule))
        one.drafts = (1, 1)
    assert fed == [(3, -1, 1, 1), (2, -1, 1, 0)] and one.num_output_tokens == 6


@pytest.mark.parametrize("num_in_flight", [0, 1])
def test_trees_are_whole_to_the_end_of_an_answer(num_in_flight):
    scheduler = Scheduler(config(cache_bytes=1 << 20, max_seqs=1, **tree(31)))
    one = sequence(1, [1] * 4, max_new_tokens=24)
    one.speculates, in_flight, lengths = True, [], []
    scheduler.add(one)
    while scheduler.has_work:
        if schedule := scheduler.schedule():
            check_schedule(scheduler, schedule)
            lengths += [row.length for row in schedule.shards[0].decode]
            in_flight.append(schedule)
        if len(in_flight) > (num_in_flight if schedule else 0):  # nothing that is drafted is right
            scheduler.commit(oldest := in_flight.pop(0), fake_output(oldest, lambda row, w: 2 + w))
    assert one.num_output_tokens == 24 and len(lengths) == 23
    assert set(lengths) == {32, 1} and lengths.count(1) <= 1 + num_in_flight


@pytest.mark.parametrize("cache_bytes", [1 << 20, 640])
def test_trees_shrink_where_context_or_pages_end(cache_bytes):
    scheduler = Scheduler(config(cache_bytes=cache_bytes, max_seqs=1, **tree(31)))
    one = sequence(1, [1] * 4, max_new_tokens=CONTEXT if cache_bytes > CONTEXT**2 else 32)
    one.speculates = True
    scheduler.add(one)
    lengths = []
    while (schedule := scheduler.schedule()) is not None:
        check_schedule(scheduler, schedule)
        lengths += [(row.start, row.length) for row in schedule.shards[0].decode]
        scheduler.commit(schedule, fake_output(schedule, lambda row, w: 2))
    assert lengths[-2:] == [(one.max_length - 3, 3), (one.max_length - 2, 1)]
    assert max(map(sum, lengths)) == one.max_positions == one.max_length
    assert len(one.tokens) == one.max_length


def test_more_drafts_than_the_engine_verifies_are_left_out():
    scheduler = Scheduler(config(cache_bytes=1 << 20, num_drafts=2))
    one = sequence(1, [1] * 4, max_new_tokens=30)
    scheduler.add(one)
    scheduler.commit(schedule := scheduler.schedule(), fake_output(schedule))
    one.drafts = (1,) * 5
    schedule = scheduler.schedule()
    assert schedule.shards[0].decode[0].length == 3
    assert build_batch(schedule.shape, schedule.shards[0], scheduler._config).tokens_T[
        :3
    ].tolist() == [-1, 1, 1]
    scheduler.commit(schedule, fake_output(schedule))
    assert one.num_output_tokens == 1 + 3


def test_drafts_wider_than_a_chunk_find_pages():
    """A window of 6, pages of one token, a single chunk of 2 and 8 drafts: one request, alone."""
    sizes = dict(page_tokens=1, chunk_tokens=2, prefill_chunks=(1,), num_drafts=8, max_seqs=1)
    scheduler = Scheduler(config(cache_bytes=1 << 20, **sizes))
    one = sequence(1, [1] * 4, max_new_tokens=40)
    scheduler.add(one)
    for _ in range(60):
        if (schedule := scheduler.schedule()) is None:
            break
        scheduler.commit(schedule, fake_output(schedule, lambda row, w: 1 + w % 2))
        one.drafts = (2,) * 8
    assert one.num_output_tokens == 40


def test_a_fork_that_is_preempted_at_once_holds_no_page():
    """Its copy is not to be made: else what it was copied from would stay taken."""
    scheduler = Scheduler(config(page_tokens=4, cache_bytes=1 << 20, prefix_cache=False))
    parent, child = sequence(1, [1] * 6, max_new_tokens=9), sequence(2, [1] * 6, max_new_tokens=9)
    scheduler.add(parent)
    scheduler.commit(schedule := scheduler.schedule(), fake_output(schedule))
    scheduler.fork(parent, child)
    assert child.status is Status.RUNNING
    for each in (parent, child):
        scheduler.preempt(each)
    pages = scheduler.shards[0].pages
    assert pages.prefix_cache.num_available_pages == pages.pool.num_usable_pages
    steps_of(scheduler)
    assert parent.num_output_tokens == child.num_output_tokens == 9


def test_a_fork_that_never_fits_is_refused():
    scheduler = Scheduler(config(page_tokens=4, cache_bytes=500))
    parent = sequence(1, [1] * 8, max_new_tokens=4)
    scheduler.add(parent)
    scheduler.schedule()
    with pytest.raises(InputError, match="never fits"):
        scheduler.fork(parent, sequence(2, [1] * 8, max_new_tokens=50))
    scheduler.check_integrity()


@pytest.mark.parametrize("break_books", [
    lambda scheduler: scheduler.shards[0].free_slots.pop(),
    lambda scheduler: scheduler.shards[0].free_slots.append(scheduler.running[0].slot),
    lambda scheduler: scheduler.running[0].pages[0].pop(),
    lambda scheduler: scheduler.running[0].pages[1].append(scheduler.running[1].pages[1][0]),
    lambda scheduler: setattr(next(iter(scheduler.waiting)), "slot", 0),
    lambda scheduler: scheduler.shards[0].running.pop(),
])  # fmt: skip
def test_integrity_can_fail(break_books):
    scheduler = Scheduler(config(cache_bytes=1 << 20, max_seqs=4, prefill_chunks=(2,)))
    for i in range(3):
        scheduler.add(sequence(i, [1] * 4))
    scheduler.schedule()
    scheduler.check_integrity()
    break_books(scheduler)
    with pytest.raises(RuntimeError):
        scheduler.check_integrity()
