"""A `ModelConfig` as JSON: read by type, and refused when a field is unknown or of another type."""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from configs.errors import InputError, shown
from configs.heads import DFlash, Eagle, Eagle3, Heads, Medusa
from configs.kinds.kind import FeedForward, Kind, Mixer
from configs.model import MOST_LAYERS, ModelConfig

_MAX_INTEGER = 1 << 31
_HEADS = {kind.__name__: kind for kind in (DFlash, Eagle, Eagle3, Medusa)}


def to_json(config: object) -> Any:
    """The fields of a configuration, as plain JSON values; what may be one of several types says
    which under "kind".
    """
    if isinstance(config, tuple):
        return [to_json(item) for item in config]
    if not dataclasses.is_dataclass(config):
        return config
    hints = typing.get_type_hints(type(config))
    value: dict[str, Any] = {"kind": config.name} if isinstance(config, Kind) else {}
    if isinstance(config, Heads):
        value["kind"] = type(config).__name__
    for field in dataclasses.fields(config):
        item = getattr(config, field.name)
        value[field.name] = to_json(item)
        if dataclasses.is_dataclass(item) and len(_choices(hints[field.name])) > 1:
            value[field.name]["kind"] = type(item).__name__
    return value


def _choices(kind: object) -> dict[str, type]:
    """The types of a union that are not None, by name."""
    return {part.__name__: part for part in typing.get_args(kind) if part is not type(None)}


def from_json(value: object, label: str) -> ModelConfig:
    """Inverse of `to_json`; raises an `InputError` if a field is missing, unknown or unsound."""
    try:
        layers = value.get("num_layers") if isinstance(value, dict) else None
        if isinstance(layers, int) and layers > MOST_LAYERS:  # a model makes a list of them
            raise InputError(f"model.num_layers is at most {MOST_LAYERS}, not {layers}")
        if isinstance(value, dict) and "kind" in value:
            heads: Heads = _one_of(_HEADS, value, "model")
            return heads
        config: ModelConfig = _read(ModelConfig, value, "model")
        return config
    except (ValueError, ArithmeticError) as error:  # InputError is a ValueError
        raise InputError(f"{label}: {' '.join(str(error).split())[:300]}") from None


def _read(kind: Any, value: Any, where: str) -> Any:
    """`value` as a `kind`: a dataclass, a tuple, an optional, or a scalar."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and issubclass(kind, Kind):
        return _one_of(
            kind.kinds if kind in (Mixer, FeedForward) else {kind.name: kind}, value, where
        )
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in parts:
            return None
        choices = _choices(kind)
        if len(choices) == 1:
            return _read(next(iter(choices.values())), value, where)
        return _one_of(choices, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise InputError(f"{where} is a list, not {shown(value)}")
        if len(value) > MOST_LAYERS:
            raise InputError(f"{where} lists {len(value)} values; at most {MOST_LAYERS} are valid")
        if len(parts) == 2 and parts[1] is Ellipsis:
            parts = parts[:1] * len(value)
        if len(parts) != len(value):
            raise InputError(f"{where} lists {len(parts)} values, not {len(value)}")
        return tuple(
            _read(p, v, f"{where}[{i}]") for i, (p, v) in enumerate(zip(parts, value, strict=True))
        )
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, where)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise InputError(f"{where} is {kind.__name__}, not {shown(value)}")
    if kind is int and abs(value) > _MAX_INTEGER:
        raise InputError(f"{where} is at most {_MAX_INTEGER}, not {shown(value)}")
    return value


def _one_of(choices: Mapping[str, type], value: Any, where: str) -> Any:
    """A dataclass of those that are valid there; `value` says which under "kind"."""
    name = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in choices:
        raise InputError(f"{where}.kind is one of {', '.join(choices)}, not {shown(name)}")
    fields = {key: item for key, item in value.items() if key != "kind"}
    return _dataclass(choices[name], fields, where)


def _dataclass(kind: Any, value: object, where: str) -> Any:
    if not isinstance(value, dict):
        raise InputError(f"{where} is an object, not {shown(value)}")
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    unknown = sorted(value.keys() - fields.keys())
    if unknown:
        raise InputError(
            f"{where}.{unknown[0][:80]} is not a field: written by a newer version, or damaged"
        )
    hints = typing.get_type_hints(kind)
    for name, field in fields.items():
        if name not in value and field.default is field.default_factory is dataclasses.MISSING:
            raise InputError(f"{where}.{name} is missing")
    return kind(**{name: _read(hints[name], v, f"{where}.{name}") for name, v in value.items()})
