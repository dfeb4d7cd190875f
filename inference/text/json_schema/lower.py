"""A schema becomes one that the compiler of grammars obeys.

What that compiler refuses, or reads in another way, is said in words that it obeys exactly. Unknown
formats are annotations, as JSON Schema has it. What no grammar can say is relaxed, and named.
"""

from typing import Any

from configs.errors import InputError, shown
from inference.text.json_schema import arrays, names, numbers, objects
from inference.text.json_schema.document import (
    MAX_DEPTH,
    TYPES,
    Document,
    Rewritten,
    Schema,
    as_list,
    key,
    values,
)
from inference.text.json_schema.opposite import are_disjoint, opposite

# Those that the compiler checks.
_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_COUNTS = frozenset(
    ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
)
_PLAIN = _COUNTS | {  # which are passed on as they are
    *("type", "enum", "const", "required", "format", "pattern", "$dynamicRef", "$recursiveRef")
}
_MAX_EXCLUDING = 8  # branches of `oneOf` that exclude one another
_MAX_SCHEMAS = 5_000


def lower(schema: dict[str, object], options: dict[str, object]) -> dict[str, object]:
    """Rewrites a schema in keywords that are obeyed, with options of the compiler; `$comment` names
    keywords that some texts do not obey.

    Raises:
        InputError: it is no schema, or has a keyword that cannot be obeyed.
    """
    return _Lowering(schema).whole(options)


class _Lowering:
    def __init__(self, schema: dict[str, object]):
        self._document = Document(schema)
        self._definitions: dict[str, Schema] = {}
        self._targets: dict[int, str] = {}  # ids of schemas that are referred to
        self._pending: list[tuple[str, Schema, object]] = []
        self._relaxed: set[str] = set()
        self._num_schemas = 0

    def whole(self, options: dict[str, object]) -> dict[str, object]:
        root = self._document.root
        lowered = self._lower(root, root, "", 0)
        while self._pending:
            name, target, resource = self._pending.pop()
            self._definitions[name] = self._lower(target, resource, "$ref.", 0)
        result: dict[str, object] = lowered if isinstance(lowered, dict) else {"allOf": [lowered]}
        if self._definitions:
            result["$defs"] = self._definitions
        if not names.separate(result):
            options = {**options, "json_allowed_escapes": 'nrbtf\\"'}
        if self._relaxed:
            result["$comment"] = f"relaxed: {', '.join(sorted(self._relaxed))}"
        return {**result, "x-guidance": options}

    def _lower(self, schema: Schema, resource: object, place: str, depth: int) -> Schema:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise InputError(f"{place[:-1] or 'the schema'}={shown(schema)}: is no schema")
        self._num_schemas += 1
        if depth > MAX_DEPTH or self._num_schemas > _MAX_SCHEMAS:
            how = "nested too deeply" if depth > MAX_DEPTH else "too long once it is written out"
            raise InputError(f"the schema is {how}")
        if isinstance(schema.get("$id"), str):
            resource = schema
        rewritten = Rewritten(dict(schema), [], self._relaxed)
        for rewrite in (objects.rewrite, arrays.rewrite, self._rewrite_logic):
            rewrite(self._document, rewritten, resource, place)
        schema, extras, _ = rewritten
        result, is_relaxed = numbers.lower(schema, place)
        if is_relaxed:
            self._relaxed |= {"minimum", "maximum"} & schema.keys()

        def lower(part: Any, where: str) -> Schema:
            return self._lower(part, resource, f"{where}.", depth + 1)

        for name, value in schema.items():
            where = place + name
            if name in ("properties", "patternProperties"):
                _check_type(value, dict, where)
                result[name] = {
                    label: lower(part, f"{where}.{label}") for label, part in value.items()
                }
            elif name in ("items", "additionalProperties"):
                result[name] = lower(value, where)
            elif name in ("allOf", "anyOf", "prefixItems"):
                _check_type(value, list, where)
                result[name] = [lower(part, f"{where}[{n}]") for n, part in enumerate(value)]
            elif name == "$ref":
                result[name] = self._reference(value, resource)
            elif name in _PLAIN and _is_obeyed(name, value, where):
                result[name] = value
        if extras:
            result["allOf"] = result.get("allOf", []) + [
                lower(part, place + "allOf") for part in extras
            ]
        return result

    def _reference(self, reference: Any, resource: object) -> str:
        target, home = self._document.target(reference, resource)
        if isinstance(target, bool):
            target = {} if target else {"enum": []}
        name = self._targets.setdefault(id(target), f"{len(self._targets)}")
        if name not in self._definitions:
            self._definitions[name] = True  # until its turn
            self._pending.append((name, target, home))
        return f"#/$defs/{name}"

    def _rewrite_logic(
        self, document: Document, result: Rewritten, resource: object, place: str
    ) -> None:
        schema = result.schema
        if "oneOf" in schema:
            _check_type(schema["oneOf"], list, f"{place}oneOf")
            options, is_exact = self._exclusive(schema.pop("oneOf"), resource)
            result.extras.append({"anyOf": options})
            if not is_exact:
                result.relaxed.add("oneOf")

        def other_than(part: Any, where: str) -> Schema:
            other = opposite(document, part, resource)
            if other is None:
                raise InputError(f"{where}: is too much to say the opposite of")
            return other

        if "not" in schema:
            result.extras.append(other_than(schema.pop("not"), f"{place}not"))
        condition = schema.pop("if", None)
        then, otherwise = schema.pop("then", True), schema.pop("else", True)
        if condition is not None and not then is otherwise is True:
            unless = other_than(condition, f"{place}if")
            options = [{"allOf": [condition, then]}, {"allOf": [unless, otherwise]}]
            result.extras.append({"anyOf": options})

    def _exclusive(self, options: list[Schema], resource: object) -> tuple[list[Schema], bool]:
        """Options of `anyOf` for those of `oneOf`, and whether they say the same."""
        listed = [values(self._document.resolved(option, resource)[0]) for option in options]
        keys = [key(value) for parts in listed for value in parts or ()]
        if None not in listed and len(keys) == len(set(keys)):
            return options, True
        exact: list[Schema] = []
        for option in options:
            opposites = [
                _opposite_within(self._document, option, other, resource)
                for other in options
                if other is not option and not are_disjoint(self._document, option, other, resource)
            ]
            unlike = [other for other in opposites if other is not None]
            if len(options) > _MAX_EXCLUDING and opposites or len(unlike) < len(opposites):
                return options, False
            exact.append({"allOf": [option, *unlike]} if unlike else option)
        return exact, True


def _opposite_within(
    document: Document, schema: Schema, other: Schema, resource: object
) -> Schema | None:
    """Of the values of one schema, those that are not of another; None: it cannot be said."""
    if isinstance(schema, dict) and isinstance(other, dict):
        shared = schema.keys() & other.keys() & {"type"}
        if all(schema[name] == other[name] for name in shared):
            other = {name: value for name, value in other.items() if name not in shared}
    return opposite(document, other, resource)


def _is_obeyed(name: str, value: object, where: str) -> bool:
    """Whether a keyword is passed on as it is; another one says nothing of validity. Raises
    InputError if its value is none of this keyword, or nothing obeys it.
    """
    if name in ("$dynamicRef", "$recursiveRef"):
        raise InputError(f"{where}: is not supported; use $ref")
    if name == "type":
        for kind in as_list(value):
            if kind not in (*TYPES, "integer"):
                raise InputError(f"{where}={shown(value)}: is one of {', '.join(TYPES)}, integer")
    elif name in ("enum", "const"):
        if name == "enum":
            _check_type(value, list, where)
        numbers.check_values(value, where)
    elif name == "required":
        _check_type(value, list, where)
    elif name == "format":
        return value in _FORMATS
    elif name == "pattern":
        _check_type(value, str, where)
    elif name in _COUNTS and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise InputError(f"{where}={shown(value)}: is a whole number from 0")
    return True


def _check_type(value: object, kind: type, where: str) -> None:
    if not isinstance(value, kind):
        words: dict[type, str] = {list: "a list", dict: "an object", str: "a text"}
        raise InputError(f"{where}={shown(value)}: is {words[kind]}")
