"""`--set engine.max_seqs=64`: typed overrides of frozen dataclasses. An unknown key or a wrong type
is an error. `model.pattern.ffn.width=512` changes every layer of the pattern that has that field.
"""

import ast
import dataclasses
import types
import typing
from collections.abc import Iterable
from typing import Any, TypeVar

from configs.errors import InputError
from configs.settings.section import Section, values

T = TypeVar("T")


def apply(config: T, settings: Iterable[str]) -> T:
    """Returns `config` with each 'path.to.field=value' replaced; of two for one field, the later.

    Raises:
        InputError: a setting has no '=', names no field, or its value has the wrong type; or they
            make no valid configuration together.
    """
    changes: dict[Any, Any] = {}
    for setting in settings:
        path, equals, value = setting.partition("=")
        if not equals or not path:
            raise InputError(f"--set takes key=value, not {setting!r}")
        _collect(changes, config, path.split("."), value, path)
    return _replace(config, changes) if changes else config


def changed(section: Section, base: Section) -> dict[str, object]:
    """Returns the settings of a section that differ from `base`, by their names."""
    before = values(base)
    return {name: now for name, now in values(section).items() if now != before[name]}


def _collect(changes: dict[Any, Any], node: Any, keys: list[str], value: str, path: str) -> None:
    """Adds one setting to the changes of a section, {field: value, or changes of a section}; of a
    list of sections it changes every one that has the field.
    """
    if isinstance(node, tuple):
        names = list(dict.fromkeys(_names(node, keys[:-1])))
        if keys[-1] not in names:
            valid = ", ".join(names or _names(node, []))
            raise InputError(f"unknown key {path!r}: {keys[-1]!r} is not one of {valid}")
        for index, item in enumerate(node):
            if keys[-1] in _names(item, keys[:-1]):
                _collect(changes.setdefault(index, {}), item, keys, value, path)
        return
    names = [field.name for field in dataclasses.fields(node)]
    name, *inner = keys
    if name not in names:
        if isinstance(node, Section):
            node.check_name(name)
        raise InputError(f"unknown key {path!r}: {name!r} is not one of {', '.join(names)}")
    child = getattr(node, name)
    if _is_section(child) != bool(inner):
        raise InputError(
            f"{path!r} names a whole section, a field of it is needed: "
            f"{', '.join(dict.fromkeys(_names(child, [])))}"
            if _is_section(child)
            else f"unknown key {path!r}: {name!r} has no fields"
        )
    if inner:
        _collect(changes.setdefault(name, {}), child, inner, value, path)
    else:
        changes[name] = _parse(node, name, value, path)


def _is_section(node: object) -> bool:
    """Whether settings go into it: a dataclass, or a list of them."""
    if isinstance(node, tuple):
        return bool(node) and dataclasses.is_dataclass(node[0])
    return dataclasses.is_dataclass(node)


def _names(node: Any, keys: list[str]) -> list[str]:
    """The fields of the section (or sections) that `keys` lead to."""
    if isinstance(node, tuple):
        return [name for item in node for name in _names(item, keys)]
    if keys:
        return _names(getattr(node, keys[0], None), keys[1:])
    return [field.name for field in dataclasses.fields(node)] if _is_section(node) else []


def _replace(node: Any, changes: dict[Any, Any]) -> Any:
    """All changes of a section at once: settings may be valid only together."""
    if isinstance(node, tuple):
        return tuple(_replace(item, changes.get(i, {})) for i, item in enumerate(node))
    for name, change in changes.items():
        child = getattr(node, name)
        if _is_section(child):
            changes = changes | {name: _replace(child, change)}
    return dataclasses.replace(node, **changes)


def _parse(node: Any, name: str, text: str, path: str) -> object:
    annotation = typing.get_type_hints(type(node))[name]
    choices = (
        typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    )
    if str in choices:
        return None if types.NoneType in choices and text.lower() == "none" else text
    try:
        value = ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text, text))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        value = text
    if float in choices and type(value) is int:
        value = float(value)
    if not any(_fits(value, choice) for choice in choices):
        shown = " or ".join(getattr(choice, "__name__", str(choice)) for choice in choices)
        raise InputError(f"{path}={text!r}: expected {shown}")
    return value


def _fits(value: object, annotation: object) -> bool:
    if typing.get_origin(annotation) is tuple:
        item = typing.get_args(annotation)[0]
        return isinstance(value, tuple) and all(_fits(element, item) for element in value)
    if annotation in (None, types.NoneType):
        return value is None
    return type(value) is annotation
