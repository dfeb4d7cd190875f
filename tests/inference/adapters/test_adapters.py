"""Requests choose adapters: each gets what the model with its adapter merged would say."""

import dataclasses
import gc
import weakref

import chex
import jax
import numpy as np
import pytest

from configs.errors import InputError
from configs.settings.adapters import EXTRAS, AdapterConfig
from inference.adapters import peft_directory
from inference.runtime import step
from inference.runtime.adapter_stacks import AdapterStacks
from tests import fakes
from tests.inference.adapters import peft_files

pytestmark = pytest.mark.quick_code

_SIZES = dict(max_seqs=4, decode_rows=(4,), page_tokens=8, chunk_tokens=16, prefill_chunks=(2,),
              cache_bytes=1 << 20)  # fmt: skip
_RANKS = {"small": 1, "middle": 5, "large": 8}


def _greedy(n, adapter=None):
    return dataclasses.replace(fakes.greedy(n), adapter=adapter)


@pytest.mark.parametrize("name, extras", [
    ("llama", ()), ("gemma", ()), ("gemma", ("vocab",)), ("deepseek", EXTRAS),
])  # fmt: skip
def test_rows_with_other_adapters_and_none_get_what_merged_weights_give(tmp_path, name, extras):
    model = getattr(fakes, name)()
    engine = fakes.engine(model, None, "one", False, slots=3, rank=8, extras=extras, **_SIZES)
    plain = fakes.real_params(model)
    weights = {None: plain}
    for seed, (name, rank) in enumerate(_RANKS.items()):
        directory = peft_files.write(tmp_path / name, model, rank, seed, extras=extras)
        engine.adapters.load(name, directory)
        loaded = peft_directory.read(directory, model, engine.config.engine.adapters)
        weights[name] = peft_files.merged(model, plain, loaded)
    prompts = fakes.prompts([5, 40, 17, 3], model.vocab_size, seed=2)
    answers = engine.generate(prompts, [_greedy(12, name) for name in weights])
    for (name, params), prompt, answer in zip(weights.items(), prompts, answers, strict=True):
        alone = fakes.engine(model, params, "one", False, **_SIZES)
        expected = alone.generate([prompt], fakes.greedy(12))[0]
        assert answer.token_ids == expected.token_ids, name
        np.testing.assert_allclose(answer.logprobs, expected.logprobs, atol=1e-4)
    texts = [tuple(answer.token_ids) for answer in engine.generate(
        [prompts[0]] * 4, [_greedy(12, name) for name in weights])]  # fmt: skip
    assert len(set(texts)) == 4


def test_the_uses_of_a_tied_table_have_factors_of_their_own(tmp_path):
    """As `peft` has it: the embedding's change no logits, and the head's no inputs."""
    model = fakes.llama(tied=True)
    plain = fakes.real_params(model)
    apart = plain | {"head": {"table": plain["embed"]["table"]}}
    untied = dataclasses.replace(model, tied=False)
    engine = fakes.engine(model, plain, "one", False, slots=1, extras=("vocab",), **_SIZES)
    [prompt] = fakes.prompts([21], model.vocab_size)
    texts = set()
    for modules in ("embed_tokens", "lm_head", ("embed_tokens", "lm_head")):
        where = peft_files.write(tmp_path / "one", model, modules=modules, extras=["vocab"])
        engine.adapters.load("one", where)
        [answer] = engine.generate([prompt], [_greedy(8, "one")])
        loaded = peft_directory.read(where, model, engine.config.engine.adapters)
        alone = fakes.engine(
            untied, peft_files.merged(untied, apart, loaded), "one", False, **_SIZES
        )
        [expected] = alone.generate([prompt], fakes.greedy(8))
        assert answer.token_ids == expected.token_ids
        np.testing.assert_allclose(answer.logprobs, expected.logprobs, atol=1e-4)
        texts.add(tuple(answer.token_ids))
    assert len(texts) > 1


def _loaded(directory, model, names, rank=8, engine=None, **settings):
    """An engine with adapters of these names, each other than the last."""
    if engine is None:
        engine = fakes.engine(model, None, "one", False, rank=rank, **_SIZES, **settings)
    for seed, name in enumerate(names):
        where = peft_files.write(directory / name, model, 1 + seed % rank, seed)
        engine.adapters.load(name, where)
    return engine


def test_no_bit_of_a_row_depends_on_the_adapters_of_others(tmp_path):
    """Logits are compared by their sums, log-probabilities."""
    names = [f"adapter-{n}" for n in range(8)]
    engine = _loaded(tmp_path, fakes.llama(), names, slots=8)
    prompts = fakes.prompts([5, 40, 17, 3, 26, 9, 12, 31], engine.config.model.vocab_size, seed=2)
    params = [_greedy(8, name) for name in names]
    together = engine.generate(prompts, params)
    for prompt, one, expected in zip(prompts, params, together, strict=True):
        engine.rebuild()
        [alone] = engine.generate([prompt], [one])
        assert (alone.token_ids, alone.logprobs) == (expected.token_ids, expected.logprobs)


def test_a_few_slots_serve_many_adapters_without_compiling_again(tmp_path, monkeypatch):
    model, names = fakes.llama(), [f"adapter-{n}" for n in range(7)]
    generator = np.random.default_rng(0)
    chosen = [[None, *names][n] for n in generator.integers(0, 8, 40)]
    prompts = fakes.prompts(generator.integers(3, 30, 40), model.vocab_size, seed=2)
    params = [_greedy(5, name) for name in chosen]
    expected = _loaded(tmp_path, model, names, slots=7).generate(prompts, params)
    engine = _loaded(tmp_path, model, names, slots=2)
    engine.warm_up()
    monkeypatch.setattr(step, "step", chex.assert_max_traces(step.step, 0))
    ids = [engine.add_request(*request) for request in zip(prompts, params, strict=True)]
    sequences = [fakes.sequence_of(engine, id) for id in ids]
    fakes.drain_disturbed(engine, preempt_every=7, restart_every=23)
    assert [s.output_tokens for s in sequences] == [answer.token_ids for answer in expected]


def test_each_of_64_adapters_in_one_batch_is_as_if_alone(tmp_path):
    model, names = fakes.llama(), [f"adapter-{n}" for n in range(64)]
    sizes = _SIZES | {"max_seqs": 64, "decode_rows": (1, 64), "cache_bytes": 1 << 22}
    engine = fakes.engine(model, None, "one", False, slots=64, rank=8, **sizes)
    _loaded(tmp_path, model, names, engine=engine)
    prompts = fakes.prompts([9] * 64, model.vocab_size, seed=2)
    params = [_greedy(4, name) for name in names]
    together = engine.generate(prompts, params)
    engine.rebuild()  # nothing is cached
    for prompt, one, expected in zip(prompts, params, together, strict=True):
        [alone] = engine.generate([prompt], [one])
        assert (alone.token_ids, alone.logprobs) == (expected.token_ids, expected.logprobs)


def _random_traffic(engine, directory, num_requests, generator):
    """(prompt, adapter, answer) of requests that come while others are aborted or preempted, and
    adapters unloaded and loaded anew.
    """
    names, scheduler, sequences = engine.adapters.names, engine.scheduler, []
    lengths = generator.integers(3, 30, num_requests)
    prompts = fakes.prompts(lengths, engine.config.model.vocab_size, seed=2)
    chosen = generator.choice(names, num_requests).tolist()
    for prompt, name in zip(prompts, chosen, strict=True):
        if name not in engine.adapters.names:
            engine.adapters.load(name, directory / name)
        id = engine.add_request(prompt, _greedy(int(generator.integers(1, 8)), name))
        sequences.append(fakes.sequence_of(engine, id))
        if generator.random() < 0.2:
            engine.adapters.unload(name)  # the request goes on
        if generator.random() < 0.1:
            engine.abort(id)
        if scheduler.running and generator.random() < 0.1:
            scheduler.preempt(scheduler.running[generator.integers(len(scheduler.running))])
        engine.step()
        scheduler.check_integrity()
    fakes.drain(engine)
    assert not scheduler.running and not scheduler.waiting
    answers = [sequence.output_tokens for sequence in sequences]
    return list(zip(prompts, chosen, answers, strict=True))


@pytest.mark.parametrize("num_adapters, num_slots, num_requests", [
    (40, 4, 40),
    pytest.param(1000, 32, 1500, marks=[pytest.mark.long, pytest.mark.timeout(1200)]),
])  # fmt: skip
def test_random_traffic_over_many_adapters_leaves_nothing_behind(
    tmp_path, monkeypatch, num_adapters, num_slots, num_requests
):
    model, generator = fakes.llama(), np.random.default_rng(0)
    sizes = _SIZES | {"max_seqs": 8, "decode_rows": (8,)}
    engine = fakes.engine(model, None, "one", False, slots=num_slots, rank=4, **sizes)
    names = [f"adapter-{n}" for n in range(num_adapters)]
    _loaded(tmp_path, model, names, rank=4, engine=engine)
    engine.warm_up()
    monkeypatch.setattr(step, "step", chex.assert_max_traces(step.step, 0))
    traffic = _random_traffic(engine, tmp_path, num_requests, generator)
    assert sum(bool(answer) for _, _, answer in traffic) > 0.8 * num_requests
    for name in {*names} - {*engine.adapters.names}:
        engine.adapters.load(name, tmp_path / name)
    for nth in generator.choice(num_requests, 30, replace=False):
        prompt, name, answer = traffic[nth]
        engine.rebuild()  # nothing is cached
        [alone] = engine.generate([prompt], [_greedy(8, name)])
        assert alone.token_ids[: len(answer)] == answer
    weights = [weakref.ref(engine.adapters.find(name)) for name in names]
    for name in names:
        engine.adapters.unload(name)
    gc.collect()
    assert not any(reference() for reference in weights)
    assert not engine.scheduler._adapters._users


def test_who_waits_for_a_slot_is_overtaken_a_few_times(tmp_path):
    """Others go on meanwhile, but not for ever."""
    names = ["one", "other"]
    sizes = _SIZES | {"max_seqs": 2, "decode_rows": (2,)}
    engine = fakes.engine(
        fakes.llama(), None, "one", False, slots=1, rank=8, max_overtakes=3, **sizes
    )
    for seed, name in enumerate(names):
        engine.adapters.load(name, peft_files.write(tmp_path / name, engine.config.model, 2, seed))
    prompts = fakes.prompts([9] * 9, engine.config.model.vocab_size)
    kinds = ["one", "other", *[None] * 7]
    ids = [
        engine.add_request(prompt, _greedy(40 if name == "one" else 2, name))
        for prompt, name in zip(prompts, kinds, strict=True)
    ]
    sequences = [fakes.sequence_of(engine, id) for id in ids]
    fakes.drain(engine)
    order = sorted(range(9), key=lambda n: sequences[n].history.started_s)
    assert order == [0, 2, 3, 4, 1, 5, 6, 7, 8]


@pytest.mark.parametrize("loses", [False, True])
def test_a_copy_that_fails_is_made_again(tmp_path, monkeypatch, loses):
    """Before the stacks are donated, and with them lost."""
    engine = _loaded(tmp_path, fakes.llama(), ["one", "other"], slots=1)
    [prompt] = fakes.prompts([20], engine.config.model.vocab_size)
    expected = {name: engine.generate([prompt], [_greedy(5, name)])[0].token_ids
                for name in ("one", "other")}  # fmt: skip
    load, failed = AdapterStacks.load, []

    def fail_once(self, stacks, slot, adapter):
        if not failed:
            failed.append(slot)
            if loses:
                load(self, stacks, slot, adapter)
            raise RuntimeError("no memory")
        return load(self, stacks, slot, adapter)

    monkeypatch.setattr(AdapterStacks, "load", fail_once)
    id = engine.add_request(prompt, _greedy(5, "one"))
    sequence = fakes.sequence_of(engine, id)
    with pytest.raises(RuntimeError, match="no memory"):
        fakes.drain(engine)
    fakes.drain(engine)
    assert sequence.output_tokens == expected["one"]
    assert engine.generate([prompt], [_greedy(5, "other")])[0].token_ids == expected["other"]


def test_prefixes_are_shared_by_requests_of_one_adapter_only(tmp_path):
    engine = _loaded(tmp_path, fakes.llama(), ["one", "other"], slots=2)
    [prompt] = fakes.prompts([40], engine.config.model.vocab_size)

    def num_cached(name):
        before = engine.scheduler.counters.num_cached_tokens
        engine.generate([prompt], [_greedy(2, name)])
        return engine.scheduler.counters.num_cached_tokens - before

    assert [num_cached(name) for name in (None, "one", "other")] == [0, 0, 0]
    assert min(num_cached(name) for name in (None, "one", "other")) >= 32
    engine.adapters.load("twin", tmp_path / "one")
    assert num_cached("twin") >= 32
    engine.adapters.load("one", peft_files.write(tmp_path / "new", engine.config.model, 3, seed=9))
    assert num_cached("one") == 0


def test_a_conversation_is_retained_with_its_adapter(tmp_path, monkeypatch):
    engine, retained = _loaded(tmp_path, fakes.llama(), ["one", "other"], slots=2), []
    cache = engine.scheduler.shards[0].pages.prefix_cache
    monkeypatch.setattr(cache, "retain", lambda tokens, key: retained.append(key))
    for name in (None, "one", "other", "unloaded"):
        engine.retain([1, 2, 3], "salt", name)
    digests = [engine.adapters.find(name).digest for name in ("one", "other")]
    assert retained == [("salted", "salt", digest) for digest in (None, *digests, None)]


def test_samples_beams_and_forks_keep_their_adapter(tmp_path):
    engine = _loaded(tmp_path, fakes.llama(), ["one"], slots=1, top_logprobs=4)
    plain = fakes.real_params(engine.config.model)
    loaded = peft_directory.read(tmp_path / "one", engine.config.model, AdapterConfig(rank=8))
    values = peft_files.merged(engine.config.model, plain, loaded)
    merged = fakes.engine(engine.config.model, values, "one", False, top_logprobs=4, **_SIZES)
    [prompt] = fakes.prompts([21], engine.config.model.vocab_size, seed=4)

    def answers(engine, **more):
        kinds = (
            _greedy(6, **more), dataclasses.replace(_greedy(6, **more), n=3),
            dataclasses.replace(_greedy(6, **more), beam_width=3, n=3),
        )  # fmt: skip
        texts = [
            [each.token_ids for each in (answer, *answer.others)]
            for answer in engine.generate([prompt] * 3, kinds)
        ]
        id = engine.add_request(prompt, _greedy(9, **more))
        for _ in range(4):
            engine.step()
        child = fakes.sequence_of(engine, engine.fork(id, _greedy(6, **more)))
        fakes.drain(engine)
        return texts, child.output_tokens

    assert answers(engine, adapter="one") == answers(merged)


def test_adapters_outlive_sleep_new_weights_and_their_own_name(tmp_path):
    model = fakes.llama()
    engine = _loaded(tmp_path, model, ["one"], slots=1)
    [prompt] = fakes.prompts([21], model.vocab_size, seed=4)

    def answer(engine):
        return engine.generate([prompt], [_greedy(6, "one")])[0].token_ids

    expected = answer(engine)
    engine.sleep(keeps_pages=True)
    engine.wake()
    assert answer(engine) == expected
    engine.sleep(keeps_weights=False)
    engine.wake(fakes.real_params(model))
    assert answer(engine) == expected
    other = jax.tree.map(lambda leaf: leaf * 1.5, fakes.real_params(model))
    engine.update_params(other)
    assert answer(engine) != expected
    engine.update_params(fakes.real_params(model))
    id = engine.add_request(prompt, _greedy(6, "one"))
    sequence = fakes.sequence_of(engine, id)
    engine.step()
    engine.adapters.unload("one")
    engine.rebuild()
    fakes.drain(engine)
    assert sequence.output_tokens == expected
    with pytest.raises(InputError, match="no adapter 'one'; valid: none is loaded"):
        engine.generate([prompt], [_greedy(6, "one")])
