"""Values at the declared limits of a body's fields, and past them, as they are declared."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

_OF_ANY_KIND = ("x", True, [None], 1.5, {"x": None})


class Case(NamedTuple):
    """A value of one field, by the names that lead to it; a list's first item is 0. `is_past`: it
    is past a limit; others may be of the wrong kind.
    """

    path: tuple[str | int, ...]
    value: Any
    is_past: bool

    @property
    def name(self) -> str:
        return str(self.path[0])


def cases(kind: type[msgspec.Struct], examples: dict[type, Any]) -> Iterator[Case]:
    """Of each field of a struct, and of those within; `examples`: of structs, what is valid."""
    for field in inspect.type_info(kind).fields:
        yield from _of(field.type, (field.encode_name,), examples)


def unlimited(kind: type[msgspec.Struct]) -> set[str]:
    """Fields that hold a text or a list without a limit, or anything at all."""
    found = set()
    for field in inspect.type_info(kind).fields:
        if any(map(_is_unlimited, _nested(field.type))):
            found.add(field.encode_name)
    return found


def with_value(body: dict[str, Any], case: Case, examples: dict[type, Any], kind: type) -> dict:
    """A body with the value, and around it what is valid."""
    name, *rest = case.path
    outer = inspect.type_info(kind)
    field = next(each for each in outer.fields if each.encode_name == name)
    return body | {name: _around(field.type, rest, case.value, examples)}


def _around(kind: Any, path: list, value: Any, examples: dict[type, Any]) -> Any:
    if not path:
        return value
    name, *rest = path
    for one in _members(kind):
        if name == 0 and isinstance(one, inspect.ListType):
            return [_around(one.item_type, rest, value, examples)]
        if name != 0 and isinstance(one, inspect.DictType) and not rest:
            return {name: value}
        if isinstance(one, inspect.StructType):
            for field in one.fields:
                if field.encode_name == name:
                    inner = _around(field.type, rest, value, examples)
                    return _example(one, examples) | {name: inner}
    raise AssertionError(path)


def _of(kind: Any, path: tuple[str | int, ...], examples: dict[type, Any]) -> Iterator[Case]:
    kinds = _OF_ANY_KIND if len(path) == 1 else _OF_ANY_KIND[-2:]
    yield from (Case(path, value, False) for value in kinds)
    for one in _members(kind):
        yield from (Case(path, value, is_past) for value, is_past in _limits(one, examples))
        if isinstance(one, inspect.ListType):
            yield from _of(one.item_type, (*path, 0), examples)
        elif isinstance(one, inspect.DictType):
            yield from _of(one.value_type, (*path, "0"), examples)
        elif isinstance(one, inspect.StructType):
            for field in one.fields:
                yield from _of(field.type, (*path, field.encode_name), examples)


def _limits(kind: Any, examples: dict[type, Any]) -> Iterator[tuple[Any, bool]]:
    """Values at the limits of a kind, and past them (true)."""
    if isinstance(kind, inspect.BoolType):
        yield from ((True, False), (False, False))
    elif isinstance(kind, inspect.IntType | inspect.FloatType):
        step = 1e-9 if isinstance(kind, inspect.FloatType) else 1
        if kind.ge is not None:
            yield from ((kind.ge, False), (kind.ge - step, True))
        if kind.gt is not None:
            yield from ((kind.gt, True), (kind.gt + step, False))
        if kind.le is not None:
            yield from ((kind.le, False), (kind.le + step, True))
    elif isinstance(kind, inspect.LiteralType):
        yield from ((value, False) for value in kind.values)
    elif isinstance(kind, inspect.StrType | inspect.ListType | inspect.DictType):
        for num in (kind.min_length, kind.max_length):
            if num is not None:
                yield _sized(kind, num, examples), False
        if kind.min_length:
            yield _sized(kind, kind.min_length - 1, examples), True
        if kind.max_length is not None:
            yield _sized(kind, kind.max_length + 1, examples), True


def _sized(kind: Any, num: int, examples: dict[type, Any]) -> Any:
    if isinstance(kind, inspect.StrType):
        return "a" * num
    if isinstance(kind, inspect.ListType):
        return [_example(kind.item_type, examples)] * num
    return {str(n): _example(kind.value_type, examples) for n in range(num)}


def _example(kind: Any, examples: dict[type, Any]) -> Any:
    """The smallest that is valid."""
    one = _members(kind)[0]
    if isinstance(one, inspect.StructType):
        if one.cls in examples:
            return examples[one.cls]
        required = [field for field in one.fields if field.required]
        return {field.encode_name: _example(field.type, examples) for field in required}
    if isinstance(one, inspect.LiteralType):
        return one.values[0]
    if isinstance(one, inspect.IntType | inspect.FloatType):
        return 1 if (one.ge or 0) <= 1 else one.ge
    if isinstance(one, inspect.BoolType):
        return True
    if isinstance(one, inspect.AnyType):
        return None
    return _sized(one, one.min_length or (1 if isinstance(one, inspect.StrType) else 0), examples)


def _members(kind: Any) -> list[Any]:
    if isinstance(kind, inspect.UnionType):
        return [one for one in kind.types if not isinstance(one, inspect.NoneType)]
    return [kind]


def _nested(kind: Any) -> Iterator[Any]:
    for one in _members(kind):
        yield one
        if isinstance(one, inspect.ListType):
            yield from _nested(one.item_type)
        elif isinstance(one, inspect.DictType):
            yield from _nested(one.value_type)
        elif isinstance(one, inspect.StructType):
            for field in one.fields:
                yield from _nested(field.type)


def _is_unlimited(kind: Any) -> bool:
    if isinstance(kind, inspect.AnyType):
        return True
    sized = inspect.StrType, inspect.ListType, inspect.DictType
    if isinstance(kind, sized):
        return kind.max_length is None
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        return (kind.ge is None and kind.gt is None) or kind.le is None
    return False
