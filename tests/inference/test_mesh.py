"""One step on several chips gives what one chip gives."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from configs.mesh import Mesh
from configs.model import LayerSpec
from inference.planner.compiled import program
from inference.request import SamplingParams
from inference.scheduling.step_shapes import StepShape
from tests import fakes

pytestmark = pytest.mark.quick_code

_SIZES = dict(max_seqs=4, decode_rows=(4,), page_tokens=8, chunk_tokens=16, prefill_chunks=(2,),
              cache_bytes=1 << 20)  # fmt: skip


def _sharing():
    """Two layers that keep keys and values, and one that reads the first's."""
    model = fakes.llama(num_kv_heads=2, num_heads=4)
    own = model.pattern[0].mixer
    reader = dataclasses.replace(own, owner=0)
    pattern = tuple(LayerSpec(mixer, model.pattern[0].ffn) for mixer in (own, own, reader))
    return dataclasses.replace(model, pattern=pattern, num_layers=3)


def _normed():
    return fakes.llama(num_heads=8, num_kv_heads=4, qk_norm="all")


_MODELS = {
    "full": fakes.llama(),
    "windows": fakes.gemma(),
    "shared": _sharing(),
    "quirks": fakes.quirks(),
    "norm of all heads": _normed(),
    "3 KV heads": fakes.llama(num_heads=24, num_kv_heads=3),
    "8 KV heads": fakes.llama(num_heads=8, num_kv_heads=8),
}
_CASES = [
    ("full", 2), ("full", 3), ("windows", 2), ("windows", 3), ("shared", 2), ("quirks", 2),
    ("norm of all heads", 2), ("norm of all heads", 4), ("3 KV heads", 8), ("8 KV heads", 8),
]  # fmt: skip


def _requests():
    """Greedy, and drawn with each filter."""
    kinds = [
        {}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"allowed_ids": (9, 70, 128)},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "min_p": 0.01}, {"logit_bias": {130: 9.0}},
    ]  # fmt: skip
    prompts = fakes.prompts([5, 40, 17, 3, 26, 9], 131, seed=2)
    return prompts, [SamplingParams(max_new_tokens=9, ignore_eos=True, seed=i, **kind)
                     for i, kind in enumerate(kinds)]  # fmt: skip


def _run(name, mesh):
    engine = fakes.engine(_MODELS[name], None, "one", mesh=mesh, top_logprobs=3, **_SIZES)
    return engine.generate(*_requests()), engine.score(fakes.prompts([60, 33], 131, seed=3))


@pytest.mark.parametrize("name, chips", _CASES)
def test_tokens_and_scores_are_those_of_one_chip(name, chips):
    (expected, scores), (found, other) = _run(name, Mesh()), _run(name, Mesh(model=chips))
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
    for a, b in zip(other, scores, strict=True):
        np.testing.assert_allclose(a.logprobs[1:], b.logprobs[1:], atol=1e-4)
        assert [set(x) for x in a.top_logprobs[1:]] == [set(x) for x in b.top_logprobs[1:]]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_an_engine_on_chips_keeps_its_contract(preemption):
    """Prefix hits, preemption, forks, several answers and beams, beside each other."""
    shared = fakes.prompts([30], 131, seed=5)[0]
    prompts = [shared + more for more in fakes.prompts([3, 9, 1, 6], 131, seed=6)]
    params = [SamplingParams(max_new_tokens=12, ignore_eos=True, seed=7, **more) for more in (
        {"temperature": 1.0}, {"n": 3, "temperature": 0.9}, {"beam_width": 2}, {})]  # fmt: skip
    found = []
    for mesh in (Mesh(), Mesh(model=2)):
        sizes = _SIZES | {"cache_bytes": 48_000 // mesh.model, "top_logprobs": 2}
        engine = fakes.engine(
            _MODELS["full"], None, "one", mesh=mesh, preemption=preemption, **sizes
        )
        engine.generate([shared], SamplingParams(max_new_tokens=1))
        ids = [engine.add_request(*each) for each in zip(prompts, params, strict=True)]
        groups = [engine._requests[id].group for id in ids]
        steps = 0

        def disturb(engine=engine):
            nonlocal steps
            steps += 1
            if steps % 5 == 0 and engine.scheduler.running:
                engine.scheduler.preempt(engine.scheduler.running[-1])

        fakes.drain(engine, disturb)
        answers = [[s.token_ids for s in [g.completion(), *g.completion().others]] for g in groups]
        counters = engine.scheduler.counters
        assert counters.num_preemptions and counters.num_cached_tokens
        found.append(answers)
    assert found[0] == found[1]


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


@pytest.mark.parametrize("name", ["full", "windows", "shared"])
def test_two_sums_a_layer_are_exchanged(name):
    """And one of the embedding; what sampling needs is small."""
    model = _MODELS[name]
    engine = fakes.engine(model, None, "one", draws=False, mesh=Mesh(model=2), **_SIZES)
    shape = engine.scheduler.shapes[0]
    text = engine.model_runner.compiled(shape).as_text()
    tokens = shape.num_tokens
    sums = re.findall(r"= f32\[(\d+),(\d+)\]\S* all-reduce\(", text)
    assert len(sums) == 1 + 2 * model.num_layers
    assert set(sums) == {(str(tokens), str(model.width))}
    found = program.read(text)
    assert set(found.collectives) == {"all-reduce", "all-gather"}
    rows = 2 * shape.num_logits + shape.prefill[1]  # as they are, edited, and a block of scores
    assert found.collective_bytes["all-gather"] == rows * 2 * 3 * 4  # best value, id, log-sum-exp
