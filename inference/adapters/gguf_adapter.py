"""Adapters in `.gguf` files, as llama.cpp's convert_lora_to_gguf.py writes them."""

import dataclasses
from pathlib import Path

import numpy as np

from configs.errors import InputError, shown
from configs.model import ModelConfig
from configs.settings.adapters import AdapterConfig
from inference.adapters import stored
from inference.adapters.modules import gguf_modules
from inference.adapters.stored import MOST_ALPHA, Stored
from inference.checkpoints.gguf import gguf_file, gguf_heads
from inference.checkpoints.gguf.gguf_scan import Header, TensorEntry
from inference.checkpoints.tensor_source import TensorSource
from inference.families import families
from inference.runtime.adapter_weights import AdapterWeights

ENDING = ".gguf"
_DOWN, _UP = ".lora_a", ".lora_b"
_ALPHA = "adapter.lora.alpha"
# What is read, or changes no number.
_READ = "adapter.type", _ALPHA, "adapter.lora.task_name"
_TRANSPOSED = f"token_embd.weight{_DOWN}"


def room(path: Path, config: ModelConfig) -> AdapterConfig:
    """The room that an adapter of a model takes, by its header; raises InputError as `read`, which
    checks the rest.
    """
    return stored.room(_stored(_header(path, config), config), config.name)


def read(path: Path, config: ModelConfig, room: AdapterConfig) -> AdapterWeights:
    """An adapter of a model, checked, for which there is so much room.

    Raises:
        InputError: it is no LoRA adapter of this model, or not sound, or there is less room.
    """
    header = _header(path, config)
    alpha = header.metadata.get(_ALPHA)
    if not isinstance(alpha, float) or not 0 < alpha <= MOST_ALPHA:
        raise InputError(
            f"{path}: {_ALPHA} is a number above 0, at most {MOST_ALPHA}, not {shown(alpha)}"
        )
    factors = _stored(header, config)
    return stored.read(
        factors, config.name, room, path, stored.digest(path), lambda name, rank: alpha / rank
    )


def _header(path: Path, config: ModelConfig) -> Header:
    header = gguf_file.open_gguf(path)
    metadata = header.metadata
    if metadata.get("general.type") != "adapter" or metadata.get("adapter.type") != "lora":
        raise InputError(
            f"{path}: is no LoRA adapter: general.type={shown(metadata.get('general.type'))}, "
            f"adapter.type={shown(metadata.get('adapter.type'))}"
        )
    for key in metadata:
        if key.startswith("adapter.") and key not in _READ:
            raise InputError(f"{path}: {key} is not supported: merge such an adapter")
    name = metadata.get("general.architecture")
    family, _ = families.gguf_readers().get(name if isinstance(name, str) else "", ("", None))
    if family != config.family:
        raise InputError(
            f"{path}: is an adapter of architecture {shown(name)}; {config.name} is of "
            f"{config.family}"
        )
    return header


def _stored(header: Header, config: ModelConfig) -> Stored:
    """The factors in a file, in our order wherever llama.cpp has another one of heads or of rotary
    pairs.
    """
    modules, shapes, by_module = gguf_modules(config), dict[str, tuple[int, ...]](), {}
    downs, ups = dict[str, TensorEntry](), dict[str, TensorEntry]()
    for name, entry in header.tensors.items():
        weight, _, ending = name.rpartition(".")
        module = weight.removesuffix(".weight")
        shapes[name] = entry.shape[::-1] if name == _TRANSPOSED else entry.shape
        if f".{ending}" in (_DOWN, _UP):
            by_module[module] = f"{weight}{_DOWN}", f"{weight}{_UP}"
        if module in modules and f".{ending}" == _UP:
            ups[weight] = entry  # by the name of the matrix, whose rows it has
        else:
            downs[name] = entry
    of_downs, of_ups = (
        gguf_file.tensors(dataclasses.replace(header, tensors=tensors), config, "float32")
        for tensors in (downs, ups)
    )

    def read(name: str, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        weight = name.rpartition(".")[0]
        if name.endswith(_UP):
            return of_ups.read(weight, start, stop, columns)
        if name == _TRANSPOSED:
            return of_downs.read(name, 0, shapes[name][1]).T[start:stop, columns]
        order = gguf_heads.columns(config, weight)
        rows = of_downs.read(name, start, stop)
        return (rows if order is None else rows[:, order])[..., columns]

    source = TensorSource(str(header.path), shapes, read, "float32")
    return Stored(source, modules, by_module)
