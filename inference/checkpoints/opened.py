"""Checkpoints that are directories: of the Hugging Face format, and of our own."""

import dataclasses
import functools
import logging
from pathlib import Path

from configs.errors import InputError
from configs.heads import Eagle
from configs.model import ModelConfig
from inference.checkpoints import defaults, load, manifest, names, safetensors_file, text_files
from inference.checkpoints.checkpoint import Checkpoint, Contents
from inference.checkpoints.hf import hf_directory, hub, split_tensors
from inference.checkpoints.hf.hf_directory import Storage
from inference.checkpoints.hf.quantized import tensors
from inference.checkpoints.names import NameMap
from inference.checkpoints.native import orbax_directory
from inference.checkpoints.tensor_source import TensorSource
from inference.families import families
from inference.families.shared.config_keys import Keys
from inference.text.tokenizer import Tokenizer
from layers import params

# --- Hugging Face directories ---------------------------------------------------------------------


def read_directory_config(path: Path) -> ModelConfig:
    """Returns the model of a Hugging Face directory.

    Raises:
        InputError: as `hf_directory.parse_config`, or its weights are quantized in a way that is
            not served.
    """
    config, storage = _described(path)
    return _with_formats(path, config, storage)


def _described(path: Path) -> tuple[ModelConfig, Storage]:
    """What `config.json` says of the model, but for its formats, and of the tensors."""
    raw = _raw(path)
    _refuse_quantized(path, raw)
    storage = hf_directory.storage(raw, path)
    return hf_directory.parse_config(hf_directory.without_storage(raw), path), storage


def _with_formats(path: Path, config: ModelConfig, storage: Storage) -> ModelConfig:
    try:
        if storage.is_packed:
            formats = tensors.packed_experts(config, Keys(_raw(path)))
        elif storage.quantization is not None:
            formats = tensors.formats(config, storage.quantization, names.huggingface(config))
        else:
            return config
        return dataclasses.replace(config, formats=tuple(formats.items()))
    except InputError as error:
        raise InputError(f"{path / text_files.CONFIG}: {error}") from None


def _raw(path: Path) -> dict[str, object]:
    return hf_directory.read_config(path / text_files.CONFIG)


def _stored(path: Path, storage: Storage) -> TensorSource:
    """A directory's tensors, those of few bits as the matrices that they stand for."""
    source = safetensors_file.open_directory(path, storage.codes_at)
    if storage.quantization is None:
        return source
    return tensors.dequantized(source, storage.quantization)


def read_stored_config(path: Path) -> ModelConfig:
    """As `read_directory_config`, where the weights are there and may have their say.

    Raises:
        InputError: as `read_directory_config`, or the weights are unsound.
    """
    config, storage = _described(path)
    if config.tied and safetensors_file.is_in(path):
        is_other = hf_directory.has_other_head(_stored(path, storage), config)
        config = dataclasses.replace(config, tied=not is_other)
    return _with_formats(path, config, storage)


def read_predicting_config(path: Path) -> Eagle:
    """The layer that predicts a second token; raises as `hf_directory.parse_predicting`."""
    return hf_directory.parse_predicting(hf_directory.without_storage(_raw(path)), path)


def _refuse_quantized(path: Path, raw: dict[str, object]) -> None:
    """Weights of few bits that `config.json` says nothing of."""
    for name in hub.QUANTIZED:
        if hf_directory.without_storage(raw) == raw and (path / name).exists():
            raise InputError(
                f"{path / name}: weights quantized like this are not served; use a repository "
                "whose config.json has a quantization_config, the unquantized one, or a .gguf file"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StoredDirectory(Checkpoint):
    """A directory of weights, and of the small files beside them.

    Attributes:
        raw_config: transformers' own configuration, where the directory has one.
    """

    path: Path
    source: TensorSource
    name_map: NameMap
    raw_config: dict[str, object] | None

    def contents(self) -> Contents:
        read_files = functools.partial(text_files.read, self.path)
        return Contents(self.source, self.name_map, read_files, self.raw_config)

    def build_tokenizer(self) -> Tokenizer:
        from inference.checkpoints import tokenizer_files  # loads `tokenizers`

        return tokenizer_files.load_tokenizer(self.path, self.config.vocab_size)


class HfDirectory(StoredDirectory):
    """A Hugging Face directory."""

    @classmethod
    def open(cls, path: Path, config: ModelConfig) -> "HfDirectory":
        """Opens a directory; one that we wrote is compared with its manifest.

        Raises:
            InputError: a file is missing, damaged or unsound.
        """
        if (path / manifest.NAME).exists():
            listed = manifest.read(path, (".json", ".jinja", ".safetensors"))
            listed.verify(listed.digests)
        raw = _raw(path)
        storage = hf_directory.storage(raw, path)
        source = safetensors_file.open_directory(path, storage.codes_at)
        _warn_of_others(path, source, config)
        if storage.quantization is not None:
            tensors.warn(source, storage.quantization)
            source = tensors.dequantized(source, storage.quantization)
        source = hf_directory.tensors(source, config, storage.num_predicting)
        name_map = names.huggingface(config)
        if storage.quantization is not None and storage.quantization.method == "gptq":
            source = tensors.without_empty_biases(source, config, name_map)
        source = split_tensors.split(source, config, storage.is_packed)
        if storage.is_packed or storage.quantization is not None:
            tensors.check(source, config, name_map)
        return cls._of(path, config, source, name_map, raw)

    @classmethod
    def open_predicting(cls, path: Path, config: Eagle) -> "HfDirectory":
        """Opens the layer of a directory that predicts a second token.

        Args:
            config: of the heads that it is, as `hf_directory.parse_predicting` has it.

        Raises:
            InputError: as `open`, or a tensor of the layer is missing or has no place.
        """
        raw = _raw(path)
        storage, target = hf_directory.storage(raw, path), read_stored_config(path)
        source = hf_directory.predicting_tensors(_stored(path, storage), target)
        source = split_tensors.split(source, config, storage.is_packed, target.num_layers)
        name_map = names.predicting(config, target.num_layers)
        load.check(params.flatten(config.parameters()), source, name_map)
        return cls._of(path, config, source, name_map, raw)

    @classmethod
    def _of(
        cls,
        path: Path,
        config: ModelConfig,
        source: TensorSource,
        name_map: NameMap,
        raw: dict[str, object],
    ) -> "HfDirectory":
        load.check_parts(config, source, name_map)
        return cls(
            config=config,
            eos_ids=defaults.read_eos_ids(path, config.vocab_size),
            path=path,
            source=source,
            name_map=name_map,
            raw_config=hf_directory.as_copied(raw, config),
        )


def _warn_of_others(path: Path, source: TensorSource, config: ModelConfig) -> None:
    family = families.of(config)
    if unread := [name for name in source.shapes if names.is_other(family, name)]:
        logging.warning(
            "%s: images and sounds are not served: %d tensors for them, from %s on, are left out",
            path,
            len(unread),
            unread[0],
        )


# --- our own format -------------------------------------------------------------------------------


class NativeDirectory(StoredDirectory):
    """A directory in our native format."""

    @classmethod
    def open(cls, path: Path, config: ModelConfig, raw: dict[str, object]) -> "NativeDirectory":
        """Opens a directory, given what `orbax_directory.read_config` returns.

        Raises:
            InputError: a file is missing, damaged or unsound.
        """
        huggingface = raw.get("huggingface")
        return cls(
            config=config,
            eos_ids=defaults.read_eos_ids(path, config.vocab_size),
            path=path,
            source=orbax_directory.open_tensors(path, config),
            name_map=names.identity,
            raw_config=huggingface if isinstance(huggingface, dict) else None,
        )
