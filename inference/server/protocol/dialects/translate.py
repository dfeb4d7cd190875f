"""Translates fields of other servers into declared ones."""

import re
from collections.abc import Collection

from inference.server.protocol.dialects.table import ROWS, Fate, ForeignField
from inference.server.protocol.errors import ApiError, invalid


def translate(
    body: dict[str, object], declared: Collection[str]
) -> tuple[dict[str, object], list[str], dict[str, str]]:
    """Translates undeclared fields by the table of other servers' fields.

    Returns:
        The body with declared fields only, and what `Parsed` calls `ignored` and `names`.

    Raises:
        ApiError: 400, a field would change the answer, and is not supported.
    """
    translated = {name: body[name] for name in body if name in declared}
    ignored: list[str] = []
    names: dict[str, str] = {}
    for name in sorted(body.keys() - set(declared)):
        row = ROWS.get(name)
        if row is not None and body[name] in row.neutral:
            continue
        target, part = ("", "") if row is None else _target(row, declared)
        if target in ROWS and target not in declared and ROWS[target].fate is Fate.REFUSED:
            row = ROWS[target]
        if row is not None and row.fate is Fate.REFUSED:
            raise invalid(name, f"is not supported by this server: {row.why}", "unsupported")
        if row is None or row.fate is Fate.IGNORED or target and target not in declared:
            ignored.append(name)
        else:
            if translated.get(target) is not None:
                raise invalid(name, f"and {names.get(target, target)} exclude each other")
            value = body[name]
            if isinstance(value, int | float | str):
                value = row.values.get(value, value)
            translated[target] = {part: value} if part else value
            names[target] = name
    return translated, ignored, names


def _target(row: ForeignField, declared: Collection[str]) -> tuple[str, str]:
    """The field, and the part of it, that a row becomes; if the field is not declared, the one that
    its own row becomes.
    """
    fields = [field.partition(".") for field in row.becomes.split()] or [("", "", "")]
    target, _, part = next((field for field in fields if field[0] in declared), fields[0])
    other = ROWS.get(target)
    if target not in declared and other is not None and other.fate is Fate.OBEYED:
        target, _, part = other.becomes.partition(".")
    return target, part


def renamed(error: ApiError, names: dict[str, str]) -> ApiError:
    """The same error, with the name of the field that the client sent."""
    target = re.match(r"\w*", error.param or "")
    name = names.get(target[0]) if target else None
    return error if name is None else error.renamed(name)
