"""The cache of what JAX compiled: damage costs one line and one compilation, not one a start."""

import logging
import os
import subprocess
import sys

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
    assert jax.jit(lambda x: jnp.tanh(x) @ x)(jnp.ones((8, 8))).shape == (8, 8)

start()
entries = list((cache_directory.path() / "compiled").glob("*-cache"))
for path in entries:
    data = path.read_bytes()
    path.write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:])
    assert not compilation_cache.is_whole(path)
start()
assert entries and all(map(compilation_cache.is_whole, entries))
print(len(entries), "entries", file=sys.stderr)
start()
"""


def test_damaged_entries_are_removed_and_written_again(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", _STARTS], cwd=apps.ROOT, capture_output=True, text=True,
        env=os.environ | {"RIDGELINE_CACHE": str(tmp_path), "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    mended, count = ran.stderr.splitlines()  # and nothing at the third
    assert f"{count.split()[0]} damaged, compiled and kept again" in mended


def test_what_cannot_be_kept_is_one_line(tmp_path, caplog):
    shown = []
    warn = compilation_cache._mending(tmp_path, lambda *args: shown.append(args))
    unwritable = f"{compilation_cache._UNWRITABLE} for 'jit_step': OSError: [Errno 28] No space"
    with caplog.at_level(logging.WARNING):
        warn(UserWarning(unwritable), UserWarning, "compiler.py", 1)
        warn(UserWarning("another"), UserWarning, "compiler.py", 1)
    assert caplog.messages == ["an executable is not kept: OSError: [Errno 28] No space"]
    assert len(shown) == 1
