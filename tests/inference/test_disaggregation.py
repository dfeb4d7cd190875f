"""Prompts on chips of their own: the tokens are those of one engine, whatever is asked."""

from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.hardware import catalog
from configs.mesh import ONE_CHIP, Mesh
from configs.prefill import TOGETHER, Prefill
from inference.engine import Engine
from inference.planner.deployment import Deployment
from inference.request import SamplingParams
from tests import fakes

pytestmark = pytest.mark.quick_code

_SIZES = dict(max_seqs=6, decode_rows=(6,), page_tokens=8, chunk_tokens=16, prefill_chunks=(2,),
              cache_bytes=1 << 20, top_logprobs=4)  # fmt: skip
_VOCAB = 131
_LITTLE = Prefill(chips=1, max_seqs=3, cache_bytes=30_000)


class Bytes:
    """A tokenizer whose tokens are single bytes."""

    strips_first_space = False
    byte_ids = frozenset()

    def token_bytes(self, token, skip_special=True):
        return bytes([token])


def _make(model, prefill, mesh=ONE_CHIP, **settings):
    return fakes.engine(model, None, "one", mesh=mesh, prefill=prefill, tokenizer=Bytes(),
                        **_SIZES | settings)  # fmt: skip


def _requests(count):
    """Prompts of any length, some with a prefix in common, and all ways to ask."""
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, _VOCAB, 37).tolist()
    kinds = [
        {}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "n": 3}, {"max_new_tokens": 0},
        {"temperature": 1.2, "top_k": 20, "best_of": 2}, {"beam_width": 2}, {"n": 2},
        {"stop": ("e", "no")}, {"stop_token_ids": tuple(range(0, _VOCAB, 17))}, {"priority": 1},
        {"logit_bias": {130: 9.0}}, {"max_new_tokens": 1},
    ]  # fmt: skip
    for index in range(count):
        length = int(rng.integers(1, 70))
        prompt = rng.integers(0, _VOCAB, length).tolist()
        if index % 3 == 0:
            prompt = prefix[: int(rng.integers(8, 37))] + prompt
        kind = kinds[index % len(kinds)]
        if not kind.get("max_new_tokens", 1) and len(prompt) == 1:
            prompt = prompt * 2
        new_tokens = int(rng.integers(1, 12))
        yield prompt, SamplingParams(**{"max_new_tokens": new_tokens, "seed": index} | kind)


def _serve(engine, count, aborts=()):
    """All answers; some requests come while others run, and some are aborted with two tokens."""
    waiting, groups, sizes = list(_requests(count)), {}, {}
    for step in range(10_000):
        if waiting and step % 2 == 0:
            id = engine.add_request(*waiting.pop(0))
            groups[id], sizes[id] = engine._requests[id].group, 0
        for output in engine.step():
            sizes[output.id] += len(output.token_ids)
            if list(groups).index(output.id) in aborts and sizes[output.id] >= 2:
                engine.abort(output.id)
        engine.scheduler.check_integrity()
        if engine.config.prefill.chips:
            engine._prefill.scheduler.check_integrity()
        if not (waiting or engine._requests):
            break
    found = []
    for group in groups.values():
        answers = [group.completion(), *group.completion().others]
        scores = [sequence.results.prompt_logprobs for sequence in group.sequences]
        found.append((answers, scores))
    return found


def _assert_same(found, expected, aborts):
    """Where a request was aborted, as far as both have come."""
    for index, ((own, scores), (others, other_scores)) in enumerate(
        zip(found, expected, strict=True)
    ):
        for a, b in zip(own, others, strict=True):
            most = min(len(a.token_ids), len(b.token_ids)) if index in aborts else None
            assert a.token_ids[:most] == b.token_ids[:most]
            if index not in aborts:
                assert (a.text, a.finish_reason) == (b.text, b.finish_reason)
                np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
        for a, b in zip(scores, other_scores, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4)


CASES = [  # a model of `fakes`, and chips that decode
    ("llama", ONE_CHIP),
    *(
        pytest.param(*case, marks=pytest.mark.long)
        for case in (
            ("gemma", ONE_CHIP), ("every_cache", ONE_CHIP), ("compressed", ONE_CHIP),
            ("llama", Mesh(data=2, model=2)), ("llama", Mesh(data=2)),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("model, mesh", CASES, ids=str)
def test_tokens_are_those_of_one_engine(model, mesh):
    made = getattr(fakes, model)()
    count = 100 if (model, mesh) == ("llama", ONE_CHIP) else 36
    aborts = range(0, count, 7)
    together = _make(made, TOGETHER, mesh)
    apart = _make(made, Prefill(chips=mesh.model), mesh)
    expected = _serve(together, count, aborts)
    send = apart._prefill.send

    def send_without_the_host(schedule):
        with pytest.MonkeyPatch.context() as patch:  # what JAX copies to the host goes through this
            patch.setattr(
                type(jnp.zeros(1)), "_value", property(lambda array: pytest.fail("copied"))
            )
            send(schedule)

    apart.model_runner.before_admit = send_without_the_host
    found = _serve(apart, count, aborts)
    _assert_same(found, expected, aborts)
    prefilled = apart.scheduler.counters.num_prefilled_tokens
    assert apart._prefill.sent_bytes
    assert prefilled < 0.1 * apart._prefill.scheduler.counters.num_prefilled_tokens
    assert not apart._prefill.scheduler.has_work


@pytest.mark.parametrize("windows", [False, pytest.param(True, marks=pytest.mark.long)])
def test_what_moves_is_what_the_plan_says(windows):
    model, length = fakes.gemma() if windows else fakes.llama(), 8 * 20
    engine = _make(model, Prefill(chips=1))
    engine.generate(fakes.prompts([length + 1], _VOCAB), fakes.greedy(1))
    predicted = Deployment(model, catalog.get("h100")).cache_bytes(length)
    # A window of 20 tokens is in 3 pages of 8.
    assert engine._prefill.sent_bytes == pytest.approx(predicted, rel=0.1 if windows else 1e-9)


@pytest.mark.parametrize("keeps_pages", [False, True])
def test_both_sides_sleep_and_change_weights(keeps_pages):
    model = fakes.llama()
    prompts = fakes.prompts([40, 3, 21, 65, 12, 30, 55, 9], _VOCAB, seed=4)
    params = [fakes.greedy(9 + i, ignore_eos=True) for i in range(len(prompts))]
    found = []
    for prefill in (TOGETHER, Prefill(chips=1)):
        engine = _make(model, prefill)
        ids = [engine.add_request(*each) for each in zip(prompts, params, strict=True)]
        groups = [engine._requests[id].group for id in ids]
        for _ in range(5):
            engine.step()
        engine.sleep(keeps_pages=keeps_pages)
        if prefill.chips:
            assert engine._prefill.model_runner.params == {}
        engine.wake()
        for _ in range(3):
            engine.step()
        engine.rebuild()  # as after a failed step
        fakes.drain(engine)
        found.append([group.completion().token_ids for group in groups])
        other = jax.tree.map(lambda leaf: leaf * 1.5, fakes.real_params(model))
        engine.update_params(other)
        answers = engine.generate(prompts, params)
        assert {answer.params_versions for answer in answers} == {(1,)}
        found[-1] += [answer.token_ids for answer in answers]
    assert found[0] == found[1]


@pytest.mark.parametrize("keeps_pages", [False, True])
def test_both_sides_sleep_or_neither(keeps_pages, monkeypatch):
    """The worker's part fails, of `sleep` and of `wake`."""
    engine = _make(fakes.llama(), Prefill(chips=1))
    prompts = fakes.prompts([40, 21], _VOCAB, seed=8)
    expected = engine.generate(prompts, fakes.greedy(5))
    runners = engine.model_runner, engine._prefill.model_runner
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(runners[1], "copies", Mock(side_effect=MemoryError))
        engine.sleep(keeps_pages=keeps_pages)
    assert all(runner.params for runner in runners)
    assert engine.generate(prompts, fakes.greedy(5))[0].token_ids == expected[0].token_ids
    engine.sleep(keeps_pages=keeps_pages)
    for owner, part in ((engine._prefill, "params_of"), (runners[1], "restore")):
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(owner, part, Mock(side_effect=MemoryError))
            engine.wake()
        assert not any(runner.params or runner.cache for runner in runners)
        with pytest.raises(InputError, match="the engine sleeps"):
            engine.step()
    engine.wake()
    answers = engine.generate(prompts, fakes.greedy(5))
    assert [each.token_ids for each in answers] == [each.token_ids for each in expected]


def test_a_step_that_fails_loses_no_scores(monkeypatch):
    """Those of a step that the same call has committed before."""
    prompts = fakes.prompts([20, 60], _VOCAB, seed=9)
    expected = _make(fakes.llama(), TOGETHER).score(prompts)
    engine = _make(fakes.llama(), Prefill(chips=1))
    engine.add_request([5], fakes.greedy(60, ignore_eos=True))  # decodes: no prompt is waited for
    engine.step()
    steps, sizes = engine._prefill._leaders._steps, []
    fetch = steps.fetch

    def fail_after_another():
        sizes.append(len(steps))
        if sizes == [2, 1]:
            raise jax.errors.JaxRuntimeError("lost")
        return fetch()

    monkeypatch.setattr(steps, "fetch", fail_after_another)
    monkeypatch.setattr(type(steps), "is_done", property(lambda own: sizes or len(own) == 2))
    found = engine.score(prompts)
    assert sizes[:2] == [2, 1]
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_little_room_on_either_side(preemption):
    """Prompts wait for room to decode, and sequences that decode are preempted."""
    model = fakes.llama()
    prompts = fakes.prompts([60, 44, 21, 65, 52, 30, 55, 39], _VOCAB, seed=5)
    params = [fakes.greedy(30, ignore_eos=True)] * len(prompts)
    expected = _make(model, TOGETHER).generate(prompts, params)
    small = _make(model, _LITTLE, cache_bytes=60_000, preemption=preemption)
    ids = [small.add_request(*request) for request in zip(prompts, params, strict=True)]
    groups = [small._requests[id].group for id in ids]
    preempted = 0

    def disturb():
        nonlocal preempted
        if small.scheduler.counters.num_steps % 9 == 8 and len(small.scheduler.running) > 1:
            small.scheduler.preempt(small.scheduler.running[-1])
            preempted += 1

    fakes.drain(small, disturb)
    assert preempted
    assert [g.completion().token_ids for g in groups] == [a.token_ids for a in expected]


def test_a_prompt_that_is_too_long_for_the_other_chips_is_computed_here():
    engine = _make(fakes.llama(), _LITTLE, cache_bytes=60_000)
    prompt = fakes.prompts([150], _VOCAB, seed=6)
    expected = _make(fakes.llama(), TOGETHER).generate(prompt, fakes.greedy(5))
    assert engine.generate(prompt, fakes.greedy(5))[0].token_ids == expected[0].token_ids
    assert not engine._prefill.sent_bytes


def test_a_fault_in_a_prompt_ends_its_request_alone():
    model = fakes.llama()
    params = fakes.real_params(model)
    bad = 77
    table = params["embed"]["table"].at[bad].set(jnp.nan)
    engine = fakes.engine(model, params | {"embed": {"table": table}}, "one",
                          prefill=Prefill(chips=1), tokenizer=Bytes(), **_SIZES)  # fmt: skip
    good, faulty, *_ = fakes.prompts([20, 30], bad, seed=7)
    answers = engine.generate([faulty[:9] + [bad] + faulty[9:], good], fakes.greedy(4))
    assert answers[0].finish_reason == "error"
    expected = _make(model, TOGETHER).generate([good], fakes.greedy(4))
    assert answers[1].token_ids == expected[0].token_ids


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"chips": -1}, "prefill.chips=-1: must be at least 0"),
        ({"chips": 2}, "prefill.chips=2: must equal mesh.model .1."),
        ({"chips": 2, "first_chip": 1, "mesh": Mesh(model=2)},
         "prefill.first_chip=1: must be at least 2, because chips 0 to 1 decode"),
        ({"host_bytes": -1}, "prefill.host_bytes=-1: must be at least 0"),
        ({"cache_bytes": 9}, "chips of prefill: engine.cache.cache_bytes=9: must be at least"),
        ({"max_seqs": 0}, "chips of prefill: engine.max_seqs=0: must be from 1"),
        ({"engine": EngineConfig.of(policy="static")}, "policy=static: must be continuous"),
        ({"model": fakes.fake_model()}, "needs a model whose whole context is in pages"),
        ({"hosts": "a:1"}, "prefill.hosts=a:1: goes without prefill.chips"),
        ({"chips": 0, "hosts": "a:1,b"}, "hosts=a:1,b: 'b' is no address; write host:port, with a"),
        ({"chips": 0, "hosts": "a:99999"}, "'a:99999' is no address; .* from 1 to 65535"),
        ({"chips": 0, "hosts": "a..b:8101"}, "'a..b:8101' is no address; write host:port"),
        ({"chips": 0, "hosts": f"{64 * 'a'}.b:1"}, "is no address; write host:port"),
        ({"chips": 0, "hosts": "a:\u0661"}, "is no address; write host:port"),
        ({"chips": 0, "hosts": ""}, "prefill.hosts=: '' is no address"),
        ({"chips": 0, "hosts": "a:1, a:1"}, "names an address twice; name each once"),
        ({"chips": 0, "hosts": "a:1", "max_seqs": 0}, "processes of prefill: engine.max_seqs=0"),
        ({"chips": 0, "hosts": "a:1", "mesh": Mesh(context=2)}, "goes without mesh.context .2."),
        ({"chips": 0, "hosts": "a:1", "model": fakes.fake_model()}, "hosts=a:1: needs a model"),
        ({"chips": 0, "hosts": "a:1", "engine": EngineConfig.of(policy="static")},
         "must be continuous where prefill.hosts are set"),
        ({"chips": 0, "hosts": "a:1", "engine": EngineConfig.of(prompt_budgets=True)},
         "prompt_budgets: it goes without prefill.hosts"),
        ({"bandwidth": 0.0}, "prefill.bandwidth=0: must be above 0, in bytes a second"),
    ],
)  # fmt: skip
def test_chips_that_cannot_prefill_are_refused(settings, message):
    with pytest.raises(InputError, match=message) as refused:
        own = {k: settings.pop(k) for k in ("model", "engine", "mesh") if k in settings}
        Config(**{"model": fakes.llama()} | own, prefill=Prefill(**{"chips": 1} | settings))
    assert "\n" not in str(refused.value)


def test_chips_that_are_not_there_are_refused_before_weights_are_read():
    config = Config(fakes.llama(), prefill=Prefill(chips=1, first_chip=8))
    with pytest.raises(InputError, match="prefill takes chips 8 to 8, here are 8"):
        Engine(config, lambda: pytest.fail("weights are read"))
