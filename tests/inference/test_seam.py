"""Three fake mixers through pool, admission, abort, fork, speculation, preemption and rebuild.

The engine has never heard of them; every token is checked against plain Python.
"""

import functools

import jax
import numpy as np
import pytest

from configs.cache import PageGroup
from inference.request import SamplingParams
from inference.runtime import batch
from inference.scheduling.sequence import Status
from layers import kv_cache
from tests import fakes

pytestmark = pytest.mark.quick_code

MODEL = fakes.fake_model()
LENGTHS = (1, 7, 30, 4, 13, 2, 45, 16)


def make(shapes="one", draws=False, **settings):
    """Room for one and a half full sequences, so that more than a few preempt each other."""
    settings = {
        "max_seqs": 4,
        "page_tokens": 4,
        "cache_bytes": 2800,
        "decode_rows": (4,),
        "chunk_tokens": 4,
        "prefill_chunks": (3,),
        "num_drafts": 2,
    } | settings
    return fakes.engine(MODEL, shapes=shapes, draws=draws, **settings)


def plain(**settings):
    """An engine of another make: no drafts, other pages and chunks, room for all."""
    settings = {"page_tokens": 16, "chunk_tokens": 16, "prefill_chunks": (2,)} | settings
    return make(num_drafts=0, cache_bytes=1 << 20, **settings)


def assert_plain(engine, prompts, n, before_step=lambda: None):
    """Every prompt is continued by n tokens as by hand; nothing is left behind."""
    ids = [engine.add_request(prompt, fakes.greedy(n)) for prompt in prompts]
    sequences = [fakes.sequence_of(engine, id) for id in ids]
    fakes.drain(engine, before_step)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert sequence.output_tokens == fakes.continuation(prompt, n)
    assert_empty(engine)


def assert_empty(engine):
    pages = engine.scheduler.shards[0].pages
    assert pages.prefix_cache.num_available_pages == pages.pool.num_usable_pages
    assert not engine._requests and not engine.scheduler.has_work
    engine.scheduler.check_integrity()


def proposer(engine, seed=0, accuracy=0.6, sure=None):
    """Called before a step: proposes up to two tokens a sequence, each right or wrong by chance."""
    rng = np.random.default_rng(seed)

    def propose():
        for sequence in engine.scheduler.running:
            if sequence.is_prefilling:
                continue
            right = sure(sequence) if sure else fakes.continuation(sequence.tokens, 2)
            sequence.drafts = tuple(
                token if rng.random() < accuracy else int(rng.integers(fakes.VOCAB))
                for token in right[: rng.integers(0, 3)]
            )

    return propose


def test_the_specs_make_two_page_groups():
    paged, _, windowed, reader = MODEL.cache_specs
    assert MODEL.page_groups == (PageGroup(paged, (0,)), PageGroup(windowed, (2,)))
    assert paged.bytes_per_entry("float32") == 12 and reader.bytes_per_entry("float32") == 0
    assert [spec.bytes_per_sequence(2) for spec in MODEL.cache_specs] == [0, 12, 0, 0]
    engine = make()
    full, state, window, shared = engine.model_runner.cache
    assert shared == kv_cache.Empty() and [x.shape for x in state.states] == [(5, 3, 1)]
    assert (full.pages.shape[0], window.pages.shape[0]) == engine.config.num_pages


def test_the_continuation_is_not_trivial():
    tokens = fakes.continuation([1, 2, 3], 60)
    assert len(set(tokens)) > 20
    for p in (0, 1, 30, 60):  # every token of the history counts
        changed = [1, 2, 3, *tokens]
        changed[p] = (changed[p] + 1) % fakes.VOCAB
        assert fakes.continuation(changed, 3) != fakes.continuation([1, 2, 3, *tokens], 3)


@pytest.mark.parametrize("build", [make, plain, functools.partial(plain, page_tokens=1)])
def test_admission_and_chunks(build):
    assert_plain(build(), fakes.prompts(LENGTHS), 12)


def test_a_slot_starts_without_its_predecessors_state():
    """One slot, one request after the other; then the state itself, before the first step."""
    engine = make(max_seqs=1, decode_rows=(1,))
    for prompt in fakes.prompts([9, 5]):
        assert_plain(engine, [prompt], 4)
    assert np.asarray(engine.model_runner.cache[1].states[0][0]).any()
    engine.add_request([1, 2], fakes.greedy(1))
    schedule = engine.scheduler.schedule()
    engine.model_runner.admit(batch.build(schedule, engine.config).admissions)
    assert not np.asarray(engine.model_runner.cache[1].states[0][0]).any()


def test_abort_leaves_no_trace():
    engine = make()
    prompts = fakes.prompts(LENGTHS)
    doomed = [engine.add_request(prompt, fakes.greedy(40)) for prompt in prompts]
    rng = np.random.default_rng(0)

    def abort_one():
        if doomed and rng.random() < 0.5:
            engine.abort(doomed.pop(rng.integers(len(doomed))))

    assert_plain(engine, fakes.prompts(LENGTHS, seed=1), 12, abort_one)
    assert not doomed


@pytest.mark.parametrize("num_computed", [3, 4, 6, 8, 21])
def test_fork_shares_full_pages_and_copies_the_rest(num_computed):
    engine = make()
    pool = engine.scheduler.shards[0].pages.pool
    prompt = fakes.prompts([num_computed])[0]
    parent = fakes.sequence_of(engine, engine.add_request(prompt, fakes.greedy(30)))
    while parent.num_computed_tokens < num_computed:
        engine.step()
    free = pool.num_free_pages
    child = fakes.sequence_of(engine, engine.fork(parent.id, fakes.greedy(20)))
    is_open = int(num_computed % 4 != 0)
    *pages, snapshots = free
    assert pool.num_free_pages == (*(n - is_open for n in pages), snapshots)
    full = num_computed // 4
    assert child.pages[0][:full] == parent.pages[0][:full]
    assert not set(child.pages[0][full:]) & set(parent.pages[0])
    # Different continuations of one history: the child is told another newest token.
    grandchild = fakes.sequence_of(engine, engine.fork(parent.id, fakes.greedy(20)))
    grandchild.tokens[-1] = (grandchild.tokens[-1] + 1) % fakes.VOCAB
    other = fakes.continuation(grandchild.tokens, 10)
    fakes.drain(engine, proposer(engine))
    expected = fakes.continuation(prompt, 30)
    assert parent.output_tokens == expected and child.output_tokens == expected[:20]
    assert grandchild.output_tokens[1:11] == other
    assert_empty(engine)


def test_fork_of_a_prompt_in_flight_and_without_room():
    engine = make(overlap=False)
    prompt = fakes.prompts([30])[0]
    parent = fakes.sequence_of(engine, engine.add_request(prompt, fakes.greedy(10)))
    early = fakes.sequence_of(engine, engine.fork(parent.id, fakes.greedy(10)))  # still queued
    engine.step()
    assert 0 < parent.num_computed_tokens < 30
    children = [
        fakes.sequence_of(engine, engine.fork(parent.id, fakes.greedy(10))) for _ in range(4)
    ]
    assert children[-1].status is Status.WAITING
    fakes.drain(engine)
    expected = fakes.continuation(prompt, 10)
    for sequence in (parent, early, *children):
        assert sequence.output_tokens == expected
    assert_empty(engine)


def test_fork_survives_the_end_of_its_parent():
    """Parent aborted between fork and step: its slot and open page go to another at once."""
    engine = make()
    prompt, *others = fakes.prompts([9, 11, 8, 7, 12])
    parent = engine.add_request(prompt, fakes.greedy(30))
    for _ in range(4):
        engine.step()
    child = fakes.sequence_of(engine, engine.fork(parent, fakes.greedy(20)))
    engine.abort(parent)
    assert_plain(engine, others, 8)
    assert child.output_tokens == fakes.continuation(prompt, 20)


@pytest.mark.parametrize("accuracy", [0.0, 0.6, 1.0])
def test_any_proposer_gives_plain_decoding(accuracy):
    engine = make()
    propose = proposer(engine, seed=1, accuracy=accuracy)
    assert_plain(engine, fakes.prompts(LENGTHS), 25, propose)


def test_right_drafts_save_steps():
    engine = make()
    prompt = fakes.prompts([4])[0]

    def propose():
        for sequence in engine.scheduler.running:
            sequence.drafts = tuple(fakes.continuation(sequence.tokens, 2))

    assert_plain(engine, [prompt], 31, propose)
    assert len(engine.records) == 1 + 10  # the prompt gives one token, each step 3


def test_drafts_stop_at_the_context_and_at_an_end():
    engine = make()
    prompt = fakes.prompts([117])[0]
    expected = fakes.continuation(prompt, 11)

    def propose():
        for sequence in engine.scheduler.running:
            if not sequence.is_prefilling:
                sequence.drafts = tuple(fakes.continuation(sequence.tokens, 2))

    assert_plain(engine, [prompt], 11, propose)
    params = fakes.greedy(11, stop_token_ids=(expected[2],))  # the first draft of a step
    sequence = fakes.sequence_of(engine, engine.add_request(prompt, params))
    fakes.drain(engine, propose)
    assert sequence.output_tokens == expected[: expected.index(expected[2]) + 1]
    assert_empty(engine)


def test_sampled_tokens_do_not_depend_on_the_proposer():
    """Coupled acceptance: noise belongs to the position, so drafts change nothing."""
    prompts = fakes.prompts(LENGTHS)
    params = SamplingParams(max_new_tokens=20, temperature=3.0, seed=5)
    undisturbed = [c.token_ids for c in plain(draws=True).generate(prompts, params)]
    assert undisturbed != [fakes.continuation(prompt, 20) for prompt in prompts]
    engine = make(draws=True)
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    sequences = [fakes.sequence_of(engine, id) for id in ids]
    known = {tuple(p): p + tokens for p, tokens in zip(prompts, undisturbed, strict=True)}

    def sure(sequence):
        text = known[tuple(sequence.tokens[: sequence.num_prompt_tokens])]
        return text[len(sequence.tokens) :][:2]

    fakes.drain(engine, proposer(engine, seed=2, sure=sure))
    assert [sequence.output_tokens for sequence in sequences] == undisturbed


@pytest.mark.parametrize("accuracy", [None, 0.6])
def test_preemption_recomputes(accuracy, monkeypatch):
    engine = make()
    preempted = []
    preempt = engine.scheduler.preempt
    monkeypatch.setattr(engine.scheduler.shards[0].admission_control, "will_fit", lambda *_: True)
    monkeypatch.setattr(
        engine.scheduler,
        "preempt",
        lambda sequence: (preempted.append(sequence), preempt(sequence)),
    )
    propose = (lambda: None) if accuracy is None else proposer(engine, 3, accuracy)
    assert_plain(engine, fakes.prompts(LENGTHS), 50, propose)
    assert preempted


def test_a_rebuild_frees_the_cache_first(monkeypatch):
    engine = fakes.engine(fakes.llama(), max_seqs=2)
    init, runner = kv_cache.init, engine.model_runner
    monkeypatch.setattr(kv_cache, "init", lambda *sizes: runner.cache or init(*sizes))
    before = runner.cache
    engine.rebuild()
    assert runner.cache is not before and runner.cache_bytes


def test_rebuild_prefills_again_from_the_hosts_tokens():
    engine = make()
    propose, rng = proposer(engine, seed=4), np.random.default_rng(4)

    def lose_the_cache():
        propose()
        if rng.random() < 0.2:
            engine.rebuild()
            leaves = jax.tree.leaves(engine.model_runner.cache)
            assert not any(np.asarray(leaf).any() for leaf in leaves)

    assert_plain(engine, fakes.prompts(LENGTHS), 15, lose_the_cache)


def test_outputs_do_not_wait_for_the_executable_of_the_next_step(monkeypatch):
    """A prompt's token is returned before steady decoding is compiled, and nothing is lost."""
    engine, prepared = plain(shapes="riding"), []
    runner = engine.model_runner
    prepare = runner.prepare
    monkeypatch.setattr(runner, "is_ready", lambda schedule: schedule.shape in prepared)
    monkeypatch.setattr(
        runner, "prepare", lambda schedule: (prepared.append(schedule.shape), prepare(schedule))
    )
    prompt = fakes.prompts([3])[0]
    engine.add_request(prompt, fakes.greedy(4))
    outputs = []
    while not outputs:
        outputs = engine.step()
    assert [shape.prefill[0] for shape in prepared] == [2]
    while engine.scheduler.has_work:
        outputs += engine.step()
    assert [shape.prefill[0] for shape in prepared] == [2, 0]
    assert [t for output in outputs for t in output.token_ids] == fakes.continuation(prompt, 4)
    assert [record.shape.prefill[0] for record in engine.records] == [2, 0, 0, 0]
    assert_empty(engine)


@pytest.mark.parametrize("is_chunked", [True, False])
def test_an_executable_that_does_not_compile_is_raised(is_chunked, monkeypatch):
    """Though every step before it succeeds."""
    engine = plain(chunked_prefill=is_chunked)
    runner = engine.model_runner
    monkeypatch.setattr(runner, "is_ready", lambda schedule: bool(schedule.shards[0].prefill))

    def fail(schedule):
        raise jax.errors.JaxRuntimeError("out of memory")

    monkeypatch.setattr(runner, "prepare", fail)
    engine.add_request(fakes.prompts([3])[0], fakes.greedy(4))
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"):
        fakes.drain(engine, limit=20)


def test_a_held_step_that_serves_no_request_is_dropped(monkeypatch):
    """The first request ends while its decode step waits to be compiled."""
    engine, prepared = plain(), []
    runner = engine.model_runner
    monkeypatch.setattr(runner, "is_ready", lambda schedule: bool(schedule.shards[0].prefill))
    monkeypatch.setattr(runner, "prepare", prepared.append)
    doomed = engine.add_request(fakes.prompts([3])[0], fakes.greedy(4))
    while not engine.step():
        pass
    assert engine._steps.waiting is not None
    engine.abort(doomed)
    assert_plain(engine, fakes.prompts([5]), 1)
    assert not prepared and engine._steps.waiting is None
    assert len(engine.records) == 2


@pytest.mark.parametrize(("num_drafts", "readiness"), [(2, 1.0), (2, 0.5), (0, 0.4)])
def test_everything_at_once(num_drafts, readiness, monkeypatch):
    """Random requests, forks, aborts, drafts, preemption and rebuilds, also while a step
    is held for its executable: tokens as by hand.
    """
    rng = np.random.default_rng(7)
    engine = make(num_drafts=num_drafts)
    luck = np.random.default_rng(9)
    known = engine.model_runner.is_ready
    monkeypatch.setattr(
        engine.model_runner,
        "is_ready",
        lambda schedule: luck.random() < readiness and known(schedule),
    )
    propose, expected = proposer(engine, seed=8) if num_drafts else lambda: None, {}

    def act():
        propose()
        unfinished = [s for s in expected if s.status is not Status.FINISHED]
        action = rng.random()
        if action < 0.3 and len(expected) < 60:
            prompt, n = fakes.prompts([rng.integers(1, 60)], seed=rng)[0], int(rng.integers(1, 60))
            id = engine.add_request(prompt, fakes.greedy(n))
            expected[fakes.sequence_of(engine, id)] = fakes.continuation(prompt, n)
        elif action < 0.45 and unfinished:
            parent = unfinished[rng.integers(len(unfinished))]
            child = fakes.sequence_of(engine, engine.fork(parent.id, parent.params))
            expected[child] = expected[parent]
        elif action < 0.5 and unfinished:
            engine.abort(unfinished[rng.integers(len(unfinished))].id)
        elif action < 0.52:
            engine.rebuild()

    engine.add_request([1], fakes.greedy(100))  # keeps the loop going
    for _ in range(250):
        act()
        engine.step()
        engine.scheduler.check_integrity()
    fakes.drain(engine, propose, limit=20_000)
    assert len(expected) > 40
    for sequence, tokens in expected.items():
        if sequence.finish_reason == "abort":
            tokens = tokens[: sequence.num_output_tokens]
        assert sequence.output_tokens == tokens
    assert_empty(engine)
