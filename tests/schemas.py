"""Random JSON schemas of moderate size, as clients send them: each has a finite text."""

import random
from typing import Any

Schema = dict[str, Any]

NAMES = ("name", "id", "tags", "größe", "is_active", "a b", "price", "x", "created_at", "数")
PARAMETERS = ("query", "days", "is_long", "note_2", "tags", "X")  # names in any format
WORDS = ("red", "green", "blue", "élan", "", "naïve", '"quoted"', "back\\slash", "new\nline", "🙂")
PATTERNS = ("[a-z]{1,8}", "[A-Z]{2}-[0-9]{3}", r"\d{1,4}(\.\d{2})?", "(yes|no)", "x?y{2,3}z*w{0}")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")
NOTES = ("path", "password", "binary", "int64")  # formats that say what a value is for
CHARS = 12  # of a text
DEFINITIONS: dict[str, Schema] = {
    "point": {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
        "required": ["x", "y"],
        "additionalProperties": False,
    },
    "open": {"type": "object", "properties": {"u": {"type": "boolean"}}, "required": ["u"]},
    "chain": {
        "type": "object",
        "properties": {
            "label": {"type": "string", "maxLength": CHARS},
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/chain"}]},
        },
        "required": ["label", "next"],
        "additionalProperties": False,
    },
}


def random_schema(dice: random.Random) -> Schema:
    """An object, of up to three levels."""
    return _object(dice, 3) | {"$defs": DEFINITIONS}


def arguments(dice: random.Random) -> Schema:
    """Of a function, whose texts have an end even where a format does not obey their patterns."""
    names = dice.sample(PARAMETERS, dice.randint(1, 4))
    properties = {name: _any(dice, 2) for name in names}
    for part in properties.values():
        if part.get("type") == "string":
            part.setdefault("maxLength", 36)
    schema = _closed(properties, dice.sample(names, dice.randint(0, len(names))))
    if dice.random() < 0.2:
        schema["dependentRequired"] = {names[0]: [names[-1]]}
    return schema | {"$defs": DEFINITIONS}


def _any(dice: random.Random, depth: int) -> Schema:
    kinds = [_text, _number, _integer, _enum, _const, _simple, _nullable, _set, _other]
    if depth:
        kinds += [_object, _object, _array, _tuple, _any_of, _reference, _all_of, _one_of]
        kinds += [_map, _conditional, _dependent, _containing, _merged, _counted]
    return dice.choice(kinds)(dice, depth)


def _object(dice: random.Random, depth: int) -> Schema:
    names = dice.sample(NAMES, dice.randint(1, 4))
    found: Schema = {
        "type": "object",
        "properties": {name: _any(dice, depth - 1) for name in names},
        "required": dice.sample(names, dice.randint(0, len(names))),
        "additionalProperties": False,
    }
    if dice.random() < 0.5:
        found["title"] = dice.choice(WORDS)
        found["description"] = "What it is for."
    return found


def _array(dice: random.Random, depth: int) -> Schema:
    least = dice.randint(0, 2)
    most = least + dice.randint(0, 2)
    return {"type": "array", "items": _any(dice, depth - 1), "minItems": least, "maxItems": most}


def _tuple(dice: random.Random, depth: int) -> Schema:
    items = [_any(dice, depth - 1) for _ in range(dice.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _any_of(dice: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(dice, depth - 1) for _ in range(dice.randint(2, 3))]}


def _reference(dice: random.Random, depth: int) -> Schema:
    return {"$ref": f"#/$defs/{dice.choice(sorted(DEFINITIONS))}"}


def _all_of(dice: random.Random, depth: int) -> Schema:
    low = dice.randint(-50, 50)
    return {"type": "integer", "allOf": [{"minimum": low}, {"maximum": low + dice.randint(0, 99)}]}


def _text(dice: random.Random, depth: int) -> Schema:
    return dice.choice([
        {"type": "string", "maxLength": CHARS},
        {"type": "string", "minLength": 3, "maxLength": CHARS, "format": dice.choice(NOTES)},
        {"type": "string", "pattern": f"^{dice.choice(PATTERNS)}$"},
        {"type": "string", "format": dice.choice(FORMATS)},
    ])  # fmt: skip


def _number(dice: random.Random, depth: int) -> Schema:
    low = round(dice.uniform(-100, 100), 2)
    return {"type": "number", "minimum": low, "maximum": round(low + dice.uniform(0, 50), 2)}


def _integer(dice: random.Random, depth: int) -> Schema:
    low = dice.randint(-1000, 1000)
    kinds = [
        {"minimum": low, "maximum": low + dice.randint(0, 5000)},
        {"exclusiveMinimum": low, "exclusiveMaximum": low + dice.randint(2, 50)},
        {"minimum": 0, "maximum": 1000, "multipleOf": dice.choice((2, 5, 10))},
    ]
    return {"type": "integer"} | dice.choice(kinds)


def _enum(dice: random.Random, depth: int) -> Schema:
    values = [*WORDS, 1, -2.5, None, True, [1, "x"], {"a": 1}]
    return {"enum": dice.sample(values, dice.randint(1, 5))}


def _const(dice: random.Random, depth: int) -> Schema:
    return {"const": dice.choice([*WORDS, 0, False, None])}


def _simple(dice: random.Random, depth: int) -> Schema:
    return {"type": dice.choice(("boolean", "null"))}


def _nullable(dice: random.Random, depth: int) -> Schema:
    return {"type": ["string", "null"], "maxLength": CHARS}


def _set(dice: random.Random, depth: int) -> Schema:
    items = dice.choice([{"type": "boolean"}, {"enum": dice.sample(WORDS, 3)}])
    return {"type": "array", "items": items, "uniqueItems": True, "minItems": dice.randint(0, 2)}


def _other(dice: random.Random, depth: int) -> Schema:
    return dice.choice([
        {"type": "string", "maxLength": CHARS, "not": {"enum": dice.sample(WORDS, 3)}},
        {"type": ["integer", "null"], "minimum": 0, "maximum": 9, "not": {"const": 3}},
        {"type": ["boolean", "null", "string"], "not": {"type": "string"}},
        {"type": "string", "not": {"minLength": 5}},
    ])  # fmt: skip


def _one_of(dice: random.Random, depth: int) -> Schema:
    """Tagged objects, ranges that overlap, and objects of which one property decides."""
    low = dice.randint(-9, 9)
    tagged = [
        _closed({"tag": {"const": tag}, "value": _any(dice, depth - 1)}, ["tag"]) for tag in "ab"
    ]
    ranges = [{"type": "integer", "minimum": low + n, "maximum": low + n + 9} for n in (0, 5)]
    either = {"properties": {"a": {"type": "null"}, "b": {"type": "null"}}}
    return dice.choice([
        {"oneOf": [{"type": "null"}, *tagged]},
        {"oneOf": ranges},
        {"type": "object", **either, "additionalProperties": False,
         "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    ])  # fmt: skip


def _map(dice: random.Random, depth: int) -> Schema:
    part = _any(dice, depth - 1)
    return dice.choice([
        {"type": "object", "additionalProperties": part, "maxProperties": 2,
         "propertyNames": {"pattern": "^[a-z]{1,3}$"}},
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": part},
        {"type": "object", "patternProperties": {"^x[0-9]{1,2}$": part, "^y$": {"type": "null"}},
         "additionalProperties": False, "maxProperties": 2},
    ])  # fmt: skip


def _conditional(dice: random.Random, depth: int) -> Schema:
    parts = {"kind": {"enum": ["a", "b"]}, "value": _any(dice, depth - 1)}
    return _closed(parts, ["kind"]) | {
        "if": {"properties": {"kind": {"const": "a"}}},
        "then": {"required": ["value"]},
        "else": {"properties": {"value": False}},
    }


def _dependent(dice: random.Random, depth: int) -> Schema:
    parts = {name: _any(dice, depth - 1) for name in ("a", "b")} | {"c": {"type": "boolean"}}
    return _closed(parts, []) | {
        "dependentRequired": {"a": ["b"]},
        "dependentSchemas": {"c": {"properties": {"b": False}}},
    }


def _containing(dice: random.Random, depth: int) -> Schema:
    return {
        "type": "array",
        "items": {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
        "contains": dice.choice([{"type": "null"}, {"minimum": 50, "type": "integer"}]),
        "maxItems": 3,
    }


def _merged(dice: random.Random, depth: int) -> Schema:
    return {
        "allOf": [{"$ref": "#/$defs/open"}, {"properties": {"w": _any(dice, depth - 1)}}],
        "properties": {"v": {"type": "null"}},
        "unevaluatedProperties": False,
    }


def _counted(dice: random.Random, depth: int) -> Schema:
    parts = {name: _any(dice, depth - 1) for name in ("a", "b", "c")}
    least = dice.randint(0, 2)
    return _closed(parts, dice.sample(["a", "b"], dice.randint(0, 1))) | {
        "minProperties": least,
        "maxProperties": least + 1,
    }


def _closed(properties: Schema, required: list[str]) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
