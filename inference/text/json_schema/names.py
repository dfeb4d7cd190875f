r"""Names of properties beside those that are listed, which must not be these in another spelling.

The compiler keeps apart texts, not names: a listed "a" may come again as "\u0061".
"""

from collections.abc import Iterator
from typing import Any

from inference.text.json_schema.document import constraints, types
from inference.text.json_schema.opposite import pattern_of_others


def separate(root: dict[str, object]) -> bool:
    """Gives names beside listed ones a pattern of their own; where schemas are merged, they cannot
    have one, and this returns False: the caller forbids escapes of characters by their number.
    """
    nodes = list(_nodes(root))
    free = [node for node in nodes if _has_free_names(node)]
    if any("patternProperties" in node for node in free) or (free and any(map(_merges, nodes))):
        return False
    patterns = [
        pattern_of_others([*node.get("properties", ()), *node.get("required", ())]) for node in free
    ]
    if None in patterns:
        return False
    for node, pattern in zip(free, patterns, strict=True):
        additional = node.pop("additionalProperties", True)
        properties = node.get("properties", {})
        missing = (name for name in node.get("required", ()) if name not in properties)
        node["properties"] = {**properties, **dict.fromkeys(missing, additional)}
        node["patternProperties"] = {pattern: additional}
        node["additionalProperties"] = False
    return True


def _has_free_names(node: dict[str, object]) -> bool:
    is_listed = bool(node.keys() & {"properties", "required", "patternProperties"})
    return is_listed and "object" in types(node) and node.get("additionalProperties") is not False


def _merges(node: dict[str, object]) -> bool:
    keywords = constraints(node) - {"type"}
    return "allOf" in node or (
        len(keywords) > 1 and bool(keywords & {"anyOf", "$ref", "enum", "const"})
    )


def _nodes(node: object) -> Iterator[dict[str, Any]]:
    if isinstance(node, list):
        for child in node:
            yield from _nodes(child)
    if not isinstance(node, dict):
        return
    yield node
    for name in ("properties", "patternProperties", "$defs"):
        yield from _nodes(list(node.get(name, {}).values()))
    for name in ("items", "additionalProperties", "prefixItems", "allOf", "anyOf"):
        yield from _nodes(node.get(name))
