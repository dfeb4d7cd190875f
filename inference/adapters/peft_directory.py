"""Adapters in the directories of the `peft` package: adapter_config.json and
adapter_model.safetensors.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from configs.errors import InputError, shown
from configs.model import ModelConfig
from inference.adapters.modules import Module, modules_of
from inference.checkpoints import mapped, safetensors_file
from inference.checkpoints.tensor_source import TensorSource
from inference.runtime.adapter_weights import AdapterWeights, Factors, Place

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _DOWN, _UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
# What is read, or decides how an adapter was trained; all else, known or not, must be neutral.
_READ = {
    *("alpha_pattern", "lora_alpha", "peft_type", "use_rslora"),
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"),
    *("ensure_weight_tying", "exclude_modules", "fan_in_fan_out", "layers_pattern"),
    *("layers_to_transform", "lora_dropout", "megatron_config", "megatron_core", "r"),
    *("qalora_group_size", "rank_pattern", "runtime_config", "target_modules", "task_type"),
    *("eva_config", "init_lora_weights"),
}
_NEUTRAL: tuple[object, ...] = None, False, "none", {}, []
# They change the model's own weights, too, before training begins.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_MOST_ALPHA = 1 << 20
_HASHED_BYTES = 16 << 20  # at a time


def rank(directory: Path) -> int:
    """The largest rank in the header of an adapter; raises InputError as `read`, which checks the
    rest.
    """
    _check_settings(directory / CONFIG, _settings(directory))
    shapes = safetensors_file.open_file(directory / WEIGHTS).shapes
    downs = (shape for name, shape in shapes.items() if name.endswith(_DOWN))
    return max((shape[0] for shape in downs if shape), default=1)


def read(directory: Path, config: ModelConfig, most_ranks: int) -> AdapterWeights:
    """An adapter of a model, checked.

    Args:
        most_ranks: the largest rank that there is room for.

    Raises:
        InputError: it is no LoRA adapter of this model, or not sound.
    """
    path, settings = directory / CONFIG, _settings(directory)
    _check_settings(path, settings)
    source = safetensors_file.open_file(directory / WEIGHTS)
    modules, factors = modules_of(config), dict[Place, Factors]()
    for name in _adapted(source):
        if (module := modules.get(name)) is None:
            endings = sorted({module.rpartition(".")[2] for module in modules})
            raise InputError(
                f"{source.label}: adapts {shown(name)}, which {config.name} has not, or which "
                f"takes no adapters; those that do end in {', '.join(endings)}"
            )
        down_RD, up_FR = _factors(source, name, module, settings)
        factors |= {place: Factors(down_RD, up_FR[rows]) for place, rows in module.places}
    rank = max(len(down_RD) for down_RD, _ in factors.values())
    if rank > most_ranks:
        raise InputError(
            f"{source.label}: has rank {rank}, the engine's adapters at most {most_ranks}: set "
            f"engine.adapters.rank={rank}"
        )
    return AdapterWeights(directory, _digest(path, directory / WEIGHTS), rank, factors)


def write(
    directory: Path,
    factors: Mapping[str, tuple[np.ndarray, np.ndarray]],
    base_name: str,
    alpha: float,
) -> None:
    """Writes an adapter of one rank into a directory that is there.

    Args:
        factors: A [R, D] and B [F, R] of each module, without the scale alpha / R.
        base_name: names the model for whoever loads both.
    """
    from safetensors.numpy import save_file

    tensors = {
        f"{_PREFIX}{name}{ending}": np.ascontiguousarray(matrix)
        for name, both in factors.items()
        for ending, matrix in zip((_DOWN, _UP), both, strict=True)
    }
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True, "bias": "none",
        "base_model_name_or_path": base_name, "lora_alpha": alpha, "lora_dropout": 0.0,
        "r": len(next(iter(factors.values()))[0]), "target_modules": sorted(factors),
    }  # fmt: skip
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})
    (directory / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")


def _settings(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG
    if not path.exists():
        pickles = [*directory.glob("adapter_model.bin")] if directory.is_dir() else []
        raise InputError(
            f"{directory}: no adapter of the peft package, which has {CONFIG} and {WEIGHTS}"
            + (f" ({pickles[0].name} is a pickle, which is never loaded)" if pickles else "")
        )
    settings: dict[str, Any] = mapped.read_json(path)
    return settings


def _check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    if settings.get("peft_type") != "LORA":
        raise InputError(f"{path}: peft_type is LORA, not {shown(settings.get('peft_type'))}")
    begun = str(settings.get("init_lora_weights")).lower()
    unknown = [name for name in settings.keys() - _READ if settings[name] not in _NEUTRAL]
    unknown += ["init_lora_weights"] if begun.startswith(_CHANGES_BASE) else []
    for name in sorted(unknown):
        raise InputError(
            f"{path}: {name}={shown(settings[name])} is not supported: merge such an adapter with "
            "its model, and load the result"
        )
    pattern = settings.get("alpha_pattern") or {}
    if not isinstance(pattern, dict):
        raise InputError(f"{path}: alpha_pattern is an object of names and numbers")
    alphas = {f"alpha_pattern of {shown(name)}": value for name, value in pattern.items()}
    for name, value in {"lora_alpha": settings.get("lora_alpha"), **alphas}.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= _MOST_ALPHA:
            raise InputError(
                f"{path}: {name} is a number above 0, at most {_MOST_ALPHA}, not {shown(value)}"
            )
    for name in pattern:
        try:
            _pattern(name)
        except re.error as error:
            raise InputError(
                f"{path}: alpha_pattern: {shown(name)} is no regular expression: {error}"
            ) from None


def _adapted(source: TensorSource) -> list[str]:
    """The names of modules that a file adapts, each with both of its factors."""
    names = dict.fromkeys(
        tensor.removeprefix(_PREFIX).removesuffix(ending)
        for tensor in source.shapes
        for ending in (_DOWN, _UP)
        if tensor.endswith(ending)
    )
    expected = {f"{_PREFIX}{name}{ending}" for name in names for ending in (_DOWN, _UP)}
    for tensor in sorted(expected ^ source.shapes.keys()):
        what = "is missing" if tensor in expected else "is no factor of LoRA, and would be lost"
        raise InputError(f"{source.label}: tensor {shown(tensor)} {what}")
    if not names:
        raise InputError(f"{source.label}: adapts nothing")
    return [*names]


def _factors(
    source: TensorSource, name: str, module: Module, settings: Mapping[str, Any]
) -> Factors:
    (rows, columns), matrices = module.shape, []
    for ending in (_DOWN, _UP):
        tensor = f"{_PREFIX}{name}{ending}"
        shape = source.shapes[tensor]
        if len(shape) != 2:
            raise InputError(f"{source.label}: {shown(tensor)} is a matrix, not {[*shape]}")
        matrices.append(np.array(source.read(tensor, 0, shape[0])))
    down_RD, up_FR = matrices
    rank = len(down_RD)
    if (down_RD.shape, up_FR.shape) != ((rank, columns), (rows, rank)) or not rank:
        raise InputError(
            f"{source.label}: {shown(name)} has factors {[*down_RD.shape]} and {[*up_FR.shape]}; "
            f"it is [{rows}, {columns}], so they are [r, {columns}] and [{rows}, r]"
        )
    up_FR = up_FR.astype(np.float32) * np.float32(_scale(name, rank, settings))
    for ending, matrix in ((_DOWN, down_RD.astype(np.float32)), (_UP, up_FR)):
        if not np.isfinite(matrix).all():
            tensor = f"{_PREFIX}{name}{ending}"
            raise InputError(f"{source.label}: {shown(tensor)} has values that are not finite")
    return Factors(down_RD, up_FR)


def _scale(name: str, rank: int, settings: Mapping[str, Any]) -> float:
    """alpha / r, or alpha / sqrt(r) (rsLoRA, Kalajdzievski 2023, arXiv 2312.03732)."""
    alpha = settings["lora_alpha"]
    for pattern, value in (settings.get("alpha_pattern") or {}).items():
        if _pattern(pattern).match(name):
            alpha = value
            break
    return float(alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank))


def _pattern(text: str) -> re.Pattern[str]:
    """What the names of modules match to which a pattern of `peft` applies; the first one does."""
    return re.compile(rf"(.*\.)?({text})$")


def _digest(*paths: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with mapped.map_file(path) as data:
            for start in range(0, len(data), _HASHED_BYTES):
                digest.update(data.read(start, min(start + _HASHED_BYTES, len(data))))
    return digest.hexdigest()
