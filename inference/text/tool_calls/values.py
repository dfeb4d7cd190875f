"""Values of parameters that a model writes as plain text: which are text, and which are JSON."""

import json
from collections.abc import Mapping
from typing import Any

from configs.errors import InputError
from inference.text.json_schema.document import (
    Document,
    Schema,
    as_list,
    constraints,
    type_of,
    types,
)

Schemas = Mapping[str, dict[str, Any]]  # of the arguments, by names of functions

TEXT = frozenset({"string"})
_MAX_DEPTH = 8  # of schemas within each other
_PYTHON = {"True": "true", "False": "false", "None": "null"}  # as some models write them


class Parameters:
    """A function's parameters, by the schema of its arguments.

    Attributes:
        listed: whether each one is required; these first, in the schema's order.
        constraints: keywords of the schema that may make arguments invalid.
    """

    def __init__(self, schema: dict[str, Any]):
        self._whole = schema
        self._document = _document(schema)
        self._schema, self._resource = self._resolved(schema, schema)
        properties = self._schema.get("properties")
        self._properties = properties if isinstance(properties, dict) else {}
        required = as_list(self._schema.get("required", []))
        names = [name for name in self._properties if name in required]
        names += [name for name in required if name not in self._properties]
        self.listed = dict.fromkeys(names, True)
        self.listed |= {name: False for name in self._properties if name not in self.listed}
        self.constraints = constraints(self._schema)

    def types(self, name: str) -> frozenset[str]:
        """Types of a parameter's values, of `document.TYPES`."""
        return self._types(self._property(name), self._resource, 0)

    def resolved(self, name: str) -> Schema:
        """The schema of a parameter, without references at its top."""
        schema = self._property(name)
        if isinstance(schema, bool):
            return schema
        return self._resolved(schema, self._resource)[0]

    def alone(self, name: str) -> dict[str, Any]:
        """A schema of a parameter's values alone."""
        schema = self._property(name)
        if isinstance(schema, bool):
            return {} if schema else {"not": {}}
        if "$ref" not in json.dumps(schema):
            return schema
        whole = {"$id": "arguments:", **self._whole}
        place = name.replace("~", "~0").replace("/", "~1").replace("%", "%25")
        return {"$defs": {"arguments": whole}, "$ref": f"{whole['$id']}#/properties/{place}"}

    def _property(self, name: str) -> Schema:
        if name in self._properties:
            schema = self._properties[name]
        else:
            schema = self._schema.get("additionalProperties", True)
        return schema if isinstance(schema, dict | bool) else True

    def _resolved(self, schema: Any, resource: Any) -> tuple[dict[str, Any], object]:
        try:
            target, resource = self._document.resolved(schema, resource)
        except InputError:  # the reference names nothing
            return schema, resource
        return (target, resource) if isinstance(target, dict) else (schema, resource)

    def _types(self, schema: Any, resource: object, depth: int) -> frozenset[str]:
        kinds = frozenset(types(True))
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return kinds
        try:
            kinds = frozenset(types(schema))
            if "$ref" in schema:
                target = self._document.target(schema["$ref"], resource)
                kinds &= self._types(*target, depth + 1)
        except (InputError, KeyError, TypeError):  # the parameter's value is still one
            return kinds
        for name in ("anyOf", "oneOf"):
            if branches := schema.get(name):
                options = (self._types(branch, resource, depth + 1) for branch in as_list(branches))
                kinds &= frozenset().union(*options)
        for branch in as_list(schema.get("allOf", [])):
            kinds &= self._types(branch, resource, depth + 1)
        return kinds


def _document(schema: dict[str, Any]) -> Document:
    try:
        return Document(schema)
    except InputError:  # nested too deeply: no reference is known
        return Document({})


def to_json(text: str, kinds: frozenset[str]) -> str:
    """A value as JSON: itself where it is JSON of one of these types, else a text if that may be.

    A value of another type stays what it is, for the client to reject.
    """
    written = _PYTHON.get(text.strip(), text) if "string" not in kinds else text
    try:
        written.encode()
        kind = type_of(json.loads(written, parse_constant=_refuse))
    except (ValueError, RecursionError):
        kind = None
    if kind is not None and (kind in kinds or "string" not in kinds):
        return written.strip()
    return json.dumps(text, ensure_ascii=False)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
