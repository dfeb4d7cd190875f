"""Converts a request's fields on the form of the answer to a grammar."""

import json
from collections.abc import Callable
from typing import Any

from configs.errors import InputError
from inference.server.protocol.errors import invalid
from inference.server.protocol.fields import Sampling
from inference.text import grammar

_Form = tuple[str, Callable[[Any], str], Any]  # a field, what writes its grammar, from its value
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_WRITERS: dict[str, Callable[[Any], str]] = {
    "json": grammar.of_json_schema,
    "regex": grammar.of_regex,
    "choice": grammar.of_choices,
    "grammar": grammar.of_lark,
}


def read(request: Sampling) -> tuple[str | None, str]:
    """Returns the grammar of the answer, if any, and the field that requests it.

    Raises:
        ApiError: 400, several fields do, or one is not valid.
    """
    readers = _response_format, _structured_outputs, _bad_words
    forms = [form for reader in readers if (form := reader(request))]
    if len(forms) > 1:
        raise invalid(forms[1][0], f"and {forms[0][0]} exclude each other")
    if not forms:
        return None, ""
    ((name, write, value),) = forms
    try:
        return write(value), name
    except InputError as error:
        raise invalid(name, str(error)) from None


def _response_format(request: Sampling) -> _Form | None:
    format, name = request.response_format, "response_format"
    if format is None:
        return None
    schemas: dict[str, Any] = {
        place: schema for place in ("schema", "value")
        if (schema := getattr(format, place)) is not None
    }  # fmt: skip
    if format.json_schema is not None:
        schemas["json_schema.schema"] = format.json_schema.schema
    if len(schemas) > 1:
        raise invalid(name, f"has one of {' and '.join(schemas)}")
    if format.type == "text":
        if schemas:
            raise invalid(f"{name}.type", "is json_schema where there is a schema")
        return None
    if not schemas:
        if format.type == "json_schema":
            raise invalid(f"{name}.json_schema", "is required")
        return name, grammar.of_json_schema, _ANY_OBJECT
    ((place, schema),) = schemas.items()
    if not isinstance(schema, dict):
        raise invalid(f"{name}.{place}", "is an object")
    return name, grammar.of_json_schema, schema


def _structured_outputs(request: Sampling) -> _Form | None:
    outputs, name = request.structured_outputs, "structured_outputs"
    if outputs is None:
        return None
    values: dict[str, Any] = {
        kind: value for kind in _WRITERS if (value := getattr(outputs, kind)) is not None
    }
    if len(values) + bool(outputs.json_object) != 1:
        raise invalid(name, "is one of json, regex, choice, grammar and json_object=true")
    for part in ("disable_any_whitespace", "disable_additional_properties"):
        if getattr(outputs, part):
            raise invalid(f"{name}.{part}", "is not supported by this server", "unsupported")
    if outputs.json_object:
        return name, grammar.of_json_schema, _ANY_OBJECT
    ((kind, value),) = values.items()
    if isinstance(value, str) and kind == "json":
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise invalid(f"{name}.json", "is a JSON schema")
    return name, _WRITERS[kind], value


def _bad_words(request: Sampling) -> _Form | None:
    return ("bad_words", grammar.without, request.bad_words) if request.bad_words else None
