"""Pieces of work on threads: none is lost, run twice, before its phase or after its call."""

import subprocess
from pathlib import Path

import pytest

from layers.kernels.cpu import build
from tests.layers import native

_PROGRAM = Path(__file__).with_name("parallel.cc")


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="plain"),
        pytest.param(("-g", "-fsanitize=thread"), id="thread_sanitizer", marks=pytest.mark.long),
    ],
)
def test_pieces_run_once_and_in_order_however_late_helpers_are(flags, tmp_path):
    native.need()
    program = tmp_path / "parallel"
    command = [*build._compilers()[0], *build._FLAGS, "-O1", "-pthread", *flags]
    subprocess.run([*command, "-I", build._SOURCES, _PROGRAM, "-o", program], check=True)
    ended = subprocess.run([program], stderr=subprocess.PIPE, text=True, timeout=100)
    assert (ended.returncode, ended.stderr) == (0, "")
