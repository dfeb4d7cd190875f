"""All that the kernels' tests ask of an instruction set, of AVX512_BF16 and of AMX where these are
not there.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from layers.kernels.cpu import build, library
from tests.layers import native

_HERE = Path(__file__).parent


_BF16 = (build._WIDE, "-mavx512vnni", "-include", str(_HERE / "avx512bf16.h"))
_AMX = ("-include", str(_HERE / "amx.h"))
_UNITS = {
    "avx512bf16": {"dispatch.cc": (), "avx512bf16.cc": _BF16},
    # Under the other's name, which needs no state of the system's.
    "amx": {
        "dispatch.cc": ("-DkBfloat16Pairs=kBfloat16Amx", "-DkBlocksVnni=kBlocksAmx"),
        "avx512bf16.cc": _BF16, "amx.cc": (*_BF16, *_AMX),
        "amx_blocks.cc": (build._WIDE, "-mavx512vnni", *_AMX),
    },
}  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", _UNITS)
def test_every_test_of_an_instruction_set(name, tmp_path):
    native.need()
    if library.product_seconds("avx512vnni") < 0 or library.product_seconds("avx512bf16") >= 0:
        pytest.skip("this processor has avx512bf16, or no AVX-512")
    units = build._X86 | {
        file: ("x86-64" if file == "dispatch.cc" else "x86-64-v4", flags)
        for file, flags in _UNITS[name].items()
    }
    level, flags = units["dispatch.cc"]
    units["dispatch.cc"] = level, ("-include", str(_HERE / "claims.h"), *flags)
    for folder in (kernels := tmp_path / "kernels", work := tmp_path / "building"):
        folder.mkdir(0o700)
    built = build._compile(build._compilers()[0], units, work)
    build._keep(built, kernels, build.library_name())
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "", "-k", "avx512bf16 and not test_pairs",
         "-p", "no:cacheprovider", "tests/layers/kernels", "tests/inference/runtime"],
        cwd=_HERE.parents[2], capture_output=True, text=True,
        env=os.environ | {"RIDGELINE_KERNELS": str(kernels), "RIDGELINE_CACHE": str(tmp_path)},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:]
    passed = run.stdout.rpartition(" passed")[0].split()[-1]
    assert int(passed) > 100
