"""Executables kept between starts. They are code: only the owner may read or write them."""

import logging
import os

import jax

from inference.files import cache_directory


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
