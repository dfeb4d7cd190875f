"""The cache of what JAX compiled: damage costs one line and one compilation, not one a start."""

import logging
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from inference.runtime import compilation_cache
from tests.scripts import apps

_STARTS = """
import sys
import jax, jax.numpy as jnp
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from inference.files import cache_directory
from inference.runtime import compilation_cache
compilation_cache.enable()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

def start():
    jax.clear_caches()
    reset_cache()
    jax.jit(lambda x: jnp.tanh(x) @ x)(jnp.ones((8, 8))).block_until_ready()

start()
entries = list((cache_directory.path() / "compiled").glob("*-cache"))
for path in entries:
    data = path.read_bytes()
    path.write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:])
damaged = sum(not compilation_cache.is_whole(path) for path in entries)
start()
mended = sum(map(compilation_cache.is_whole, entries))
print(len(entries), damaged, mended, file=sys.stderr)
start()
"""


def test_damaged_entries_are_removed_and_written_again(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", _STARTS], cwd=apps.ROOT, capture_output=True, text=True,
        env=os.environ | {"RIDGELINE_CACHE": str(tmp_path), "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    warning, counts = ran.stderr.splitlines()  # and nothing at the third
    count, damaged, mended = map(int, counts.split())
    assert count == damaged == mended > 0
    assert f"{count} damaged, compiled and kept again" in warning


@pytest.fixture
def keep_all():
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update(names[1], 0.0)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


@pytest.mark.usefixtures("keep_all")
def test_processes_of_the_suite_find_what_it_compiled(tmp_path):
    """By whatever path they reach the folder: it is no part of an entry's name."""
    names = []
    for folder in (tmp_path / "one", tmp_path / "other"):
        jax.config.update("jax_compilation_cache_dir", str(folder))
        reset_cache()
        jax.jit(lambda x: jnp.tanh(x) @ x).lower(np.ones((8, 8))).compile()
        names.append({path.name for path in folder.glob(compilation_cache.ENTRIES)})
    assert names[0] == names[1] != set()


def test_entries_without_a_checksum_are_removed_by_their_program(tmp_path, caplog):
    """JAX compresses by zstd where it is installed."""
    entries = [tmp_path / f"{program}-1-cache" for program in ("jit_step", "jit_admit")]
    for path in entries:
        path.write_bytes(compilation_cache._ZSTD + b"damaged")
    warn = compilation_cache._mending(tmp_path, print)
    unreadable = "Error reading persistent compilation cache entry for 'jit_step': ZstdError: x"
    warn(UserWarning(unreadable), UserWarning, "compiler.py", 1)
    assert [path.exists() for path in entries] == [False, True]
    assert "1 damaged, compiled and kept again" in caplog.messages[0]


def test_what_cannot_be_kept_is_one_line(tmp_path, caplog):
    shown = []
    warn = compilation_cache._mending(tmp_path, lambda *args: shown.append(args))
    unwritable = f"{compilation_cache._UNWRITABLE} for 'jit_step': OSError: [Errno 28] No space"
    with caplog.at_level(logging.WARNING):
        warn(UserWarning(unwritable), UserWarning, "compiler.py", 1)
        warn(UserWarning("another"), UserWarning, "compiler.py", 1)
    assert caplog.messages == ["an executable is not kept: OSError: [Errno 28] No space"]
    assert len(shown) == 1
