"""All that the kernels' tests ask of an instruction set, of AVX512_BF16 where it is not there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from layers.kernels.cpu import build, library
from tests.layers import native

_HERE = Path(__file__).parent


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_test_of_an_instruction_set(tmp_path):
    native.need()
    if library.product_seconds("avx512vnni") < 0 or library.product_seconds("avx512bf16") >= 0:
        pytest.skip("this processor has avx512bf16, or no AVX-512")
    units = build._X86 | {
        "dispatch.cc": ("x86-64", ("-include", str(_HERE / "claims.h"))),
        "avx512bf16.cc": ("x86-64-v4", (build._WIDE, "-include", str(_HERE / "avx512bf16.h"))),
    }
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
