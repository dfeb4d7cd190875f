"""A Hugging Face directory as a checkpoint: the tensors that count, by the names of a model."""

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from configs.errors import InputError
from configs.heads import Eagle
from configs.model import ModelConfig
from inference.checkpoints import load, manifest, names, safetensors_file, text_files
from inference.checkpoints.checkpoint import StoredDirectory
from inference.checkpoints.hf import (
    config_json,
    repository_code,
    sequence_classifier,
    split_tensors,
)
from inference.checkpoints.hf.config_json import Storage
from inference.checkpoints.hf.quantized import schemes
from inference.checkpoints.hf.quantized import tensors as few_bits
from inference.checkpoints.tensor_source import TensorSource
from inference.families import families
from layers import params

_DERIVED = "rotary_emb.inv_freq"
_EMBEDDER = "modules.json"  # of sentence-transformers


def read_model(path: Path) -> ModelConfig:
    """As `config_json.read_model`, where the weights are there and may have their say.

    Raises:
        InputError: as there, or the weights are unsound.
    """
    if not safetensors_file.is_in(path):
        return config_json.read_model(path)
    raw = config_json.read(path / text_files.CONFIG)
    storage = config_json.storage(raw, path)
    config = _with_a_head(path, config_json.read_unformatted(path))
    if (
        config.tied
        and _stores_head(path, config)
        and has_other_head(_stored(path, storage), config)
    ):
        config = dataclasses.replace(config, tied=False)
    if storage.quantization is not None:
        modules = _stored_modules(_named_scales(safetensors_file.names_in(path)), config)
        storage = dataclasses.replace(storage, quantization=storage.quantization.of(modules))
    return config_json.with_formats(config, storage, raw, path)


def _stores_head(path: Path, config: ModelConfig) -> bool:
    """Whether a directory may have a head of its own: an index says so without its shards."""
    head = _head(config).removesuffix("weight")  # in few bits it has tensors of other names
    return any(head in name for name in safetensors_file.names_in(path))


def _stored_modules(names: Iterable[str], config: ModelConfig) -> dict[str, tuple[str, bool]]:
    """Modules of a whole model: a directory's names for them, and whether they are in few bits."""
    modules: dict[str, tuple[str, bool]] = {}
    for whole, stored in _whole_names(names, config).items():
        name, _, ending = stored.rpartition(".")
        module = whole.rpartition(".")[0]
        if ending in schemes.MARKS:
            modules[module] = (name, True)
        elif module not in modules:
            modules[module] = (name, False)
    return modules


def _with_a_head(path: Path, config: ModelConfig) -> ModelConfig:
    """Returns the model, tied where a directory for embeddings has no head of its own."""
    if config.tied:
        return config
    is_headless = config_json.is_headless(config_json.read(path / text_files.CONFIG))
    is_embedder = is_headless or (path / _EMBEDDER).exists()
    if not is_embedder or _stores_head(path, config):
        return config
    logging.warning(
        "%s: there is no %s: vectors of texts mean something, what continues them does not",
        *(path, _head(config)),
    )
    return dataclasses.replace(config, tied=True)


def open_directory(path: Path, config: ModelConfig) -> StoredDirectory:
    """Opens a directory; one that we wrote is compared with its manifest.

    Raises:
        InputError: a file is missing, damaged or unsound.
    """
    if (path / manifest.NAME).exists():
        listed = manifest.read(path, (".json", ".jinja", ".safetensors"))
        listed.verify(listed.digests)
    repository_code.warn(path / text_files.CONFIG)
    raw = config_json.read(path / text_files.CONFIG)
    storage = config_json.storage(raw, path)
    source = _source(path, storage)
    family = families.of(config)
    ignored = names.ignored_prefixes(family)
    if unserved := [name for name in source.shapes if name.startswith(ignored)]:
        logging.warning(
            "%s: images and sounds are not served: %d tensors for them, from %s on, are left out",
            *(path, len(unserved), unserved[0]),
        )
    if storage.quantization is not None:
        matrices = few_bits.matrices(source, storage.quantization)
        few_bits.warn(source.label, matrices)
        source = few_bits.dequantized(source, matrices)
    classifier = None
    if config_json.is_classifier(raw):
        classifier, source = sequence_classifier.split(source, raw, config.width)
        logging.warning("%s: labels texts; what continues them means nothing", path)
    source = tensors(source, config, storage.num_predicting)
    name_map = names.huggingface(config)
    if storage.quantization is not None and storage.quantization.method == "gptq":
        source = few_bits.without_empty_biases(source, config, name_map)
    source = split_tensors.split(source, config, storage.is_packed)
    if storage.is_packed or storage.quantization is not None:
        few_bits.check(source, config, name_map)
    load.check_parts(config, source, name_map)
    directory = StoredDirectory.of(
        path, config, source, name_map, config_json.as_copied(raw, config)
    )
    return dataclasses.replace(directory, classifier=classifier)


def open_predicting(path: Path, config: Eagle) -> StoredDirectory:
    """Opens the layer of a directory that predicts a second token.

    Args:
        config: of the heads that it is, as `config_json.parse_predicting` has it.

    Raises:
        InputError: as `open_directory`, or a tensor of the layer is missing or has no place.
    """
    raw = config_json.read(path / text_files.CONFIG)
    storage, target = config_json.storage(raw, path), read_model(path)
    source = predicting_tensors(_stored(path, storage), target)
    layers, first = names.predicting_layers(families.of(config), target.num_layers)
    source = split_tensors.split(source, config, storage.is_packed, first, layers)
    name_map = names.predicting(config, target.num_layers)
    load.check(params.flatten(config.parameters()), source, name_map)
    load.check_parts(config, source, name_map)
    return StoredDirectory.of(path, config, source, name_map, config_json.as_copied(raw, config))


def _named_scales(stored: Iterable[str]) -> dict[str, str]:
    """The names of a directory's tensors by those that they have here: DeepSeek-V4 calls scales
    of weights `scale`.
    """
    named = {name: name for name in stored}
    for name in [name for name in named if name.endswith(".scale")]:
        module = name.removesuffix(".scale")
        if f"{module}.weight" in named:
            named[f"{module}.weight_scale_inv"] = named.pop(name)
    return named


def _source(path: Path, storage: Storage) -> TensorSource:
    """A directory's tensors as they are stored, scales of FP8 by one name."""
    source = safetensors_file.open_directory(path, storage.codes_at)
    if storage.quantization is None or storage.quantization.method != "fp8":
        return source
    stored = _named_scales(source.shapes)
    if stored.keys() != source.shapes.keys():
        source = renamed(source, stored)
    integers = {name: "float32" for name in stored if name.endswith(storage.integers)}
    return dataclasses.replace(source, dtypes={**source.dtypes, **integers})


def _stored(path: Path, storage: Storage) -> TensorSource:
    """A directory's tensors, those of few bits as the matrices that they stand for."""
    source = _source(path, storage)
    if storage.quantization is None:
        return source
    return few_bits.dequantized(source, few_bits.matrices(source, storage.quantization))


def tensors(source: TensorSource, config: ModelConfig, num_predicting: int) -> TensorSource:
    """The source under the names of a whole model, without tensors that only repeat what the
    configuration says.

    Old checkpoints store the rotary frequencies or the causal masks, and tied ones may store the
    head beside the embedding or in its place. One that was written without its head lacks the
    prefix of all other names. Layers that predict a second token, of which `num_predicting` are
    announced, are left out, as are what reads images and sounds, keys and values of layers that
    read earlier ones', and rows of inputs of layers that no token has.

    Raises:
        InputError: the configuration ties the head to an embedding of other values.
    """
    if has_other_head(source, config):
        raise InputError(
            f"{source.label}: tie_word_embeddings is true, but {_head(config)} is not the "
            "embedding; name this directory as the model: it is then read as untied"
        )
    family = families.of(config)
    unread = names.unread(config, family.tensors, family.layers)
    stored = {
        name: tensor
        for name, tensor in _whole_names(source.shapes, config).items()
        if not names.is_behind(config, name, family.layers, num_predicting)
        and not name.startswith(unread)
    }
    if config.tied and _head(config) in stored:
        stored.setdefault(_embedding(config), stored.pop(_head(config)))
    return _without_unread_rows(renamed(source, stored), config)


def predicting_tensors(source: TensorSource, config: ModelConfig) -> TensorSource:
    """Tensors of the layer that predicts a second token, without those that repeat the model's
    embedding and head.

    Raises:
        InputError: there are none, or its embedding or head is not the model's.
    """
    stored, family = _whole_names(source.shapes, config), families.of(config)
    layer = {n: stored[n] for n in stored if names.is_behind(config, n, family.layers, 1)}
    prefix = names.predicting_prefix(family, config.num_layers)
    if not layer:
        raise InputError(
            f"{source.label}: there is no tensor of {prefix}, the layer that is to predict a "
            "second token"
        )
    assert family.predicting is not None
    embedding = _embedding(config)
    for path, whole in (
        ("embed/table", embedding),
        ("head/table", embedding if config.tied else _head(config)),
    ):
        name = f"{prefix}.{family.predicting[path][0]}"
        if name in layer and not _is_same(source, layer.pop(name), stored.get(whole, whole)):
            raise InputError(
                f"{source.label}: {name} is not {whole}, which a layer that predicts a second "
                "token shares"
            )
    return renamed(source, layer)


def _without_unread_rows(source: TensorSource, config: ModelConfig) -> TensorSource:
    if config.layer_inputs is None:
        return source
    table = names.huggingface(config)("inputs/table").names[0]
    rows, *row_shape = source.shapes.get(table, (0,))
    shapes = {**source.shapes, table: (config.vocab_size, *row_shape)}
    return dataclasses.replace(source, shapes=shapes) if rows > config.vocab_size else source


def has_other_head(source: TensorSource, config: ModelConfig) -> bool:
    """Whether a configuration ties what is stored twice with different values: transformers then
    leaves the two apart.
    """
    if not config.tied:
        return False
    stored = _whole_names(source.shapes, config)
    embedding, head = _embedding(config), _head(config)
    if not {head, embedding} <= stored.keys():
        return False
    return not _is_same(source, stored[head], stored[embedding])


def _is_same(source: TensorSource, *pair: str) -> bool:
    if source.shapes.get(pair[0]) != source.shapes.get(pair[1]):
        return False
    blocks = zip(*map(source.blocks, pair), strict=True)
    return all(np.array_equal(first, second) for first, second in blocks)


def renamed(source: TensorSource, stored: dict[str, str]) -> TensorSource:
    """Some of its tensors, by the names that they are to have."""
    shapes = {name: source.shapes[tensor] for name, tensor in stored.items()}

    def read(name: str, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        return source.read(stored[name], start, stop, columns)

    def read_blocks(name: str) -> np.ndarray:
        assert source.read_blocks is not None
        return source.read_blocks(stored[name])

    dtypes = {name: source.dtypes[tensor] for name, tensor in stored.items()}
    formats = {
        n: source.formats[tensor] for n, tensor in stored.items() if tensor in source.formats
    }
    blocks = None if source.read_blocks is None else read_blocks
    return dataclasses.replace(
        source, shapes=shapes, read=read, read_blocks=blocks, formats=formats, dtypes=dtypes
    )


def _whole_names(stored_names: Iterable[str], config: ModelConfig) -> dict[str, str]:
    """The names of a whole model, and those that are there instead."""
    family, stored_names = families.of(config), list(stored_names)
    base = family.layers.split(".")[0]
    wrapped = (f"{base}.", "language_model.") if family.wrapper else f"{base}."
    is_bare = not any(name.startswith(wrapped) for name in stored_names)
    derived, ignored = (_DERIVED, *family.derived), names.ignored_prefixes(family)
    stored = {}
    for name in stored_names:
        if name.endswith(derived) or name.startswith(ignored):
            continue
        whole_name = f"{base}.{name}" if is_bare and name != _head(config) else name
        stored[_alone(whole_name) if family.wrapper else whole_name] = name
    return _respelled(config, stored)


def _alone(name: str) -> str:
    """The name of a tensor of the text of a model that reads images and sounds too, as if it stood
    alone: published files wrap the text with its head, transformers 5 what is below the head.
    """
    inside = name.removeprefix("model.language_model.")
    return name.removeprefix("language_model.") if inside == name else f"model.{inside}"


def _respelled(config: ModelConfig, stored: Mapping[str, str]) -> dict[str, str]:
    """Tensors by their names, those that have another name here by that (`Family.also`)."""
    also = families.of(config).also
    if not also:
        return dict(stored)
    name_map = names.huggingface(config)
    expected = {n for path in params.flatten(config.parameters()) for n in name_map(path).names}

    def spelled(name: str) -> str:
        spellings = (
            name.removesuffix(ending) + also[ending] for ending in also if name.endswith(ending)
        )
        spelling = next(
            (other for other in spellings if other in expected and other not in stored), name
        )
        return name if name in expected else spelling

    return {spelled(name): tensor for name, tensor in stored.items()}


def _embedding(config: ModelConfig) -> str:
    return names.huggingface(config)("embed/table").names[0]


def _head(config: ModelConfig) -> str:
    return names.huggingface(config)("head/table").names[0]
