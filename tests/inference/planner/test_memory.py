"""The largest batch that fits: in whole pages, allocated to the byte, refused before it fails."""

import dataclasses

import jax
import pytest

from configs import overrides, presets
from configs.cache import CacheSpec
from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.experts import Experts
from configs.kinds.feed_forward import Gated
from configs.kinds.recurrent.mamba import Mamba2
from configs.mesh import Mesh
from configs.model import LayerSpec, ModelConfig
from configs.recipes import run
from inference.engine import Engine
from inference.planner import cost
from inference.planner.compiled import prediction
from inference.runtime.model_runner import ModelRunner
from inference.scheduling.step_shapes import StepShape
from layers import decoder, kv_cache, params
from tests import fakes
from tests.kinds import Caching

LIMIT = 512 << 20

# SmolLM2's cache (30 layers of 3 heads of 64) around next to no weights.
THIN = ModelConfig(
    "thin", "llama", 64, width=16, num_layers=30, max_context=8192, dtype="bfloat16",
    pattern=(LayerSpec(Attention(3, 3, 64), Gated(16)),),
)  # fmt: skip


def largest_batch(model, cache_bytes: int, context: int) -> int:
    """Sequences of `context` tokens that an engine of that much cache never preempts."""
    engine = EngineConfig.of(max_seqs=1, max_context=context, cache_bytes=cache_bytes)
    return Config(model, engine).most_seqs


def engine_config(**changes) -> EngineConfig:
    return EngineConfig.of(max_context=512, cache_bytes=LIMIT, overcommit=False, **changes)


@pytest.mark.parametrize("name", presets.NAMES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_predicted_pool_is_the_allocated_one(name, dtype):
    model = dataclasses.replace(presets.get(name).config, dtype=dtype)
    config = Config(model, EngineConfig.of(max_seqs=3, max_context=1024, cache_bytes=64 << 20))
    engine = config.engine
    leaves = kv_cache.abstract(
        model, config.num_pages, config.page_tokens, engine.max_seqs, engine.drafts.num_drafts,
        num_snapshots=config.num_snapshots,
    )  # fmt: skip
    allocated = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(leaves))
    assert config.pool_bytes == allocated


def test_the_largest_batch_by_hand():
    """SmolLM2 keeps 2 * 3 * 64 elements of 2 bytes in each of 30 layers: 23,040 bytes a token."""
    model = presets.get("smollm2-135m").config
    page = 16 * 23_040
    assert cost.cache_bytes(model, 16) == page
    fits = (LIMIT - page) // (32 * page)  # 512 tokens are 32 pages; a sink comes first
    assert fits == 45
    assert largest_batch(model, LIMIT, 512) == fits
    config = Config(model, engine_config(max_seqs=fits))
    assert config.full_bytes(fits) <= LIMIT < config.full_bytes(fits + 1)
    assert config.full_bytes(fits) == config.pool_bytes


def test_an_open_page_is_a_whole_one():
    model = presets.get("smollm2-135m").config
    page = 16 * 23_040
    assert largest_batch(model, page * (1 + 3 * 2), 17) == 3  # 17 tokens are two pages
    assert largest_batch(model, page * (1 + 3 * 2) - 1, 17) == 2
    assert largest_batch(model, page, 17) == 0


def test_windows_keep_what_a_step_may_add():
    model = presets.get("gemma3-270m").config
    config = Config(model, EngineConfig.of(max_seqs=1, max_context=4096, cache_bytes=LIMIT))
    windowed, whole = config.peak_pages(4096)
    assert (windowed, whole) == ((512 + 512 + 32) // 16, 256)  # 8 chunks of 64 are a step
    assert config.most_seqs == largest_batch(model, LIMIT, 4096)
    assert config.full_bytes(config.most_seqs) <= LIMIT < config.full_bytes(config.most_seqs + 1)


@pytest.mark.quick_code
def test_the_largest_batch_is_served_without_a_preemption():
    """A tenth of the layers in a tenth of the memory: as many sequences."""
    model, limit = dataclasses.replace(THIN, num_layers=3), LIMIT // 10
    fits = largest_batch(model, limit, 512)
    assert fits == largest_batch(THIN, LIMIT, 512) == 45
    settings = engine_config(max_seqs=fits, decode_rows=(64,), prefill_chunks=(16,))
    config = Config(model, settings.replace(cache_bytes=limit))
    engine = Engine(config, params.init(decoder.param_infos(model)))
    engine.scheduler.shapes = engine.scheduler.shapes[-1:]  # that of all steps: one to compile
    assert engine.model_runner.cache_bytes == config.pool_bytes <= limit
    preempted = []
    engine.scheduler.preempt = preempted.append
    prompts = [[1 + (7 * i + j) % 60 for j in range(480)] for i in range(fits)]
    with fakes.no_draws():
        done = engine.generate(prompts, fakes.greedy(32))
    assert [len(each.token_ids) for each in done] == [32] * fits
    assert all(each.finish_reason == "length" for each in done)
    assert not preempted
    decoding = [[row for row in record.rows if row[0] == 1] for record in engine.records]
    assert max(map(len, decoding)) == fits  # all at once
    assert max(context for rows in decoding for _, context in rows) == 511  # the 512th is only told


def test_a_tenth_more_is_refused_before_anything_is_allocated(monkeypatch):
    allocated = []
    monkeypatch.setattr(kv_cache, "init", lambda *args: allocated.append(args))
    most = largest_batch(THIN, LIMIT, 512)
    asked = most * 11 // 10
    needed = (1 + asked * 32) * 16 * 23_040
    with pytest.raises(InputError) as refused:
        ModelRunner(Config(THIN, engine_config(max_seqs=asked)), params={})
    for figure in (asked, 512, needed, LIMIT, most):
        assert str(figure) in str(refused.value)
    assert not allocated


def test_overcommit_is_the_default_and_a_setting():
    config = Config(THIN, EngineConfig.of(max_seqs=100, max_context=512, cache_bytes=LIMIT))
    assert config.engine.cache.overcommit
    with pytest.raises(InputError, match="at most 45"):
        overrides.apply(config, ["engine.cache.overcommit=false"])
    fitting = overrides.apply(config, ["engine.cache.overcommit=false", "engine.max_seqs=45"])
    assert fitting.engine.max_seqs == 45


@pytest.mark.parametrize("drafts", [0, 3])
def test_states_are_counted_with_their_sink(drafts):
    """A state is the sequence's whole cache, in float32, once more for every draft; beside them lie
    two snapshots and the sink of these.
    """
    layer = LayerSpec(Mamba2(num_heads=2, head_width=2, state_width=16), Gated(16))
    model = dataclasses.replace(THIN, num_layers=2, pattern=(layer,))
    state = 2 * (4 * 16 + 3 * (4 + 2 * 16)) * 4 * (1 + drafts)
    kept = 3 * state // (1 + drafts)
    engine = EngineConfig.of(
        max_seqs=7, cache_bytes=8 * state + kept, overcommit=False, num_drafts=drafts,
        max_context=512, snapshots=2,
    )  # fmt: skip
    config = Config(model, engine)
    assert config.num_pages == () and config.most_seqs == 7
    assert config.full_bytes(7) == config.pool_bytes == 8 * state + kept
    with pytest.raises(InputError, match=f"7 sequences of 512 tokens need {8 * state + kept}"):
        Config(model, engine.replace(cache_bytes=8 * state + kept - 1))
    mixed = dataclasses.replace(model, pattern=(layer, *THIN.pattern))
    single = Config(mixed, engine.replace(max_seqs=1, cache_bytes=1 << 30))
    assert single.full_bytes(1) == single.pool_bytes


def test_a_model_that_keeps_nothing_is_never_refused():
    model = dataclasses.replace(
        THIN, num_layers=1, pattern=(LayerSpec(Caching(CacheSpec()), None),)
    )
    config = Config(model, EngineConfig.of(max_seqs=7, cache_bytes=1, overcommit=False))
    assert config.num_pages == () and config.most_seqs == 7


def test_a_mixture_copies_the_tokens_of_all_chips_for_their_experts():
    """Of 40 tokens a chip, each visits 3 of 8 experts: D = 16, F = 48, and half of it on a chip of
    two. Copies and what is between products are bfloat16, sums and ordered results float32, these
    in tiles of 4 rows for the 3 of a token.
    """
    layers = tuple(LayerSpec(Attention(4, 2, 8), ffn) for ffn in (Gated(16), Experts(8, 3, 48)))
    model = dataclasses.replace(THIN, num_layers=2, pattern=layers)
    engine = EngineConfig.of(max_seqs=8, max_context=512, cache_bytes=1 << 20)
    shape = StepShape((8, 1), (1, 32), greedy=True)
    for mesh, inner in ((Mesh(), 48), (Mesh(expert=4), 48), (Mesh(1, 2, 4), 24)):
        each = 3 * (16 * (2 + 4) + 2 * inner * (4 + 2)) + 4 * 16 * 4
        found = prediction.temporary_bytes(Config(model, engine, mesh), shape)
        assert found == 40 * mesh.expert * each
    dense = dataclasses.replace(model, num_layers=1, pattern=layers[:1])
    assert prediction.temporary_bytes(Config(dense, engine), shape) < 40 * 3 * 736


def test_what_draws_has_a_mask_for_each_pass_of_the_search():
    """8 rows of 30,000 logits: four float32 arrays, and 15 masks of a byte."""
    model = dataclasses.replace(THIN, num_layers=1, vocab_size=30_000)
    config = Config(model, EngineConfig.of(max_seqs=8, max_context=512, cache_bytes=1 << 20))
    logits = 8 * 30_000
    for greedy, logit_bytes in ((True, 4 * 4), (False, 4 * 4 + 15)):
        shape = StepShape((8, 1), (0, 32), greedy=greedy)
        assert prediction.temporary_bytes(config, shape) == logits * logit_bytes


@pytest.mark.parametrize("deterministic", [False, True])
def test_experts_in_few_bits_multiply_blocks_of_rows(deterministic):
    """40 tokens visit 3 of 8 experts each: 120 rows, in blocks of 16, as many as an expert has on
    average, or as the engine always has, and a part of one for each expert. D = 64, F = 32.
    """
    layers = (LayerSpec(Attention(4, 2, 16), Experts(8, 3, 32)),)
    model = dataclasses.replace(THIN, width=64, num_layers=1, pattern=layers)
    engine = EngineConfig.of(
        max_seqs=8, max_context=512, cache_bytes=1 << 20, weights="mxfp4",
        deterministic=deterministic,
    )  # fmt: skip
    shape, config = StepShape((8, 1), (1, 32), greedy=True), run.stored(Config(model, engine))
    num_blocks = 120 // 16 + 8
    padded = num_blocks * 16 * (64 * 4 + (64 + 32) * 2)
    one_matrix, all_scales = 64 * 64 * (1 + 2), 8 * 64 * 64 // 32
    residual = 40 * 2 * 64 * 4
    assert prediction.temporary_bytes(config, shape) == padded + one_matrix + all_scales + residual
