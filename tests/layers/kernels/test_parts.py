"""Attention over parts of a sequence's tokens, as chips along `context` hold them: what they bring
together is the softmax in float64, whichever implementation each part is of.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreted_tpu
from jax.experimental.pallas import tpu as pltpu

from layers import page_rows
from layers.kernels.attention import (
    ffi_cpu,
    gpu,
    gpu_prefill,
    hopper_pages,
    mask,
    reference,
    tpu,
)
from layers.kernels.attention.contract import Stretch
from layers.kernels.device import target_device
from tests import compiling
from tests.interpreted import HOPPER, blocks_in_order, check_races, threads_are_compiled_once  # noqa: F401
from tests.layers import native, paged_case
from tests.layers.paged_case import Sight

pytestmark = pytest.mark.quick_code

_CHIPS = 3
_LATENT = {"value_width": 128, "values_in_keys": True}
_CASES = {  # (N, K), query tokens, head width, dtype, sight, cap, of the pages
    "one token": ((8, 2), 1, 64, "bfloat16", None, None, {}),
    "drafts, window": ((4, 2), 4, 64, "float32", 100, 3.0, {}),
    "first tokens": ((4, 2), 1, 64, "float32", Sight(90, first_tokens=70), None, {}),
    "a prompt": ((8, 2), 40, 64, "bfloat16", 150, None, {}),
    "a latent": ((16, 1), 1, 192, "bfloat16", None, None, _LATENT),
    "int8": ((8, 2), 1, 64, "bfloat16", None, None, {"stored": "int8"}),
    "int8, a latent": ((16, 1), 3, 192, "bfloat16", 100, None, _LATENT | {"stored": "int8"}),
}
_GPU, _TPU = {"interpret": HOPPER}, {"interpret": pltpu.InterpretParams(detect_races=True)}
_IMPLEMENTATIONS = {
    "reference": (reference.attend_part, {}),
    "ffi_cpu": (ffi_cpu.attend_part, {}),
    "pallas_gpu": (gpu.attend_part, _GPU),
    "pallas_gpu, splits": (gpu.attend_part, _GPU | {"num_splits": 2}),
    "pallas_tpu": (tpu.attend_part, _TPU),
    "pallas_tpu, appended": (tpu.append_and_attend_part, _TPU),
}


def _parts(case, pages, name: str):
    """Pages of each chip, as an implementation lays them out."""
    pages, S = np.asarray(pages), case.page_tokens
    for chip in range(_CHIPS):
        part = np.broadcast_to(pages[0, -1], pages.shape).copy()  # poisoned
        for length, table_P in zip(case.lengths, case.table_YP, strict=True):
            at = np.arange(chip, length, _CHIPS)
            part[table_P[at // _CHIPS // S], at // _CHIPS % S] = pages[table_P[at // S], at % S]
        if name.startswith("pallas_tpu"):
            width = page_rows.in_lanes(1, S, case.page_format).shape[2]
            part = np.pad(part, ((0, 0), (0, 0), (0, width - part.shape[2])))
        elif name.startswith("pallas_gpu") and case.page_format.is_quantized:
            part = hopper_pages.pack(part.reshape(-1, part.shape[2])).reshape(*part.shape[:2], -1)
        yield chip, jnp.asarray(part)


_CANNOT = [("pallas_gpu, splits", "a prompt")]
_CANNOT += [(name, "first tokens") for name in _IMPLEMENTATIONS if name.startswith("pallas_tpu")]
# Of Hopper's, which take seconds each.
_SOON = ("pallas_gpu", "one token"), ("pallas_gpu, splits", "drafts, window")
_LATER = [(name, case) for name in _IMPLEMENTATIONS for case in _CASES
          if name.startswith("pallas_gpu") and (name, case) not in _SOON]  # fmt: skip


@pytest.mark.parametrize("name, case", [
    pytest.param(name, case, marks=pytest.mark.long if (name, case) in _LATER else ())
    for name in _IMPLEMENTATIONS for case in _CASES if (name, case) not in _CANNOT
])  # fmt: skip
def test_parts_of_a_softmax_make_the_whole(name, case, monkeypatch):
    """Chips hold every third token, some none of those that a query sees; a sink counts once."""
    monkeypatch.setattr(tpu, "_BLOCK_TOKENS", 128)
    heads, width, head_width, dtype, sight, cap, more = _CASES[case]
    drawn = paged_case.Case(
        (0, 1, 2, 130, 460), heads, 64, width, dtype, 0, head_width, head_width**-0.5,
        rounds=name == "reference", **more,
    )  # fmt: skip
    if name == "ffi_cpu":
        native.need(drawn.page_format)
    if (name, case) == ("pallas_gpu", "a prompt"):
        assert gpu_prefill.suits(drawn.q_YWNH.shape, heads[1], target_device())
    sinks_N = np.float32(np.random.default_rng(1).normal(size=heads[0]))
    attend, sizes = _IMPLEMENTATIONS[name]
    whole = paged_case.options(sight, cap)
    local = whole._replace(first_tokens=-(-whole.first_tokens // _CHIPS))

    @compiling.jit
    def part(q_YWNH, row_YWX, pages, rectangle, chip):
        bounds = mask.on_chip(reference.bounds(rectangle, whole), chip, _CHIPS)
        part_arguments = Stretch(pages, rectangle.tables[0], bounds), rectangle.valid_YW
        new = (row_YWX, rectangle.kv_position_YW, (chip, _CHIPS)) if is_new else ()
        return attend(q_YWNH, *new, *part_arguments, drawn.page_format, local, **sizes)

    q_YWNH, pages, rectangle = drawn.arguments
    outs, totals, row_YWX, is_new = [], [], None, name.endswith("appended")
    written = [part for _, part in _parts(drawn, pages, name)]
    if is_new:
        row_YWX, pages = paged_case.take_newest(pages, rectangle)
    for chip, chip_pages in _parts(drawn, pages, name):
        with blocks_in_order() if "splits" in name else contextlib.nullcontext():
            results = jax.block_until_ready(part(q_YWNH, row_YWX, chip_pages, rectangle, chip))
        out_YWNH, total_YWN = results[:2]
        if is_new:
            np.testing.assert_array_equal(results[2], written[chip])
        check_races(HOPPER if name.startswith("pallas_gpu") else None)
        assert not name.startswith("pallas_tpu") or not interpreted_tpu.races.races_found
        assert out_YWNH.dtype == total_YWN.dtype == jnp.float32
        valid_YW = drawn.valid_YW
        assert np.isfinite(out_YWNH[valid_YW]).all()
        sees_YW = np.zeros_like(valid_YW)
        for row, w in np.argwhere(valid_YW):
            sees_YW[row, w] = drawn._seen(row, w, sight)[chip::_CHIPS].any()
        assert (np.asarray(total_YWN)[valid_YW & ~sees_YW] <= -1e30).all()
        assert (np.asarray(total_YWN)[valid_YW & sees_YW] > -1e3).all()
        outs.append(np.float64(out_YWNH))
        totals.append(np.float64(total_YWN))
    totals = np.stack([*totals, np.broadcast_to(sinks_N, totals[0].shape)])
    shares = np.exp(totals - totals.max(0))
    shares /= shares.sum(0)
    whole_YWNH = sum(out * share[..., None] for out, share in zip(outs, shares[:-1], strict=True))
    drawn.check(np.float32(whole_YWNH), sight, cap, sinks_N, is_rounded=name.startswith("pallas"))
