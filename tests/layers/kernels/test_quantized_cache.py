"""Quantized caches: what is stored of a token, and attention over it, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from configs.cache import CacheSpec, PageFormat, keys_values, latent
from layers import page_rows
from layers.kernels.attention import ffi_cpu, gpu, hopper_pages, reference, tpu
from layers.kernels.attention.contract import Options
from tests import compiling
from tests.interpreted import HOPPER, check_races, threads_are_compiled_once  # noqa: F401
from tests.layers import native, paged_case, quantized_rows
from tests.layers.native import instruction_set  # noqa: F401

pytestmark = pytest.mark.quick_code

_FORMATS = ("int8", "fp8", "int4")
_SPECS = {"heads": keys_values(3, 64), "uneven": CacheSpec(2, 96, 128), "latent": latent(128, 32)}


@functools.cache
def _round_trip(page_format: PageFormat):
    def run(row_TX):
        stored_TX = page_rows.quantize(row_TX, page_format)
        return stored_TX, page_rows.dequantize(stored_TX, page_format, jnp.float32)

    return compiling.jit(run)


def _rows(page_format: PageFormat, seed: int = 0, num_rows: int = 40) -> np.ndarray:
    """Rows of sizes far apart, some elements of which are far larger than others."""
    generator = np.random.default_rng(seed)
    row_TX = generator.standard_normal((num_rows, page_format.row_width))
    row_TX *= 10.0 ** generator.integers(-6, 6, (num_rows, 1))
    return np.float32(row_TX * np.where(generator.random(row_TX.shape) < 0.02, 30, 1))


@pytest.mark.parametrize("spec", _SPECS)
@pytest.mark.parametrize("name", _FORMATS)
def test_a_reader_finds_the_nearest_multiples_of_the_stored_scale(name, spec):
    page_format = _SPECS[spec].page_format(name)
    row_TX = _rows(page_format)
    stored_TX, found_TX = _round_trip(page_format)(row_TX)
    assert stored_TX.dtype == jnp.uint8
    assert stored_TX.shape[1] == page_format.bytes_per_token
    expected_TX = quantized_rows.numbers(np.float64(row_TX), page_format)
    np.testing.assert_allclose(found_TX, expected_TX, rtol=1e-6)  # no element rounds otherwise


@pytest.mark.parametrize("name", _FORMATS)
def test_a_token_is_stored_whatever_is_beside_it(name):
    page_format = _SPECS["uneven"].page_format(name)
    row_TX, store = _rows(page_format), _round_trip(page_format)
    whole_TX, _ = store(row_TX)
    for rows in ([3], [30, 7], range(9, 26)):
        np.testing.assert_array_equal(store(row_TX[np.array(rows)])[0], whole_TX[np.array(rows)])


@pytest.mark.parametrize("name", _FORMATS)
def test_zeros_and_what_is_smaller_than_any_scale_are_zeros(name):
    page_format = _SPECS["heads"].page_format(name)
    tiny_TX = np.full((2, page_format.row_width), 1e-38, np.float32)
    tiny_TX[1] = 0
    _, found_TX = _round_trip(page_format)(tiny_TX)
    assert np.abs(found_TX).max() <= 1e-38
    unwritten_TX = jnp.zeros((1, page_format.stored_width), jnp.uint8)
    assert not np.asarray(page_rows.dequantize(unwritten_TX, page_format, jnp.float32)).any()


@pytest.mark.parametrize("spec", _SPECS)
@pytest.mark.parametrize("name", _FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_nan_to_its_whole_group_and_to_no_other(name, spec, bad):
    page_format = _SPECS[spec].page_format(name)
    row_TX = _rows(page_format, num_rows=2)
    plain_TX = np.asarray(_round_trip(page_format)(row_TX)[1])
    at = page_format.row_width - 1
    row_TX[1, at] = bad
    found_TX = np.asarray(_round_trip(page_format)(row_TX)[1])
    size = page_format.groups[-1][1]
    assert np.isnan(found_TX[1, -size:]).all()
    np.testing.assert_array_equal(found_TX[0], plain_TX[0])
    np.testing.assert_array_equal(found_TX[1, :-size], plain_TX[1, :-size])


# --- attention ------------------------------------------------------------------------------------

_INSIDE = {"value_width": 64, "values_in_keys": True}
_CASES = {  # (N, K), query tokens, dtype, key width, window, masks and widths
    "one token": ((6, 2), 1, "bfloat16", 64, None, {}),
    "a chunk, window": ((4, 2), 20, "float32", 64, 24, {}),
    "a tree": ((4, 4), 8, "bfloat16", 32, None, {"trees": True}),
    "narrow values": ((3, 3), 4, "float32", 96, None, {"value_width": 32}),
    "latent": ((12, 1), 1, "bfloat16", 96, None, _INSIDE),
    "latent, a chunk": ((3, 1), 20, "float32", 96, 90, _INSIDE),
    "two groups, a chunk": ((14, 2), 20, "bfloat16", 128, 90, {}),
    "an odd width": ((3, 1), 5, "bfloat16", 32, None, {"value_width": 96}),
}


def _drawn(case: str, name: str, rounds: bool = True, lengths=(0, 1, 15, 70, 150), seed: int = 0):
    heads, width, dtype, key_width, window, more = _CASES[case]
    drawn = paged_case.Case(
        lengths, heads, 16, width, dtype, seed, key_width, key_width**-0.5,
        stored=name, rounds=rounds, **more,
    )  # fmt: skip
    return drawn, window


@functools.cache
def _program(attend, page_format: PageFormat, window: int | None = None, deterministic=False):
    options = Options(window, deterministic=deterministic)
    return compiling.jit(
        functools.partial(attend, group=0, page_format=page_format, options=options)
    )


_QUICK = {
    "one token": "fp8", "a chunk, window": "int8", "narrow values": "int4", "latent": "int8",
    "two groups, a chunk": "int8", "a tree": "int4",
}  # fmt: skip
_LONG = [
    pytest.param(name, case, marks=pytest.mark.long)
    for case in _CASES for name in _FORMATS if _QUICK.get(case) != name
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "case"), [*((name, case) for case, name in _QUICK.items()), *_LONG]
)
def test_attention_over_quantized_pages(name, case):
    drawn, window = _drawn(case, name)
    for deterministic in (False, True):
        attend = _program(reference.attend_pages, drawn.page_format, window, deterministic)
        drawn.check(attend(*drawn.arguments), window)


@pytest.mark.parametrize(
    ("name", "case"), [*((name, case) for case, name in _QUICK.items()), *_LONG]
)
def test_quantized_pages_on_every_instruction_set(instruction_set, name, case):  # noqa: F811
    """Against float64, and bit for bit the same for a token alone and among others."""
    drawn, window = _drawn(case, name, rounds=False)
    native.need(drawn.page_format)
    attend = _program(ffi_cpu.attend_pages, drawn.page_format, window)
    q_YWNH, pages, rectangle = drawn.arguments
    found = np.asarray(attend(q_YWNH, pages, rectangle))
    drawn.check(found, window)
    alone = np.asarray(attend(q_YWNH[:, :1], pages, rectangle.first(1)))
    valid_Y1 = drawn.valid_YW[:, :1]
    np.testing.assert_array_equal(alone[valid_Y1], found[:, :1][valid_Y1])


@pytest.mark.long
@pytest.mark.parametrize("name", _FORMATS)
@pytest.mark.parametrize("case", _CASES)
def test_500_random_batches_on_every_instruction_set(instruction_set, case, name):  # noqa: F811
    """Of random lengths, zero among them, against float64."""
    for seed in range(1, 1 + -(-500 // len(_CASES))):
        generator = np.random.default_rng(seed)
        lengths = (generator.integers(0, 300, 4) * (generator.random(4) < 0.9)).tolist()
        drawn, window = _drawn(case, name, rounds=False, lengths=lengths, seed=seed)
        native.need(drawn.page_format)
        attend = _program(ffi_cpu.attend_pages, drawn.page_format, window)
        drawn.check(attend(*drawn.arguments), window)


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize(
    ("attend", "dtype", "at"),
    [
        (reference.attend_pages, "float32", 0), (ffi_cpu.attend_pages, "float32", 0),
        (ffi_cpu.attend_pages, "bfloat16", 0), (ffi_cpu.attend_pages, "bfloat16", 128),
    ],
)  # fmt: skip
def test_a_visible_nan_reaches_its_readers_only(attend, dtype, at, name):
    """As what `quantize` stores of a key, or a value, that is not finite."""
    drawn = paged_case.Case((70, 130), (4, 2), 16, 1, dtype, head_width=64, stored=name)
    if attend is ffi_cpu.attend_pages:
        native.need(drawn.page_format)
    row_TX = np.zeros((1, drawn.page_format.row_width), np.float32)
    row_TX[0, at : at + 64] = np.nan  # of KV head 0
    pages = drawn.pages.at[drawn.table_YP[1, 3], 3].set(
        page_rows.quantize(jnp.asarray(row_TX), drawn.page_format)[0]
    )
    q_YWNH, _, rectangle = drawn.arguments
    found = np.asarray(_program(attend, drawn.page_format)(q_YWNH, pages, rectangle))
    assert np.isnan(found[1, 0, :2]).all() and np.isfinite(found[0]).all()


_TPU_CASES = {  # as `_CASES`; heads begin at half a tile of lanes
    "one token": ((8, 2), 1, "bfloat16", 64, None, {}),
    "one token, MQA": ((4, 1), 1, "float32", 128, 90, {}),
    "drafts, window": ((4, 2), 5, "bfloat16", 64, 70, {}),
    "a chunk": ((4, 4), 40, "float32", 64, None, {}),
    "latent": ((6, 1), 1, "bfloat16", 192, None, {"value_width": 128, "values_in_keys": True}),
    "latent, a tree": (
        (6, 1), 8, "float32", 192, None,
        {"value_width": 128, "values_in_keys": True, "trees": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("int8", "drafts, window"), ("fp8", "latent"),
        *(
            pytest.param(name, case, marks=pytest.mark.long)
            for name in ("int8", "fp8") for case in _TPU_CASES
        ),
    ],
)  # fmt: skip
def test_the_tpu_kernel_appends_and_reads_them(name, case, monkeypatch):
    """The step's rows are in the pages afterwards, as if they had been written."""
    monkeypatch.setattr(tpu, "_BLOCK_TOKENS", 64)
    heads, width, dtype, key_width, window, more = _TPU_CASES[case]
    drawn = paged_case.Case(
        (0, 1, 63, 130), heads, 64, width, dtype, 0, key_width, key_width**-0.5, stored=name, **more
    )
    q_YWNH, pages, rectangle = drawn.arguments
    lanes = page_rows.in_lanes(*pages.shape[:2], drawn.page_format).shape[2]
    assert lanes % 128 == 0

    def padded(pages):
        return jnp.pad(pages, ((0, 0), (0, 0), (0, lanes - pages.shape[2])))

    row_YWX, without = paged_case.take_newest(pages, rectangle)
    attend = functools.partial(
        tpu.append_and_attend, group=0, page_format=drawn.page_format, options=Options(window),
        interpret=pltpu.InterpretParams(detect_races=True),
    )  # fmt: skip
    # As on a TPU: a CPU's compiler would leave out that keys are rounded to their type.
    options = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}
    attend = jax.jit(attend, compiler_options=options)
    found, after = attend(q_YWNH, row_YWX, padded(without), rectangle)
    assert not interpret_pallas_call.races.races_found
    drawn.check(found, window, is_rounded=True)
    np.testing.assert_array_equal(np.asarray(after)[1:], np.asarray(padded(pages))[1:])


HOPPER_CASES = {  # (N, K), page tokens, query tokens, head width, window, cap, sinks, masks
    "one token": ((9, 3), 64, 1, 128, None, None, False, {}),
    "one token, all at once": ((10, 5), 128, 1, 64, 90, 3.0, True, {}),
    "drafts, wide heads": ((4, 2), 64, 4, 256, 70, None, False, {}),
    "a tree": ((4, 2), 64, 8, 64, None, None, True, {"trees": True}),
    "a canvas of trees, window": ((2, 1), 128, 6, 64, 40, 2.0, True,
                                  {"canvases": True, "trees": True}),
    "a chunk of several tiles": ((16, 2), 64, 9, 64, None, None, False, {}),
    "latents": ((12, 1), 64, 1, 192, None, None, False,
                {"value_width": 128, "values_in_keys": True}),
    "latents, two tiles, drafts": ((24, 1), 64, 2, 320, 90, 3.0, True,
                                   {"value_width": 256, "values_in_keys": True}),
    "latents of DeepSeek-V3, a tree": (
        (16, 1), 64, 4, 576, None, None, False,
        {"value_width": 512, "values_in_keys": True, "trees": True},
    ),
}  # fmt: skip


@functools.cache
def _on_hopper(page_format: PageFormat, window: int | None, cap: float | None, **options):
    def attend(q_YWNH, pages, rectangle, sinks_N):
        told = rectangle, 0, page_format, paged_case.options(window, cap, sinks_N)
        return gpu.attend_pages(q_YWNH, pages, *told, **options)

    return compiling.jit(attend)


def _hopper_pages(drawn: paged_case.Case) -> jax.Array:
    words = hopper_pages.pack(drawn.pages.reshape(-1, drawn.pages.shape[2]))
    return words.reshape(*drawn.pages.shape[:2], -1)


def check_on_hopper(name, case, lengths, seed=0, interpret=HOPPER, **sizes):
    """Against float64 of what pages hold, without a race, and twice the same bits."""
    heads, page_tokens, width, head_width, window, cap, has_sinks, masks = HOPPER_CASES[case]
    drawn = paged_case.Case(
        lengths, heads, page_tokens, width, "bfloat16", seed, head_width, head_width**-0.5,
        stored=name, rounds=False, **masks,
    )  # fmt: skip
    sinks_N = np.float32(np.random.default_rng(seed).normal(size=heads[0])) if has_sinks else None
    q_YWNH, _, rectangle = drawn.arguments
    attend = _on_hopper(drawn.page_format, window, cap, interpret=interpret, **sizes)
    arguments = q_YWNH, _hopper_pages(drawn), rectangle, sinks_N
    found = attend(*arguments)
    check_races(interpret)
    drawn.check(found, window, cap, sinks_N, is_rounded=not sizes)
    again = np.asarray(attend(*arguments))
    np.testing.assert_array_equal(again[drawn.valid_YW], np.asarray(found)[drawn.valid_YW])


@pytest.mark.parametrize(
    ("name", "case", "sizes"),
    [
        ("fp8", "one token", {}),
        ("int8", "a tree", {"num_splits": 3, "num_stages": 2}),
        ("fp8", "latents", {}),
        *(
            pytest.param(name, case, {"num_splits": 2}, marks=pytest.mark.long)
            for name in hopper_pages.FORMATS for case in HOPPER_CASES
        ),
    ],
)  # fmt: skip
def test_the_hopper_kernel_reads_them(name, case, sizes):
    check_on_hopper(name, case, (0, 65, 172), **sizes)


@pytest.mark.long
@pytest.mark.parametrize("name", hopper_pages.FORMATS)
@pytest.mark.parametrize("case", HOPPER_CASES)
def test_500_random_batches_on_hopper(name, case):
    for seed in range(1, 1 + -(-250 // len(HOPPER_CASES))):
        generator = np.random.default_rng(seed)
        lengths = (generator.integers(0, 300, 3) * (generator.random(3) < 0.9)).tolist()
        check_on_hopper(name, case, lengths, seed, **({"num_splits": 2} if seed % 2 else {}))


@pytest.mark.parametrize(("at", "position", "window", "seen_by"), [
    (0, 129, None, [3]), (128, 129, None, [3]), (128, 125, 2, [0]),
])  # fmt: skip
def test_a_nan_on_hopper_reaches_those_that_see_it(at, position, window, seen_by):
    """A key, or value, that is not finite, among those of other queries of a tile: earlier ones,
    and later ones that see nothing of its page.
    """
    drawn = paged_case.Case((70, 130), (4, 2), 64, 4, "bfloat16", head_width=64, stored="int8")
    row_TX = np.zeros((1, drawn.page_format.row_width), np.float32)
    row_TX[0, at : at + 64] = np.nan  # of KV head 0
    row_TX = hopper_pages.pack(page_rows.quantize(jnp.asarray(row_TX), drawn.page_format))
    place = drawn.table_YP[1, position // 64], position % 64
    pages = _hopper_pages(drawn).at[place].set(row_TX[0])
    q_YWNH, _, rectangle = drawn.arguments
    attend = _on_hopper(drawn.page_format, window, None, interpret=HOPPER)
    found = np.asarray(attend(q_YWNH, pages, rectangle, None))
    is_nan = np.zeros((2, 4, 4), bool)
    is_nan[1, seen_by, :2] = True
    np.testing.assert_array_equal(np.isnan(found).any(-1), is_nan)


def test_jit_and_eager_store_the_same():
    """One way to round, whatever is fused with it."""
    page_format = _SPECS["heads"].page_format("int8")
    row_TX = _rows(page_format)
    with jax.disable_jit():
        eager = page_rows.quantize(jnp.asarray(row_TX), page_format)
    np.testing.assert_array_equal(eager, _round_trip(page_format)(row_TX)[0])
