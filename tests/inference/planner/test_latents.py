"""Latent attention beside what it replaces, divided by tokens, and projected out."""

import dataclasses

import pytest

from configs import presets
from configs.hardware import catalog
from configs.mesh import Mesh
from inference.planner.deployment import Deployment
from inference.planner.kinds import latents

_V2 = presets.get("deepseek-v2").config
_LITE = presets.get("deepseek-v2-lite").config
_FOUR = Deployment(_LITE, catalog.get("h200"), mesh=Mesh(model=4))


def _elements(config) -> int:
    return config.cache_specs[0].elements_per_token


def test_caches_of_the_same_heads():
    """DeepSeek-V2 (arXiv 2405.04434, section 2.1.4): as much as GQA with 2.25 groups."""
    kept = _elements(_V2)
    assert kept == 512 + 64
    assert _elements(latents.with_attention(_V2, 128)) == 2 * 128 * 128
    assert f"{2 * 128 * 128 / kept:.4g}" == "56.89"
    assert _elements(latents.with_attention(_V2, 8)) / kept * 2.25 == 8
    assert latents.with_attention(_V2, 8).layers[3].ffn == _V2.layers[3].ffn
    odd = _V2.with_kinds(value_width=9)  # no rotation fits it
    assert _elements(latents.with_attention(odd, 8)) == 2 * 8 * 9


def test_caches_are_compared_on_one_mesh():
    mla, gqa, mha = latents.compare(_FOUR, 64, 4096, 512)
    assert [found.name for found in (mla, gqa, mha)] == ["MLA", "GQA, 8 KV heads", "MHA"]
    # Four chips divide the heads of keys and values, and each holds all latents.
    per_element = 27 * 2
    assert mla.token_bytes == 576 * per_element
    assert gqa.token_bytes == 2 * 8 * 128 * per_element / 4
    assert mha.token_bytes == 2 * gqa.token_bytes
    assert mla.step_s == _FOUR.decode_time(64, 4096 + 256).total_s
    assert mla.most_tok_s == pytest.approx(
        mla.largest_batch / _FOUR.decode_time(mla.largest_batch, 4096 + 256).total_s
    )
    assert latents.latent_of(presets.get("llama3-8b").config) is None
    assert latents.latent_of(presets.get("deepseek-v3.2").config) is None  # reads chosen tokens


def test_chips_that_divide_tokens_by_hand():
    """A quarter of the cache a chip, and three exchanges a layer more."""
    whole, divided = latents.compare_divided(_FOUR, 64, 4096, 512)
    assert whole.is_run and not divided.is_run
    assert divided.token_bytes == whole.token_bytes / 4
    assert divided.largest_batch // 4 in (whole.largest_batch, whole.largest_batch - 1)
    context = 4096 + 256
    before, after = _FOUR.decode_time(64, context), latents.divided_time(_FOUR, 64, context)
    cached = 64 * (context + 1) * 576 * 2 * 27  # read, and one written
    queries = 64 * 16 * (2 * 512 + 64) * 2 * 27  # a chip's own before, of all heads after
    moved = cached * 3 / 4 - queries * 3 / 4
    assert before.memory_s - after.memory_s == pytest.approx(moved / 4.8e12)
    assert before.compute_s == pytest.approx(after.compute_s)
    sent = 64 * 16 * (576 * 2 + 4 * 4 + 512 * 4)  # of a layer: queries, log-sum-exps, sums
    latency = 3 * 3 * _FOUR.hardware.link_latency_s
    exchanged = 27 * (sent * 3 / 4 / 450e9 + latency)
    assert after.collective_s - before.collective_s == pytest.approx(exchanged)


def test_dividing_tokens_pays_where_contexts_are_long():
    placed = dataclasses.replace(_FOUR, mesh=Mesh(model=8))
    saved = [
        placed.decode_time(batch, context).total_s
        - latents.divided_time(placed, batch, context).total_s
        for batch, context in ((1, 1024), (64, 32_768))
    ]
    assert saved[0] < 0 < saved[1]


@pytest.mark.parametrize("model", ["deepseek-v2-lite", "deepseek-v3"])
@pytest.mark.parametrize("earlier", [0, 1, 19, 20, 63, 64, 1000, 4096, 131_072])
def test_expanded_attention_begins_where_its_flops_do(model, earlier):
    """Counted query by query."""
    mixer = latents.latent_of(presets.get(model).config)
    N, C, R = mixer.num_heads, mixer.rank, mixer.rope_width
    H, X = mixer.nope_width, mixer.value_width

    def pays(tokens: int) -> bool:
        pairs = sum(earlier + i for i in range(1, tokens + 1))
        absorbed = pairs * 2 * N * (2 * C + R)
        return pairs * 2 * N * (H + R + X) + earlier * 2 * N * C * (H + X) <= absorbed

    first = latents.expanded_from(mixer, earlier)
    assert first == next(tokens for tokens in range(1, 1000) if pays(tokens))
    assert first <= 171 and (earlier < 20) == (first <= 64)


def test_chunks_are_compared_by_their_steps():
    """Where arithmetic is what a step waits for, longer chunks would gain, those of 64 lose."""
    slow = dataclasses.replace(_FOUR.hardware, rates={"bfloat16": 1e12}, link_latency_s=0.0)
    placed = dataclasses.replace(_FOUR, hardware=slow, mesh=Mesh())
    chunks = latents.compare_chunks(placed, 4096)
    assert [chunk.tokens for chunk in chunks] == [64, 128, 256, 512]
    assert [chunk.expanded_s > chunk.absorbed_s for chunk in chunks] == [True, True, False, False]
    pairs = 512 * (3584 + 513 / 2)
    fewer = pairs * (2 * 512 - 256) - 3584 * 512 * 256
    gained = 27 * 2 * 16 * fewer / 1e12
    assert chunks[-1].absorbed_s - chunks[-1].expanded_s == pytest.approx(gained)
    assert [chunk.tokens for chunk in latents.compare_chunks(placed, 128)] == [64, 128]


def test_narrow_latents_are_never_expanded():
    mixer = dataclasses.replace(latents.latent_of(_LITE), rank=128)
    assert latents.expanded_from(mixer, 4096) is None
