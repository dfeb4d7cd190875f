"""The cache algebra against values worked out by hand."""

import dataclasses

import pytest

from configs.cache import (
    CacheSpec,
    PageFormat,
    PageGroup,
    keys_values,
    latent,
    page_groups,
    recurrent,
    shared,
)
from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from tests.kinds import Caching

WINDOW = keys_values(2, 8, window=6)


def model(**changes) -> ModelConfig:
    pattern = tuple(LayerSpec(Attention(4, 2, 8, window=window), None) for window in (20, 20, None))
    fields = dict(vocab_size=9, width=8, num_layers=4, max_context=1000, pattern=pattern)
    return ModelConfig("m", "m", **fields | changes)


@pytest.mark.parametrize(
    "spec, per_token, per_sequence",
    [
        (keys_values(2, 8), 2 * 2 * 8, 0),
        (keys_values(1, 64, window=3), 2 * 64, 0),
        (recurrent((10,)), 0, 10),
        (shared(0), 0, 0),
        (CacheSpec(1, 3), 3, 0),
        (CacheSpec(3, 8, 4), 3 * (8 + 4), 0),
        (latent(512, 64), 576, 0),
        (dataclasses.replace(latent(512, 64), index_width=128), 576 + 128, 0),
    ],
)
def test_bytes(spec, per_token, per_sequence):
    assert spec.bytes_per_entry("bfloat16") == 2 * per_token
    assert spec.bytes_per_entry("float32") == 4 * per_token
    assert [spec.bytes_per_sequence(k) for k in (0, 1, 3)] == [
        4 * per_sequence * n for n in (1, 2, 4)
    ]
    assert spec.can_tree == (per_sequence == 0)
    assert spec.elements_per_token == per_token


def test_a_page_format_divides_its_row_into_keys_and_values():
    uneven = CacheSpec(3, 8, 4).page_format("float32")
    assert uneven == PageFormat(3, 8, 4, False, "float32")
    assert (uneven.keys, uneven.values) == (slice(0, 24), slice(24, 36))
    assert (uneven.row_width, uneven.bytes_per_token) == (36, 4 * 36)
    inside = latent(512, 64).page_format("bfloat16")
    assert (inside.keys, inside.values) == (slice(0, 576), slice(0, 512))
    assert (inside.row_width, inside.bytes_per_token) == (576, 2 * 576)
    assert (inside.padded_width(128), inside.padded_width(64)) == (640, 576)


def test_a_quantized_row_is_its_elements_and_then_its_scales():
    """One of 64 elements of a key, a value or a latent's part, of all where these are no multiple;
    of four bits of 32 elements.
    """
    wide, uneven, inside = keys_values(3, 128), CacheSpec(2, 96, 32), latent(512, 64)
    for spec, groups, small in (
        (wide, ((6, 64), (6, 64)), ((12, 32), (12, 32))),
        (uneven, ((2, 96), (2, 32)), ((6, 32), (2, 32))),
        (inside, ((8, 64), (1, 64)), ((16, 32), (2, 32))),
    ):
        for name in ("int8", "fp8"):
            found = spec.page_format(name)
            assert found.groups == groups and found.element_bytes == found.row_width
            scales = 2 * sum(count for count, _ in groups)
            assert found.stored_width == found.bytes_per_token == found.row_width + scales
        found = spec.page_format("int4")
        assert found.groups == small
        assert found.bytes_per_token == found.row_width // 2 + 2 * found.row_width // 32
    assert inside.page_format("int8").padded_width(128) == 640


def test_keys_without_values_have_one_scale():
    spec = dataclasses.replace(latent(64, 32), index_width=128)
    assert spec.bytes_per_entry("int8") == 64 + 32 + 2 * 2 + 128 + 2 * 2
    assert spec.scaled_elements == (64 + 32 + 128) / 4
    assert recurrent((5,)).bytes_per_entry("int8") == 0 and recurrent((5,)).scaled_elements == 1


_FORMATS = {"int8": 24, "fp8": 24, "int4": 32}  # and a head width that each stores


def _of_width(width: int, **changes) -> ModelConfig:
    return model(
        pattern=(LayerSpec(Attention(4, 2, width, rope=None), None),), num_layers=1, **changes
    )


@pytest.mark.parametrize("name", _FORMATS)
def test_a_model_stores_its_cache_in_a_format_of_its_own(name):
    config = _of_width(_FORMATS[name], cache_format=name)
    assert (config.dtype, config.cache_dtype) == ("bfloat16", name)
    assert config.page_bytes(16) == [16 * config.cache_specs[0].bytes_per_entry(name)]
    assert config.per_chip(2).cache_dtype == name
    assert _of_width(24).cache_dtype == _of_width(24, cache_format="bfloat16").cache_dtype


@pytest.mark.parametrize("name", ["float32", "q8_0", "int3", ""])
def test_no_other_format_stores_a_cache(name):
    """float32 would be more than activations have."""
    with pytest.raises(InputError, match=f"bfloat16 as model.dtype, fp8, int8 or .*not '{name}'"):
        _of_width(32, cache_format=name)


@pytest.mark.parametrize("width", [7, 24, 48])
def test_four_bits_need_whole_groups(width):
    with pytest.raises(InputError, match=f"multiple of 32, not {width}; int8 and fp8 have any"):
        _of_width(width, cache_format="int4")


def test_what_is_chosen_from_is_not_quantized():
    plain = _of_width(32, cache_format="int8")
    with pytest.raises(InputError, match="cache_format='int8' does not go with layers that choose"):
        plain.with_kinds(token_budget=24)


@pytest.mark.parametrize("length, first", [(0, 0), (5, 0), (6, 1), (7, 2), (100, 95)])
def test_a_window_counts_the_newest_token(length, first):
    """The token at position `length` sees itself and window - 1 others."""
    assert WINDOW.live_from(length) == first
    assert keys_values(2, 8).live_from(length) == 0
    assert length - first + 1 <= WINDOW.window


@pytest.mark.parametrize("boundary", range(0, 40))
def test_resume_needs_the_pages_that_are_still_visible(boundary):
    assert list(keys_values(2, 8).resume_at(boundary, 4)) == list(range(-(-boundary // 4)))
    seen = {position // 4 for position in range(max(0, boundary - 5), boundary)}
    assert set(WINDOW.resume_at(boundary, 4)) == seen
    assert list(recurrent((3,)).resume_at(boundary, 4)) == [boundary // 4 - 1] * (boundary > 3)


_SIGHTS = [
    dict(window=6), dict(window=1), dict(window=6, first_tokens=3), dict(window=2, first_tokens=9),
    dict(window=8, chunked=True), dict(window=6, chunked=True), dict(window=1, chunked=True),
]  # fmt: skip


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
@pytest.mark.parametrize("sight", _SIGHTS)
def test_what_is_kept_is_what_a_later_token_sees(sight, page_tokens):
    """Query by query, of 64 positions."""

    def sees(query, position):
        if sight.get("chunked"):
            return position // sight["window"] == query // sight["window"]
        near = query - sight["window"] < position
        return near or position < sight.get("first_tokens", 0)

    spec = CacheSpec(1, 3, **sight)
    plain = CacheSpec(1, 3, window=spec.sliding(page_tokens))
    for boundary in range(64):
        seen = {
            position // page_tokens
            for position in range(boundary)
            if any(sees(query, position) for query in range(boundary, 64))
        }
        kept = set(range(-(-boundary // page_tokens))) - {*spec.dead_pages(boundary, page_tokens)}
        found = list(spec.resume_at(boundary, page_tokens))
        assert found == sorted(found)
        assert set(found) <= kept and seen <= kept
        if boundary % page_tokens == 0:  # else the open page is kept, whoever sees it
            assert set(found) == kept == seen
        is_open = boundary % page_tokens > 0
        assert len(kept) <= len(plain.resume_at(boundary, page_tokens)) + is_open


def test_contradictions_are_refused():
    with pytest.raises(InputError, match="a cache in chunks has a window"):
        CacheSpec(1, 3, chunked=True)
    for sight in ({}, {"window": 4, "chunked": True}):
        with pytest.raises(InputError, match="beside a window that slides"):
            CacheSpec(1, 3, first_tokens=2, **sight)
    with pytest.raises(InputError, match="first_tokens of a cache is at least 0, not -1"):
        CacheSpec(1, 3, window=4, first_tokens=-1)
    with pytest.raises(InputError, match="at least 1 token"):
        CacheSpec(1, 3, window=0)
    with pytest.raises(InputError, match="nothing of its own"):
        CacheSpec(1, 3, owner=0)
    with pytest.raises(InputError, match="nothing of its own"):
        CacheSpec(states=((1,),), owner=0)
    with pytest.raises(InputError, match="states lie beside plain pages"):
        CacheSpec(1, 1, states=((1,),), index_width=4)
    for widths in ((2, 8, 4), (1, 8, 9)):
        with pytest.raises(InputError, match="values lie in keys where there is one KV head"):
            CacheSpec(*widths, values_in_keys=True)
    with pytest.raises(InputError, match="a class of configs/kinds/rope.py, not 'yarn'"):
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
    own = Attention(4, 2, 8)
    layers = tuple(LayerSpec(Caching(spec) if spec else own, None) for spec in pattern)
    with pytest.raises(InputError, match=cause):
        model(pattern=layers, num_layers=len(layers))
    recurrent_owner = tuple(LayerSpec(Caching(spec), None) for spec in (recurrent((3,)), shared(0)))
    assert model(pattern=recurrent_owner, num_layers=4).cache_specs[3] == shared(0)


def test_equal_specs_make_a_group():
    specs = (WINDOW, keys_values(2, 8), shared(0), WINDOW, recurrent((4,)), keys_values(2, 8))
    groups = page_groups(specs)
    assert groups == (PageGroup(WINDOW, (0, 3)), PageGroup(keys_values(2, 8), (1, 5)))
    assert groups[0].bytes_per_page("float32", 16) == 2 * 2 * 8 * 4 * 16 * 2
    assert page_groups((recurrent((4,)),)) == ()


def test_a_model_derives_its_specs():
    config = model()
    local, world = keys_values(2, 8, window=20), keys_values(2, 8)
    assert config.cache_specs == (local, local, world, local)
    assert [group.layers for group in config.page_groups] == [(0, 1, 3), (2,)]
    assert config.groups_of_layer == {0: (0,), 1: (0,), 3: (0,), 2: (1,)}


def test_peak_pages_hold_a_window_and_a_step():
    config = Config(model(), EngineConfig.of(page_tokens=8, chunk_tokens=16, prefill_chunks=(1, 2)))
    assert config.peak_pages(10) == (2, 2)
    assert config.peak_pages(1000) == (-(-(20 + 32 + 16) // 8), 125)
    assert config.page_columns == 1024 // 8
    drafts = EngineConfig.of(page_tokens=8, chunk_tokens=2, prefill_chunks=(1,), num_drafts=40)
    assert Config(model(), drafts).peak_pages(1000)[0] == -(-(20 + 41 + 16) // 8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cache_bytes", [40_000, 150_000, 1 << 30])
def test_pages_are_split_in_proportion_and_within_the_budget(dtype, cache_bytes):
    engine = EngineConfig.of(cache_bytes=cache_bytes, max_seqs=3)
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


@pytest.mark.parametrize("max_seqs", [1, 3, 40])
@pytest.mark.parametrize("expected_tokens", [1, 30, 100, 400, 1000, 5000, None])
@pytest.mark.parametrize("cache_bytes", [80_000, 150_000, 400_000, 1 << 24])
def test_pages_are_split_by_the_length_that_is_expected(cache_bytes, expected_tokens, max_seqs):
    """No sequence of that length more would fit, and one of the longest always does."""
    engine = EngineConfig.of(
        cache_bytes=cache_bytes, max_seqs=max_seqs, expected_tokens=expected_tokens,
        page_tokens=8, chunk_tokens=8, prefill_chunks=(1,),
    )  # fmt: skip
    config = Config(model(), engine)
    usable, sizes = [n - 1 for n in config.num_pages], config.model.page_bytes(8)
    longest = config.peak_pages(1000)
    expected = config.peak_pages(min(expected_tokens or 1000, 1000))
    used = sum(n * size for n, size in zip(usable, sizes, strict=True))
    assert used <= cache_bytes
    most = [max_seqs * n for n in longest]
    assert all(low <= n <= high for low, n, high in zip(longest, usable, most, strict=True))
    fits = min(n / e for n, e in zip(usable, expected, strict=True))
    more = [min(max(int(fits + 1) * e, low), high)
            for e, low, high in zip(expected, longest, most, strict=True)]  # fmt: skip
    needs = sum(n * size for n, size in zip(more, sizes, strict=True))
    assert needs > cache_bytes or all(n >= m for n, m in zip(usable, more, strict=True))


def test_what_is_expected_moves_pages_from_where_they_would_lie_idle():
    """Sequences of 40 tokens fill windows of 20 and little beside them."""
    engine = EngineConfig.of(
        cache_bytes=400_000, page_tokens=8, chunk_tokens=8, prefill_chunks=(1,)
    )
    split = {}
    for expected in (40, 1000):
        config = Config(model(), engine.replace(expected_tokens=expected))
        split[expected] = [n - 1 for n in config.num_pages]
        peaks = config.peak_pages(40)
        split[expected].append(min(n // e for n, e in zip(split[expected], peaks, strict=True)))
    assert split[40][0] > 3 * split[1000][0] and split[40][1] < split[1000][1]
    assert split[40][2] > 2 * split[1000][2]  # sequences at a time
    with pytest.raises(InputError, match="engine.cache.expected_tokens=0: must be at least 1"):
        EngineConfig.of(expected_tokens=0)


def test_a_cache_without_room_for_a_page_is_refused():
    with pytest.raises(InputError, match="engine.cache.cache_bytes=1: must be at least") as caught:
        Config(model(), EngineConfig.of(cache_bytes=1, max_seqs=3))
    least = int(str(caught.value).split()[5].rstrip(","))
    test_pages_are_split_in_proportion_and_within_the_budget("bfloat16", least)
    with pytest.raises(InputError, match=f"engine.cache.cache_bytes={least}: must be at least"):
        Config(model(), EngineConfig.of(cache_bytes=least)).for_platform("tpu")


def test_pages_are_of_the_devices_size_unless_one_is_asked_for():
    """And whatever follows from it, what does not fit included."""
    config = Config(model(), EngineConfig(max_seqs=3))
    sizes = {"cpu": 16, "gpu": 64, "tpu": 128, "unheard of": 16}
    for platform, tokens in sizes.items():
        there = config.for_platform(platform)
        assert there.engine.cache.page_tokens == there.page_tokens == tokens
        assert there.device_page_tokens == tokens
        assert there.page_columns == 1024 // tokens
        assert there.for_platform("cpu") == there
    assert config.page_tokens == 16
    large_pages = Config(model(), EngineConfig.of(page_tokens=256))
    assert large_pages.for_platform("gpu").page_tokens == large_pages.page_tokens

    assert large_pages.device_page_tokens == 128 and large_pages.device_pages == 2
    needed = config.full_bytes(3)
    tight = EngineConfig.of(max_seqs=3, cache_bytes=needed, overcommit=False)
    with pytest.raises(InputError, match="engine.max_seqs=3: must be at most 2 without"):
        Config(model(), tight).for_platform("tpu")


def test_a_model_without_pages_needs_none():
    state = model(pattern=(LayerSpec(Caching(recurrent((4,))), None),))
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
        (dict(dtype="float16"), "'float32' or 'bfloat16', not 'float16'"),
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
        (dict(max_seqs=0), "engine.max_seqs=0: must be from 1 to 4096"),
        (dict(cache_bytes=-1), "engine.cache.cache_bytes"),
        (dict(num_drafts=-1), "engine.drafts.num_drafts=-1: must be from 0 to 4096"),
        (
            dict(decode_rows=()),
            r"engine.shapes.decode_rows=\(\): must be a list of sizes, each from 1 to 4096",
        ),
        (dict(prefill_chunks=(0, 2)), r"engine.shapes.prefill_chunks=\(0, 2\): must be a list"),
        (dict(page_tokens=24), "must divide 128"),
        (dict(page_tokens=0), "engine.cache.page_tokens=0: must be at least 1"),
        (dict(seed=-1), "engine.seed=-1: must be from 0 to 18446744073709551615"),
        (dict(seed=2**64), "engine.seed=18446744073709551616: must be from 0 to"),
        (
            dict(top_logprobs=10),
            r"engine.requests.top_logprobs=10: must be at most the vocabulary \(9\)",
        ),
        (dict(deterministic=True, chunk_tokens=7), "at least 8"),
        (dict(max_context=1001), "from 1 to the model's 1000"),
        (dict(max_context=0), "from 1 to the model's 1000"),
    ],
)
def test_an_engine_refuses(fields, cause):
    with pytest.raises(InputError, match=cause) as error:
        Config(model(), EngineConfig.of(**fields))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("platform, default", [("cpu", False), ("gpu", True), ("tpu", True)])
def test_accelerators_have_greedy_steps(platform, default):
    """Unless they are asked for, or not."""
    assert Config(model()).for_platform(platform).engine.shapes.greedy_steps is default
    for asked in (False, True):
        config = Config(model(), EngineConfig.of(greedy_steps=asked))
        assert config.for_platform(platform).engine.shapes.greedy_steps is asked
