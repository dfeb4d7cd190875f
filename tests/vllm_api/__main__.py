"""Runs vLLM's tests of its server against ours: VLLM_TESTS=~/vllm PYTHON tests/vllm_api [ARGS].

ARGS are pytest's; without a path they are all tests of FOLDERS. PYTHON is that of an environment
with the packages that docs/server.md names. The server runs in RIDGELINE_PYTHON, or else in the
environment that `make serve` makes.
"""

import os
import sys
from pathlib import Path

import plugin
import pytest

FOLDERS = ("tests/entrypoints/openai", "tests/entrypoints/anthropic", "tests/tool_use")

if __name__ == "__main__":
    vllm = os.environ.get("VLLM_TESTS")
    if vllm is None or not (Path(vllm) / FOLDERS[0]).is_dir():
        sys.exit(f"VLLM_TESTS={vllm}: is no checkout of vLLM; git clone its repository")
    os.chdir(vllm)
    args = sys.argv[1:]
    if not any(arg.startswith("tests/") for arg in args):
        args = [*FOLDERS, *args]
    # vLLM's own tests/conftest.py imports its engine, so it stays out.
    args += ["--confcutdir=tests/entrypoints", "--timeout=120", "-rsfE", "-p", "no:cacheprovider"]
    sys.exit(pytest.main(args, plugins=[plugin]))
