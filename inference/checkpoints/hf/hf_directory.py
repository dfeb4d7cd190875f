"""A Hugging Face directory: `config.json` as a `ModelConfig`, and the tensors that count."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from configs.errors import InputError
from configs.heads import Eagle
from configs.kinds.params import leaves
from configs.model import MOST_LAYERS, ModelConfig
from inference.checkpoints import mapped, names
from inference.checkpoints.hf import config_json, mxfp4
from inference.checkpoints.hf.quantized import schemes
from inference.checkpoints.hf.quantized.schemes import Quantization
from inference.checkpoints.tensor_source import TensorSource
from inference.families import families
from inference.families.shared.config_keys import Keys

_DERIVED = "rotary_emb.inv_freq"
_HEAD = "lm_head.weight"
QUANTIZATION = "quantization_config", "compression_config"  # keys; the second is older


@dataclasses.dataclass(frozen=True)
class Storage:
    """What `config.json` says of the tensors, and not of the model.

    Attributes:
        is_packed: experts are stored as MXFP4.
        num_predicting: layers behind the last one, which predict a second token.
        quantization: how weights are stored in few bits; None: they are not, or as MXFP4.
    """

    is_packed: bool
    num_predicting: int
    quantization: Quantization | None = None

    @property
    def codes_at(self) -> tuple[str, ...]:
        """See `safetensors_file.open_directory`."""
        if self.quantization is not None:
            return ("",)
        return mxfp4.ENDINGS if self.is_packed else ()


def read_config(path: Path) -> dict[str, object]:
    """A `config.json`; of a model that reads images and sounds too, what describes its text.

    Raises:
        InputError: the file is unsound.
    """
    raw = mapped.read_json(path)
    try:
        return config_json.text_part(raw)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def parse_config(raw: dict[str, object], directory: Path) -> ModelConfig:
    """The model that a directory's `config.json` describes.

    Raises:
        InputError: the architecture is another, or a key is unsound or changes the model in a way
            that is not supported.
    """
    try:
        return config_json.build(Keys(raw), directory.resolve().name)
    except ValueError as error:
        raise InputError(f"{directory / 'config.json'}: {error}") from None


def parse_predicting(raw: dict[str, object], directory: Path) -> Eagle:
    """The layer that predicts a second token, as heads for the model that a directory's
    `config.json` describes: it is of the kind that one more layer of the model would be.

    Raises:
        InputError: as `parse_config`, or there is no such layer, or more than one.
    """
    config, count = parse_config(raw, directory), storage(raw, directory).num_predicting
    family = families.of(config)
    if family.predicting is None or count != 1:
        predicting = " or ".join(
            family.name for family in families.ALL.values() if family.predicting is not None
        )
        raise InputError(
            f"{directory / 'config.json'}: {config.family} with num_nextn_predict_layers={count}; "
            f"what drafts is one layer that predicts a second token, of {predicting}"
        )
    listed = ((key, raw.get(key)) for key in family.listed)
    longer = {key: [*kinds, kinds[-1]] for key, kinds in listed if isinstance(kinds, list)}
    more = parse_config(raw | {"num_hidden_layers": config.num_layers + 1} | longer, directory)
    target = {field.name: getattr(config, field.name) for field in dataclasses.fields(ModelConfig)}
    target |= {"name": f"{config.name}-mtp", "num_layers": 1, "pattern": more.layers[-1:]}
    return Eagle(**target | {"tied": False}, shares_head=True, skips_first=True)


def storage(raw: dict[str, object], directory: Path) -> Storage:
    """How a directory stores its tensors; raises an `InputError` if a key is unsound."""
    described = next((raw[key] for key in QUANTIZATION if raw.get(key) is not None), None)
    is_mxfp4 = isinstance(described, dict) and described.get("quant_method") == "mxfp4"
    is_packed = is_mxfp4 and config_json.packs_experts(raw)
    try:
        extra = Keys(raw).whole("num_nextn_predict_layers", 0, limit=MOST_LAYERS)
        quantization = None if described is None or is_packed else schemes.read(described)
    except InputError as error:
        raise InputError(f"{directory / 'config.json'}: {error}") from None
    return Storage(is_packed, extra, quantization)


def without_storage(raw: dict[str, object]) -> dict[str, object]:
    """A `config.json` without what is said of how weights are stored."""
    return {key: value for key, value in raw.items() if key not in QUANTIZATION}


def as_copied(raw: dict[str, object], config: ModelConfig) -> dict[str, object]:
    """A `config.json` for copies of its model: nothing is packed, layers that predict a second
    token and rows that no token has stay behind.
    """
    rows_key = families.of(config).rows_key
    read = {"num_nextn_predict_layers": 0} | ({rows_key: config.vocab_size} if rows_key else {})
    return without_storage(raw) | {key: value for key, value in read.items() if key in raw}


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
            f"{source.label}: tie_word_embeddings is true, but {_HEAD} is not the embedding; name "
            "this directory as the model: it is then read as untied"
        )
    family = families.of(config)
    unread = names.unread(config, family.tensors, family.layers)
    stored = {
        name: tensor
        for name, tensor in _stored(source, config).items()
        if not names.is_behind(config, name, family.layers, num_predicting)
        and not name.startswith(unread)
    }
    if config.tied and _HEAD in stored:
        stored.setdefault(_embedding(config), stored.pop(_HEAD))
    return _without_unread_rows(_renamed(source, stored), config)


def predicting_tensors(source: TensorSource, config: ModelConfig) -> TensorSource:
    """Tensors of the layer that predicts a second token, without those that repeat the model's
    embedding and head.

    Raises:
        InputError: there are none, or its embedding or head is not the model's.
    """
    stored, family = _stored(source, config), families.of(config)
    layer = {n: stored[n] for n in stored if names.is_behind(config, n, family.layers, 1)}
    prefix = f"{family.layers}.{config.num_layers}"
    if not layer:
        raise InputError(
            f"{source.label}: there is no tensor of {prefix}, the layer that is announced to "
            "predict a second token"
        )
    assert family.predicting is not None
    embedding = _embedding(config)
    for path, whole in (
        ("embed/table", embedding),
        ("head/table", embedding if config.tied else _HEAD),
    ):
        name = f"{prefix}.{family.predicting[path][0]}"
        if name in layer and not _is_same(source, layer.pop(name), stored.get(whole, whole)):
            raise InputError(
                f"{source.label}: {name} is not {whole}, which a layer that predicts a second "
                "token shares"
            )
    return _renamed(source, layer)


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
    stored, embedding = _stored(source, config), _embedding(config)
    if not config.tied or not {_HEAD, embedding} <= stored.keys():
        return False
    return not _is_same(source, stored[_HEAD], stored[embedding])


def _is_same(source: TensorSource, *pair: str) -> bool:
    if source.shapes.get(pair[0]) != source.shapes.get(pair[1]):
        return False
    blocks = zip(*map(source.blocks, pair), strict=True)
    return all(np.array_equal(first, second) for first, second in blocks)


def _renamed(source: TensorSource, stored: dict[str, str]) -> TensorSource:
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


def _stored(source: TensorSource, config: ModelConfig) -> dict[str, str]:
    """The names of a whole model, and those the source has instead."""
    family = families.of(config)
    base = family.layers.split(".")[0]
    is_bare = not any(name.startswith(f"{base}.") for name in source.shapes)
    derived = (_DERIVED, *family.derived)
    stored = {}
    for name in source.shapes:
        if name.endswith(derived) or names.is_other(family, name):
            continue
        whole_name = f"{base}.{name}" if is_bare and name != _HEAD else name
        if family.inside is not None and name.startswith(f"{family.inside}."):
            whole_name = f"{base}.{name.removeprefix(f'{family.inside}.')}"
        stored[whole_name] = name
    return _respelled(config, stored)


def _respelled(config: ModelConfig, stored: Mapping[str, str]) -> dict[str, str]:
    """Tensors by their names, those that have another name here by that (`Family.also`)."""
    also = families.of(config).also
    if not also:
        return dict(stored)
    name_map = names.huggingface(config)
    expected = {
        name for path, _ in leaves(config.parameters()) for name in name_map("/".join(path)).names
    }

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
