"""Translates fields of other servers into declared ones."""

import re
from collections.abc import Collection
from typing import NamedTuple

from inference.server.protocol.dialects.table import ROWS, Fate, Row
from inference.server.protocol.errors import ApiError, invalid


class Translated(NamedTuple):
    """A translated body.

    Attributes:
        body: declared fields only.
        ignored: names of fields without effect.
        names: declared field -> field that the client sent instead.
    """

    body: dict[str, object]
    ignored: list[str]
    names: dict[str, str]


def translate(body: dict[str, object], declared: Collection[str]) -> Translated:
    """Translates undeclared fields by the table of other servers' fields.

    Raises:
        ApiError: 400, a field would change the answer, and is not supported.
    """
    translated = Translated({name: body[name] for name in body if name in declared}, [], {})
    for name in sorted(body.keys() - set(declared)):
        row = ROWS.get(name)
        if row is not None and body[name] in row.neutral:
            continue
        target, part = ("", "") if row is None else _target(row, declared)
        if row is None or row.fate is Fate.IGNORED or target and target not in declared:
            translated.ignored.append(name)
        elif row.fate is Fate.REFUSED:
            raise invalid(name, f"is not supported by this server: {row.why}", "unsupported")
        else:
            if translated.body.get(target) is not None:
                other = translated.names.get(target, target)
                raise invalid(name, f"and {other} exclude each other")
            value = body[name]
            if isinstance(value, int | float):
                value = row.values.get(value, value)
            translated.body[target] = {part: value} if part else value
            translated.names[target] = name
    return translated


def _target(row: Row, declared: Collection[str]) -> tuple[str, str]:
    """The field, and the part of it, that a row becomes; if the field is not declared, the one that
    its own row becomes.
    """
    target, _, part = row.becomes.partition(".")
    other = ROWS.get(target)
    if target not in declared and other is not None and other.fate is Fate.OBEYED:
        target, _, part = other.becomes.partition(".")
    return target, part


def renamed(error: ApiError, names: dict[str, str]) -> ApiError:
    """The same error, with the name of the field that the client sent."""
    target = re.match(r"\w*", error.param or "")
    name = names.get(target[0]) if target else None
    return error if name is None else error.renamed(name)
