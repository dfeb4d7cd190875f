"""Executables kept between starts. They are code: only the owner may read or write them."""

import contextlib
import logging
import os
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from inference.files import cache_directory


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Context in which nothing is loaded from it: an executable that was cannot be serialized."""
    was = getattr(jax.config, "jax_enable_compilation_cache")  # noqa: B009, unknown to mypy
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        reset_cache()  # JAX asks once only
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", was)
        reset_cache()


def enable() -> None:
    """Turns on JAX's persistent compilation cache, in a directory that only its owner can open."""
    folder = cache_directory.path() / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.chmod(folder, 0o700)
    except OSError as error:
        logging.warning("executables are not kept: %s: %s", folder, error.strerror)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
