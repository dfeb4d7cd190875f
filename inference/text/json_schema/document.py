"""A schema as it was sent: where its references point, and what follows from it for a value."""

import json
from typing import Any, NamedTuple
from urllib.parse import unquote

from configs.errors import InputError, shown

Schema = dict[str, Any] | bool


class Rewritten(NamedTuple):
    """A copy of a schema, from which keywords are removed; `extras` are schemas in the words of the
    original that have to hold too, `relaxed` keywords that some invalid texts pass.
    """

    schema: dict[str, Any]
    extras: list[Schema]
    relaxed: set[str]


TYPES = ("null", "boolean", "number", "string", "array", "object")
MAX_DEPTH = 60  # of schemas within each other; the compiler counts to 128, several a level
_MAX_REFERENCES = 8  # one behind another, where they are followed
# At parts of a schema: a hostile one would have its references followed for hours.
_MAX_LOOKS = 10_000


class Document:
    """A whole schema."""

    def __init__(self, root: dict[str, object]):
        self.root = root
        # (schema, resource) by `$id` and `$anchor`
        self._by_name: dict[str, tuple[object, object]] = {}
        self._num_looks = 0
        self._index(root, root, 0)

    def may_look(self) -> bool:
        """Whether another part may be compared with others: there is an end to it."""
        self._num_looks += 1
        return self._num_looks <= _MAX_LOOKS

    def target(self, reference: object, resource: object) -> tuple[Schema, object]:
        """Returns the schema of a `$ref`, and its resource; raises InputError if there is none."""
        if not isinstance(reference, str):
            raise InputError(f"$ref={shown(reference)}: is a text")
        base, _, fragment = reference.partition("#")
        schema = resource
        if base:
            schema, resource = self._lookup(base, reference)
        if fragment and not fragment.startswith("/"):
            return self._lookup("#" + fragment, reference)
        for part in fragment.split("/")[1:]:
            part = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(schema, list) and part.isdecimal() and int(part) < len(schema):
                schema = schema[int(part)]
            elif isinstance(schema, dict) and part in schema:
                schema = schema[part]
            else:
                raise InputError(f"$ref={shown(reference)}: does not exist in the schema")
            if isinstance(schema, dict) and _id(schema):
                resource = schema
        if not isinstance(schema, dict | bool):
            raise InputError(f"$ref={shown(reference)}: is no schema")
        return schema, resource

    def resolved(self, schema: Schema, resource: object) -> tuple[Schema, object]:
        """What a reference without other keywords names at last; any other schema is itself."""
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, dict) or constraints(schema) != {"$ref"}:
                break
            schema, resource = self.target(schema["$ref"], resource)
        return schema, resource

    def _lookup(self, name: str, reference: str) -> tuple[Any, Any]:
        if name not in self._by_name:
            raise InputError(f"$ref={shown(reference)}: is not in the schema, and is not fetched")
        return self._by_name[name]

    def _index(self, node: Any, resource: object, depth: int) -> None:
        if depth > 4 * MAX_DEPTH:
            raise InputError("the schema is nested too deeply")
        if isinstance(node, dict):
            if name := _id(node):
                resource = node
                self._by_name.setdefault(name, (node, node))
            for key in ("$anchor", "$dynamicAnchor"):
                if isinstance(node.get(key), str):
                    self._by_name.setdefault("#" + node[key], (node, resource))
        for child in node.values() if isinstance(node, dict) else node:
            if isinstance(child, dict | list):
                self._index(child, resource, depth + 1)


# Those that may make a value invalid, of draft 2020-12 and those before it; others are annotations.
KEYWORDS = frozenset(
    ("type", "enum", "const", "$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else",
     "properties", "patternProperties", "additionalProperties", "propertyNames", "required",
     "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies",
     "unevaluatedProperties", "items", "prefixItems", "additionalItems", "contains", "minContains",
     "maxContains", "minItems", "maxItems", "uniqueItems", "unevaluatedItems", "minLength",
     "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum",
     "exclusiveMaximum", "multipleOf", "$dynamicRef", "$recursiveRef")
)  # fmt: skip


def constraints(schema: dict[str, object]) -> set[str]:
    """Keywords of a schema that may make a value invalid; JSON Schema ignores unknown ones."""
    return set(schema) & KEYWORDS


def types(schema: Schema) -> set[str]:
    """Types of values that a schema may permit; all integers are numbers."""
    if isinstance(schema, bool):
        return set(TYPES) if schema else set()
    listed = schema.get("type", list(TYPES))
    kinds = {"number" if name == "integer" else name for name in as_list(listed)}
    if "const" in schema:
        kinds &= {type_of(schema["const"])}
    if isinstance(schema.get("enum"), list):
        kinds &= set(map(type_of, schema["enum"]))
    return kinds


def values(schema: Schema) -> list[object] | None:
    """The values that a schema lists, each once; None: it lists none."""
    if isinstance(schema, bool):
        return None if schema else []
    if "const" in schema:
        listed = [schema["const"]]
    elif isinstance(schema.get("enum"), list):
        listed = schema["enum"]
    elif schema.get("type") == "boolean":
        listed = [False, True]
    elif schema.get("type") == "null":
        listed = [None]
    else:
        return None
    if constraints(schema) - {"const", "enum", "type"}:
        return None
    kinds, is_integral = types(schema), schema.get("type") == "integer"
    valid = [value for value in listed if type_of(value) in kinds]
    return list(
        {key(value): value for value in valid if not is_integral or value % 1 == 0}.values()
    )


def key(value: object) -> str:
    """The same text for values that JSON Schema takes for the same, such as 1 and 1.0."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(map(key, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(name)}:{key(value[name])}' for name in sorted(value))}}}"
    return json.dumps(value)


def type_of(value: object) -> str:
    """The type that JSON Schema gives a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    kinds = {int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return kinds[type(value)]


def as_list(value: object) -> list[Any]:
    """Itself, or a list of it alone."""
    return value if isinstance(value, list) else [value]


def _id(node: dict[str, object]) -> str:
    name = node.get("$id")
    return name.rstrip("#") if isinstance(name, str) and not name.startswith("#") else ""
