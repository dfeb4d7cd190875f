"""What may not change an output: neighbours, chunks, cached prefixes, preemption, a lost cache, and
the order in which host and device work. Bit for bit under `deterministic`.
"""

import functools

import numpy as np
import pytest

from inference.request import SamplingParams
from tests import fakes, newer_fakes

PREFIX = 40
MODELS = {
    "llama": fakes.llama("bfloat16"),
    "gemma": fakes.gemma("bfloat16"),
    "deepseek": fakes.deepseek("bfloat16"),
    "gpt-oss": fakes.gpt_oss("bfloat16"),
    "gemma4": fakes.gemma4("bfloat16"),
    "every cache": fakes.every_cache("bfloat16"),
    "every cache, int8": fakes.every_cache("bfloat16", cache_format="int8"),
    "gemma, int4": fakes.gemma("bfloat16", cache_format="int4", head_width=32),
    "deepseek, fp8": fakes.deepseek("bfloat16", cache_format="fp8"),
    "indexer": fakes.deepseek_v32("bfloat16"),
    "pages": fakes.llama("bfloat16", token_budget=24),
    "compressed": fakes.compressed("bfloat16"),
    "compressed, int8": fakes.compressed("bfloat16", cache_format="int8"),
    "deepseek-v4": newer_fakes.deepseek_v4("bfloat16"),
    "hybrid": fakes.hybrid("bfloat16"),
    "indexer, fp8": newer_fakes.shared_indexer("bfloat16", cache_format="fp8"),
}
SIZES = dict(
    max_seqs=32, decode_rows=(1, 32), page_tokens=8, chunk_tokens=16, prefill_chunks=(4,),
    deterministic=True, cache_bytes=8 << 20,
)  # fmt: skip
# Sizes of their own are programs of their own: few, and other ones than those of `alone`.
OWN = {"decode_rows": (32,)}
HOST = OWN | {"preemption": "swap", "cache_bytes": 32_000}

# What is done to the engine, and what it is built with.
DISTURBANCES = {
    "together": {},
    "planned one by one": {"overlap": False},
    "chunks of 16": {"prefill_budget": 16},
    "chunks of 64": OWN | {"chunk_tokens": 64, "prefill_budget": 64},
    "chunks of 256": OWN | {"chunk_tokens": 64, "prefix_cache": False},
    "no prefixes": {"prefix_cache": False},
    "prompts first": {"chunked_prefill": False},
    "static": {"policy": "static"},
    "contiguous": OWN | {"page_tokens": 256, "prefix_cache": False},
    "recompute": {"preemption": "recompute", "prefix_cache": False},
    "swap": HOST | {"prefix_cache": False},
    "prefixes on the host": HOST,
    "restart": {},
}


def requests(model, count):
    """Prompts of 2 to 90 tokens, half of them with one beginning; Llama's are sampled but for every
    third.
    """
    rng = np.random.default_rng(4)
    prefix = fakes.prompts([PREFIX], 131, seed=1)[0]
    prompts = [
        prefix * int(i % 2) + rng.integers(0, 131, rng.integers(2, 50)).tolist()
        for i in range(count)
    ]
    params = [
        SamplingParams(
            max_new_tokens=int(rng.integers(1, 24)),
            temperature=float(model == "llama" and i % 3 > 0), top_p=0.9, seed=i, ignore_eos=True,
        )
        for i in range(count)
    ]  # fmt: skip
    return prompts, params


def make(model, **changes):
    room = {"every cache": 60_000, "compressed": 47_000, "deepseek-v4": 47_000}.get(model)
    if room and "cache_bytes" in changes:
        changes |= {"cache_bytes": room}  # of five groups
    shapes = "one" if OWN.items() <= changes.items() else "riding"
    return fakes.engine(MODELS[model], None, shapes, model == "llama", **(SIZES | changes))


@functools.cache
def alone(model, count):
    """Tokens and log-probabilities of each request by itself."""
    engine = make(model, prefix_cache=False, overlap=False)
    one_by_one = [engine.generate([p], s)[0] for p, s in zip(*requests(model, count), strict=True)]
    return [(c.token_ids, c.logprobs) for c in one_by_one]


CASES = [("llama", 30, name) for name in DISTURBANCES]
CASES += [("gemma", 30, name) for name in ("together", "prefixes on the host")]
CASES += [("deepseek", 15, "recompute")]
# What the engine does with other caches; their bits in optimized code are looked at by long cases.
CASES += [
    pytest.param(*case, marks=pytest.mark.quick_code)
    for case in (
        ("gpt-oss", 15, "together"), ("every cache, int8", 15, "prefixes on the host"),
        ("indexer", 12, "swap"), ("pages", 12, "prefixes on the host"),
        ("deepseek-v4", 12, "together"),
    )
]  # fmt: skip
CASES += [
    pytest.param(model, 100, name, marks=[pytest.mark.long, pytest.mark.timeout(900)])
    for model in MODELS
    for name in DISTURBANCES
    if (model, name) != ("pages", "contiguous")  # of larger pages, queries choose others
]


@pytest.mark.parametrize("model, count, name", CASES)
def test_no_bit_changes(model, count, name):
    expected = alone(model, count)
    engine = make(model, **DISTURBANCES[name])
    prompts, params = requests(model, count)
    ids = [engine.add_request(*each) for each in zip(prompts, params, strict=True)]
    sequences = [fakes.sequence_of(engine, id) for id in ids]
    preempts = name in ("recompute", "swap", "prefixes on the host")
    fakes.drain_disturbed(engine, 3 if preempts else 0, 17 if name == "restart" else 0)
    assert [(s.output_tokens, s.results.logprobs) for s in sequences] == expected
    counters = engine.scheduler.counters
    if name in ("together", "prefixes on the host"):
        assert counters.num_cached_tokens > count // 3 * PREFIX // 2
    if preempts:
        assert counters.num_preemptions > count // 5
    if name in ("swap", "prefixes on the host"):
        assert counters.num_restored_pages > count // 5
    if name == "recompute":
        assert counters.num_cached_tokens == 0


@pytest.mark.parametrize("model", ["llama", "gemma"])
def test_a_second_round_is_read_from_the_cache(model):
    count = 16
    engine = make(model)
    for _ in range(2):
        found = engine.generate(*requests(model, count))
        assert [(c.token_ids, c.logprobs) for c in found] == alone(model, count)
    counters = engine.scheduler.counters
    assert counters.num_cached_tokens > 0.5 * counters.num_prompt_tokens
    assert counters.num_preemptions == 0
