"""What a schema does not permit, as another schema, and which schemas have no value in common."""

from typing import Any

from inference.text.json_schema.document import (
    TYPES,
    Document,
    Schema,
    as_list,
    constraints,
    key,
    type_of,
    types,
    values,
)

_MAX_DEPTH = 8
_MAX_CHARS = 2000  # of texts that a pattern excludes
# The bound that holds where a bound does not, its type, and the difference to it.
_BOUNDS: dict[str, tuple[str, str, int]] = {
    "minimum": ("number", "exclusiveMaximum", 0), "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0), "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1), "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1), "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}  # fmt: skip


def opposite(document: Document, schema: Schema, resource: object, depth: int = 0) -> Schema | None:
    """A schema of all other values; None where keywords that are obeyed cannot say it."""
    if isinstance(schema, bool):
        return not schema
    if depth > _MAX_DEPTH or not document.may_look():
        return None
    options: list[Schema | None] = []
    for name in constraints(schema) - {"format"}:  # which is an annotation
        options += _opposites(document, schema, name, resource, depth)
    return None if None in options else any_of([option for option in options if option is not None])


def _opposites(
    document: Document, schema: dict[str, Any], name: str, resource: object, depth: int
) -> list[Schema | None]:
    """Schemas of values, one of which a value is where it breaks one keyword."""
    value = schema[name]

    def other(part: Schema) -> Schema | None:
        return opposite(document, part, resource, depth + 1)

    if name in _BOUNDS and isinstance(value, int | float) and not isinstance(value, bool):
        kind, bound, difference = _BOUNDS[name]
        limit = value + difference
        is_never = kind != "number" and limit < 0
        return [] if is_never else [{"type": kind, bound: limit}]
    if name == "type":
        listed = set(as_list(value))
        if "integer" in listed and "number" not in listed:
            return [None]
        other_types = [kind for kind in TYPES if kind not in listed]
        return [{"type": other_types}] if other_types else []
    if name in ("const", "enum"):
        return [_other_than([value] if name == "const" else value)]
    if name == "required" and isinstance(value, list):
        return [{"type": "object", "properties": {absent: False}} for absent in value]
    if name == "properties" and isinstance(value, dict):
        wrong = {label: other(part) for label, part in value.items()}
        return [
            None if part is None else
            {"type": "object", "required": [label], "properties": {label: part}}
            for label, part in wrong.items() if part is not False
        ]  # fmt: skip
    if name == "allOf":
        return list(map(other, value))
    if name == "anyOf":
        parts = list(map(other, value))
        return [None if None in parts else {"allOf": parts}]
    if name == "not":
        return [value]
    if name == "$ref":
        target, resource = document.target(value, resource)
        return [opposite(document, target, resource, depth + 1)]
    is_empty = value is True or value == {}
    return [] if is_empty and name in ("items", "additionalProperties") else [None]


def are_disjoint(
    document: Document, a: Schema, b: Schema, resource: object, depth: int = 0
) -> bool:
    """Whether it is sure that no value is of both schemas."""
    if depth > _MAX_DEPTH or not document.may_look():
        return False
    (a, home), (b, other_home) = (document.resolved(schema, resource) for schema in (a, b))
    if home is not other_home:
        return False
    common = types(a) & types(b)
    if not common:
        return True
    if isinstance(a, bool) or isinstance(b, bool):
        return False
    a_values, b_values = values(a), values(b)
    if a_values is not None and b_values is not None:
        return not set(map(key, a_values)) & set(map(key, b_values))
    for schema, other in ((a, b), (b, a)):
        for name, decide in (("anyOf", all), ("oneOf", all), ("allOf", any)):
            parts = schema.get(name)
            if isinstance(parts, list) and decide(
                are_disjoint(document, part, other, home, depth + 1) for part in parts
            ):
                return True
    if common == {"object"}:
        names = {*_required(a), *_required(b)}
        return any(
            are_disjoint(document, _property(a, name), _property(b, name), home, depth + 1)
            for name in names
        )
    return common == {"number"} and (_is_below(a, b) or _is_below(b, a))


def any_of(options: list[Schema]) -> Schema:
    """A schema of values that are of one of these."""
    options = [option for option in options if option is not False]
    if not options:
        return False
    return options[0] if len(options) == 1 else {"anyOf": options}


def pattern_of_others(texts: list[str]) -> str | None:
    """A regular expression of all texts but these; None where it would be long."""
    if sum(map(len, texts)) > _MAX_CHARS or max(map(len, texts), default=0) > _MAX_CHARS // 10:
        return None
    return f"^{_others(sorted(set(texts)))}$"


def _others(texts: list[str]) -> str:
    """Of texts that go on in none of these ways."""
    by_first: dict[str, list[str]] = {}
    for text in texts:
        if text:
            by_first.setdefault(text[0], []).append(text[1:])
    if not by_first:
        return r"[\s\S]+" if texts else r"[\s\S]*"
    escaped = {first: f"\\x{{{ord(first):x}}}" for first in by_first}
    options = [rf"[^{''.join(escaped.values())}][\s\S]*"]
    options += [escaped[first] + _others(ends) for first, ends in by_first.items()]
    ending = "" if "" in texts else "?"
    return f"(?:{'|'.join(options)}){ending}"


def _other_than(listed: object) -> Schema | None:
    if not isinstance(listed, list):
        return None
    kinds: dict[str, list[Any]] = {}
    for value in listed:
        kinds.setdefault(type_of(value), []).append(value)
    if kinds.keys() & {"array", "object"}:
        return None
    options: list[Schema] = [{"type": [kind for kind in TYPES if kind not in kinds]}]
    truths = [value for value in (False, True) if value not in kinds.get("boolean", [])]
    if "boolean" in kinds and truths:
        options.append({"enum": truths})
    if "string" in kinds:
        pattern = pattern_of_others(kinds["string"])
        if pattern is None:
            return None
        options.append({"type": "string", "pattern": pattern})
    if numbers := sorted(set(kinds.get("number", []))):
        edges = [None, *numbers, None]
        for low, high in zip(edges, edges[1:], strict=False):
            bounds = {"exclusiveMinimum": low, "exclusiveMaximum": high}
            finite = {name: edge for name, edge in bounds.items() if edge is not None}
            options.append({"type": "number", **finite})
    return any_of(options)


def _required(schema: dict[str, Any]) -> list[str]:
    names = schema.get("required", [])
    return names if isinstance(names, list) else []


def _property(schema: dict[str, Any], name: str) -> Schema:
    """What a property has to be, as far as that is plain."""
    properties = schema.get("properties", {})
    if name in properties:
        part: Schema = properties[name]
        return part
    return schema.get("additionalProperties") is not False or "patternProperties" in schema


def _is_below(a: dict[str, object], b: dict[str, object]) -> bool:
    """Whether each number of one is below each of the other, by their plain bounds."""
    high, low = a.get("maximum"), b.get("minimum")
    return isinstance(high, int | float) and isinstance(low, int | float) and high < low
