"""Converts a request's fields on the form of the answer to a grammar."""

import json
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from configs.errors import InputError
from inference.server.protocol.errors import ApiError, invalid, unusable
from inference.server.protocol.fields import Sampling
from inference.server.protocol.parse import invalid_field
from inference.text import grammar
from inference.text.structural_tags import formats

_Form = tuple[str, Callable[[Any], str], Any]  # a field, what writes its grammar, from its value
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_WRITERS: dict[str, Callable[[Any], str]] = {
    "json": grammar.of_json_schema,
    "regex": grammar.of_regex,
    "choice": grammar.of_choices,
    "grammar": grammar.of_lark,
}


class _StructuralTag(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["structural_tag"]
    format: formats.Format | None = None
    structures: list[formats.Structure] | None = None
    triggers: formats.Texts | None = None


def read(request: Sampling, written_tag: str | None = None) -> tuple[str | None, str]:
    """Returns the grammar of the answer, if any, and the field that requests it.

    Args:
        written_tag: the grammar of its structural tag.

    Raises:
        ApiError: 400, several fields do, or one is not valid.
    """
    readers = _response_format, _structured_outputs, _bad_words
    forms = [form for reader in readers if (form := reader(request))]
    if written_tag is not None:
        forms.append((tag(request)[1], str, written_tag))
    if len(forms) > 1:
        raise invalid(forms[1][0], f"and {forms[0][0]} exclude each other")
    if not forms:
        return None, ""
    ((name, write, value),) = forms
    try:
        return write(value), name
    except InputError as error:
        raise invalid(name, str(error)) from None


def tag(request: Sampling) -> tuple[str | None, str]:
    """Returns the structural tag of the answer as JSON, if any, and the field that has it; raises
    an `ApiError` (400) if it is not valid.
    """
    format, outputs = request.response_format, request.structured_outputs
    in_outputs = outputs.structural_tag if outputs is not None else None
    if format is not None and format.type == "structural_tag":
        if in_outputs is not None:
            raise invalid("structured_outputs", "and response_format exclude each other")
        fields = {name: getattr(format, name) for name in format.__struct_fields__}
        return _tag_json({k: v for k, v in fields.items() if v is not None}, "response_format")
    if in_outputs is None:
        return None, ""
    place = "structured_outputs.structural_tag"
    try:
        value = msgspec.json.decode(in_outputs)
    except (ValueError, RecursionError):
        raise invalid(place, "is no JSON") from None
    return _tag_json(value, place)


def is_free(request: Sampling) -> bool:
    """Whether a request's grammar is of texts in which calls of tools may be."""
    return bool(request.bad_words) or tag(request)[0] is not None


def _tag_json(value: object, place: str) -> tuple[str, str]:
    try:
        read = msgspec.convert(value, _StructuralTag)
    except msgspec.ValidationError as error:
        raise _of_tag(invalid_field(error, _StructuralTag, place), place) from None
    except RecursionError:
        raise unusable(place, "it is nested too deeply") from None
    format, structures, triggers = read.format, read.structures, read.triggers
    if (format is None) == (structures is None) or (structures is None) != (triggers is None):
        raise invalid(place, "is a structural_tag with a format, or with structures and triggers")
    if format is None:
        format = formats.of_structures(structures or [], triggers or [])
    try:
        return formats.as_json(format), place
    except InputError as error:
        raise unusable(place, str(error)) from None


def _of_tag(error: ApiError, place: str) -> ApiError:
    """The error, with the types that there may be."""
    if error.param == f"{place}.type":
        return invalid(error.param, "is structural_tag")
    values = formats.VALUES.get((error.param or "").rpartition(".")[2])
    if error.param is None or values is None:
        return error
    return invalid(error.param, f"is one of {', '.join(values)}")


def _response_format(request: Sampling) -> _Form | None:
    format, name = request.response_format, "response_format"
    if format is None or format.type == "structural_tag":
        return None
    for part in ("format", "structures", "triggers"):
        if getattr(format, part) is not None:
            raise invalid(f"{name}.type", f"is structural_tag where there is {part}")
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
    has_tag = outputs.structural_tag is not None
    if len(values) + bool(outputs.json_object) + has_tag != 1:
        kinds = "json, regex, choice, grammar, structural_tag and json_object=true"
        raise invalid(name, f"is one of {kinds}")
    for part in ("disable_any_whitespace", "disable_additional_properties"):
        if getattr(outputs, part):
            raise invalid(f"{name}.{part}", "is not supported by this server", "unsupported")
    if has_tag:
        return None
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
