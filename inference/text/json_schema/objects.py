"""Keywords of objects that are said in other words."""

import itertools
import math
import re
from typing import Any

from configs.errors import InputError, shown
from inference.text.json_schema.document import Document, Rewritten, Schema, constraints

_MAX_CHOICES = 128  # which of the optional properties an object has
_MAX_DEPTH = 8  # of parts that are looked through for names
_CONDITIONAL = frozenset(("anyOf", "oneOf", "if", "dependentSchemas"))
_OPEN = frozenset(("patternProperties", "additionalProperties", "unevaluatedProperties"))


def rewrite(document: Document, result: Rewritten, resource: object, place: str) -> None:
    """Rewrites keywords of names, of what depends on names, and of how many there are.

    Raises:
        InputError: one of them is not said in other words.
    """
    schema = result.schema
    _depend(place, result)
    if "unevaluatedProperties" in schema:
        _close(document, resource, place, schema)
    if "propertyNames" in schema:
        _restrict_names(document, resource, place, schema)
    if schema.keys() & {"minProperties", "maxProperties"}:
        _count(place, result)


def _depend(place: str, result: Rewritten) -> None:
    """`dependencies` is both keywords of today in one."""
    schema = result.schema
    for word in ("dependentRequired", "dependentSchemas", "dependencies"):
        dependents = schema.pop(word, {})
        if not isinstance(dependents, dict):
            raise InputError(f"{place}{word}={shown(dependents)}: is an object")
        for name, part in dependents.items():
            then = {"required": part} if isinstance(part, list) else part
            result.extras.append({"anyOf": [{"properties": {name: False}}, then]})


def _close(document: Document, resource: object, place: str, schema: dict[str, Any]) -> None:
    """What no part evaluates is what no part names."""
    unevaluated = schema.pop("unevaluatedProperties")
    if unevaluated is True or "additionalProperties" in schema:
        return
    names, is_plain = _evaluated(document, schema, resource, 0)
    if not is_plain:
        raise InputError(
            f"{place}unevaluatedProperties: is supported beside allOf and $ref of plain properties"
        )
    schema["properties"] = dict.fromkeys(names, True) | schema.get("properties", {})
    schema["additionalProperties"] = unevaluated


def _evaluated(
    document: Document, schema: Schema, resource: object, depth: int
) -> tuple[list[str], bool]:
    """Names of properties that a schema evaluates, and whether these are all, always."""
    if isinstance(schema, bool):
        return [], True
    if not isinstance(schema, dict) or depth > _MAX_DEPTH or not document.may_look():
        return [], False
    is_plain = not schema.keys() & (_CONDITIONAL | _OPEN if depth else _CONDITIONAL)
    names = list(schema.get("properties", {}))
    parts = [(part, resource) for part in schema.get("allOf", [])]
    if "$ref" in schema:
        parts.append(document.target(schema["$ref"], resource))
    for part, home in parts:
        more, is_part_plain = _evaluated(document, part, home, depth + 1)
        names += more
        is_plain = is_plain and is_part_plain
    return names, is_plain


def _restrict_names(
    document: Document, resource: object, place: str, schema: dict[str, Any]
) -> None:
    """Names that are listed become properties, a pattern of names one of properties."""
    where = f"{place}propertyNames"
    rule, _ = document.resolved(schema.pop("propertyNames"), resource)
    if rule is False:
        schema["maxProperties"] = 0
    if isinstance(rule, bool):
        return
    keywords = constraints(rule) - {"type", "format"}
    if not keywords:
        return
    additional = schema.get("additionalProperties", True)
    properties = schema.get("properties", {})
    if "patternProperties" in schema:
        raise InputError(f"{where}: is not supported beside patternProperties")
    if keywords <= {"enum", "const"}:
        listed = [rule["const"]] if "const" in rule else rule["enum"]
        names = [name for name in listed if isinstance(name, str)]
        schema["properties"] = {
            name: part if name in names else False for name, part in properties.items()
        } | {name: additional for name in names if name not in properties}
        schema["additionalProperties"] = False
        return
    if keywords == {"pattern"}:
        pattern = rule["pattern"]
    elif keywords <= {"minLength", "maxLength"}:
        pattern = rf"^[\s\S]{{{rule.get('minLength', 0)},{rule.get('maxLength', '')}}}$"
    else:
        raise InputError(f"{where}: is a list, a pattern, or bounds of the length")
    if properties and additional is not True:
        raise InputError(f"{where}: is not supported beside properties and additionalProperties")
    schema["properties"] = {
        name: part if _matches(pattern, name, where) else False for name, part in properties.items()
    }
    schema["patternProperties"] = {pattern: additional}
    schema["additionalProperties"] = False


def _matches(pattern: Any, name: str, where: str) -> bool:
    try:
        return re.search(pattern, name, re.ASCII) is not None
    except (re.error, TypeError, OverflowError):
        raise InputError(f"{where}: {shown(pattern)} is no regular expression") from None


def _count(place: str, result: Rewritten) -> None:
    """Counts objects by their optional properties; names beside those listed may repeat."""
    schema = result.schema
    low, high = schema.get("minProperties", 0), schema.get("maxProperties", math.inf)
    for name, bound in (("minProperties", low), ("maxProperties", high)):
        is_count = type(bound) is int and bound >= 0
        if not (is_count or bound is math.inf):
            raise InputError(f"{place}{name}={shown(bound)}: is a number of properties")
    required = schema.get("required", [])
    properties = schema.get("properties", {})
    optional = [
        name for name, part in properties.items() if name not in required and part is not False
    ]
    is_open = schema.get("additionalProperties") is not False or bool(
        schema.get("patternProperties")
    )
    num_required = len(set(required))
    if is_open and low - num_required > 1:
        result.relaxed.add("minProperties")
    if not optional or (low <= num_required and high == math.inf):
        return
    sizes = range(len(optional) + 1)
    # Without an upper bound, each object that has enough properties is one of those with the least.
    is_least = not is_open and high >= len(optional) + num_required
    if not is_open:
        schema.pop("minProperties", None), schema.pop("maxProperties", None)
        least = max(0, low - num_required)
        sizes = range(least, (least if is_least else int(high) - num_required) + 1)
    choices = itertools.accumulate(math.comb(len(optional), size) for size in sizes)
    if any(num > _MAX_CHOICES for num in choices):
        name = "minProperties" if low > num_required else "maxProperties"
        raise InputError(f"{place}{name}: is not supported beside {len(optional)} optional ones")
    options: list[Schema] = []
    for size in sizes:
        for chosen in itertools.combinations(optional, size):
            option: dict[str, Any] = {"type": "object", "required": list(chosen)}
            if not is_least:
                absent = (name for name in optional if name not in chosen)
                option["properties"] = dict.fromkeys(absent, False)
            options.append(option)
    if schema.get("type") != "object":
        options.append({"type": ["null", "boolean", "number", "string", "array"]})
    result.extras.append({"anyOf": options} if options else False)
