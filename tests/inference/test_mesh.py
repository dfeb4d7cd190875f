"""One step on several chips gives what one chip gives."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

from configs.mesh import Mesh
from inference.request import SamplingParams
from inference.scheduling.step_shapes import StepShape
from tests import fakes, newer_fakes

pytestmark = pytest.mark.quick_code

_SIZES = dict(max_seqs=4, decode_rows=(4,), page_tokens=8, chunk_tokens=16, prefill_chunks=(2,),
              cache_bytes=1 << 20)  # fmt: skip


_EVERY_CACHE = fakes.every_cache().pattern  # all at once, it magnifies a rounding to 6e-5


def _shared(layers):
    """The second reads the cache of the first."""
    first, second = layers
    return first, dataclasses.replace(second, mixer=dataclasses.replace(second.mixer, owner=0))


_MODELS = {
    **{kind: fakes.of_kind(kind) for kind in fakes.KINDS},
    **{f"{kind}, 3 KV heads": fakes.of_kind(kind, 24, 3) for kind in fakes.KINDS},
    "uneven": fakes.llama(),
    "uneven windows": fakes.gemma(),
    "quirks": fakes.quirks(),
    "norm of all heads": fakes.llama(num_heads=8, num_kv_heads=4, qk_norm="all"),
    "deepseek": fakes.deepseek(),
    "gpt-oss": fakes.gpt_oss(),
    "gemma4": fakes.gemma4(),
    "every cache": fakes.every_cache(),
    "four sights": fakes.every_cache(num_layers=4, pattern=_EVERY_CACHE[:4]),
    "shared latents": fakes.every_cache(num_layers=2, pattern=_shared(_EVERY_CACHE[6:])),
    "uneven, int8": fakes.llama(cache_format="int8"),
    "deepseek, fp8": fakes.deepseek(cache_format="fp8"),
    "indexer": newer_fakes.shared_indexer(),
    "pages": fakes.llama(token_budget=16),
    "compressed": newer_fakes.deepseek_v4(),
    "delta": fakes.delta(),
    "hybrid": fakes.hybrid(),
    "jamba": fakes.jamba(),
    "linear": fakes.linear(),
    "side by side": fakes.side_by_side(),
}
_MESHES = Mesh(model=2), Mesh(model=8), Mesh(data=2, model=4), Mesh(data=8)
_QUICK = [
    ("full", Mesh(model=2)), ("shared", Mesh(model=8)),
    ("windows", Mesh(data=8)), ("full, 3 KV heads", Mesh(model=8)),
    ("uneven windows", Mesh(data=2, model=3)), ("deepseek", Mesh(model=2, expert=2)),
    ("gpt-oss", Mesh(data=2, expert=2)), ("pages", Mesh(model=2)),
    ("uneven, int8", Mesh(model=3)), ("compressed", Mesh(data=2, model=2)),
    ("hybrid", Mesh(model=2, expert=2)), ("side by side", Mesh(model=2)),
    ("full", Mesh(context=4)), ("windows", Mesh(context=2, data=2)),
    ("gpt-oss", Mesh(context=2, expert=2)), ("uneven, int8", Mesh(context=2)),
    ("deepseek", Mesh(context=2, model=2)),
]  # fmt: skip
_ALL = [
    *((kind, mesh) for kind in fakes.KINDS for mesh in _MESHES),
    *((f"{kind}, 3 KV heads", Mesh(model=8)) for kind in fakes.KINDS),
    *(("uneven, int8", mesh) for mesh in (Mesh(model=2), Mesh(data=2, model=2))),
    ("deepseek, fp8", Mesh(model=2)),
    ("uneven", Mesh(model=3)), ("pages", Mesh(model=2)), ("pages", Mesh(data=2, model=4)),
    ("quirks", Mesh(model=2)), ("every cache", Mesh(model=2)),
    ("every cache", Mesh(data=2, model=4)), ("norm of all heads", Mesh(model=4)),
    *((name, mesh) for name in ("deepseek", "gpt-oss", "indexer") for mesh in (
        Mesh(model=2), Mesh(model=3), Mesh(expert=2), Mesh(expert=4), Mesh(data=2, expert=2),
        Mesh(model=2, expert=2), Mesh(data=2, model=2, expert=2))),
    *(("delta", mesh) for mesh in (
        Mesh(model=2), Mesh(model=3), Mesh(model=4), Mesh(data=2, model=2))),
    *(("hybrid", mesh) for mesh in (Mesh(model=2), Mesh(data=2, expert=2))),
    *((name, mesh) for name in ("linear", "side by side") for mesh in (
        Mesh(model=2), Mesh(data=2, model=4))),
    *(("gemma4", mesh) for mesh in (
        Mesh(model=2), Mesh(model=3), Mesh(model=2, expert=2), Mesh(data=2, model=4))),
    *((name, mesh) for name in (*fakes.KINDS, "uneven windows", "deepseek", "gpt-oss", "gemma4",
        "four sights", "shared latents", "hybrid", "uneven, int8", "side by side", "quirks")
        for mesh in (
            Mesh(context=2), Mesh(context=4), Mesh(context=2, model=2), Mesh(context=2, data=2))),
    *((name, Mesh(context=2, expert=2)) for name in ("deepseek", "gpt-oss", "hybrid")),
    ("deepseek", Mesh(context=2, model=2, expert=2)), ("deepseek, fp8", Mesh(context=4)),
    *(("jamba", mesh) for mesh in (Mesh(model=2), Mesh(model=3), Mesh(data=2, model=2, expert=2))),
]  # fmt: skip
_LONG = [pytest.param(*case, marks=pytest.mark.long) for case in _ALL if case not in _QUICK]


def _requests():
    """Greedy, and drawn with each filter."""
    kinds = [
        {}, {"temperature": 1.0, "epsilon_cutoff": 0.01}, {"temperature": 0.7, "top_p": 0.9},
        {"allowed_token_ids": (9, 70, 128)}, {"logit_bias": {130: 9.0}},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "epsilon_cutoff": 0.05},
    ]  # fmt: skip
    prompts = fakes.prompts([5, 40, 17, 3, 26, 9], 131, seed=2)
    return prompts, [SamplingParams(max_new_tokens=9, ignore_eos=True, seed=i, **kind)
                     for i, kind in enumerate(kinds)]  # fmt: skip


@functools.cache
def _run(name, mesh):
    """Answers and scores, of greedy requests alone but where a few models say how chips draw:
    what layers do matters to no draw.
    """
    draws = name in ("full", "uneven", "uneven windows", "deepseek")
    engine = fakes.engine(_MODELS[name], None, "one", draws, mesh, top_logprobs=3, **_SIZES)
    prompts, params = _requests()
    if not draws:
        params = [dataclasses.replace(each, temperature=0.0) for each in params]
    return engine.generate(prompts, params), engine.score(fakes.prompts([60, 33], 131, seed=3))


@pytest.mark.parametrize("name, mesh", _QUICK + _LONG, ids=lambda it: str(it).replace(",", " "))
def test_tokens_and_scores_are_those_of_one_chip(name, mesh):
    (expected, scores), (found, other) = _run(name, Mesh()), _run(name, mesh)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    # An element of few bits may be rounded the other way.
    bound = 1e-5 if _MODELS[name].cache_format is None else 1e-2
    close = functools.partial(np.testing.assert_allclose, rtol=bound, atol=bound)
    for a, b in zip(found, expected, strict=True):
        close(a.logprobs, b.logprobs)
    for a, b in zip(other, scores, strict=True):
        close(a.logprobs[1:], b.logprobs[1:])
        assert [set(x) for x in a.top_logprobs[1:]] == [set(x) for x in b.top_logprobs[1:]]


def _disturbed(mesh, preemption, name="uneven"):
    """(tokens of every answer, scores of a text) of an engine whose requests share a prefix, and
    fork, branch, end early and are preempted, a step ahead of the device.
    """
    shared, scored = fakes.prompts([30, 25], 131, seed=5)
    prompts = [shared + more for more in fakes.prompts([3, 9, 1, 6], 131, seed=6)]
    params = [SamplingParams(max_new_tokens=12, ignore_eos=True, seed=7, **more) for more in (
        {"temperature": 1.0}, {"n": 3, "temperature": 0.9}, {"beam_width": 2}, {})]  # fmt: skip
    # Latent vectors are the same on all chips along `model`.
    room = {"uneven": 27_000 // mesh.model, "deepseek": 20_000, "gpt-oss": 60_000 // mesh.model,
            "uneven, int8": 8_500 // mesh.model}  # fmt: skip
    sizes = _SIZES | {"cache_bytes": room[name] // mesh.context, "top_logprobs": 2}
    sizes["page_tokens"] //= mesh.context
    engine = fakes.engine(
        _MODELS[name], None, "one", mesh=mesh, preemption=preemption, **sizes
    )  # fmt: skip
    for prompt in (shared, *fakes.prompts([80, 80], 131, seed=8)):  # the last evict the first
        engine.generate([prompt], SamplingParams(max_new_tokens=1))
    ids = [engine.add_request(*each) for each in zip(prompts, params, strict=True)]
    aborted = engine.add_request(shared, fakes.greedy(40))
    ids.append(engine.add_request(scored, SamplingParams(max_new_tokens=0)))
    groups = [engine._requests[id].group for id in ids]
    steps = 0

    def disturb():
        nonlocal steps
        steps += 1
        if steps == 4:
            groups.append(engine._requests[engine.fork(ids[0], fakes.greedy(20))].group)
        if steps == 7:
            engine.abort(aborted)
        if steps % 3 == 0 and engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[-1])

    fakes.drain(engine, disturb)
    counters = engine.scheduler.counters
    assert counters.num_preemptions and counters.num_cached_tokens
    assert bool(counters.num_restored_pages) == (preemption == "swap")
    completions = [group.completion() for group in groups]
    answers = [[each.token_ids for each in (one, *one.others)] for one in completions]
    return answers, groups[4].sequences[0].results.prompt_logprobs


@pytest.mark.parametrize("name, preemption", [
    ("uneven", "recompute"), ("uneven", "swap"),
    pytest.param("deepseek", "recompute", marks=pytest.mark.long),
    pytest.param("deepseek", "swap", marks=pytest.mark.long),
    pytest.param("uneven, int8", "recompute", marks=pytest.mark.long),
    pytest.param("uneven, int8", "swap", marks=pytest.mark.long),
    pytest.param("gpt-oss", "recompute", marks=pytest.mark.long),
    pytest.param("gpt-oss", "swap", marks=pytest.mark.long),
])  # fmt: skip
def test_an_engine_on_chips_keeps_its_contract(name, preemption):
    expected, scores = _disturbed(Mesh(), preemption, name)
    others = Mesh(data=2, model=2) if "uneven" in name else Mesh(model=2, expert=2)
    for mesh in (Mesh(model=2), others, Mesh(context=2)):
        answers, found = _disturbed(mesh, preemption, name)
        assert answers == expected
        bound = 1e-5 if "," not in name else 1e-2
        np.testing.assert_allclose(found, scores, rtol=bound, atol=bound)


def test_a_chain_of_drafts_goes_with_divided_tokens():
    prompts = [[5, 6, 7, 8] * 6, [9, 1] * 10, fakes.prompts([30], 131, seed=4)[0]]
    tokens = [
        fakes.engine(
            _MODELS["full"], None, "one", mesh=mesh, **_SIZES, **drafts
        ).generate(prompts, fakes.greedy(20))
        for mesh, drafts in (
            (Mesh(), {}), (Mesh(context=2), {"proposer": "ngram", "num_drafts": 3}),
        )
    ]  # fmt: skip
    assert [a.token_ids for a in tokens[0]] == [a.token_ids for a in tokens[1]]


def test_a_step_reads_no_input_without_elements():
    """At one XLA crashes on a mesh (jaxlib 0.11.2), even at a constant of JAX's own."""
    engine = fakes.engine(
        _MODELS["full"], None, "one", mesh=Mesh(model=2), proposer="ngram", num_drafts=3,
        penalties=True, embeddings=True, top_logprobs=3, **_SIZES,
    )  # fmt: skip
    lowered = engine.model_runner.executables._lower_step(StepShape((4, 4), (0, 0)))
    [on_chips] = [text for text in lowered.as_text().split("func.func") if "sdy.manual" in text]
    inputs, body = on_chips.split("sdy.manual_computation")[1].split("\n", 1)
    empty = re.findall(r"(%arg\d+): tensor<(?:0x|\w+x0x)", inputs)
    assert empty and not [name for name in empty if re.search(rf"{name}\b", body)]


def test_a_chip_holds_what_its_model_declares():
    engine = fakes.engine(_MODELS["full"], None, "one", mesh=Mesh(model=2), **_SIZES)
    config, runner = engine.config, engine.model_runner
    per_chip = [
        sum(shard.data.nbytes for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards
            if shard.device == device)
        for tree in (runner.params, runner.cache) for device in jax.devices()[:2]
    ]  # fmt: skip
    del per_chip[::2]
    assert per_chip[1] == config.pool_bytes
    compiled = runner.compiled(StepShape((4, 1), (2, 16), scored=True))
    arguments = compiled.memory_analysis().argument_size_in_bytes
    assert arguments >= sum(per_chip)


def test_weights_are_exchanged_on_chips():
    model = _MODELS["full"]
    other = jax.tree.map(lambda leaf: leaf * 1.5, fakes.real_params(model))
    expected = fakes.engine(model, other, "one", **_SIZES).generate([[1, 2, 3]], fakes.greedy(9))
    engine = fakes.engine(model, None, "one", mesh=Mesh(model=2), **_SIZES)
    assert engine.generate([[1, 2, 3]], fakes.greedy(9))[0].token_ids != expected[0].token_ids
    engine.update_params(other)
    assert engine.generate([[1, 2, 3]], fakes.greedy(9))[0].token_ids == expected[0].token_ids
