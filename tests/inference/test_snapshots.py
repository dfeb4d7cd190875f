"""Prompts of models that recur go on from states that outlived the sequences they were made of."""

import dataclasses

import jax
import numpy as np
import pytest

from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.kinds.recurrent.mamba import Mamba2
from configs.mesh import Mesh
from configs.model import LayerSpec, ModelConfig
from tests import fakes
from tests.inference.test_seam import assert_plain, make

pytestmark = pytest.mark.quick_code

_MIXER, _FFN = Mamba2(num_heads=4, head_width=6, state_width=5, num_groups=2), Gated(20)
_HYBRID = ModelConfig(
    "hybrid", "mamba2", 61, width=12, num_layers=3, max_context=256, dtype="float32",
    pattern=(LayerSpec(_MIXER, _FFN), LayerSpec(Attention(4, 2, 6), _FFN), LayerSpec(_MIXER, None)),
)  # fmt: skip
_ALONE = dataclasses.replace(_HYBRID, pattern=_HYBRID.pattern[:1], num_layers=2)


def _found(engine, prompt, n=6) -> int:
    """Tokens of a prompt that need not be computed; what follows them is as by hand."""
    counters = engine.scheduler.counters
    before = counters.num_cached_tokens
    assert_plain(engine, [prompt], n)
    return counters.num_cached_tokens - before


def test_a_prompt_is_found_as_far_as_its_last_full_page():
    engine = make(num_drafts=0, cache_bytes=1 << 20)
    prompt = fakes.prompts([21])[0]
    assert _found(engine, prompt) == 0
    assert _found(engine, prompt) == 20
    assert _found(engine, [*prompt, 3, 1, 4]) == 20
    assert _found(engine, [*prompt, 3, 1, 4, 1]) == 20  # and one is made at 24
    assert _found(engine, [*prompt, 3, 1, 4, 1]) == 24


def test_where_prompts_part_a_state_is_kept():
    engine = make(num_drafts=0, cache_bytes=1 << 20)
    engine.scheduler.shards[0].pages._snapshot_tokens = 0
    common = fakes.prompts([12])[0]
    found = [_found(engine, [*common, *tail]) for tail in ([1] * 9, [2] * 9, [3] * 9)]
    assert found == [0, 0, 12]


def test_states_are_kept_in_regular_distances():
    engine = make(num_drafts=0, cache_bytes=1 << 20, snapshots=9)
    engine.scheduler.shards[0].pages._snapshot_tokens = 8
    prompt = fakes.prompts([30])[0]
    assert _found(engine, prompt) == 0
    assert [_found(engine, [*prompt[:stop], 1, 2, 3]) for stop in (9, 17, 25)] == [8, 16, 24]


def test_the_least_recently_used_state_goes_first():
    engine = make(num_drafts=0, cache_bytes=1 << 20, snapshots=2, preemption="recompute")
    first, second, third = fakes.prompts([9, 10, 11])
    for prompt in (first, second, first, third):
        _found(engine, prompt)
    assert _found(engine, first) == 8 and _found(engine, second) == 0


def test_without_snapshots_nothing_is_found():
    engine = make(num_drafts=0, cache_bytes=1 << 20, snapshots=0)
    prompt = fakes.prompts([21])[0]
    assert _found(engine, prompt) == _found(engine, prompt) == 0


@pytest.mark.parametrize("drafts", [0, 2])
def test_preempted_sequences_resume_from_what_is_kept(drafts):
    engine = make(num_drafts=drafts, max_seqs=3)
    rng = np.random.default_rng(1)

    def preempt():
        running = engine.scheduler.running
        if running and rng.random() < 0.2:
            engine.scheduler.preempt(running[rng.integers(len(running))])

    assert_plain(engine, fakes.prompts((30, 25, 40, 33, 18)), 12, preempt)


def test_evicted_states_come_back_from_the_host():
    engine = make(num_drafts=0, cache_bytes=1 << 20, snapshots=2, preemption="swap")
    prompts = fakes.prompts([17, 18, 19, 21])
    assert not any(_found(engine, prompt) for prompt in prompts)
    assert [_found(engine, prompt) for prompt in prompts] == [16, 16, 16, 20]
    assert engine.scheduler.counters.num_restored_pages > 0


@pytest.mark.parametrize("model, mesh", [
    pytest.param(model, mesh, id=f"{name}-{mesh}", marks=pytest.mark.long if is_long else ())
    for model, name, mesh, is_long in (
        (_HYBRID, "hybrid", Mesh(), False), (_HYBRID, "hybrid", Mesh(model=2), True),
        (_HYBRID, "hybrid", Mesh(data=2), False), (_ALONE, "alone", Mesh(), False),
        (_ALONE, "alone", Mesh(model=2), True), (_ALONE, "alone", Mesh(data=2), True),
    )
])  # fmt: skip
def test_what_resumes_answers_as_what_is_computed(model, mesh):
    """Prompts that share beginnings, one after another, and each alone on an engine of its own that
    keeps nothing.
    """
    sizes = dict(max_seqs=2, chunk_tokens=16, prefill_chunks=(2,), decode_rows=(2,), page_tokens=8)
    engine = fakes.engine(model, shapes="one", draws=False, mesh=mesh, **sizes)
    alone = fakes.engine(model, shapes="one", draws=False, snapshots=0, prefix_cache=False, **sizes)
    rng = np.random.default_rng(2)
    common = rng.integers(61, size=45).tolist()
    prompts = [[*common[:stop], *rng.integers(61, size=9).tolist()] for stop in (45, 30, 30, 45)]
    answers = [engine.generate([p], fakes.greedy(8))[0].token_ids for p in prompts]
    assert answers == [alone.generate([p], fakes.greedy(8))[0].token_ids for p in prompts]
    assert engine.scheduler.counters.num_cached_tokens > 0
    leaves = jax.tree.leaves(engine.model_runner.cache)
    held = engine.config.pool_bytes * engine.config.num_chips
    assert held == sum(leaf.nbytes for leaf in leaves)
