"""Rules in Lark of one call, by its shape."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from configs.errors import InputError, shown
from inference.text import grammar
from inference.text.json_schema.document import Schema, constraints
from inference.text.json_schema.document import values as listed_values
from inference.text.tool_calls import values
from inference.text.tool_calls.shapes import Bare, Literals, NameThenJson, Objects, Shape, Tagged
from inference.text.tool_calls.values import Parameters

_ANY = "(?s:.*)"
_OBEYED = {"type", "properties", "required", "additionalProperties"}  # of arguments in tags
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_BARE_KEY = re.compile(r"[^\s:,{}\[\]\"<]+( [^\s:,{}\[\]\"<]+)*")
_LENGTHS = {"minLength", "maxLength"}


class CallRules:
    """Writes rules of calls.

    Attributes:
        lines: the rules so far.
        specials: ids of special tokens that marks have in them, by their text.
    """

    def __init__(self, shape: Shape, specials: Mapping[str, int]):
        self.specials = specials
        self.lines: list[str] = []
        self._shape = shape

    def text(self, text: str) -> str:
        """A text, special tokens within it as such."""
        return grammar.rule_text(text, self.specials)

    def add(self, n: int, name: str, schema: dict[str, Any]) -> None:
        """Adds the rule `call_{n}` of a function."""
        shape = self._shape
        if isinstance(shape, Tagged):
            self._add_tagged(shape, n, name, schema)
            return
        if isinstance(shape, Literals):
            self._add_literals(n, name, schema)
            return
        if isinstance(shape, Bare):
            self._add_bare(shape, n, name, schema)
            return
        if isinstance(shape, Objects):
            before = self.text(f'{{"{shape.name_key}": {json.dumps(name)}, "{shape.key}": ')
            after = self.text("}")
        else:
            before, after = self._before(shape, name), self.text(shape.tail)
        self.lines.append(f"call_{n}: {before} arguments_{n} {after}")
        self.lines.append(f"arguments_{n}: {grammar.json_rule(schema)}")

    def _before(self, shape: NameThenJson, name: str) -> str:
        head = self.text(f"{shape.head}{shape.prefix}{name}")
        if not shape.id_pattern:
            return f"{head} {self.text(shape.name_end)}"
        return f"{head} {self.text(shape.id_mark)} /{shape.id_pattern}/ {self.text(shape.name_end)}"

    def _add_literals(self, n: int, name: str, schema: dict[str, Any]) -> None:
        grammar.json_rule(schema)  # which rejects one that cannot be obeyed
        parameters = Parameters(schema)
        items: dict[str, str] = {}
        for key in _written_keys(parameters, _KEY, "in Python"):
            items[key] = f'"{key}=" {grammar.json_rule(parameters.alone(key))}'
        listed = self.listed(f"parameter_{n}", items, _required(parameters), ", ")
        self.lines.append(f'call_{n}: "{name}(" {listed} ")"')
        self._relax(parameters.constraints - _OBEYED)

    def _add_bare(self, shape: Bare, n: int, name: str, schema: dict[str, Any]) -> None:
        grammar.json_rule(schema)  # which rejects one that cannot be obeyed
        parameters = Parameters(schema)
        relaxed = parameters.constraints - _OBEYED
        items: dict[str, str] = {}
        writer = _Bare(self, shape.quote, f"value_{n}")
        for key in _written_keys(parameters, _BARE_KEY, "without quotes"):
            resolved, alone = parameters.resolved(key), parameters.alone(key)
            refers = "$ref" in json.dumps(resolved)
            value = grammar.json_rule(alone) if refers else writer.value(resolved)
            items[key] = f"{self.text(f'{key}:')} {value}"
        listed = self.listed(f"parameter_{n}", items, _required(parameters), ",")
        self.lines.append(f'call_{n}: {self.text(f"{shape.head}{name}{{")} {listed} "}}"')
        self._relax(relaxed | writer.relaxed)

    def listed(
        self, name: str, items: Mapping[str, str], required_keys: Collection[str], separator: str
    ) -> str:
        """Adds rules of parameters; returns what lists them, the required ones first.

        Args:
            name: of the rules, each of which adds a number.
            items: rules by keys.
        """
        required: list[str] = []
        options: list[str] = []
        for m, (key, item) in enumerate(items.items()):
            rule = f"{name}_{m}"
            self.lines.append(f"{rule}: {item}")
            (required if key in required_keys else options).append(rule)
        listed = f' "{separator}" '.join(required)
        for m, rule in enumerate(options):
            after = f"{name}_options_{m + 1}" if m + 1 < len(options) else ""
            self.lines.append(f'{name}_options_{m}: ("{separator}" {rule})? {after}')
        if required and options:
            listed += f" {name}_options_0"
        elif options:
            firsts = (
                f"{rule} {name}_options_{m}" if m < len(options) else rule
                for m, rule in enumerate(options, start=1)
            )
            listed = f"({' | '.join(firsts)})?"
        return listed

    def _relax(self, keywords: set[str]) -> None:
        if keywords:
            self.lines.append(f'// "$comment": "relaxed: {", ".join(sorted(keywords))}"')

    def _add_tagged(self, shape: Tagged, n: int, name: str, schema: dict[str, Any]) -> None:
        grammar.json_rule(schema)  # which rejects one that cannot be obeyed
        parameters = Parameters(schema)
        relaxed = parameters.constraints - _OBEYED
        written = []
        for m, (key, is_required) in enumerate(parameters.listed.items()):
            if shape.key_end.strip() in key or key != key.strip() or not key:
                if not is_required:
                    continue
                raise InputError(
                    f"required={shown(key)}: no name of a parameter that can be tagged"
                )
            rule = f"parameter_{n}_{m}"
            before = self.text(f"{shape.key_begin}{key}{shape.key_end}")
            value = _Value(self, f"VALUE_{n}_{m}", parameters, key)
            self.lines.append(f"{rule}: {before} {value.rule(shape)}")
            relaxed |= value.relaxed
            written.append(rule if is_required else f"{rule}?")
        begin, tail = self.text(f"{shape.head}{name}{shape.name_end}"), self.text(shape.tail)
        self.lines.append(f"call_{n}: {' '.join([begin, *written, tail])}")
        self._relax(relaxed)


def _required(parameters: Parameters) -> set[str]:
    return {key for key, is_required in parameters.listed.items() if is_required}


def _written_keys(parameters: Parameters, pattern: re.Pattern[str], where: str) -> Iterator[str]:
    """Yields names of parameters that have this form; a required one has to."""
    for key, is_required in parameters.listed.items():
        if pattern.fullmatch(key):
            yield key
        elif is_required:
            raise InputError(f"required={shown(key)}: no name of a parameter {where}")


class _Value:
    """The rule of a parameter's value between its tags.

    Attributes:
        relaxed: keywords that some of these values do not obey.
    """

    def __init__(self, rules: CallRules, terminal: str, parameters: Parameters, key: str):
        self.relaxed: set[str] = set()
        self._rules = rules
        self._terminal = terminal
        self._parameters = parameters
        self._key = key
        self._kinds = parameters.types(key)
        self._schema = parameters.resolved(key)

    def rule(self, shape: Tagged) -> str:
        end, text = shape.value_end.strip(), self._rules.text
        before = text(shape.text_begin or shape.value_begin)
        if (listed := listed_values(self._schema)) is not None:
            spelled = [self._spelled(shape, value) for value in listed]
            if quoted := " | ".join(text(value) for value in spelled if end not in value):
                return f"({quoted}) {text(shape.value_end)}"
            self.relaxed.add("enum")
            return f"{before} {self._closed(shape, _ANY)}"
        if self._kinds == values.TEXT:
            return f"{before} {self._closed(shape, self._pattern())}"
        if "string" not in self._kinds or not _permits_any(self._schema):
            return self._json(shape, self._parameters.alone(self._key))
        whole = f"{before} {self._closed(shape, _ANY)}"
        json_types = sorted(self._kinds - values.TEXT) if shape.text_begin else []
        return f"({whole} | {self._json(shape, {'type': json_types})})" if json_types else whole

    def _json(self, shape: Tagged, schema: dict[str, Any]) -> str:
        """Adds a rule of JSON of a schema; returns that between its tags."""
        name = self._terminal.lower()
        self._rules.lines.append(f"{name}: {grammar.json_rule(schema)}")
        return f"{self._rules.text(shape.value_begin)} {name} {self._rules.text(shape.value_end)}"

    def _spelled(self, shape: Tagged, value: object) -> str:
        """A listed value, and what is before it, as it is read as itself."""
        quoted = json.dumps(value, ensure_ascii=False)
        if not isinstance(value, str):
            return shape.value_begin + quoted
        if shape.text_begin:
            return shape.text_begin + value
        is_itself = self._kinds == values.TEXT or values.to_json(value, self._kinds) == quoted
        return shape.value_begin + (value if is_itself else quoted)

    def _pattern(self) -> str:
        """A regular expression of texts that obey the schema, as far as one says that."""
        if not isinstance(self._schema, dict):
            return _ANY
        self.relaxed |= constraints(self._schema) - {"type", *_LENGTHS}
        return _pattern(self._schema)

    def _closed(self, shape: Tagged, pattern: str) -> str:
        return closed(self._rules, self._terminal, shape.value_end, pattern, shape.pad)


def closed(rules: CallRules, terminal: str, end: str, pattern: str, pad: str = "") -> str:
    """Adds a terminal: text of a pattern up to its end, which it does not have in it. Returns the
    rule of the two.
    """
    mark = end.strip()
    if mark in rules.specials:  # which is in no text
        rules.lines.append(f"{terminal}: /{pattern}/")
        return f"{terminal} {rules.text(end.lstrip())}"
    close = grammar.literal(mark)
    whole = f"{pattern}{grammar.literal(pad)}{close}"
    rules.lines.append(f"{terminal}: /{whole}/ & ~/{_ANY}{close}(?s:.+)/")
    after = end[end.index(mark) + len(mark) :]
    return " ".join(filter(None, [terminal, rules.text(after)]))


class _Bare:
    """Rules of values with bare keys, and texts between quotes. Where a schema has more than types,
    properties, items, choices, listed values and lengths, a value is JSON, which is read as well.

    Attributes:
        relaxed: keywords that some of these values do not obey.
    """

    def __init__(self, rules: CallRules, quote: str, name: str):
        """`name`: of the rules, each of which adds a number."""
        self.relaxed: set[str] = set()
        self._rules = rules
        self._quote = quote
        self._name = name
        self._num = 0

    def value(self, schema: Schema) -> str:
        """Adds rules of a schema without references; returns that of its values."""
        if (listed := listed_values(schema)) is not None:
            spelled = [self._spelled(value) for value in listed]
            if None not in spelled:
                return f"({' | '.join(filter(None, spelled))})"
            return self._json(schema)
        if not isinstance(schema, dict) or not (names := constraints(schema)):
            return self._any() if schema is not False else self._json(schema)
        kind, branches = schema.get("type"), schema.get("anyOf")
        if names == {"type"} and isinstance(kind, list):
            branches = [{"type": name} for name in kind]
        if names <= {"anyOf", "type"} and isinstance(branches, list) and len(names) == 1:
            return f"({' | '.join(self._rule(self.value(branch)) for branch in branches)})"
        if kind == "string":
            self.relaxed |= names - {"type", *_LENGTHS}
            return self._text(_pattern(schema))
        if kind == "array" and names <= {"type", "items"}:
            item = self._rule(self.value(schema.get("items", True)))
            return f'"[" ({item} ("," {item})*)? "]"'
        if kind == "object" and names <= _OBEYED:
            return self._object(schema)
        return self._json(schema)

    def _object(self, schema: dict[str, Any]) -> str:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        if not properties and not required and schema.get("additionalProperties", True) is True:
            return f"{self._any()}_object"
        if not {*required} <= properties.keys() or not all(map(_BARE_KEY.fullmatch, properties)):
            return self._json(schema)
        items = {
            key: f"{self._rules.text(f'{key}:')} {self.value(item)}"
            for key, item in properties.items()
        }
        return f'"{{" {self._rules.listed(self._next(), items, required, ",")} "}}"'

    def _any(self) -> str:
        """Any value."""
        name, text = f"{self._next()}", self._text(_ANY)
        scalar = self._json({"type": ["number", "boolean", "null"]})
        self._rules.lines += [
            f"{name}: {text} | {scalar} | {name}_object | {name}_list",
            f'{name}_list: "[" ({name} ("," {name})*)? "]"',
            f'{name}_object: "{{" ({name}_item ("," {name}_item)*)? "}}"',
            f'{name}_item: {name.upper()}_KEY ":" {name}',
            f"{name.upper()}_KEY: /[A-Za-z_][A-Za-z0-9_-]*/",
        ]
        return name

    def _text(self, pattern: str) -> str:
        end = closed(self._rules, self._next().upper(), self._quote, pattern)
        return f"{self._rules.text(self._quote)} {end}"

    def _spelled(self, value: object) -> str | None:
        """A listed value as it is read as itself; None: as JSON."""
        if isinstance(value, str):
            quoted = self._quote + value + self._quote
            return None if self._quote in value else self._rules.text(quoted)
        is_scalar = value is None or isinstance(value, bool | int | float)
        return self._rules.text(json.dumps(value)) if is_scalar else None

    def _json(self, schema: Schema) -> str:
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        return self._rule(grammar.json_rule(schema))

    def _rule(self, body: str) -> str:
        name = self._next()
        self._rules.lines.append(f"{name}: {body}")
        return name

    def _next(self) -> str:
        self._num += 1
        return f"{self._name}_{self._num}"


def _pattern(schema: dict[str, Any]) -> str:
    """A regular expression of texts of the lengths that a schema says."""
    if not constraints(schema) & _LENGTHS:
        return _ANY
    shortest, longest = (schema.get(name, "") for name in ("minLength", "maxLength"))
    return f"(?s:.{{{shortest or 0},{longest}}})"


def _permits_any(schema: Schema) -> bool:
    """Whether all values of the schema's types are valid."""
    if isinstance(schema, bool):
        return schema
    names = constraints(schema)
    if not names <= {"type", "anyOf"}:
        return False
    branches = schema.get("anyOf", [])
    return isinstance(branches, list) and all(
        isinstance(branch, dict) and constraints(branch) <= {"type"} for branch in branches
    )
