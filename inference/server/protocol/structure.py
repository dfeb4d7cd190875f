"""Converts a request's fields on the form of the answer to a grammar."""

import json
from typing import Any

from configs.errors import InputError
from inference.server.protocol.errors import invalid
from inference.server.protocol.fields import Sampling
from inference.text import grammar

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


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
    ((name, kind, value),) = forms
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
        return name, "json", _ANY_OBJECT
    ((place, schema),) = schemas.items()
    if not isinstance(schema, dict):
        raise invalid(f"{name}.{place}", "is an object")
    return name, "json", schema


def _structured_outputs(request: Sampling) -> tuple[str, str, Any] | None:
    outputs, name = request.structured_outputs, "structured_outputs"
    if outputs is None:
        return None
    values: dict[str, Any] = {
        kind: value
        for kind in ("json", "regex", "choice", "grammar")
        if (value := getattr(outputs, kind)) is not None
    }
    if outputs.json_object:
        values["object"] = _ANY_OBJECT
    if len(values) != 1:
        raise invalid(name, "is one of json, regex, choice, grammar and json_object=true")
    for part in ("disable_any_whitespace", "disable_additional_properties"):
        if getattr(outputs, part):
            raise invalid(f"{name}.{part}", "is not supported by this server", "unsupported")
    ((kind, value),) = values.items()
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
