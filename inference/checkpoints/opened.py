"""A checkpoint whose headers have been checked, whatever its format."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from configs.errors import InputError
from configs.heads import Eagle
from configs.kinds.params import leaves
from configs.model import ModelConfig
from configs.precision import FORMATS
from inference.checkpoints import defaults, load, names, text_files
from inference.checkpoints.gguf import gguf_file, gguf_stacks, gguf_state_parts
from inference.checkpoints.gguf.gguf_scan import Header
from inference.checkpoints.hf import hf_directory, hub, safetensors_file, split_tensors
from inference.checkpoints.hf.hf_directory import Storage
from inference.checkpoints.hf.quantized import tensors
from inference.checkpoints.load import Place, Progress
from inference.checkpoints.names import NameMap
from inference.checkpoints.native import converted, manifest, orbax_directory, packed_file
from inference.checkpoints.tensor_source import TensorSource
from inference.families import families
from inference.text.tokenizer import Tokenizer
from layers import params
from layers.params import Params


@dataclasses.dataclass(frozen=True)
class Contents:
    """What a conversion copies.

    Attributes:
        source, name_map: the parameters.
        read_files: the small files beside them, by name.
        raw_config: transformers' own configuration, where the checkpoint has one.
        header: of a `.gguf` file.
        exact: makes the source of such a file's numbers, not rounded.
    """

    source: TensorSource
    name_map: NameMap
    read_files: Callable[[], dict[str, bytes]]
    raw_config: dict[str, Any] | None = None
    header: Header | None = None
    exact: Callable[[], TensorSource] | None = None


class LoadParams(Protocol):
    """`Checkpoint.load_params`."""

    def __call__(
        self,
        infos: Any,
        progress: Progress | None = None,
        place: Place = load.on_device,
        packed: Any = None,
        in_part: bool = False,
    ) -> Params:
        """Values for a declaration."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model on disk whose headers have been checked; weights are read when called for.

    `eos_ids` end a sequence.
    `load_params(infos, progress, place, packed)` takes the declaration of the configuration,
    overrides included; progress and place are `load.load_params`'s and may be left out, as may
    `packed`: shapes and dtypes of what `place` makes, if that is worth being kept, and `in_part`:
    `place` reads no whole parameters, so nothing is worth being kept.
    `formats()` are those in which the checkpoint's own numbers are kept, by path, of each part of a
    stack where they differ; `load_exact` loads these numbers, each rounded to its declared format
    alone, where `load_params` does not.
    `load_tokenizer()` builds the tokenizer, once; `contents()` is for conversion to another format.
    """

    config: ModelConfig
    eos_ids: tuple[int, ...]
    load_tokenizer: Callable[[], Tokenizer]
    load_params: LoadParams
    contents: Callable[[], Contents]
    formats: Callable[[], dict[str, tuple[str, ...]]]
    load_exact: LoadParams | None = None


def read_directory_config(path: Path) -> ModelConfig:
    """The model of a Hugging Face directory.

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
            own = tensors.packed_experts(config, _raw(path)["quantization_config"])
        elif storage.quantization is not None:
            own = tensors.formats(config, storage.quantization, names.huggingface(config))
        else:
            return config
        return dataclasses.replace(config, formats=tuple(own.items()))
    except InputError as error:
        raise InputError(f"{path / text_files.CONFIG}: {error}") from None


def _raw(path: Path) -> dict[str, Any]:
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
    """The layer of a Hugging Face directory that predicts a second token.

    Raises:
        InputError: as `hf_directory.parse_predicting`.
    """
    return hf_directory.parse_predicting(hf_directory.without_storage(_raw(path)), path)


def _refuse_quantized(path: Path, raw: dict[str, Any]) -> None:
    """Weights of few bits that `config.json` says nothing of."""
    for name in hub.QUANTIZED:
        if hf_directory.without_storage(raw) == raw and (path / name).exists():
            raise InputError(
                f"{path / name}: weights quantized like this are not served; use a repository "
                "whose config.json has a quantization_config, the unquantized one, or a .gguf file"
            )


def directory(path: Path, config: ModelConfig) -> Checkpoint:
    """Opens a Hugging Face directory; one that we wrote is compared with its manifest.

    Raises:
        InputError: a file is missing, damaged or unsound.
    """
    if (path / manifest.NAME).exists():
        listed = manifest.read(path, (".json", ".jinja", ".safetensors"))
        listed.verify(listed.digests)
    raw = _raw(path)
    storage = hf_directory.storage(raw, path)
    source = safetensors_file.open_directory(path, storage.codes_at)
    family = families.of(config)
    if others := [name for name in source.shapes if names.is_other(family, name)]:
        logging.warning(
            "%s: images and sounds are not served: %d tensors for them, from %s on, are left out",
            path,
            len(others),
            others[0],
        )
    if storage.quantization is not None:
        tensors.warn(source, storage.quantization)
        source = tensors.dequantized(source, storage.quantization)
    source = hf_directory.tensors(source, config, storage.num_predicting)
    if storage.quantization is not None and storage.quantization.method == "gptq":
        source = tensors.without_empty_biases(source, config, names.huggingface(config))
    source = split_tensors.split(source, config, storage.is_packed)
    if storage.is_packed or storage.quantization is not None:
        tensors.check(source, config, names.huggingface(config))
    return _of_directory(path, config, source, names.huggingface(config), raw)


def predicting(path: Path, config: Eagle) -> Checkpoint:
    """Opens the layer of a Hugging Face directory that predicts a second token.

    Args:
        path: the directory.
        config: of the heads that it is, as `hf_directory.parse_predicting` has it.

    Raises:
        InputError: as `directory`, or a tensor of the layer is missing or has no place.
    """
    raw = _raw(path)
    storage, target = hf_directory.storage(raw, path), read_stored_config(path)
    source = hf_directory.predicting_tensors(_stored(path, storage), target)
    source = split_tensors.split(source, config, storage.is_packed, target.num_layers)
    name_map = names.predicting(config, target.num_layers)
    load.check(params.flatten(config.parameters()), source, name_map)
    return _of_directory(path, config, source, name_map, raw)


def _of_directory(
    path: Path,
    config: ModelConfig,
    source: TensorSource,
    name_map: NameMap,
    raw: dict[str, Any],
) -> Checkpoint:
    load.check_parts(config, source, name_map)
    copied = hf_directory.as_copied(raw, config)
    return Checkpoint(
        config,
        defaults.read_eos_ids(path, config.vocab_size),
        functools.cache(lambda: _hf_tokenizer(path, config.vocab_size)),
        functools.partial(_load, source, name_map),
        lambda: Contents(
            source,
            name_map,
            lambda: text_files.read(path),
            copied,
        ),
        functools.partial(_dense_formats, source, name_map, config),
    )


def _hf_tokenizer(path: Path, vocab_size: int) -> Tokenizer:
    from inference.checkpoints.hf import hf_tokenizer  # loads `tokenizers`

    return hf_tokenizer.load_tokenizer(path, vocab_size)


def orbax(path: Path, config: ModelConfig, raw: dict[str, Any]) -> Checkpoint:
    """Opens a directory in our native format, given what `orbax_directory.read_config` found.

    Raises:
        InputError: a file is missing, damaged or unsound.
    """
    source = orbax_directory.open_tensors(path, config)
    kept = raw.get("huggingface")
    return Checkpoint(
        config,
        defaults.read_eos_ids(path, config.vocab_size),
        functools.cache(lambda: _hf_tokenizer(path, config.vocab_size)),
        functools.partial(_load, source, names.identity),
        lambda: Contents(
            source,
            names.identity,
            lambda: text_files.read(path),
            kept if isinstance(kept, dict) else None,
        ),
        functools.partial(_dense_formats, source, names.identity, config),
    )


def _dense_formats(
    source: TensorSource, name_map: NameMap, config: ModelConfig
) -> dict[str, tuple[str, ...]]:
    """Those of the numbers, and float32 where a parameter has it whatever the rest."""
    kept = load.stored_dtype(config, source, name_map)
    dtype = "bfloat16" if kept == "bfloat16" else "float32"
    model = dataclasses.replace(config, dtype=dtype, formats=())
    plain = {"/".join(path): (info.format,) for path, info in leaves(model.parameters())}
    blocks = {
        path: tuple(name if FORMATS[name].is_quantized else plain[path][0] for name in own)
        for path, own in config.formats
    }
    return plain | blocks


def gguf(header: Header, config: ModelConfig) -> Checkpoint:
    """Opens a `.gguf` file.

    Raises:
        InputError: an end token is not a valid id, or experts are missing.
    """
    header = gguf_stacks.split(header, config)
    keys = (f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom"))
    ids = [header.metadata[key] for key in keys if key in header.metadata]
    eos_ids = defaults.check_ids(ids, config.vocab_size, str(header.path))

    @functools.cache
    def load_tokenizer() -> Tokenizer:
        from inference.checkpoints.gguf import gguf_tokenizer

        return gguf_tokenizer.load_tokenizer(header, config.vocab_size)

    def read_text_files() -> dict[str, bytes]:
        from inference.checkpoints.gguf import gguf_tokenizer

        return gguf_tokenizer.text_files(header, config, eos_ids)

    return Checkpoint(
        config,
        eos_ids,
        load_tokenizer,
        functools.partial(_load_gguf, header, config, "bfloat16"),
        lambda: Contents(
            _gguf_tensors(header, config),
            names.gguf(config),
            read_text_files,
            header=header,
            exact=lambda: _gguf_tensors(header, config, "float32"),
        ),
        functools.partial(_gguf_formats, header, config),
        functools.partial(_load_gguf, header, config, "float32"),
    )


def _gguf_tensors(header: Header, config: ModelConfig, dtype: str = "bfloat16") -> TensorSource:
    source = gguf_file.tensors(header, config, dtype)
    load.check_parts(config, source, names.gguf(config))
    return source


def _load(
    source: TensorSource,
    name_map: NameMap,
    infos: Any,
    progress: Progress | None = None,
    place: Place = load.on_device,
    packed: Any = None,
    in_part: bool = False,
) -> Params:
    del packed  # another copy of the user's files: they are packed within a second
    source = source if in_part else source.verified()
    return load.load_params(infos, source, name_map, progress, place)


def _gguf_formats(header: Header, config: ModelConfig) -> dict[str, tuple[str, ...]]:
    name_map = names.gguf(config)
    load.check(params.flatten(config.parameters()), _gguf_tensors(header, config), name_map)
    return gguf_file.formats(header, config, name_map)


def _load_gguf(
    header: Header,
    config: ModelConfig,
    dtype: str,
    infos: Any,
    progress: Progress | None = None,
    place: Place = load.on_device,
    packed: Any = None,
    in_part: bool = False,
) -> Params:
    """Parameters whose numbers are rounded to `dtype` (bfloat16; float32 keeps them) before they
    get their formats.
    """
    folder = converted.place(header.path, *header.fingerprints)
    source, name_map = _gguf_tensors(header, config, dtype), names.gguf(config)
    read = functools.partial(load.load_params, infos, source, name_map, progress, place)
    if packed is not None:
        return packed_file.load(folder / dtype, packed, read)
    if dtype != "bfloat16" or in_part:
        return read()
    rounded = params.unflatten(
        infos,
        {
            path: dataclasses.replace(info, format=_rounded(name_map(path).names, dtype))
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


def _rounded(names_of: tuple[str, ...], dtype: str) -> str:
    """The type of a parameter in a copy of a `.gguf` file: decays of states stay as they are."""
    return "float32" if all(map(gguf_state_parts.is_exact, names_of)) else dtype
