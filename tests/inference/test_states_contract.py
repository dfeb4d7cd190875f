"""Models with states keep the engine's contract: whatever runs beside a request, and whatever is
done to the engine, its tokens are those of the request alone.
"""

import functools

import numpy as np
import pytest

from configs.mesh import ONE_CHIP, Mesh
from inference.request import SamplingParams
from tests import fakes

pytestmark = pytest.mark.quick_code

MODELS = {"jamba": fakes.jamba(), "delta": fakes.delta()}  # selective scans; the delta rule
SIZES = dict(
    max_seqs=6, decode_rows=(6,), page_tokens=8, chunk_tokens=16, prefill_chunks=(2,),
    snapshots=3, top_logprobs=4,
)  # fmt: skip
ROOM = {"jamba": 36_000, "delta": 55_000}  # that not all requests have at once
SHARED, OTHER = fakes.prompts([40, 21], 131, seed=5)
PROMPTS = [SHARED + more for more in fakes.prompts([3, 9, 1, 6], 131, seed=6)] + [OTHER]
ASKED = [SamplingParams(max_new_tokens=16, ignore_eos=True, seed=7, **more) for more in (
    {}, {"temperature": 0.7, "allowed_token_ids": (5, 7)}, {"n": 4, "temperature": 0.9},
    {"beam_width": 2, "n": 2}, {"temperature": 1.0, "allowed_token_ids": (5, 7, 9)},
)]  # fmt: skip
# What the engine is built with; preempted requests are computed again, unless pages are swapped.
CASES = {
    "together": {},
    "no overlap": {"overlap": False},
    "small steps": {"prefill_budget": 16, "prefix_cache": False},
    "recompute": {"preemption": "recompute"},
    "swap": {"preemption": "swap"},
    "drafts": {"num_drafts": 3, "proposer": "ngram"},
    "deterministic": {"deterministic": True, "preemption": "recompute"},
    "two chips": {"mesh": Mesh(model=2), "preemption": "swap"},
}


def make(name, mesh=ONE_CHIP, **changes):
    room = {"cache_bytes": ROOM[name] // mesh.model}
    settings = SIZES | room | changes
    return fakes.engine(MODELS[name], shapes="one", mesh=mesh, **settings)


def each(completion):
    return [(one.token_ids, one.logprobs) for one in (completion, *completion.others)]


@functools.cache
def alone(name, is_deterministic):
    """Each request by itself, on an engine that keeps nothing of the one before."""
    engine = make(name, deterministic=is_deterministic, prefix_cache=False, overlap=False)
    found = [engine.generate([p], a)[0] for p, a in zip(PROMPTS, ASKED, strict=True)]
    return [each(completion) for completion in found]


@pytest.mark.parametrize("name, case", [
    pytest.param(name, case, marks=[pytest.mark.long] if name == "delta" else [])
    for name in MODELS for case in CASES
])  # fmt: skip
def test_tokens_are_those_of_one_request_alone(name, case):
    """Side by side, in chunks, from a prefix that is cached, forked in the middle, beside one that
    is aborted, and preempted at every third step.
    """
    settings = CASES[case]
    is_deterministic = "deterministic" in settings
    expected, engine = alone(name, is_deterministic), make(name, **settings)
    # Where prompts part a state is kept; the last ones evict it.
    for prompt in (SHARED + [1] * 9, SHARED + [2] * 9, *fakes.prompts([80, 80], 131, seed=8)):
        engine.generate([prompt], fakes.greedy(1))
    ids = [engine.add_request(p, a) for p, a in zip(PROMPTS, ASKED, strict=True)]
    doomed = engine.add_request(SHARED[:30], fakes.greedy(60))
    groups, forks, steps = [engine._requests[id].group for id in ids], [], 0

    def disturb():
        nonlocal steps
        steps += 1
        running = engine.scheduler.running
        if steps == 9:
            engine.abort(doomed)
        if not forks and groups[0].sequences[0].num_output_tokens > 4:
            forks.append(engine._requests[engine.fork(ids[0], ASKED[0])].group)
        if "preemption" in settings and steps % 3 == 0 and running:
            engine.scheduler.preempt(running[steps % len(running)])

    fakes.drain(engine, disturb)
    found = [each(group.completion()) for group in groups]
    found.append(each(forks[0].completion()))
    for answers, wanted in zip(found, [*expected, expected[0]], strict=True):
        assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in wanted]
        for (_, logprobs), (_, others) in zip(answers, wanted, strict=True):
            np.testing.assert_allclose(
                logprobs, others, atol=0 if is_deterministic else 1e-4, rtol=0
            )
    counters = engine.scheduler.counters
    assert counters.num_cached_tokens or not settings.get("prefix_cache", True)
    assert bool(counters.num_preemptions) >= ("preemption" in settings)
    if settings.get("preemption") == "swap":
        assert counters.num_restored_pages
    if "proposer" in settings:
        assert 0 < counters.num_accepted < counters.num_drafts
