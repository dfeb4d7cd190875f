"""Checkpoints on disk: Hugging Face directories, `.gguf` files, and directories in our format."""

import dataclasses
import functools
import logging
from pathlib import Path

from configs.errors import InputError
from configs.heads import Eagle
from configs.kinds.params import Declared
from configs.model import ModelConfig
from inference.checkpoints import (
    converted,
    defaults,
    load,
    manifest,
    names,
    packed_file,
    safetensors_file,
    text_files,
)
from inference.checkpoints.checkpoint import Checkpoint, Contents
from inference.checkpoints.gguf import gguf_file, gguf_stacks, gguf_state_parts
from inference.checkpoints.gguf.gguf_scan import Header
from inference.checkpoints.hf import hf_directory, hub, split_tensors
from inference.checkpoints.hf.hf_directory import Storage
from inference.checkpoints.hf.quantized import tensors
from inference.checkpoints.load import Place, Progress
from inference.checkpoints.names import NameMap
from inference.checkpoints.native import orbax_directory
from inference.checkpoints.tensor_source import TensorSource
from inference.families import families
from inference.families.shared.config_keys import Keys
from inference.text.tokenizer import Tokenizer
from layers import params
from layers.params import Params

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
        from inference.checkpoints import hf_tokenizer  # loads `tokenizers`

        return hf_tokenizer.load_tokenizer(self.path, self.config.vocab_size)


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


# --- .gguf files ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class GgufFile(Checkpoint):
    """A `.gguf` file.

    Attributes:
        header: of the file, with an entry for each part of a stack.
        is_exact: numbers are not rounded to bfloat16 first.
    """

    header: Header
    is_exact: bool = False

    def exact(self) -> "GgufFile":
        return dataclasses.replace(self, is_exact=True)

    @classmethod
    def open(cls, header: Header, config: ModelConfig) -> "GgufFile":
        """Opens a file whose header has been scanned.

        Raises:
            InputError: an end token is not a valid id, or experts are missing.
        """
        header = gguf_stacks.split(header, config)
        keys = (f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom"))
        ids = [header.metadata[key] for key in keys if key in header.metadata]
        eos_ids = defaults.check_ids(ids, config.vocab_size, str(header.path))
        return cls(config=config, eos_ids=eos_ids, header=header)

    def contents(self) -> Contents:
        return Contents(
            self._tensors("bfloat16"),
            names.gguf(self.config),
            self._read_files,
            header=self.header,
            exact=functools.partial(self._tensors, "float32"),
        )

    def build_tokenizer(self) -> Tokenizer:
        from inference.checkpoints.gguf import gguf_tokenizer

        return gguf_tokenizer.load_tokenizer(self.header, self.config.vocab_size)

    def load_params(
        self,
        infos: Declared,
        progress: Progress | None = None,
        place: Place = load.on_device,
        packed: Params | None = None,
        in_part: bool = False,
    ) -> Params:
        """Loads values as `Checkpoint.load_params`. Numbers are rounded to bfloat16 before they get
        their formats, unless `is_exact`; what was rounded is cached.
        """
        dtype = "float32" if self.is_exact else "bfloat16"
        folder = converted.place(self.header.path, *self.header.fingerprints)
        source, name_map = self._tensors(dtype), names.gguf(self.config)
        read = functools.partial(load.load_params, infos, source, name_map, progress, place)
        if packed is not None:
            return packed_file.load(folder / dtype, packed, read)
        if self.is_exact or in_part:
            return read()
        rounded = params.unflatten(
            infos,
            {
                path: dataclasses.replace(info, format=_rounded(name_map(path).names))
                for path, info in params.flatten(infos).items()
            },
        )
        target = folder / "weights.safetensors"
        try:
            cached = converted.open_or_convert(target, rounded, source, name_map, progress)
        except OSError as error:
            logging.warning("converted weights are not cached: %s: %s", target, error.strerror)
            return read()
        return load.load_params(infos, cached, names.identity, progress, place)

    def formats(self) -> dict[str, tuple[str, ...]]:
        name_map = names.gguf(self.config)
        infos = params.flatten(self.config.parameters())
        load.check(infos, self._tensors("bfloat16"), name_map)
        return gguf_file.formats(self.header, self.config, name_map)

    def _tensors(self, dtype: str) -> TensorSource:
        source = gguf_file.tensors(self.header, self.config, dtype)
        load.check_parts(self.config, source, names.gguf(self.config))
        return source

    def _read_files(self) -> dict[str, bytes]:
        from inference.checkpoints.gguf import gguf_tokenizer

        return gguf_tokenizer.text_files(self.header, self.config, self.eos_ids)


def _rounded(tensors_of: tuple[str, ...]) -> str:
    """The type of a parameter in a copy of a `.gguf` file: decays of states stay as they are."""
    return "float32" if all(map(gguf_state_parts.is_exact, tensors_of)) else "bfloat16"
