"""The cache algebra against values worked out by hand."""

import pytest

from configs.cache import CacheSpec, PageGroup, keys_values, page_groups, recurrent, shared
from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig

WINDOW = keys_values(2, 8, window=6)


def model(**changes) -> ModelConfig:
    widths = dict(width=8, ffn_width=8, num_layers=4, num_heads=4, num_kv_heads=2, head_width=8)
    pattern = (LayerSpec(window=20), LayerSpec(window=20), LayerSpec())
    fields = widths | {"vocab_size": 9, "max_context": 1000, "pattern": pattern} | changes
    return ModelConfig("m", "m", **fields)


@pytest.mark.parametrize(
    "spec, per_token, per_sequence",
    [
        (keys_values(2, 8), 2 * 2 * 8, 0),
        (keys_values(1, 64, window=3), 2 * 64, 0),
        (recurrent(10), 0, 10),
        (shared(0), 0, 0),
        (CacheSpec(3), 3, 0),
    ],
)
def test_bytes(spec, per_token, per_sequence):
    assert spec.bytes_per_token("bfloat16") == 2 * per_token
    assert spec.bytes_per_token("float32") == 4 * per_token
    assert [spec.bytes_per_sequence(k) for k in (0, 1, 3)] == [
        4 * per_sequence * n for n in (1, 2, 4)
    ]
    assert spec.can_tree == (per_sequence == 0)


@pytest.mark.parametrize("length, first", [(0, 0), (5, 0), (6, 1), (7, 2), (100, 95)])
def test_a_window_counts_the_newest_token(length, first):
    """The token at position `length` sees itself and window - 1 others."""
    assert WINDOW.live_from(length) == first
    assert keys_values(2, 8).live_from(length) == 0
    assert length - first + 1 <= WINDOW.window


@pytest.mark.parametrize(
    "start, stop, pages",
    [(0, 0, []), (0, 1, [0]), (0, 4, [0]), (0, 5, [0, 1]), (4, 8, [1]), (7, 13, [1, 2, 3])],
)
def test_pages_for(start, stop, pages):
    assert list(CacheSpec(3).pages_for(start, stop, 4)) == pages


@pytest.mark.parametrize("boundary", range(0, 40))
def test_resume_needs_the_pages_that_are_still_visible(boundary):
    assert list(keys_values(2, 8).resume_at(boundary, 4)) == list(range(-(-boundary // 4)))
    seen = {position // 4 for position in range(max(0, boundary - 5), boundary)}
    assert set(WINDOW.resume_at(boundary, 4)) == seen
    assert recurrent(3).resume_at(boundary, 4) is None


def test_contradictions_are_refused():
    with pytest.raises(InputError, match="at least 1 token"):
        CacheSpec(3, window=0)
    with pytest.raises(InputError, match="nothing of its own"):
        CacheSpec(3, owner=0)
    with pytest.raises(InputError, match="nothing of its own"):
        CacheSpec(elements_per_sequence=1, owner=0)
    with pytest.raises(InputError, match="per token or per sequence, not both"):
        CacheSpec(elements_per_token=1, elements_per_sequence=1)
    with pytest.raises(InputError, match="window=4 or a cache with a window of its own, not both"):
        LayerSpec(window=4, cache=keys_values(2, 8, window=4))
    with pytest.raises(InputError, match="a value of configs/kinds/rope.py, not 'yarn'"):
        Rope(scaling="yarn")


@pytest.mark.parametrize(
    "pattern, cause",
    [
        ([shared(0)], "layer 0 shares the cache of layer 0, .* valid: none"),
        ([None, shared(2), None], "layer 1 shares the cache of layer 2, .* valid: 0"),
        ([None, shared(0), shared(1)], "layer 2 shares the cache of layer 1, .* valid: 0"),
        ([CacheSpec(), None, shared(0)], "layer 2 shares the cache of layer 0, .* valid: 1"),
        ([None, shared(-1)], "layer 1 shares the cache of layer -1"),
    ],
)
def test_a_sharer_names_an_earlier_owner(pattern, cause):
    layers = tuple(LayerSpec(cache=spec) for spec in pattern)
    with pytest.raises(InputError, match=cause):
        model(pattern=layers, num_layers=len(layers))
    recurrent_owner = (LayerSpec(cache=recurrent(3)), LayerSpec(cache=shared(0)))
    assert model(pattern=recurrent_owner, num_layers=4).cache_specs[3] == shared(0)


def test_equal_specs_make_a_group():
    specs = (WINDOW, keys_values(2, 8), shared(0), WINDOW, recurrent(4), keys_values(2, 8))
    groups = page_groups(specs)
    assert groups == (PageGroup(WINDOW, (0, 3)), PageGroup(keys_values(2, 8), (1, 5)))
    assert groups[0].bytes_per_page("float32", 16) == 2 * 2 * 8 * 4 * 16 * 2
    assert page_groups((recurrent(4),)) == ()


def test_a_model_derives_its_specs():
    config = model()
    local, world = keys_values(2, 8, window=20), keys_values(2, 8)
    assert config.cache_specs == (local, local, world, local)
    assert [group.layers for group in config.page_groups] == [(0, 1, 3), (2,)]
    assert config.group_of_layer == {0: 0, 1: 0, 3: 0, 2: 1}


def test_peak_pages_hold_a_window_and_a_step():
    config = Config(model(), EngineConfig(page_tokens=8, tile_tokens=16, prefill_tiles=(1, 2)))
    assert config.peak_pages(10) == (2, 2)
    assert config.peak_pages(1000) == (-(-(20 + 32 + 16) // 8), 125)
    assert config.page_columns == 1024 // 8
    drafts = EngineConfig(page_tokens=8, tile_tokens=2, prefill_tiles=(1,), num_drafts=40)
    assert Config(model(), drafts).peak_pages(1000)[0] == -(-(20 + 41 + 16) // 8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cache_bytes", [40_000, 150_000, 1 << 30])
def test_pages_are_split_in_proportion_and_within_the_budget(dtype, cache_bytes):
    engine = EngineConfig(cache_bytes=cache_bytes, max_seqs=3)
    config = Config(model(dtype=dtype), engine)
    usable = [n - 1 for n in config.num_pages]
    peaks = config.peak_pages(config.max_context)
    used = sum(
        n * group.bytes_per_page(dtype, config.page_tokens)
        for n, group in zip(usable, config.model.page_groups, strict=True)
    )
    assert used <= cache_bytes
    assert all(n <= 3 * peak for n, peak in zip(usable, peaks, strict=True))
    if cache_bytes == 1 << 30:
        assert usable == [3 * peak for peak in peaks]


def test_pages_are_of_the_devices_size_unless_one_is_asked_for():
    """And whatever follows from it, what does not fit included."""
    config = Config(model(), EngineConfig(max_seqs=3))
    sizes = {"cpu": 16, "gpu": 64, "tpu": 128, "unheard of": 16}
    for platform, tokens in sizes.items():
        there = config.on(platform)
        assert there.engine.page_tokens == there.page_tokens == there.device_page_tokens == tokens
        assert there.page_columns == 1024 // tokens
        assert there.on("cpu") == there
    assert config.page_tokens == 16
    asked = Config(model(), EngineConfig(page_tokens=256))
    assert asked.on("gpu") == asked and asked.device_page_tokens == 128 and asked.device_pages == 2
    needed = config.full_bytes(3)
    tight = EngineConfig(max_seqs=3, cache_bytes=needed, overcommit=False)
    with pytest.raises(InputError, match="engine.max_seqs is at most 2 without"):
        Config(model(), tight).on("tpu")


def test_a_model_without_pages_needs_none():
    state = model(pattern=(LayerSpec("counter", cache=recurrent(4)),))
    config = Config(state)
    assert config.num_pages == () and config.peak_pages(99) == ()


@pytest.mark.parametrize(
    "fields, cause",
    [
        (dict(width=0), "model.width is at least 1"),
        (dict(width=2**24 + 1), "model.width is at most 16777216"),
        (dict(vocab_size=10**400), "model.vocab_size is at most 16777216"),
        (dict(num_layers=10_001), "model.num_layers is at most 10000"),
        (dict(max_context=2**31), "model.max_context is at most 2147483647"),
        (dict(num_heads=3), "num_heads=3 is not a multiple of model.num_kv_heads=2"),
        (dict(dtype="float16"), "'float32' or 'bfloat16', not 'float16'"),
        (dict(activation="relu"), "'silu' or 'gelu_tanh', not 'relu'"),
        (dict(pattern=()), "model.pattern lists at least one layer"),
        (dict(norm_eps=0.0), "model.norm_eps is a finite number above 0, not 0.0"),
        (dict(norm_eps=float("nan")), "model.norm_eps is a finite number above 0, not nan"),
        (dict(norm_eps=float("inf")), "model.norm_eps is a finite number above 0, not inf"),
    ],
)
def test_a_model_refuses(fields, cause):
    with pytest.raises(InputError, match=cause):
        model(**fields)


@pytest.mark.parametrize(
    "fields, cause",
    [
        (dict(max_seqs=0), "engine.max_seqs is at least 1, not 0"),
        (dict(cache_bytes=-1), "engine.cache_bytes"),
        (dict(num_drafts=-1), "engine.num_drafts is at least 0"),
        (dict(decode_rows=()), "engine.decode_rows lists sizes from 1 to 4096"),
        (dict(prefill_tiles=(0, 2)), "engine.prefill_tiles lists"),
        (dict(page_tokens=24), "divides"),
        (dict(page_tokens=0), "engine.page_tokens is at least 1, not 0"),
        (dict(seed=-1), "engine.seed is at least 0 and below 2..64, not -1"),
        (dict(seed=2**64), "engine.seed is at least 0"),
        (dict(top_logprobs=10), "engine.top_logprobs is at most the vocabulary of 9, not 10"),
        (dict(deterministic=True, tile_tokens=7), "at least 8"),
        (dict(max_context=1001), "between 1 and the model's 1000"),
        (dict(max_context=0), "between 1 and the model's 1000"),
    ],
)
def test_an_engine_refuses(fields, cause):
    with pytest.raises(InputError, match=cause) as error:
        Config(model(), EngineConfig(**fields))
    assert "\n" not in str(error.value)
