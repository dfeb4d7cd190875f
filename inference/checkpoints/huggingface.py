"""A Hugging Face directory: `config.json` as a `ModelConfig`, and the tensors that count."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from configs.errors import InputError
from configs.model import ModelConfig
from inference.checkpoints import families, mapped, names
from inference.checkpoints.config_keys import Keys
from inference.checkpoints.tensor_source import TensorSource

_DERIVED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


def read_config(directory: Path) -> ModelConfig:
    """The model that `config.json` describes.

    Raises:
        InputError: the file is unsound, the architecture is another, or a key changes the model in
            a way that is not supported.
    """
    return parse_config(mapped.read_json(directory / "config.json"), directory)


def parse_config(raw: dict[str, Any], directory: Path) -> ModelConfig:
    """As `read_config`, for the parsed object.

    Raises:
        InputError: as `read_config`.
    """
    try:
        return families.build(Keys(raw), directory.resolve().name)
    except ValueError as error:
        raise InputError(f"{directory / 'config.json'}: {error}") from None


def tensors(source: TensorSource, config: ModelConfig) -> TensorSource:
    """The source under the names of a whole model, without tensors that only repeat what the
    configuration says.

    Old checkpoints store the rotary frequencies or the causal masks, and tied ones may store the
    head beside the embedding, which transformers then ignores. One that was written without its
    head lacks the prefix of all other names.
    """
    base = names.base(config.family)
    is_bare = not any(name.startswith(f"{base}.") for name in source.shapes)
    stored = {
        f"{base}.{name}" if is_bare and name != "lm_head.weight" else name: name
        for name in source.shapes
        if not name.endswith(_DERIVED) and not (config.tied and name == "lm_head.weight")
    }
    shapes = {name: source.shapes[own] for name, own in stored.items()}

    def read(name: str, start: int, stop: int) -> np.ndarray:
        return source.read(stored[name], start, stop)

    return dataclasses.replace(source, shapes=shapes, read=read)
