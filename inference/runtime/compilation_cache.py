"""Compiled programs kept between starts. The directory holds code: it is ours alone."""

import logging
import os

import jax

from inference import files


def enable() -> None:
    """Turns on JAX's persistent compilation cache, in a directory only its owner can read."""
    folder = files.cache_directory() / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.chmod(folder, 0o700)
    except OSError as error:
        logging.warning("compiled programs are not kept: %s: %s", folder, error.strerror)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
