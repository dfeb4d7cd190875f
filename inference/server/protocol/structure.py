"""What a request says of its answer's form becomes a grammar."""

import json
from typing import Any

from configs.errors import InputError
from inference.server.protocol.errors import invalid
from inference.server.protocol.fields import Sampling
from inference.text import grammar

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


def read(request: Sampling) -> tuple[str | None, str]:
    """The grammar, if one is asked for, and the field that does.

    Raises:
        ApiError: 400, several are, or what one says makes no sense.
    """
    each = _response_format(request), _structured_outputs(request), _bad_words(request)
    found = [asked for asked in each if asked]
    if len(found) > 1:
        raise invalid(found[1][0], f"and {found[0][0]} exclude each other")
    if not found:
        return None, ""
    ((name, kind, value),) = found
    try:
        if kind == "regex":
            return grammar.of_regex(value), name
        if kind == "choice":
            return grammar.of_choices(value), name
        if kind == "grammar":
            return grammar.of_lark(value), name
        if kind == "words":
            return grammar.without(value), name
        return grammar.of_json_schema(value), name
    except InputError as error:
        raise invalid(name, str(error)) from None


def _response_format(request: Sampling) -> tuple[str, str, Any] | None:
    asked, name = request.response_format, "response_format"
    if asked is None:
        return None
    schemas: dict[str, Any] = {
        place: schema for place in ("schema", "value")
        if (schema := getattr(asked, place)) is not None
    }  # fmt: skip
    if asked.json_schema is not None:
        schemas["json_schema.schema"] = asked.json_schema.schema
    if len(schemas) > 1:
        raise invalid(name, f"has one of {' and '.join(schemas)}")
    if asked.type == "text":
        if schemas:
            raise invalid(f"{name}.type", "is json_schema where there is a schema")
        return None
    if not schemas:
        if asked.type == "json_schema":
            raise invalid(f"{name}.json_schema", "is required")
        return name, "json", _ANY_OBJECT
    ((place, schema),) = schemas.items()
    if not isinstance(schema, dict):
        raise invalid(f"{name}.{place}", "is an object")
    return name, "json", schema


def _structured_outputs(request: Sampling) -> tuple[str, str, Any] | None:
    asked, name = request.structured_outputs, "structured_outputs"
    if asked is None:
        return None
    given: dict[str, Any] = {
        kind: value
        for kind in ("json", "regex", "choice", "grammar")
        if (value := getattr(asked, kind)) is not None
    }
    if asked.json_object:
        given["object"] = _ANY_OBJECT
    if len(given) != 1:
        raise invalid(name, "is one of json, regex, choice, grammar and json_object=true")
    for part in ("disable_any_whitespace", "disable_additional_properties"):
        if getattr(asked, part):
            raise invalid(f"{name}.{part}", "is not supported by this server", "unsupported")
    ((kind, value),) = given.items()
    if isinstance(value, str) and kind == "json":
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise invalid(f"{name}.json", "is a JSON schema")
    return name, kind, value


def _bad_words(request: Sampling) -> tuple[str, str, Any] | None:
    return ("bad_words", "words", request.bad_words) if request.bad_words else None
