"""Every implementation of attention that runs on the device at hand, compiled and not interpreted,
against float64. Run by `make device`; decoding comes first.
"""

import functools

import jax
import numpy as np
import pytest

from configs.engine import ATTENTIONS, Config, EngineConfig
from inference.engine import Engine
from layers.kernels.attention import api, reference
from layers.kernels.attention.contract import Demand
from layers.kernels.device import target_device
from tests import fakes
from tests.layers import paged_case

pytestmark = pytest.mark.device

_BATCHES, _FEW_BATCHES = 500, 12  # of all cases together; of the reference, tested elsewhere
_DECODE = {  # (N, K), H, page tokens, query tokens, dtype, window, cap, sinks, masks
    "llama3-8b": ((32, 8), 128, 64, 1, "bfloat16", None, None, False, {}),
    "llama3-8b, large pages": ((32, 8), 128, 128, 1, "bfloat16", 200, None, False, {}),
    "one KV head": ((16, 1), 64, 64, 1, "float16", None, None, True, {}),
    "odd group, cap": ((9, 3), 64, 64, 1, "bfloat16", 90, 3.0, False, {}),
    "drafts": ((8, 2), 128, 64, 5, "bfloat16", 70, None, False, {}),
}
_OTHERS = {
    "a tree": ((4, 2), 64, 64, 8, "bfloat16", None, None, True, {"trees": True}),
    "a tree, window": ((4, 4), 128, 64, 16, "bfloat16", 5, None, False, {"trees": True}),
    "a canvas": ((4, 2), 64, 64, 40, "float16", None, None, False, {"canvases": True}),
    "a prompt": ((32, 8), 128, 64, 64, "bfloat16", None, None, False, {}),
    "wide heads": ((8, 4), 256, 64, 33, "bfloat16", 100, 50.0, False, {}),
}
_CASES = _DECODE | _OTHERS


@functools.cache
def _program(name, window, cap):
    attend = functools.partial(api.implementation(name).attend_pages, group=0)
    return jax.jit(functools.partial(attend, window=window, score_cap=cap))


def _check(name, case, seeds):
    heads, width, page_tokens, queries, dtype, window, cap, has_sinks, masks = _CASES[case]
    implementation = api.implementation(name)
    demand = Demand(*heads, width, page_tokens, dtype, False)
    if (reason := implementation.limit(demand, target_device())) is not None:
        pytest.skip(f"{name} {reason}")
    if implementation.layout is not reference.layout:
        pytest.skip(f"{name} has pages of its own layout")
    program = _program(name, window, cap)
    for seed in seeds:
        generator = np.random.default_rng(seed)
        lengths = (generator.integers(0, 500, 6) * (generator.random(6) < 0.9)).tolist()
        lengths[0] = int(generator.choice([1, page_tokens - 1, page_tokens, page_tokens + 1]))
        drawn = paged_case.Case(
            lengths, heads, page_tokens, queries, dtype, seed, width, width**-0.5, **masks
        )
        sinks_N = np.float32(generator.normal(size=heads[0]) * 3) if has_sinks else None
        found = np.asarray(program(*drawn.arguments, sinks_N=sinks_N))
        drawn.check(found, window, cap, sinks_N)
        again = np.asarray(program(*drawn.arguments, sinks_N=sinks_N))
        np.testing.assert_array_equal(again[drawn.valid_CW], found[drawn.valid_CW])


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("case", _DECODE)
def test_decoding(case, name):
    _check(name, case, range(2))


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("case", _OTHERS)
def test_other_rows(case, name):
    _check(name, case, range(2))


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("case", _CASES)
def test_500_random_batches(case, name):
    batches = _FEW_BATCHES if name == "reference" else _BATCHES
    _check(name, case, range(2, 2 + -(-batches // len(_CASES))))


@pytest.mark.parametrize("name", ATTENTIONS[1:])
def test_an_engine_scores_as_with_the_reference(name):
    """Prefill, scored in tiles, of prompts longer than pages, and the tokens decoded after it."""
    model = fakes.llama("bfloat16", num_heads=4, num_kv_heads=2, head_width=128, max_context=512)
    sizes = {"max_seqs": 4, "page_tokens": 128, "cache_bytes": 32 << 20}
    demand = Demand(4, 2, 128, 128, "bfloat16", False)
    if (reason := api.implementation(name).limit(demand, target_device())) is not None:
        pytest.skip(f"{name} {reason}")
    params = fakes.real_params(model)
    prompts = fakes.prompts((300, 70, 1, 128), model.vocab_size)
    found = {}
    for attention in ("reference", name):
        engine = Engine(Config(model, EngineConfig(attention=attention, **sizes)), params)
        answers = engine.generate(prompts, fakes.greedy(40))
        whole = [
            [*prompt, *answer.token_ids] for prompt, answer in zip(prompts, answers, strict=True)
        ]
        whole = found.setdefault("texts", whole)
        found[attention] = np.concatenate([each.logprobs for each in engine.score(whole)])
        found[f"{attention}, decoded"] = [answer.token_ids for answer in answers]
    np.testing.assert_allclose(found[name], found["reference"], atol=0.05)
    pairs = zip(found[f"{name}, decoded"], found["reference, decoded"], strict=True)
    equal = [own == other for one, two in pairs for own, other in zip(one, two, strict=True)]
    assert np.mean(equal) > 0.5  # bfloat16 has near-ties, after which tokens go their own way
