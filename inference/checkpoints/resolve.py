"""From what `--model` names to a configuration, a tokenizer and parameters."""

import dataclasses
import functools
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from configs import presets
from configs.errors import InputError
from configs.model import ModelConfig
from configs.presets import Preset
from inference import tokenizer
from inference.checkpoints import (
    converted,
    defaults,
    gguf_config,
    gguf_file,
    gguf_tokenizer,
    huggingface,
    load,
    names,
    safetensors_file,
    sources,
)
from inference.checkpoints.gguf_scan import Header
from inference.checkpoints.load import Progress
from inference.tokenizer import Tokenizer
from layers import params
from layers.params import Params


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model on disk whose headers have been checked; weights are read when called for.

    `eos_ids` end a sequence.
    `load_params(infos, progress)` takes the declaration of the configuration, overrides included;
    `load_tokenizer()` builds the tokenizer.
    """

    config: ModelConfig
    eos_ids: tuple[int, ...]
    load_tokenizer: Callable[[], Tokenizer]
    load_params: Callable[[Any, Progress | None], Params]


@dataclasses.dataclass(frozen=True)
class Resolved:
    """What `--model` names.

    Attributes:
        config: known without reading weights.
        open: fetches a preset's weights when they are not cached, and opens the checkpoint.
            Licence terms are shown on stderr before the first download.
    """

    config: ModelConfig
    open: Callable[[Progress | None], Checkpoint]


def resolve(model: str) -> Resolved:
    """Finds a model by preset name, Hugging Face directory or `.gguf` file; fetches nothing.

    Raises:
        InputError: it is none of these, or its description is unsound.
    """
    if model in presets.NAMES:
        preset = presets.get(model)
        return Resolved(preset.config, functools.partial(_open_preset, preset))
    if model in presets.PLANNED:
        layers = presets.PLANNED[model].config.pattern
        parts = sorted({layer.mixer for layer in layers} | {layer.ffn for layer in layers})
        raise InputError(
            f"{model} can be planned (scripts.plan), not run yet: its layers have "
            f"{', '.join(parts)}; what runs: {', '.join(presets.NAMES)}"
        )
    path = Path(model)
    try:
        found = bool(model) and path.exists()
    except (OSError, ValueError):  # too long, or holds a NUL
        found = False
    if found and path.is_dir():
        config = huggingface.read_config(path)
        return Resolved(config, lambda progress: _open_directory(path, config))
    if found and path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"):
        raise InputError(f"{model}: pickles can run code when loaded; use safetensors or GGUF")
    if found or path.suffix == ".gguf":
        header = gguf_file.open_gguf(path)
        config = gguf_config.read_config(header)
        return Resolved(config, lambda progress: _open_gguf(header, config))
    raise InputError(
        f"no model {model!r}; valid: a preset ({', '.join(presets.NAMES)}), a directory in Hugging "
        "Face format, or a .gguf file (hub ids are not supported yet: download the repository)"
    )


def _open_preset(preset: Preset, progress: Progress | None) -> Checkpoint:
    if preset.weights.notice and not sources.cached_path(preset.weights):
        print(preset.weights.notice, file=sys.stderr, flush=True)
    path = sources.fetch(preset.weights, progress)
    if path.is_dir():
        found = huggingface.read_config(path)
        opened = _open_directory(path, preset.config)
    else:
        header = gguf_file.open_gguf(path)
        found = gguf_config.read_config(header)
        opened = _open_gguf(header, preset.config)
    for field in dataclasses.fields(ModelConfig):
        expected, actual = getattr(preset.config, field.name), getattr(found, field.name)
        if field.name != "name" and expected != actual:
            raise InputError(f"{path}: {field.name} is {actual!r}, the preset expects {expected!r}")
    return opened


def _open_directory(path: Path, config: ModelConfig) -> Checkpoint:
    source = huggingface.tensors(safetensors_file.open_directory(path), config)
    name_map = names.huggingface(config.family)
    load.check_parts(config, source, name_map)
    return Checkpoint(
        config,
        defaults.read_eos_ids(path, config.vocab_size),
        lambda: tokenizer.from_directory(path, config.vocab_size),
        lambda infos, progress: load.load_params(infos, source, name_map, progress),
    )


def _open_gguf(header: Header, config: ModelConfig) -> Checkpoint:
    end = header.metadata.get("tokenizer.ggml.eos_token_id")
    turn_end = header.metadata.get("tokenizer.ggml.eot_token_id")
    ids = [token for token in (end, turn_end) if token is not None]
    return Checkpoint(
        config,
        defaults.check_ids(ids, config.vocab_size, str(header.path)),
        lambda: gguf_tokenizer.load_tokenizer(header, config.vocab_size),
        functools.partial(_load_gguf, header, config),
    )


def _load_gguf(
    header: Header, config: ModelConfig, infos: Any, progress: Progress | None
) -> Params:
    source, name_map = gguf_file.tensors(header, config), names.gguf(config.family)
    load.check_parts(config, source, name_map)
    rounded = jax.tree.map(
        lambda info: dataclasses.replace(info, dtype="bfloat16"), infos, is_leaf=params.is_info
    )
    place = converted.place(header.path) / "weights.safetensors"
    try:
        cached = converted.open_or_convert(place, rounded, source, name_map, progress)
    except OSError as error:
        logging.warning("converted weights are not cached: %s: %s", place, error.strerror)
        return load.load_params(infos, source, name_map, progress)
    return load.load_params(infos, cached, names.identity, progress)
