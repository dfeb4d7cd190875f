"""Adapters in the directories of the `peft` package: adapter_config.json and
adapter_model.safetensors.
"""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from configs.errors import InputError, shown
from configs.model import ModelConfig
from inference.adapters.modules import places
from inference.checkpoints import mapped, safetensors_file
from inference.checkpoints.tensor_source import TensorSource
from inference.runtime.adapter_weights import AdapterWeights, Factors, Place

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _DOWN, _UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "use_dora": (None, False), "bias": (None, "none"), "lora_bias": (None, False),
    "use_qalora": (None, False), "alora_invocation_tokens": (None,), "corda_config": (None,),
}  # fmt: skip
_HASHED_BYTES = 16 << 20


def read(directory: Path, config: ModelConfig, most_ranks: int) -> AdapterWeights:
    """An adapter of a model, checked.

    Args:
        most_ranks: the largest rank that there is room for.

    Raises:
        InputError: it is no LoRA adapter of this model, or not sound.
    """
    path = directory / CONFIG
    if not path.exists():
        pickled = [*directory.glob("adapter_model.bin")] if directory.is_dir() else []
        raise InputError(
            f"{directory}: no adapter of the peft package, which has {CONFIG} and {WEIGHTS}"
            + (f" ({pickled[0].name} is a pickle, which is never loaded)" if pickled else "")
        )
    settings = mapped.read_json(path)
    _check_settings(path, settings)
    source = safetensors_file.open_file(directory / WEIGHTS)
    place_of, factors = places(config), dict[Place, Factors]()
    for module in _modules(source):
        if (place := place_of.get(module)) is None:
            raise InputError(
                f"{source.label}: adapts {shown(module)}, which {config.name} has not, or which "
                f"takes no adapters; those that do end in {', '.join(_endings(place_of))}"
            )
        factors[place] = _factors(source, module, place, config, settings)
    rank = max(len(down_RD) for down_RD, _ in factors.values())
    if rank > most_ranks:
        raise InputError(
            f"{source.label}: has rank {rank}, the engine's adapters at most {most_ranks}; set "
            f"engine.adapters.rank={rank}"
        )
    return AdapterWeights(directory.name, _digest(directory / WEIGHTS), rank, factors)


def _check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    if settings.get("peft_type") != "LORA":
        raise InputError(f"{path}: peft_type is LORA, not {shown(settings.get('peft_type'))}")
    for name, neutral in _NEUTRAL.items():
        if settings.get(name) not in neutral:
            raise InputError(
                f"{path}: {name}={shown(settings[name])}: merge such an adapter with its model, "
                "and load the result"
            )
    for name in ("r", "lora_alpha"):
        value = settings.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise InputError(f"{path}: {name} is a number above 0, not {shown(value)}")
    if not isinstance(settings.get("alpha_pattern") or {}, dict):
        raise InputError(f"{path}: alpha_pattern is an object of names and numbers")


def _modules(source: TensorSource) -> list[str]:
    """The modules that a file adapts, each with both of its factors."""
    modules = dict.fromkeys(
        name.removesuffix(ending)
        for name in source.shapes
        for ending in (_DOWN, _UP)
        if name.endswith(ending)
    )
    expected = {module + ending for module in modules for ending in (_DOWN, _UP)}
    for name in sorted(expected ^ source.shapes.keys()):
        what = "is missing" if name in expected else "is no factor of LoRA, and would be lost"
        raise InputError(f"{source.label}: tensor {shown(name)} {what}")
    if not modules:
        raise InputError(f"{source.label}: adapts nothing")
    return [module.removeprefix(_PREFIX) for module in modules]


def _factors(
    source: TensorSource,
    module: str,
    place: Place,
    config: ModelConfig,
    settings: Mapping[str, Any],
) -> Factors:
    factors = []
    for ending in (_DOWN, _UP):
        name = f"{_PREFIX}{module}{ending}"
        if name not in source.shapes:
            raise InputError(f"{source.label}: tensor names begin with {_PREFIX!r}, not {module!r}")
        shape = source.shapes[name]
        if len(shape) != 2:
            raise InputError(f"{source.label}: {name} is a matrix, not {[*shape]}")
        values = np.array(source.read(name, 0, shape[0], slice(None)))
        if not np.isfinite(values.astype(np.float32)).all():
            raise InputError(f"{source.label}: {name} has values that are not finite")
        factors.append(values)
    down_RD, up_FR = factors
    (rows, columns), rank = place.shape, len(down_RD)
    if (down_RD.shape, up_FR.shape) != ((rank, columns), (rows, rank)):
        raise InputError(
            f"{source.label}: {module} has factors {[*down_RD.shape]} and {[*up_FR.shape]}; in "
            f"{config.name} it is [{rows}, {columns}], so they are [r, {columns}] and [{rows}, r]"
        )
    scale = np.float32(_scale(module, rank, settings))
    return Factors(down_RD, (up_FR.astype(np.float32) * scale).astype(up_FR.dtype))


def _scale(module: str, rank: int, settings: Mapping[str, Any]) -> float:
    """alpha / r, or alpha / sqrt(r) (rsLoRA, Kalajdzievski 2023, arXiv 2312.03732)."""
    alpha = settings["lora_alpha"]
    for pattern, value in (settings.get("alpha_pattern") or {}).items():
        if module == pattern or module.endswith(f".{pattern}"):
            alpha = value
    return float(alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank))


def _endings(place_of: Mapping[str, Place]) -> list[str]:
    return sorted({module.rpartition(".")[2] for module in place_of})


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with mapped.map_file(path) as data:
        for start in range(0, len(data), _HASHED_BYTES):
            digest.update(data.read(start, min(start + _HASHED_BYTES, len(data))))
    return digest.hexdigest()
