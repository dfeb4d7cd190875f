"""The factors of an adapter in a file, by the modules that they change, checked."""

import hashlib
import re
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import NamedTuple

import numpy as np

from configs.errors import InputError, shown
from configs.settings.adapters import MOST_RANKS, AdapterConfig
from inference.adapters.modules import Module
from inference.checkpoints import mapped
from inference.checkpoints.tensor_source import TensorSource
from inference.runtime.adapter_weights import AdapterWeights, Factors, Place

MOST_ALPHA = 1 << 20
_HASHED_BYTES = 16 << 20  # at a time


class Stored(NamedTuple):
    """The tensors of an adapter.

    Attributes:
        modules: those that adapters may change, by name.
        tensors: of each module that the adapter changes those of A and of B.
        unread: tensors that say nothing of their own.
    """

    source: TensorSource
    modules: Mapping[str, Module]
    tensors: Mapping[str, tuple[str, str]]
    unread: Set[str] = frozenset()


def room(stored: Stored, model: str) -> AdapterConfig:
    """The room that an adapter takes, by the shapes of its tensors; raises InputError as `read`,
    which checks the rest.
    """
    extras = {module.extra for module in _modules(stored, model).values()} - {""}
    shapes = (stored.source.shapes[down] for down, _ in stored.tensors.values())
    rank = max((shape[0] for shape in shapes if shape), default=1)
    return AdapterConfig(rank=min(max(rank, 1), MOST_RANKS), extras=tuple(sorted(extras)))


def read(
    stored: Stored,
    model: str,
    room: AdapterConfig,
    path: Path,
    digest: str,
    scale: Callable[[str, int], float],
) -> AdapterWeights:
    """An adapter of a model, for which there is so much room.

    Args:
        model: its name.
        path, digest: of the adapter.
        scale: of a module, by its name and rank.

    Raises:
        InputError: it is no adapter of this model, or not sound, or there is less room.
    """
    modules, factors = _modules(stored, model), dict[Place, Factors]()
    rank = _rank(stored, modules, room)
    for name, module in modules.items():
        factors |= module.factors(*_factors(stored, name, scale))
    return AdapterWeights(path, digest, rank, factors)


def digest(*paths: Path) -> str:
    """SHA-256 of files, one behind the other."""
    digest = hashlib.sha256()
    for path in paths:
        with mapped.map_file(path) as data:
            for start in range(0, len(data), _HASHED_BYTES):
                digest.update(data.read(start, min(start + _HASHED_BYTES, len(data))))
    return digest.hexdigest()


def _modules(stored: Stored, model: str) -> dict[str, Module]:
    """The modules that a file adapts, each with both of its factors."""
    label, valid = stored.source.label, stored.modules
    expected = {tensor for both in stored.tensors.values() for tensor in both}
    for tensor in sorted(expected ^ (stored.source.shapes.keys() - stored.unread)):
        what = "is missing" if tensor in expected else "is no factor of LoRA, and would be lost"
        raise InputError(f"{label}: tensor {shown(tensor)} {what}")
    for name in stored.tensors:
        if re.search(r"\bexperts\b|_exps\b", name) and name not in valid:
            raise InputError(
                f"{label}: adapts {shown(name)}, and adapters of such routed experts are not "
                "supported: merge such an adapter with its model, and load the result"
            )
        if name not in valid:
            endings = ", ".join(sorted({module.rpartition(".")[2] for module in valid}))
            raise InputError(
                f"{label}: adapts {shown(name)}, which {model} has not, or which takes no "
                f"adapters; those that do end in {endings}"
            )
    if not stored.tensors:
        raise InputError(f"{label}: adapts nothing")
    return {name: valid[name] for name in stored.tensors}


def _rank(stored: Stored, modules: Mapping[str, Module], room: AdapterConfig) -> int:
    """The largest rank of a file, before anything else of it is read; raises InputError for factors
    of other shapes than its modules', or if there is less room.
    """
    source, largest = stored.source, 0
    for name, module in modules.items():
        if module.extra not in ("", *room.extras):
            extras = (*room.extras, module.extra)
            raise InputError(
                f"{source.label}: adapts {shown(name)}, for which the engine's adapters have no "
                f"room: set engine.adapters.extras={extras}"
            )
        (rows, columns), tensors = module.shape, stored.tensors[name]
        down, up = (tuple(source.shapes[tensor]) for tensor in tensors)
        rank = down[0] if down else 0
        if (down, up) != ((rank, columns), (rows, rank)) or not rank:
            raise InputError(
                f"{source.label}: {shown(name)} has factors {[*down]} and {[*up]}; it is [{rows}, "
                f"{columns}], so they are [r, {columns}] and [{rows}, r]"
            )
        largest = max(largest, rank)
    if largest > MOST_RANKS:
        raise InputError(
            f"{source.label}: has rank {largest}, of which adapters have at most {MOST_RANKS}: let "
            "peft merge it with its model, and load the result"
        )
    if largest > room.rank:
        raise InputError(
            f"{source.label}: has rank {largest}, the engine's adapters at most {room.rank}: set "
            f"engine.adapters.rank={largest}"
        )
    return largest


def _factors(stored: Stored, name: str, scale: Callable[[str, int], float]) -> Factors:
    source, tensors = stored.source, stored.tensors[name]
    down_RD, up_FR = (
        np.array(source.read(tensor, 0, source.shapes[tensor][0])).astype(np.float32)
        for tensor in tensors
    )
    up_FR *= np.float32(scale(name, len(down_RD)))
    for tensor, matrix in zip(tensors, (down_RD, up_FR), strict=True):
        if not np.isfinite(matrix).all():
            raise InputError(f"{source.label}: {shown(tensor)} has values that are not finite")
    return Factors(down_RD, up_FR)
