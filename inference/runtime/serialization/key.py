"""What a compiled program depends on, so that a file of one is used where it is right, only."""

import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from configs.engine import Config

# Fields of `EngineConfig` that no program reads: the host's, and what shapes of arguments tell.
_HOSTS_OWN = frozenset((
    "max_seqs", "max_context", "cache_bytes", "decode_rows", "prefill_chunks", "policy",
    "max_wait_s", "chunked_prefill", "prefill_budget", "max_prefill_seqs", "prefix_cache",
    "max_overtakes", "preemption", "swap_bytes", "greedy_steps", "overlap", "overcommit",
    "attention", "weights", "seed", "adapt_drafts",
))  # fmt: skip
_COMPILERS = {
    "cpu": (),
    "gpu": ("jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt"),
    "tpu": ("libtpu",),
}
_NUMERICS = ("jax_default_matmul_precision", "jax_enable_x64")
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_ROOT = Path(__file__).resolve().parents[3]
_SOURCES = (
    *("configs", "sharding", "layers"),
    *(f"inference/{room}" for room in ("runtime", "sampling", "scheduling", "speculation")),
)
_SUFFIXES = (".py", ".json", ".cc", ".h")

Key = dict[str, str]  # what is compared -> its value, or a digest of it


def of_engine(config: Config, attention: str, devices: Sequence[Any], mesh: Mesh | None) -> Key:
    """The parts that all programs of an engine share.

    Args:
        config: model, engine and mesh, as resolved for these devices.
        attention: its implementation.
        devices: that the programs are compiled for.
        mesh: None on one chip.
    """
    engine = {
        field.name: getattr(config.engine, field.name)
        for field in dataclasses.fields(config.engine)
        if field.name not in _HOSTS_OWN
    }
    own = "" if devices[0].platform != "cpu" else _this_processor()
    packages = ("jax", "jaxlib", *_COMPILERS.get(devices[0].platform, ()))
    return {
        "model": digest(repr(dataclasses.replace(config.model, name=""))),
        "draft": "" if config.draft is None else digest(repr(config.draft)),
        "engine": repr(engine | {"attention": attention}),
        "mesh": "" if mesh is None else str(dict(mesh.shape)),
        "devices": f"{len(devices)} x {devices[0].platform} {devices[0].device_kind} {own}".strip(),
        "packages": ", ".join(filter(None, map(_version, packages))),
        "compiler flags": repr([os.environ.get(name, "").split() for name in _FLAGS]),
        "numerics": repr([getattr(jax.config, name) for name in _NUMERICS]),
        "code of this version": sources(),
    }


def of_program(engine: Key, name: str, arguments: Sequence[Any]) -> Key:
    """The key of one program.

    Args:
        engine: from `of_engine`.
        name: of the program.
        arguments: shapes of its arguments; batch last, before it slots and cache.
    """
    *weights, cache, slots, batch = map(_described, arguments)
    shapes = {"weights' shapes": repr(weights), "cache's shapes": cache, "slots' shapes": slots}
    return (
        engine
        | {"program": name, "batch's shapes": digest(batch)}
        | {part: digest(shape) for part, shape in shapes.items()}
    )


def digest(text: str | bytes) -> str:
    """Sixteen hexadecimal digits."""
    data = text.encode() if isinstance(text, str) else text
    return hashlib.sha256(data).hexdigest()[:16]


def _described(tree: Any) -> str:
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    lines = [str(structure)]
    for path, leaf in leaves:
        sharding = getattr(leaf, "sharding", None)
        spec = sharding.spec if isinstance(sharding, NamedSharding) else ""
        lines.append(f"{jax.tree_util.keystr(path)} {leaf.dtype}{leaf.shape} {spec}")
    return "\n".join(lines)


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def sources() -> str:
    """A digest of the code that programs are traced from."""
    found = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((_ROOT / folder).rglob("*")):
            if path.suffix in _SUFFIXES:
                data = path.read_bytes()
                found.update(f"{path.relative_to(_ROOT)} {len(data)}\n".encode() + data)
    return found.hexdigest()[:16]


@functools.cache
def _this_processor() -> str:
    """Instruction sets, and how many threads XLA divides work among."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = ("flags", "Features", "model name", "CPU part")
    found = sorted({line for line in lines if line.split("\t")[0].strip(" :") in names})
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores {digest(' '.join([platform.machine(), platform.processor(), *found]))}"
