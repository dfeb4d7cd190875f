"""The native library for tests: on every instruction set that this machine has or emulates."""

import platform
from pathlib import Path

import jax
import pytest

from configs.errors import InputError
from inference.runtime import cpu_kernels
from layers.kernels.attention import ffi_cpu
from layers.kernels.attention.contract import Demand
from layers.kernels.cpu import library
from layers.kernels.device import Device
from tests.layers import emulated

# What rounds activations to bfloat16, beside weights of that type.
ROUNDING = "amx", "avx512bf16", "neonbf16"

EMULATED = emulated.PROCESSORS if platform.machine() == "x86_64" else {}
_EMULATION = pytest.mark.long, pytest.mark.timeout(1200)  # the first of them compiles the library


def need(page_format=None) -> None:
    """Skips a test where the library, or a reader of such pages, is not there."""
    cpu_kernels.load()
    if not library.is_loaded():
        pytest.skip("the native library is not there")
    if page_format is not None:
        asked = Demand(page_format.kv_heads, page_format, 64, deterministic=True)
        if reason := ffi_cpu.limit(asked, Device("cpu", "cpu", 1)):
            pytest.skip(reason)


def multiplies_by_amx() -> bool:
    """Whether XLA may multiply bfloat16 by AMX, in an order that follows the number of rows."""
    path = Path("/proc/cpuinfo")
    return path.is_file() and "amx_bf16" in path.read_text(encoding="utf-8")


def refused(reason: str):
    """Expects the library to refuse a call: JAX raises a `ValueError` where it computes at once,
    and its own error where the result is waited for.
    """
    return pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=reason)


@pytest.fixture(
    params=[
        pytest.param(name, marks=_EMULATION if name in EMULATED else ())
        for name in library.INSTRUCTION_SETS
    ]
)
def instruction_set(request):
    """Each that the processor has, in turn; of another architecture each that is emulated."""
    need()
    if request.param in EMULATED:
        from tests import fakes  # loads the engine

        fakes.forget_programs()  # engines' know one library
        with emulated.using(request.param):
            yield request.param
        fakes.forget_programs()
        return
    try:
        before = library.use(request.param)
    except InputError as error:
        pytest.skip(str(error))
    yield request.param
    library.use(before)
