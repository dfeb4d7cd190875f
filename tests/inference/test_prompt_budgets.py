"""Prompts that give up pages: which, what the answer is then, that the pages are free, and what may
not change any of it.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.errors import InputError
from configs.settings.requests import OBSERVED_TOKENS
from inference.request import SamplingParams
from inference.scheduling.sequence import derived_seed
from layers import decoder
from layers.kernels.attention import reference
from layers.ragged import contiguous
from tests import compiling, fakes

pytestmark = pytest.mark.quick_code
PAGE, VOCAB = 8, 131
SIZES = dict(
    max_seqs=4, decode_rows=(4,), page_tokens=PAGE, chunk_tokens=16, prefill_chunks=(4,),
    prompt_budgets=True, cache_bytes=8 << 20,
)  # fmt: skip
LENGTHS, BUDGETS = (150, 90, 201, 60, 97, 170), (80, 64, 80, 60, None, 56)


LLAMA = fakes.llama("bfloat16")


def make(model, **changes):
    return fakes.engine(model, None, "riding", False, **(SIZES | changes))


def asked(budget, max_new_tokens=12, **more):
    return SamplingParams(max_new_tokens, ignore_eos=True, prompt_budget=budget, **more)


# --- what is chosen, and what is answered then ----------------------------------------------------


def dense(monkeypatch, model, tokens, last, gone=()):
    """The model in one pass without a cache: float32 logits; and the weights in float64 that the 32
    tokens before `last` give to all, of layers without a window. From position `last` on, tokens
    `gone` are not seen there.
    """
    attend_dense, weight_S = reference.attend_dense, np.zeros(len(tokens))
    at_S = np.arange(len(tokens))
    is_gone_WS = np.isin(at_S, gone) & (at_S[:, None] >= last)

    def weigh(q_WNH, k_SKH):
        q_WNH, k_SKH = np.asarray(q_WNH, np.float64), np.asarray(k_SKH, np.float64)
        k_SNH = np.repeat(k_SKH, q_WNH.shape[1] // k_SKH.shape[1], axis=1)
        scores = np.einsum("WNH,SNH->WNS", q_WNH, k_SNH)
        is_seen = at_S <= at_S[last - OBSERVED_TOKENS : last, None, None]
        weights = np.where(is_seen, np.exp(scores - scores.max(-1, keepdims=True)), 0)
        weight_S[:] += (weights / weights.sum(-1, keepdims=True)).sum((0, 1))

    def attend(q_YWNH, k_YWKH, v_YWKH, rectangle, options):
        told = q_YWNH, k_YWKH, v_YWKH, rectangle, options
        if options.window is not None:
            return attend_dense(*told)
        jax.debug.callback(weigh, q_YWNH[0, last - OBSERVED_TOKENS : last], k_YWKH[0])
        return attend_dense(*told, jnp.asarray(~is_gone_WS[None]))

    params = fakes.real_params(model)
    model = dataclasses.replace(model, name=f"{model.name} without {sorted(gone)}")  # traced anew
    monkeypatch.setattr(reference, "attend_dense", attend)

    def forward(params, tokens_T):
        hidden_TD, _ = decoder.forward(params, model, tokens_T, contiguous(1, len(tokens)))
        return decoder.logits(params, model, hidden_TD)

    logits_TV = np.asarray(compiling.call(forward, params, np.array(tokens)))
    jax.effects_barrier()
    monkeypatch.undo()
    return logits_TV, weight_S


@pytest.mark.parametrize("name", ["llama", pytest.param("every_cache", marks=pytest.mark.long)])
def test_an_answer_reads_the_pages_that_the_end_of_its_prompt_reads_most(name, monkeypatch):
    """Of all kinds of caches those without a window, among them latents and layers that share."""
    model = getattr(fakes, name)("float32")
    engine, seen = make(model), {}
    shorten = engine.scheduler.shorten

    def spy(sequence, weight_S):
        page_tokens, before = engine.config.page_tokens, list(sequence.pages[full])
        shorten(sequence, weight_S)
        kept = [before.index(page) for page in sequence.pages[full]]
        gone = [at for at in range(149) if at // page_tokens not in kept]
        seen.update(weight_S=weight_S, gone=gone)

    specs = [group.spec for group in engine.config.cached_model.page_groups]
    full = next(g for g, spec in enumerate(specs) if spec.window is None)
    engine.scheduler.shorten = spy
    [prompt] = fakes.prompts([150], VOCAB, seed=5)
    [found] = engine.generate([prompt], asked(80))
    assert found.kept_prompt_tokens == 78 and len(seen["gone"]) == 72  # of 19 pages 10, one of 6
    _, weight_S = dense(monkeypatch, model, prompt[:-1], 149)
    np.testing.assert_allclose(seen["weight_S"][:149], weight_S, rtol=1e-3, atol=1e-3)
    weight_P = weight_S[:144].reshape(18, 8).sum(1)
    gone = sorted({at // PAGE for at in seen["gone"]})
    open_to_choice = set(range(1, 117 // PAGE))
    assert set(gone) < open_to_choice
    assert max(weight_P[gone]) <= min(weight_P[sorted(open_to_choice - set(gone))]) + 1.5
    history = prompt + found.token_ids
    logits_TV, _ = dense(monkeypatch, model, history[:-1], 149, seen["gone"])
    assert logits_TV[149:].argmax(-1).tolist() == found.token_ids
    log_probs = np.asarray(jax.nn.log_softmax(logits_TV[149:])).max(-1)
    np.testing.assert_allclose(found.logprobs, log_probs, atol=2e-4)
    assert found.token_ids != engine.generate([prompt], asked(None))[0].token_ids  # it is lossy


def test_a_budget_that_holds_the_prompt_changes_no_bit():
    prompts = fakes.prompts(LENGTHS, VOCAB, seed=2)
    engine, plain = (make(LLAMA, deterministic=True, prompt_budgets=has) for has in (True, False))
    found = engine.generate(prompts, [asked(len(prompt)) for prompt in prompts])
    expected = plain.generate(prompts, asked(None))
    assert [(c.token_ids, c.logprobs) for c in found] == [
        (c.token_ids, c.logprobs) for c in expected
    ]
    assert [c.kept_prompt_tokens for c in found] == list(LENGTHS)


# --- pages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [64, None])
def test_pages_that_are_given_up_are_free_and_others_run_in_them(budget):
    """Room for 40 pages: one request of 29 and one of 23 run side by side only where one of them
    gives some up.
    """
    own = dict(deterministic=True, prefix_cache=False, preemption="recompute")
    prompts = fakes.prompts([201, 150], VOCAB, seed=4)
    params = [asked(budget, 30), asked(None, 30)]
    alone = [make(LLAMA, **own).generate([p], s)[0] for p, s in zip(prompts, params, strict=True)]
    [page_bytes] = make(LLAMA).config._page_bytes
    engine = make(LLAMA, **own, cache_bytes=40 * page_bytes)
    ids = [engine.add_request(*each) for each in zip(prompts, params, strict=True)]
    first, second = (fakes.sequence_of(engine, id) for id in ids)
    first_pages, shared = set(), set()
    pool = engine.scheduler.shards[0].pages.pool

    def look():
        if first.slot is not None:
            first_pages.update(first.pages[0])
            used = pool.num_usable_pages[0] - pool.num_free_pages[0]
            assert used == len(first.pages[0]) + (len(second.pages[0]) if second.pages else 0)
            shared.update(first_pages & set(second.pages[0] if second.pages else ()))

    fakes.drain(engine, look)
    assert engine.scheduler.counters.peak_running == (2 if budget else 1)
    assert engine.scheduler.counters.num_preemptions == 0
    assert bool(shared) == (budget is not None)
    for sequence, expected in zip((first, second), alone, strict=True):
        assert (sequence.output_tokens, sequence.results.logprobs) == (
            expected.token_ids,
            expected.logprobs,
        )


def test_a_prompt_that_gave_up_pages_is_still_found():
    engine = make(LLAMA, deterministic=True)
    [prompt] = fakes.prompts([150], VOCAB, seed=4)
    first = engine.add_request(prompt, asked(64, 40))
    sequence = fakes.sequence_of(engine, first)
    while sequence.is_whole:
        engine.step()
    pool, counters = engine.scheduler.shards[0].pages.pool, engine.scheduler.counters
    assert len(sequence.pages[0]) == 64 // PAGE and sequence.budget.num_dropped_tokens == 88
    before = counters.num_cached_tokens
    [found] = engine.generate([prompt], asked(None, 2))
    assert counters.num_cached_tokens - before == 144
    [plain] = make(LLAMA, deterministic=True).generate([prompt], asked(None, 2))
    assert (found.token_ids, found.logprobs) == (plain.token_ids, plain.logprobs)
    while engine.scheduler.has_work:
        engine.step()
        engine.scheduler.check_integrity()
    # Behind its prompt nothing of it is cached: what it computed there saw less than all.
    history = prompt + sequence.output_tokens
    match = engine.scheduler.shards[0].pages.prefix_cache.match_prefix(history, "shared")
    assert match.num_tokens == 144
    assert sum(pool.num_free_pages) < sum(pool.num_usable_pages)  # the prompt's pages are cached


# --- what may not change it -----------------------------------------------------------------------


def requests(count=6):
    prompts = fakes.prompts(LENGTHS[:count], VOCAB, seed=3)
    prompts[2][:50] = prompts[0][:50]  # a prefix that two share
    prompts[5][:150] = prompts[0]
    return prompts, [asked(budget, 10 + i) for i, budget in enumerate(BUDGETS[:count])]


@functools.cache
def alone(name):
    """Tokens and log-probabilities of each request by itself."""
    engine = make(MODELS[name], deterministic=True, prefix_cache=False, overlap=False)
    found = [engine.generate([p], s)[0] for p, s in zip(*requests(), strict=True)]
    assert [c.kept_prompt_tokens for c in found] == [78, 58, 73, 60, 97, 50]
    return [(c.token_ids, c.logprobs) for c in found]


DISTURBANCES = {
    "together": {},
    "chunks of 16": {"prefill_budget": 16},
    "prompts first": {"chunked_prefill": False},
    "recompute": {"prefix_cache": False, "preemption": "recompute"},
    "prefixes": {"preemption": "recompute"},
    "swap": {"preemption": "swap", "cache_bytes": 60_000},
    "restart": {},
}
MODELS = {
    "llama": LLAMA, "gemma": fakes.gemma("bfloat16"), "every cache": fakes.every_cache("bfloat16"),
}  # fmt: skip
CASES = [("llama", name) for name in DISTURBANCES] + [("gemma", "swap")]
CASES += [pytest.param("every cache", "swap", marks=pytest.mark.long)]


@pytest.mark.parametrize("model, name", CASES)
def test_no_bit_changes(model, name):
    expected = alone(model)
    changes = dict(DISTURBANCES[name])
    if model == "every cache" and "cache_bytes" in changes:
        changes["cache_bytes"] *= 4  # of eight layers, in five groups
    engine = make(MODELS[model], deterministic=True, **changes)
    ids = [engine.add_request(*each) for each in zip(*requests(), strict=True)]
    sequences = [fakes.sequence_of(engine, id) for id in ids]
    preempts = name in ("recompute", "prefixes", "swap")
    fakes.drain_disturbed(engine, 4 if preempts else 0, 9 if name == "restart" else 0)
    assert [(s.output_tokens, s.results.logprobs) for s in sequences] == expected
    pages = engine.scheduler.shards[0].pages
    assert pages.prefix_cache.num_available_pages == pages.pool.num_usable_pages
    if preempts:
        assert engine.scheduler.counters.num_preemptions > 3


@pytest.mark.long
def test_drafts_change_no_bit():
    """Prompt lookup, where all tokens are of a few."""
    few = (3, 17, 40)
    prompts, params = requests()
    prompts = [[few[token % 3] for token in prompt] for prompt in prompts]
    params = [
        dataclasses.replace(request_params, allowed_token_ids=few) for request_params in params
    ]
    engine, plain = (
        fakes.engine(LLAMA, None, deterministic=True, **SIZES, **drafts)
        for drafts in ({"proposer": "ngram", "num_drafts": 2}, {})
    )
    found, expected = engine.generate(prompts, params), plain.generate(prompts, params)
    assert [(c.token_ids, c.logprobs) for c in found] == [
        (c.token_ids, c.logprobs) for c in expected
    ]
    assert engine.scheduler.counters.num_accepted > 10


def test_samples_of_a_prompt_share_what_it_kept():
    engine = fakes.engine(LLAMA, None, "riding", deterministic=True, **SIZES)
    [prompt] = fakes.prompts([150], VOCAB, seed=6)
    sampled = asked(64, temperature=1.0, seed=7)
    id = engine.add_request(prompt, dataclasses.replace(sampled, n=3))
    group, chosen = engine._requests[id].group, []
    shorten = engine.scheduler.shorten
    engine.scheduler.shorten = lambda *each: chosen.append(each) or shorten(*each)
    fakes.drain(engine)
    assert len(chosen) == 1
    for index, sequence in enumerate(group.sequences):
        seed = derived_seed(7, index)
        [completion] = engine.generate([prompt], dataclasses.replace(sampled, seed=seed))
        assert (completion.token_ids, completion.logprobs) == (
            sequence.output_tokens,
            sequence.results.logprobs,
        )
        assert completion.kept_prompt_tokens == 62


def test_an_observer_that_raises_ends_its_prompt_alone(monkeypatch, caplog):
    engine, prompts = make(LLAMA), fakes.prompts([150, 90, 97], VOCAB, seed=6)
    params = [asked(80), asked(64), asked(None)]
    expected = engine.generate(prompts, params)
    observe = engine.model_runner.observe

    def fail(sequence):
        if sequence.num_prompt_tokens == 150:
            raise ValueError("poison")
        return observe(sequence)

    monkeypatch.setattr(engine.model_runner, "observe", fail)
    faulty, *others = engine.generate(prompts, params)
    assert (faulty.finish_reason, faulty.token_ids) == ("error", [])
    assert [other.token_ids for other in others] == [each.token_ids for each in expected[1:]]
    assert others[0].kept_prompt_tokens == expected[1].kept_prompt_tokens < 90
    assert not engine._requests and "poison" in caplog.text
    engine.scheduler.check_integrity()


def test_beams_share_what_it_kept_and_bear_preemption():
    [prompt] = fakes.prompts([150], VOCAB, seed=6)
    params, results = asked(64, beam_width=3, n=3), []
    for is_disturbed in (False, True):
        engine = make(LLAMA, deterministic=True, top_logprobs=8)
        group = engine._requests[engine.add_request(prompt, params)].group
        steps = itertools.count(1)

        def disturb(engine=engine, steps=steps, is_disturbed=is_disturbed):
            running = engine.scheduler.running
            if next(steps) % 5 == 0 and running and is_disturbed:
                engine.scheduler.preempt(running[-1])

        fakes.drain(engine, disturb)
        found = group.completion()
        results.append([(c.token_ids, c.score) for c in (found, *found.others)])
        assert {c.kept_prompt_tokens for c in (found, *found.others)} == {62}
        assert (engine.scheduler.counters.num_preemptions > 0) == is_disturbed
    assert results[0] == results[1] and len(results[0]) == 3


# --- what is refused ------------------------------------------------------------------------------


def test_what_goes_without_a_budget():
    engine = make(LLAMA, prompt_budgets=False)
    with pytest.raises(
        InputError, match=r"needs an engine built with engine.requests.prompt_budgets=true"
    ):
        engine.add_request([1] * 150, asked(80))
    engine = make(LLAMA)
    with pytest.raises(InputError, match=r"prompt_budget of 150 tokens is at least 48, not 47"):
        engine.add_request([1] * 150, asked(47))
    id = engine.add_request([1] * 150, asked(80))
    with pytest.raises(InputError, match="a fork .* leave prompt_budget out"):
        engine.fork(id, asked(None, 100))
    with pytest.raises(InputError, match="prompt_budget is a whole number from 1 on, not 0"):
        asked(0)
    with pytest.raises(InputError, match="a prompt that is only read is read whole"):
        asked(80, 0)


@pytest.mark.parametrize(
    "model, changes, reason",
    [
        (fakes.fake_model(), {}, "fake keeps states, which no page holds"),
        (fakes.deepseek_v32(), {}, "the queries of tiny-deepseek choose what they read"),
        (fakes.llama(token_budget=24), {}, "the queries of tiny-llama choose what they read"),
        (fakes.llama(window=20), {}, "no layer of tiny-llama keeps all of a prompt"),
        (fakes.llama(), {"mesh": fakes.Mesh(data=2)}, "it goes with one chip, not with 2"),
    ],
)
def test_what_goes_without_budgets(model, changes, reason):
    with pytest.raises(InputError, match=f"engine.requests.prompt_budgets: {reason}"):
        make(model, **changes)
