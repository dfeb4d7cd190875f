"""Which instruction sets a processor has, by what it claims and by what it does."""

import ctypes
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from layers.kernels.cpu import build, library
from tests.layers import native

_HERE = Path(__file__).parent
_SOURCE = """
#include "kernels.h"
namespace ridgeline {
static void put(const void*, bool, int64_t, int64_t, void*, int64_t) {}
static void multiply(const Product&) {}
static void fault(const Product&) { __builtin_trap(); }
constexpr Multiplier kFine = {Activations::kBfloat16, put, multiply};
constexpr Multiplier kFaulty = {Activations::kBfloat16, put, fault};
const Dense kFloat32Avx2 = {}, kFloat32Avx512 = {}, kBfloat16Amx = {};
const Dense kBfloat16Avx2 = {kFine}, kBfloat16Avx512 = {kFine}, kBfloat16Vnni = {kFine};
const Dense kBfloat16Pairs = {kFaulty};
const RowKernels kRowsAvx2 = {}, kRowsAvx512 = {};
const StateKernels kStatesAvx2 = {}, kStatesAvx512 = {};
const BoundKernels kBoundsAvx2 = {}, kBoundsAvx512 = {};
const Blocks kBlocksAvx2 = {kFine}, kBlocksVnni = {kFine}, kBlocksAmx = {};
const HalfBlocks kHalfBlocksAmx = {};
}
"""


@pytest.fixture(scope="module")
def dispatch(tmp_path_factory):
    """The functions of dispatch.cc on a processor without tiles that claims AVX512_BF16, whose
    product faults.
    """
    native.need()
    if library.product_seconds("avx512vnni") < 0:
        pytest.skip("this processor has no avx512vnni")
    source = tmp_path_factory.mktemp("dispatch") / "kernels.cc"
    source.write_text(_SOURCE)
    subprocess.run(
        [
            *build._compilers()[0], *build._FLAGS, "-shared", "-include", _HERE / "claims.h",
            "-I", build._SOURCES, build._SOURCES / "dispatch.cc", source,
            "-o", source.with_suffix(".so"),
        ],
        check=True,
    )  # fmt: skip
    functions = ctypes.CDLL(str(source.with_suffix(".so")))
    functions.ridgeline_try.restype = ctypes.c_double
    return functions


def _handler():
    """What this process calls at an illegal instruction: the first field of `struct sigaction`."""
    action = (ctypes.c_void_p * 32)()
    assert ctypes.CDLL(None).sigaction(signal.SIGILL, None, action) == 0
    return action[0]


def test_what_a_processor_claims_is_tried(dispatch):
    """One whose hypervisor forbids what it claims is no reason to end."""
    before = _handler()
    for _ in range(2):  # the second signal is caught like the first
        tried = {name: dispatch.ridgeline_try(name.encode()) for name in library.INSTRUCTION_SETS}
        assert tried["avx512bf16"] == -2 and tried["amx"] == tried["neon"] == -1
        assert all(tried[name] >= 0 for name in ("avx512vnni", "avx512", "avx2"))
        assert _handler() == before


def test_threads_may_try_at_the_same_moment(dispatch):
    with ThreadPoolExecutor(4) as pool:
        tried = pool.map(dispatch.ridgeline_try, 50 * [b"avx512bf16", b"avx512"])
    assert [seconds >= 0 for seconds in tried] == 50 * [False, True]


def test_each_usable_instruction_set_brings_a_faster_multiply_add():
    native.need()
    types = "float32", "bfloat16", "int8"
    rates = {
        name: [library.peak(name, dtype, 1e-4) for dtype in types]
        for name in library.INSTRUCTION_SETS
    }
    for name, found in rates.items():
        assert any(found) == (library.product_seconds(name) >= 0), name
        assert all(0 <= rate < float("inf") for rate in found)
    assert library.peak("avx2", "int8", 1e-4) == library.peak("neon", "int4", 1e-4) == 0
