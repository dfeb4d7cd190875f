"""Which tensors of a checkpoint make up each of our parameters.

A name map takes one of our paths ('layers/3/mixer/qkv') and gives the source tensors to stack along
their rows.
"""

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

from configs.errors import InputError
from configs.kinds.kind import Mixer
from configs.model import ModelConfig
from inference.families import families
from inference.families.family import Family, InLayer
from inference.families.shared.hf_names import Table


class Stored(NamedTuple):
    """Where a parameter is in a checkpoint.

    Attributes:
        names: tensors whose rows follow one another; a checkpoint that stacks them has one.
        transposed: matrices are stored [in, out].
    """

    names: tuple[str, ...]
    transposed: bool = False


NameMap = Callable[[str], Stored]


class _Scheme(NamedTuple):
    """The names of one format: as `Family.tensors`, `in_layer`, `layers` and `transposed`."""

    tensors: Table
    in_layer: InLayer
    layers: str
    transposed: tuple[str, ...] = ()


_LAYER = re.compile(r"layers/(\d+)/(.+)")
_PART = re.compile(r"(.+)/(\d+)")  # of a stack


def huggingface(config: ModelConfig) -> NameMap:
    """Returns the map to the names that transformers gives a model's tensors."""
    return functools.partial(_translate, _scheme(families.of(config)), config)


def predicting(config: ModelConfig, number: int) -> NameMap:
    """Returns the map to the names of a layer that predicts a second token, of heads that are that
    layer.
    """

    def name(path: str) -> Stored:
        family = families.of(config)
        assert family.predicting is not None
        layers, first = predicting_layers(family, number)
        if path not in family.predicting:
            return _translate(_scheme(family)._replace(layers=layers), config, path, first)
        prefix = predicting_prefix(family, number)
        return Stored(tuple(f"{prefix}.{tensor}" for tensor in family.predicting[path]))

    return name


def predicting_layers(family: Family, number: int) -> tuple[str, int]:
    """What stands before the number of the layer that predicts a second token, and that number.

    Args:
        number: of the model's layers.
    """
    apart = family.predicting_layers
    return (family.layers, number) if apart is None else (apart, 0)


def predicting_prefix(family: Family, number: int) -> str:
    """What stands before the names in `Family.predicting`; arguments as `predicting_layers`."""
    apart = family.predicting_layers
    return f"{family.layers}.{number}" if apart is None else apart.rpartition(".")[0]


def gguf(config: ModelConfig) -> NameMap:
    """Returns the map to the names that llama.cpp gives a model's tensors."""
    record = families.gguf(config)
    return functools.partial(_translate, _Scheme(record.tensors, record.in_layer, "blk"), config)


def ignored_prefixes(family: Family) -> tuple[str, ...]:
    """Returns how the names of tensors begin that are of other parts of a model than its text."""
    return tuple(f"{prefix}." for prefix in family.ignored)


def unread(config: ModelConfig, tensors: Table, layers: str) -> tuple[str, ...]:
    """Returns how tensors begin that make keys or values in layers that read an earlier one's.

    Args:
        tensors, layers: the family's names in a format, and what stands before a layer's number.
    """
    makers = (*tensors.get("mixer/qkv", ())[1:], *tensors.get("mixer/k_norm", ()))
    return tuple(
        f"{layers}.{number}.{name.removesuffix('weight')}"
        for number, spec in enumerate(config.cache_specs)
        if spec.owner is not None
        for name in makers
    )


def is_behind(config: ModelConfig, name: str, layers: str, count: int) -> bool:
    """Whether a tensor is of a layer that predicts a second token.

    Args:
        layers: what stands before a layer's number.
        count: such layers that the checkpoint announces.
    """
    family = families.of(config)
    if family.predictor is not None and name.startswith(family.predictor):
        return True
    if family.predicting is None:
        return False
    behind = range(config.num_layers, config.num_layers + count)
    return name.startswith(tuple(f"{layers}.{number}." for number in behind))


def identity(path: str) -> Stored:
    """The map of a checkpoint that is stored under our own paths."""
    return Stored((path,))


def _scheme(family: Family) -> _Scheme:
    return _Scheme(family.tensors, family.in_layer, family.layers, family.transposed)


def _translate(scheme: _Scheme, config: ModelConfig, path: str, first: int = 0) -> Stored:
    """`first` is the number of the model's first layer there."""
    layer = _LAYER.fullmatch(path)
    in_layer = layer[2] if layer else path
    if part := _PART.fullmatch(in_layer):
        stack = _translate(scheme, config, path.removesuffix(f"/{part[2]}"), first)
        return Stored((stack.names[int(part[2])],), stack.transposed)
    if layer and in_layer.startswith("mixer/"):
        in_layer = _of_kind(scheme, config.layers[int(layer[1])].mixer, in_layer)
    weight = _weight(scheme, in_layer)
    of_layer = scheme.in_layer(config.layers[int(layer[1])]) if layer else {}
    tensors = of_layer.get(weight) or scheme.tensors.get(weight)
    if tensors is None:
        raise InputError(f"parameter {path!r} has no counterpart in this checkpoint format")
    if weight != in_layer:
        tensors = tuple(name.removesuffix(".weight") + ".bias" for name in tensors)
    if layer:
        prefix = f"{scheme.layers}.{first + int(layer[1])}"
        tensors = tuple(f"{prefix}.{name}" for name in tensors)
    if layer and "{}" in tensors[0]:
        count = _num_matrices(config, layer)
        tensors = tuple(name.format(n) for n in range(count) for name in tensors)
    return Stored(tensors, in_layer in scheme.transposed)


def _of_kind(scheme: _Scheme, mixer: Mixer, path: str) -> str:
    """The path of a mixer's parameter that its names go by: its kind's, where the family says so,
    else that of any mixer; of one of two mixers as if it were alone.
    """
    of_kind = path.replace("mixer", mixer.name, 1)
    if len(mixer.parts) > 1:
        of_kind = path.removeprefix("mixer/")
        path = f"mixer/{of_kind.partition('/')[2]}"
    return of_kind if _weight(scheme, of_kind) in scheme.tensors else path


def _weight(scheme: _Scheme, path: str) -> str:
    """The path whose names a parameter goes by: its own, or its weight's."""
    if not path.endswith(("_bias", "/bias")) or path in scheme.tensors:
        return path
    return path.removesuffix("_bias").replace("/bias", "/weight")


def _num_matrices(config: ModelConfig, layer: re.Match[str]) -> int:
    """Matrices of a stack: a layer's experts, or its heads."""
    spec = config.layers[int(layer[1])]
    if layer[2] == "mixer/k_norm":
        return spec.mixer.cache_parts
    if layer[2].startswith("mixer/"):
        return spec.mixer.query_heads
    assert spec.ffn is not None and spec.ffn.experts is not None
    return spec.ffn.experts[0]
