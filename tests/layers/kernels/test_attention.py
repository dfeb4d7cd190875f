"""Every implementation of attention over pages against a softmax in float64, on one set of cases;
kernels in the interpreter of their back end.

The interpreters run the kernels' copies, barriers, masks and splits as they are, start from NaN and
look for races (Hopper's from jax 0.11 on): only its tensor core's two products are plain dots.
"""

import contextlib
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreted_tpu
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call  # no public name in 0.10
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax.experimental.pallas import tpu as pltpu

from layers import page_rows
from layers.kernels.attention import ffi_cpu, gpu, gpu_prefill, reference, splits, tpu
from layers.kernels.attention.contract import Options
from layers.kernels.attention.mask import mask_bounds
from layers.kernels.device import target_device
from tests import compiling
from tests.interpreted import blocks_in_order, threads_are_compiled_once  # noqa: F401
from tests.layers import native, paged_case
from tests.layers.native import instruction_set  # noqa: F401
from tests.layers.paged_case import Sight

pytestmark = pytest.mark.quick_code

_INTERPRETER = InterpretGPUParams(
    detect_races=jax.__version_info__ >= (0, 11)
)  # 0.10 overlooks them


def _interpreted(*args, **sizes):
    return gpu.attend_pages(*args, **sizes, interpret=_INTERPRETER)


def _appended(q_YWNH, pages, *told):
    """The TPU kernel, which brings the row's tokens to pages that do not have them yet."""
    row_YWX, pages = paged_case.take_newest(pages, told[0])
    width = page_rows.in_lanes(*pages.shape[:2], told[2]).shape[2]
    pages = jnp.pad(pages, ((0, 0), (0, 0), (0, width - pages.shape[2])))
    interpret = pltpu.InterpretParams(detect_races=True)
    return tpu.append_and_attend(q_YWNH, row_YWX, pages, *told, interpret=interpret)[0]


_IMPLEMENTATIONS = {
    "reference": reference.attend_pages,
    "pallas_gpu": _interpreted,
    "pallas_tpu": _appended,
    "ffi_cpu": ffi_cpu.attend_pages,
}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """A row's pages are several blocks."""
    monkeypatch.setattr(tpu, "_BLOCK_TOKENS", 128)


@functools.cache
def _program(name, page_format, window, cap, **sizes):
    def attend(q_YWNH, pages, rectangle, sinks_N=None):
        options = paged_case.options(window, cap, sinks_N)
        told = rectangle, 0, page_format, options
        return _IMPLEMENTATIONS[name](q_YWNH, pages, *told, **sizes)

    return compiling.jit(attend)


def _check(name, case, window=None, cap=None, sinks_N=None, twice=False, **sizes):
    """Within the bound of the dtype, without a race, and (`twice`) the same bits again."""
    if name == "ffi_cpu":
        native.need(case.page_format)
    program = _program(name, case.page_format, window, cap, **sizes)
    is_split = sizes.get("num_splits", 1) > 1
    with blocks_in_order() if is_split else contextlib.nullcontext():
        found = jax.block_until_ready(program(*case.arguments, sinks_N=sinks_N))
    if name == "pallas_gpu" and _INTERPRETER.detect_races:
        assert not interpret_pallas_call.get_races().races_found
    if name == "pallas_tpu":
        assert not interpreted_tpu.races.races_found
    is_rounded = name.startswith("pallas")  # as the next product reads it
    case.check(found, window, cap, sinks_N, is_rounded=is_rounded)
    if twice:
        again = np.asarray(program(*case.arguments, sinks_N=sinks_N))
        np.testing.assert_array_equal(again[case.valid_YW], np.asarray(found)[case.valid_YW])


def _lengths(page_tokens: int) -> tuple[int, ...]:
    return 0, 1, page_tokens - 1, page_tokens, page_tokens + 1, max(150, 2 * page_tokens + 44)


_CASES = {  # (N, K), page tokens, query tokens, head width, dtype, window
    "one query head": ((2, 2), 64, 1, 64, "float32", None),
    "many query heads": ((16, 2), 64, 1, 64, "bfloat16", None),
    "odd group": ((9, 3), 128, 1, 64, "float32", 24),
    "one KV head": ((8, 1), 64, 1, 128, "float16", None),
    "drafts": ((4, 2), 64, 4, 64, "float32", None),
    "drafts, window": ((4, 2), 128, 4, 64, "bfloat16", 100),
    "window of one": ((4, 2), 64, 1, 64, "float32", 1),
    "chunks": ((4, 2), 64, 4, 64, "float32", Sight(70, chunked=True)),
    "more tokens than a tile holds": ((32, 2), 64, 9, 64, "float32", 70),
    "wide heads": ((2, 1), 64, 1, 256, "bfloat16", None),
}


def _each(cases, later):
    """Cases of every implementation; of those that are interpreted some are long, whose parts
    others have.
    """
    return [
        pytest.param(
            name, case,
            marks=pytest.mark.long if case in later and name.startswith("pallas") else (),
        )
        for name in _IMPLEMENTATIONS for case in cases
    ]  # fmt: skip


@pytest.mark.parametrize("name, case", _each(_CASES, ("drafts", "window of one")))
def test_ragged_lengths(name, case):
    heads, page_tokens, width, head_width, dtype, window = _CASES[case]
    drawn = paged_case.Case(
        _lengths(page_tokens), heads, page_tokens, width, dtype, 0, head_width, head_width**-0.5
    )
    _check(name, drawn, window, twice=True)


_FORMATS = {  # (N, K), dtype, key width; of the pages
    "latent": ((6, 1), "float32", 40, {"value_width": 32, "values_in_keys": True}),
    "latent, many heads": ((20, 1), "bfloat16", 40, {"value_width": 32, "values_in_keys": True}),
    "latent, tiny": ((4, 1), "bfloat16", 18, {"value_width": 12, "values_in_keys": True}),
    "latent, odd": ((2, 1), "float32", 19, {"value_width": 7, "values_in_keys": True}),
    "latent, DeepSeek's": ((16, 1), "bfloat16", 576, {"value_width": 512, "values_in_keys": True}),
    "narrow values": ((6, 2), "float32", 40, {"value_width": 24}),
    "wide values": ((4, 2), "bfloat16", 40, {"value_width": 56}),
}


def _drawn_of_format(case, width, page_tokens=16):
    heads, dtype, key_width, widths = _FORMATS[case]
    return paged_case.Case(
        _lengths(page_tokens), heads, page_tokens, width, dtype, head_width=key_width,
        scale=key_width**-0.5, **widths,
    )  # fmt: skip


@pytest.mark.parametrize(
    "sight", [Sight(24, first_tokens=5), Sight(40, first_tokens=140), Sight(70, chunked=True)]
)
@pytest.mark.parametrize("masks", [{}, {"trees": True}, {"canvases": True}])
def test_first_tokens_and_chunks(instruction_set, sight, masks):  # noqa: F811
    """In blocks of 64 keys; of the first tokens less than a page, and more than two blocks."""
    for width in (1, 20) if not masks else (12,):
        for lengths in ((0, 1, 70, 71), (300, 6, 210, 140)):
            _check("ffi_cpu", paged_case.Case(lengths, (4, 2), 16, width, **masks), sight)


@pytest.mark.parametrize("case", _FORMATS)
@pytest.mark.parametrize("width", [1, 4, 20])
def test_page_formats_beside_keys_and_values_of_one_width(case, width):
    """Values in the keys of the one head; keys and values of two widths."""
    drawn = _drawn_of_format(case, width)
    _check("reference", drawn, window=24)
    options = Options(deterministic=True)
    attend = functools.partial(
        reference.attend_pages, group=0, page_format=drawn.page_format, options=options
    )
    drawn.check(compiling.jit(attend)(*drawn.arguments))


@pytest.mark.parametrize("case", _FORMATS)
def test_page_formats_on_every_instruction_set(instruction_set, case):  # noqa: F811
    for width in (1, 4, 20):
        _check("ffi_cpu", _drawn_of_format(case, width), window=24)
        _check("ffi_cpu", _drawn_of_format(case, width))


_LATENTS = {  # N, C, R, query tokens, dtype, window, cap, sinks, masks
    "one token": (16, 128, 64, 1, "bfloat16", None, None, False, {}),
    "one token, all at once": (6, 256, 64, 1, "float32", 90, 3.0, True, {}),
    "two tiles of heads": (96, 128, 64, 1, "float16", None, None, False, {}),
    "drafts": (16, 128, 64, 5, "float32", None, None, False, {}),
    "tiles of tokens": (40, 128, 64, 3, "bfloat16", None, None, False, {}),
    "a tree": (16, 128, 64, 8, "bfloat16", None, None, True, {"trees": True}),
    "a chunk": (16, 128, 64, 10, "float32", None, None, False, {}),
}
_LATENT_KERNELS = ["reference", "pallas_gpu", "pallas_tpu"]


def _check_latents(name, case, lengths, seed, page_tokens=64, **sizes):
    """All heads read one row a token, whose first elements are the value, too."""
    N, C, R, width, dtype, window, cap, has_sinks, masks = case
    drawn = paged_case.Case(
        lengths, (N, 1), page_tokens, width, dtype, seed, C + R, (C + R) ** -0.5,
        value_width=C, values_in_keys=True, **masks,
    )  # fmt: skip
    sinks_N = None
    if has_sinks:
        sinks_N = np.float32(np.random.default_rng(seed).normal(size=N) * 3)
    _check(name, drawn, window, cap, sinks_N, **sizes)


_LATER = "drafts", "tiles of tokens"  # one token has as many heads, and others several tokens


@pytest.mark.parametrize("name, case", [
    pytest.param(
        name, case,
        marks=pytest.mark.long if case in _LATER and name.startswith("pallas") else (),
    )
    for name in _LATENT_KERNELS for case in _LATENTS
])  # fmt: skip
def test_latents(name, case):
    _check_latents(name, _LATENTS[case], (0, 65, 172), 0)


@pytest.mark.parametrize("name", _LATENT_KERNELS)
def test_latents_of_deepseek_v3(name):
    """128 heads, a latent vector of 512 and a rotary key of 64."""
    case = 128, 512, 64, 1, "bfloat16", None, None, False, {}
    _check_latents(name, case, (0, 200), 0, twice=True)


def test_latents_in_large_pages():
    """Of which splits begin in the middle."""
    for sizes in ({}, {"num_splits": 2}):
        _check_latents("pallas_gpu", _LATENTS["one token"], (1, 65, 300), 1, 128, **sizes)


@pytest.mark.parametrize("sizes", [{"num_splits": 3}, {"num_stages": 1}, {"num_stages": 5}])
def test_latents_are_split_and_come_ahead(sizes):
    """Among the splits empty ones; of stages one, and more than there are pages."""
    _check_latents("pallas_gpu", _LATENTS["one token"], (1, 64, 300), 1, **sizes)


def test_first_tokens_of_latents():
    case = 16, 128, 64, 2, "float32", Sight(40, first_tokens=70), None, True, {}
    _check_latents("pallas_gpu", case, (1, 100, 300), 0, num_splits=2)


@pytest.mark.long
@pytest.mark.parametrize("case", _LATENTS)
@pytest.mark.parametrize("name", _LATENT_KERNELS)
def test_500_random_batches_of_latents(name, case):
    """Of random lengths, zero among them."""
    for seed in range(1, 1 + -(-500 // len(_LATENTS))):
        generator = np.random.default_rng(seed)
        lengths = (generator.integers(0, 300, 3) * (generator.random(3) < 0.9)).tolist()
        options = {"num_splits": 2} if name == "pallas_gpu" and seed % 2 else {}
        _check_latents(name, _LATENTS[case], lengths, seed, **options)


@pytest.mark.long
@pytest.mark.parametrize("name", _IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (16, 2)])
@pytest.mark.parametrize("page_tokens", [64, 128])
def test_the_whole_product(name, dtype, heads, page_tokens):
    for seed, (width, window) in enumerate(itertools.product((1, 3), (None, 1, 90))):
        drawn = paged_case.Case(
            _lengths(page_tokens), heads, page_tokens, width, dtype, seed, 64, 1 / 8
        )
        _check(name, drawn, window)


_DRAWN = {  # (N, K), page tokens, query tokens, dtype, window, cap, sinks, masks
    "one token": ((8, 2), 64, 1, "bfloat16", None, None, False, {}),
    "one token, all at once": ((6, 2), 128, 1, "float32", 90, 3.0, True, {}),
    "drafts": ((4, 2), 64, 4, "float16", 70, None, False, {}),
    "a tree": ((4, 2), 64, 8, "bfloat16", None, None, True, {"trees": True}),
    "a tree, window": ((2, 2), 64, 16, "float32", 5, None, False, {"trees": True}),
    "a canvas": ((8, 2), 64, 20, "float32", None, None, False, {"canvases": True}),
    "a canvas of trees": ((2, 1), 128, 6, "float16", 40, 2.0, True,
                          {"canvases": True, "trees": True}),
}  # fmt: skip
_INSIDE = {"value_width": 48, "values_in_keys": True}
_DRAWN_LATENT = {  # the same of values in their keys
    "latents": ((12, 1), 16, 1, "bfloat16", None, None, True, _INSIDE),
    "latents, a tree": ((20, 1), 64, 8, "bfloat16", 90, 3.0, True, {"trees": True} | _INSIDE),
    "latents, a canvas": ((3, 1), 16, 20, "float32", None, 2.0, False,
                          {"canvases": True} | _INSIDE),
}  # fmt: skip


def _check_drawn(name, case, seed):
    """A batch of random lengths, zero among them, and random sinks."""
    heads, page_tokens, width, dtype, window, cap, has_sinks, masks = (_DRAWN | _DRAWN_LATENT)[case]
    generator = np.random.default_rng(seed)
    lengths = (generator.integers(0, 300, 4) * (generator.random(4) < 0.9)).tolist()
    drawn = paged_case.Case(lengths, heads, page_tokens, width, dtype, seed, 64, 1 / 8, **masks)
    sinks_N = np.float32(generator.normal(size=heads[0]) * 3) if has_sinks else None
    options = {"num_splits": 2} if name == "pallas_gpu" else {}
    _check(name, drawn, window, cap, sinks_N, **options)


@pytest.mark.parametrize(
    "name, case", _each(_DRAWN, ("one token", "drafts", "a tree, window", "a canvas"))
)
def test_a_random_batch(name, case):
    _check_drawn(name, case, seed=0)


def _check_500_drawn(name, case):
    for seed in range(1, 1 + -(-500 // len(_DRAWN))):
        _check_drawn(name, case, seed)


@pytest.mark.long
@pytest.mark.parametrize("case", _DRAWN)
@pytest.mark.parametrize("name", [name for name in _IMPLEMENTATIONS if name != "ffi_cpu"])
def test_500_random_batches(name, case):
    _check_500_drawn(name, case)


@pytest.mark.long
@pytest.mark.parametrize("case", _DRAWN)
def test_500_random_batches_on_every_instruction_set(instruction_set, case):  # noqa: F811
    _check_500_drawn("ffi_cpu", case)


@pytest.mark.parametrize("case", _DRAWN | _DRAWN_LATENT)
def test_a_random_batch_on_every_instruction_set(instruction_set, case):  # noqa: F811
    _check_drawn("ffi_cpu", case, seed=1)


@pytest.mark.parametrize("value_width", [24, 64])
def test_the_result_is_rounded_to_the_next_products_type(
    instruction_set,  # noqa: F811
    value_width,
):
    case = paged_case.Case((70, 0, 131), (6, 2), 16, 40, "bfloat16", 0, 64, value_width=value_width)
    native.need(case.page_format)
    exact, rounded = (
        ffi_cpu.attend_pages(*case.arguments, 0, case.page_format, Options(dtype=dtype))
        for dtype in ("float32", "bfloat16")
    )
    assert (exact.dtype, rounded.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_array_equal(rounded, exact.astype(jnp.bfloat16))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "widths"), [((6, 2), {}), ((70, 1), _INSIDE)])
def test_a_token_has_the_same_bits_in_any_rectangle(
    instruction_set,  # noqa: F811
    heads,
    widths,
    dtype,
):
    """Decoded alone, in a chunk, or beside others."""
    case = paged_case.Case((70, 150, 131), heads, 16, 40, dtype, 0, 64, 1 / 8, **widths)
    native.need(case.page_format)
    q_YWNH, pages, rectangle = case.arguments
    attend = compiling.jit(
        functools.partial(ffi_cpu.attend_pages, group=0, page_format=case.page_format)
    )
    whole = np.asarray(attend(q_YWNH, pages, rectangle))
    for rows, tokens in (((1,), (39,)), ((0, 2), (0, 7, 8, 30)), ((2,), range(3, 25))):
        rows, tokens = np.array(rows), np.array(tokens)
        part = dataclasses.replace(
            rectangle, slot_Y=rectangle.slot_Y[rows],
            position_YW=rectangle.position_YW[rows][:, tokens],
            valid_YW=rectangle.valid_YW[rows][:, tokens],
            tables=tuple(table[rows] for table in rectangle.tables),
        )  # fmt: skip
        found = np.asarray(attend(q_YWNH[rows][:, tokens], pages, part))
        np.testing.assert_array_equal(found, whole[rows][:, tokens])
        valid_YW = part.valid_YW.at[:, 1:].set(False).at[-1].set(False)
        found = attend(q_YWNH[rows][:, tokens], pages, dataclasses.replace(part, valid_YW=valid_YW))
        expected = np.where(valid_YW[..., None, None], whole[rows][:, tokens], 0)
        np.testing.assert_array_equal(found, expected)


def test_padding_reads_no_pages():
    """A row without a token reads none, one with padding those of its tokens."""
    case = paged_case.Case((0, 65, 300), (4, 2), 64, 2, head_width=64)
    _, _, rectangle = case.arguments
    valid_YW = rectangle.valid_YW.at[2, 1].set(False)
    rectangle = dataclasses.replace(
        rectangle, valid_YW=valid_YW, position_YW=jnp.array([[500, 500], [63, 64], [127, 500]])
    )
    for window, first in ((None, [0, 0, 0]), (10, [0, 0, 1])):
        bounds = mask_bounds(rectangle, window)
        ranges = gpu._split_pages(rectangle.tables[0], bounds, valid_YW, 64, 0, 1)
        assert ranges.start_ZX[:, 0].tolist() == first
        assert ranges.stop_ZX[:, 0].tolist() == [0, 2, 2]
    attend = functools.partial(_interpreted, group=0, page_format=case.page_format)
    found = compiling.jit(attend)(*case.arguments)
    assert not np.asarray(found[0]).any()


@pytest.mark.parametrize("num_splits, window", [
    (2, 130), (5, None), pytest.param(9, None, marks=pytest.mark.long),
    pytest.param(5, 130, marks=pytest.mark.long),
])  # fmt: skip
def test_splits_of_a_row_are_combined(monkeypatch, num_splits, window):
    """Two at a time, among them empty ones, and ones whose keys a draft does not see yet; a row of
    padding.
    """
    monkeypatch.setattr(splits, "_AHEAD", 2)
    case = paged_case.Case((1, 0, 257, 300), (4, 2), 64, 2, head_width=64, scale=1 / 8)
    sinks_N = np.float32([-1, 3, 0.5, 8])
    _check("pallas_gpu", case, window, sinks_N=sinks_N, num_splits=num_splits)


def test_a_row_of_padding_is_zero_whatever_the_sinks():
    case = paged_case.Case((0, 65), (4, 2), 64, 1, head_width=64)
    attend = functools.partial(
        _interpreted, group=0, page_format=case.page_format,
        options=Options(sinks_N=jnp.arange(4.0)), num_splits=4,
    )  # fmt: skip
    assert not np.asarray(compiling.jit(attend)(*case.arguments)[0]).any()


@pytest.mark.parametrize("sight, masks, num_splits", [
    pytest.param(sight, masks, num_splits, marks=pytest.mark.long if is_long else ())
    for sight, masks, num_splits, is_long in [
        (Sight(24, first_tokens=5), {}, 5, False), (Sight(24, first_tokens=5), {}, 1, True),
        (Sight(40, first_tokens=140), {}, 1, False), (Sight(40, first_tokens=140), {}, 5, True),
        (Sight(40, first_tokens=70), {"trees": True}, 1, False),
        (Sight(40, first_tokens=70), {"trees": True}, 5, True),
    ]
])  # fmt: skip
def test_first_tokens_in_few_pages(sight, masks, num_splits):
    """Windows behind them, in their pages and near their end; pages between are never read."""
    case = paged_case.Case((66, 150, 0, 460), (2, 1), 64, 3, head_width=64, scale=1 / 8, **masks)
    head, first = -(-sight.first_tokens // 64), (460 - 3 - sight.window) // 64
    assert head < first
    case.table_YP[3, head:first] = 10**6
    _check("pallas_gpu", case, sight, num_splits=num_splits)


@pytest.mark.long
@pytest.mark.parametrize("masks", [{}, {"trees": True}])
def test_500_random_first_tokens(masks):
    """And random splits, windows, lengths and sinks."""
    for seed in range(250):
        generator = np.random.default_rng(seed)
        lengths = (generator.integers(0, 500, 3) * (generator.random(3) < 0.9)).tolist()
        sight = Sight(
            int(generator.choice([1, 24, 100])), first_tokens=int(generator.choice([4, 70]))
        )
        case = paged_case.Case(
            lengths, (4, 2), 64, 3, "float16", seed, head_width=64, scale=1 / 8, **masks
        )
        sinks_N = np.float32(generator.normal(size=4) * 3)
        num_splits = int(generator.choice([1, 3, 9]))
        _check("pallas_gpu", case, sight, None, sinks_N, num_splits=num_splits)


def test_tiles_of_a_row_may_be_split():
    case = paged_case.Case((1, 130), (8, 1), 64, 12, head_width=64, scale=1 / 8)
    _check("pallas_gpu", case, 70, num_splits=2)


_PROMPTS = {  # lengths, (N, K), page tokens, query tokens, dtype, head width; window, cap; masks
    "several tiles": ((200, 1, 90), (2, 1), 64, 70, "float32", 64, None, None, {}),
    "odd group, large pages": ((60, 0, 150), (6, 2), 128, 24, "bfloat16", 64, None, None, {}),
    "window": ((300, 150), (4, 1), 64, 40, "float32", 64, 70, None, {}),
    "wide heads, cap": ((60, 200), (2, 1), 64, 33, "bfloat16", 256, 100, 3.0, {}),
    "chunks": ((300, 70), (8, 1), 64, 12, "float16", 64, Sight(70, chunked=True), None, {}),
    "tree": ((200, 40), (8, 1), 64, 12, "float32", 64, 24, None, {"trees": True}),
    "canvas": ((200, 30), (4, 1), 64, 20, "float16", 64, None, None, {"canvases": True}),
    "first tokens": (
        (460, 5, 200),
        (6, 2),
        64,
        33,
        "float32",
        64,
        Sight(70, first_tokens=70),
        None,
        {},
    ),
    "first tokens, tree": (
        (300, 140),
        (8, 1),
        64,
        12,
        "float16",
        64,
        Sight(20, first_tokens=5),
        2.0,
        {"trees": True},
    ),
}


@pytest.mark.parametrize("case", [
    pytest.param(case, marks=pytest.mark.long if case in ("several tiles", "window") else ())
    for case in _PROMPTS
])  # fmt: skip
def test_prompts_of_any_mask(case):
    """Pages that all tokens see and others, an odd number of them; padding beside and in tiles."""
    lengths, heads, page_tokens, width, dtype, head_width, window, cap, masks = _PROMPTS[case]
    drawn = paged_case.Case(
        lengths, heads, page_tokens, width, dtype, 0, head_width, head_width**-0.5, **masks
    )
    assert gpu_prefill.suits(drawn.q_YWNH.shape, heads[1], target_device())
    sinks_N = np.float32(np.random.default_rng(1).normal(size=heads[0]) * 3) if cap else None
    if case == "first tokens":
        drawn.table_YP[0, 2 : (460 - 33 - 70) // 64] = 10**6  # is never read
    _check("pallas_gpu", drawn, window, cap, sinks_N)


def test_a_prompts_bits_depend_on_its_own_tokens_alone():
    """Not on the tile that a token lies in, nor on which steps are masked there."""
    case = paged_case.Case((200,), (4, 1), 64, 70, head_width=64, scale=1 / 8)
    q_YWNH, pages, rectangle = case.arguments
    later = dataclasses.replace(
        rectangle, position_YW=rectangle.position_YW[:, 37:], valid_YW=rectangle.valid_YW[:, 37:]
    )
    attend = compiling.jit(functools.partial(_interpreted, group=0, page_format=case.page_format))
    found = np.asarray(attend(q_YWNH, pages, rectangle))
    np.testing.assert_array_equal(np.asarray(attend(q_YWNH[:, 37:], pages, later)), found[:, 37:])


@pytest.mark.parametrize("num_stages", [1, pytest.param(2, marks=pytest.mark.long), 8])
def test_any_number_of_pages_may_be_on_their_way(num_stages):
    """As many as fit, at most; more than a split has."""
    case = paged_case.Case((1, 65, 257, 300), (4, 2), 64, 2, "bfloat16", 0, 128, 1 / 8)
    _check("pallas_gpu", case, num_splits=2, num_stages=num_stages)


@pytest.mark.parametrize("name", _IMPLEMENTATIONS)
def test_scores_stay_within_their_cap(name):
    case = paged_case.Case((1, 64, 200), (4, 2), 64, 1, head_width=64)
    _check(name, case, cap=1.5)


def test_large_scores_do_not_overflow():
    case = paged_case.Case((1, 64, 200), (4, 2), 64, 1, head_width=64)
    case.q_YWNH = np.float32(case.q_YWNH * 1000).astype(np.float64)
    attend = functools.partial(_interpreted, group=0, page_format=case.page_format)
    attend = compiling.jit(attend)
    np.testing.assert_allclose(attend(*case.arguments), case.expected()[0], atol=1e-3)


@pytest.mark.parametrize("name", _IMPLEMENTATIONS)
def test_a_visible_nan_reaches_its_readers_only(name):
    case = paged_case.Case((70, 130), (4, 2), 64, 1, head_width=64)
    page = case.table_YP[1, 1]
    pages = np.array(case.pages)
    pages[page, 3, :64] = np.nan  # a key of KV head 0
    q, _, rectangle = case.arguments
    if name == "ffi_cpu":
        native.need(case.page_format)
    found = np.asarray(
        _program(name, case.page_format, None, None)(q, jnp.asarray(pages), rectangle)
    )
    assert np.isnan(found[1, 0, :2]).all()
    assert np.isfinite(found[0]).all()
