"""Adapters in the directories of the `peft` package: adapter_config.json and
adapter_model.safetensors.
"""

import functools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from configs.errors import InputError, shown
from configs.model import ModelConfig
from configs.settings.adapters import EXTRAS, AdapterConfig
from inference.adapters import fused_experts, stored
from inference.adapters.modules import modules_of
from inference.adapters.stored import MOST_ALPHA, Stored
from inference.checkpoints import mapped, safetensors_file
from inference.runtime.adapter_weights import AdapterWeights

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _DOWN, _UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_ENDINGS = (_DOWN, _UP), (".lora_embedding_A", ".lora_embedding_B")
_COPY = ".base_layer.weight"
# What is read, or decides how an adapter was trained; all else, known or not, must be neutral.
_READ = {
    *("alpha_pattern", "lora_alpha", "peft_type", "use_rslora"),
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"),
    *("ensure_weight_tying", "exclude_modules", "fan_in_fan_out", "layers_pattern"),
    *("layers_to_transform", "lora_dropout", "megatron_config", "megatron_core", "r"),
    *("qalora_group_size", "rank_pattern", "runtime_config", "target_modules", "task_type"),
    *("eva_config", "init_lora_weights", "target_parameters"),
}
_NEUTRAL: tuple[object, ...] = None, False, "none", {}, []
# A pattern of names that no name can make slow: nothing that repeats is in a group, and `_CHOICES`
# bounds in how many ways a name can be divided.
_ATOM = r"[\w.|-]|\\[.dw-]"
_CHOICE = r"(?:\.|\\[dw]|\[[\w-]+\])[*+?]|\((?:\?:)?(?:" + _ATOM + r")+\)"
_PATTERN = re.compile(rf"\^?(?:{_CHOICE}|\[[\w-]+\]|{_ATOM})+\$?", re.ASCII)
_CHOICES = re.compile(r"[*+(]|\?(?!:)")
_MOST_CHOICES, _MOST_LETTERS = 3, 256
# They change the model's own weights, too, before training begins.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def room(directory: Path, config: ModelConfig) -> AdapterConfig:
    """The room that an adapter of a model takes, by its header; raises InputError as `read`, which
    checks the rest.
    """
    settings = _settings(directory)
    _check_settings(directory / CONFIG, settings)
    return stored.room(_stored(directory, config, settings), config.name)


def read(directory: Path, config: ModelConfig, room: AdapterConfig) -> AdapterWeights:
    """An adapter of a model, checked, for which there is so much room.

    Raises:
        InputError: it is no LoRA adapter of this model, or not sound, or there is less room.
    """
    path, settings = directory / CONFIG, _settings(directory)
    _check_settings(path, settings)
    factors = _stored(directory, config, settings)
    digest = stored.digest(path, directory / WEIGHTS)
    scale = functools.partial(_scale, settings=settings)
    return stored.read(factors, config.name, room, directory, digest, scale)


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
        if not is_number or not 0 < value <= MOST_ALPHA:
            raise InputError(
                f"{path}: {name} is a number above 0, at most {MOST_ALPHA}, not {shown(value)}"
            )
    if pattern and settings.get("target_parameters"):
        raise InputError(
            f"{path}: alpha_pattern with target_parameters is not supported: merge such an adapter "
            "with its model, and load the result"
        )
    for name in pattern:
        if not _is_pattern(name):
            raise InputError(
                f"{path}: alpha_pattern: {shown(name)} is no pattern of a module's name; give the "
                f"end of a name with at most {_MOST_CHOICES} of '.*', '\\d+', '[01]+' and '(q|v)', "
                f"in {_MOST_LETTERS} letters"
            )


def _stored(directory: Path, config: ModelConfig, settings: Mapping[str, Any]) -> Stored:
    """The factors in a directory, each module with both of them. Tables of the model, which `peft`
    writes beside their factors, are not read.
    """
    source = safetensors_file.open_file(directory / WEIGHTS)
    tensors: dict[str, tuple[str, str]] = {}
    for tensor in source.shapes:
        for down, up in _ENDINGS:
            name = tensor.removesuffix(down).removesuffix(up)
            if name != tensor:
                tensors[name.removeprefix(_PREFIX)] = f"{name}{down}", f"{name}{up}"
    table = [config.vocab_size, config.width]
    copies = {
        tensor
        for tensor, shape in source.shapes.items()
        if tensor.endswith(_COPY) and [*shape] == table
    }
    modules = modules_of(config, EXTRAS)
    is_vocab = any(name in modules and modules[name].extra == "vocab" for name in tensors)
    if config.tied and is_vocab and settings.get("ensure_weight_tying"):
        raise InputError(
            f"{directory / CONFIG}: ensure_weight_tying=True, with which embedding and head share "
            "factors, is not supported: merge such an adapter with its model, and load the result"
        )
    return fused_experts.split(Stored(source, modules, tensors, copies))


def _scale(name: str, rank: int, settings: Mapping[str, Any]) -> float:
    """alpha / r, or alpha / sqrt(r) (rsLoRA, Kalajdzievski 2023, arXiv 2312.03732)."""
    alpha = settings["lora_alpha"]
    for pattern, value in (settings.get("alpha_pattern") or {}).items():
        if _pattern(pattern).match(name):
            alpha = value
            break
    return float(alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank))


def _is_pattern(text: str) -> bool:
    """Whether it is a regular expression that is matched to a name in little time."""
    is_short = len(text) <= _MOST_LETTERS and len(_CHOICES.findall(text)) <= _MOST_CHOICES
    if not is_short or not _PATTERN.fullmatch(text):
        return False
    try:
        _pattern(text)
    except re.error:  # a range that is none
        return False
    return True


def _pattern(text: str) -> re.Pattern[str]:
    """What the names of modules match to which a pattern of `peft` applies; the first one does."""
    return re.compile(rf"(.*\.)?({text})$")
