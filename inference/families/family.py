"""The record of a family of checkpoints: everything particular to it."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated, Plain
from configs.model import LayerSpec, ModelConfig
from inference.families.shared import flax_names, gguf_names
from inference.families.shared.config_keys import Keys
from inference.families.shared.fields import ModelFields
from inference.families.shared.gguf_keys import RMS_EPSILON, GgufKeys
from inference.families.shared.gguf_states import Metadata
from inference.families.shared.hf_names import Table
from inference.families.shared.parts import Split


@dataclasses.dataclass(frozen=True)
class GgufReader:
    """How the metadata of one of llama.cpp's architectures is read.

    Attributes:
        build: returns the fields of `ModelConfig`, except the widths of every file; a field
            "family" names the family where that is not the reader's.
        reads: keys that only this architecture has.
        free_widths: keys of widths of heads that may differ from the head width.
        epsilon: key of the norms' epsilon where a file has no `RMS_EPSILON`.
    """

    build: Callable[[GgufKeys], ModelFields]
    reads: tuple[str, ...] = ()
    free_widths: tuple[str, ...] = ()
    epsilon: str = RMS_EPSILON


@dataclasses.dataclass(frozen=True)
class GgufWriter:
    """How a family's metadata is written.

    Attributes:
        architecture: llama.cpp's name of the family.
        metadata: the keys that only this family has.
        experts_architecture: its name where the model has experts.
        fold: removes from the model the factors that the file has in its weights.
        factors: these factors, by the endings of tensor names.
        read_as: the family as which a file is read back; None: its own.
        has_states: layers keep states, and may differ in kind.
    """

    architecture: str
    metadata: Callable[[ModelConfig], Metadata] = lambda config: {}
    experts_architecture: str | None = None
    fold: Callable[[ModelConfig], ModelConfig] = lambda config: config
    factors: Callable[[ModelConfig], dict[str, float]] = lambda config: {}
    has_states: bool = False
    read_as: str | None = None


InLayer = Callable[[LayerSpec], Table]


def _as_elsewhere(layer: LayerSpec) -> Table:
    return {}


@dataclasses.dataclass(frozen=True)
class Gguf:
    """A family in `.gguf` files.

    Attributes:
        tensors: as `Family.tensors`, by llama.cpp's names.
        in_layer: as `Family.in_layer`.
        numbers: endings of tensors of one number that a file has in its metadata instead, under
            that key, of all layers.
        is_interleaved: rotary pairs of queries and keys are stored as neighbors.
        has_heads_in_turns: of the value heads of layers with the delta rule the first of each key
            head come first, then the second ones.
        readers: by architecture. One architecture may serve several families; then the reader
            stands with the oldest of them.
        writer: None: files of this family are not written.
    """

    tensors: Table = dataclasses.field(default_factory=lambda: gguf_names.LLAMA)
    in_layer: InLayer = _as_elsewhere
    numbers: tuple[str, ...] = ()
    is_interleaved: bool = False
    has_heads_in_turns: bool = False
    readers: Mapping[str, GgufReader] = dataclasses.field(default_factory=dict)
    writer: GgufWriter | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family of checkpoints.

    Attributes:
        name: ours, which `ModelConfig.family` has; golden checkpoints begin with it.
        architecture: transformers' class, the only one of "architectures" in `config.json`.
        spellings: names that published files have instead of it.
        model_type: as `config.json` has it; None: `name`.
        read: keys of a `config.json` -> the fields of `ModelConfig`, except its name and family.
        write: returns those keys, except the ones that all families share.
        reads: keys that other families reject and `read` understands.
        mixers, feed_forwards: kinds that layers of the family may have.
        tensors: our paths, of layers without "layers/N/", and the tensors that make them up. "{}"
            stands for the number of an expert or a head. A bias goes by its weight's names, unless
            it has names of its own. Where kinds of mixers differ, one's name stands for "mixer".
        in_layer: names of a layer's tensors that depend on what the layer is.
        layers: prefix of a layer's number; its first word is the prefix of all but the head.
        transposed: paths of matrices that are stored [in, out].
        splits: make the parts of tensors that fuse several of our parameters.
        packs_experts: stacks of experts may be stored as MXFP4.
        recut: names tensors, with their rows, that writers also cut at other rows.
        stacks: tensors of a layer that hold the matrices of all experts, [E, out, in] or [E, in,
            out], which other files have apart: the names of an expert's, whose rows follow one
            another.
        predicting: as `tensors`, of layers behind the last one that predict a second token; None:
            there are no such layers.
        predicting_key: how many such layers there are.
        predicting_layers: prefix of such a layer's number where these are counted from 0; without
            its last word it is that of the names in `predicting`. None: they follow the others.
        listed: keys with a kind for each layer, to which such a layer adds one more.
        predictor: how tensors of such layers begin that have no number of the model's; they are
            not read.
        wrapper: architecture of a model of images or sounds too, of which this is the text: of the
            families that may be, the one whose `model_type` its "text_config" has.
        text_keys: keys of the text of `wrapper`, whatever its file says.
        ignored: prefixes of tensors that are not read.
        also: other endings of names, and those that they stand for where the model has none of
            that name.
        derived: endings of tensors that repeat what the configuration says.
        integers: endings of the names of tensors of integers.
        rows_key: key with the number of rows of a table of which only those of tokens are read.
        gguf: None: llama.cpp does not have the family.
        flax: the trees of packages that train it.
    """

    name: str
    architecture: str
    spellings: tuple[str, ...] = ()
    model_type: str | None = None
    read: Callable[[Keys], ModelFields]
    write: Callable[[ModelConfig], dict[str, object]]
    reads: tuple[str, ...] = ()
    mixers: tuple[type, ...] = (Attention,)
    feed_forwards: tuple[type, ...] = (Gated, Plain)
    tensors: Table
    in_layer: InLayer = _as_elsewhere
    layers: str = "model.layers"
    transposed: tuple[str, ...] = ()
    splits: tuple[Split, ...] = ()
    packs_experts: bool = False
    recut: Callable[[str, LayerSpec, Table], Iterator[Mapping[str, int]]] | None = None
    stacks: Table = dataclasses.field(default_factory=dict)
    predicting: Table | None = None
    predicting_key: str = "num_nextn_predict_layers"
    predicting_layers: str | None = None
    listed: tuple[str, ...] = ()
    predictor: str | None = None
    wrapper: str | None = None
    text_keys: Mapping[str, object] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    also: Mapping[str, str] = dataclasses.field(default_factory=dict)
    derived: tuple[str, ...] = ()
    integers: tuple[str, ...] = ()
    rows_key: str | None = None
    gguf: Gguf | None = None
    flax: tuple[flax_names.Names, ...] = ()

    def model(self, keys: Keys, name: str) -> ModelConfig:
        """Returns the model that a `config.json` describes; raises an `InputError`."""
        fields: ModelFields = {"name": name, "family": self.name, **self.read(keys)}
        return ModelConfig(**fields)
