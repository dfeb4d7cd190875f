"""Rules in Lark of one call, by its shape."""

import json
import re
from collections.abc import Mapping
from typing import Any

from configs.errors import InputError, shown
from inference.text import grammar
from inference.text.json_schema.document import Schema, constraints
from inference.text.json_schema.document import values as listed_values
from inference.text.tool_calls import values
from inference.text.tool_calls.shapes import Literals, NameThenJson, Objects, Shape, Tagged
from inference.text.tool_calls.values import Parameters

_ANY = "(?s:.*)"
_OBEYED = {"type", "properties", "required", "additionalProperties"}  # of arguments in tags
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
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
        words = sorted(map(re.escape, specials), key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(words)})") if words else None

    def text(self, text: str) -> str:
        """A text, special tokens within it as such."""
        parts = self._special.split(text) if self._special else [text]
        quoted = (
            f"<[{self.specials[part]}]>" if part in self.specials
            else json.dumps(part, ensure_ascii=False)
            for part in parts if part
        )  # fmt: skip
        return " ".join(quoted)

    def add(self, n: int, name: str, schema: dict[str, Any]) -> None:
        """Adds the rule `call_{n}` of a function."""
        shape = self._shape
        if isinstance(shape, Tagged):
            self._add_tagged(shape, n, name, schema)
            return
        if isinstance(shape, Literals):
            self._add_literals(n, name, schema)
            return
        if isinstance(shape, Objects):
            before = self.text(f'{{"name": {json.dumps(name)}, "{shape.key}": ')
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
        relaxed = parameters.constraints - _OBEYED
        required: list[str] = []
        options: list[str] = []
        for m, (key, is_required) in enumerate(parameters.listed.items()):
            if not _KEY.fullmatch(key):
                if not is_required:
                    continue
                raise InputError(f"required={shown(key)}: no name of a parameter in Python")
            rule = f"parameter_{n}_{m}"
            self.lines.append(f'{rule}: "{key}=" {grammar.json_rule(parameters.alone(key))}')
            (required if is_required else options).append(rule)
        listed = ' ", " '.join(required)
        for m, rule in enumerate(options):
            after = f"options_{n}_{m + 1}" if m + 1 < len(options) else ""
            self.lines.append(f'options_{n}_{m}: (", " {rule})? {after}')
        if required and options:
            listed += f" options_{n}_0"
        elif options:
            firsts = (
                f"{rule} options_{n}_{m}" if m < len(options) else rule
                for m, rule in enumerate(options, start=1)
            )
            listed = f"({' | '.join(firsts)})?"
        self.lines.append(f'call_{n}: "{name}(" {listed} ")"')
        self._relax(relaxed)

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
            before = self.text(f"{shape.key_begin}{key}{shape.key_end}{shape.value_begin}")
            value = _Value(self, f"VALUE_{n}_{m}", parameters, key)
            self.lines.append(f"{rule}: {before} {value.rule(shape)}")
            relaxed |= value.relaxed
            written.append(rule if is_required else f"{rule}?")
        begin, tail = self.text(f"{shape.head}{name}{shape.name_end}"), self.text(shape.tail)
        self.lines.append(f"call_{n}: {' '.join([begin, *written, tail])}")
        self._relax(relaxed)


class _Value:
    """The rule of a parameter's value and its end.

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
        end = shape.value_end.strip()
        if (listed := listed_values(self._schema)) is not None:
            texts = [text for text in map(self._written, listed) if end not in text]
            if texts:
                quoted = " | ".join(map(self._rules.text, texts))
                return f"({quoted}) {self._rules.text(shape.value_end)}"
            self.relaxed.add("enum")
            return self._closed(shape, _ANY)
        if self._kinds == values.TEXT:
            return self._closed(shape, self._pattern())
        if "string" in self._kinds and _permits_any(self._schema):
            return self._closed(shape, _ANY)
        value = grammar.json_rule(self._parameters.alone(self._key))
        self._rules.lines.append(f"{self._terminal.lower()}: {value}")
        return f"{self._terminal.lower()} {self._rules.text(shape.value_end)}"

    def _written(self, value: object) -> str:
        """A listed value as it is read as itself."""
        quoted = json.dumps(value, ensure_ascii=False)
        if not isinstance(value, str):
            return quoted
        is_itself = self._kinds == values.TEXT or values.to_json(value, self._kinds) == quoted
        return value if is_itself else quoted

    def _pattern(self) -> str:
        """A regular expression of texts that obey the schema, as far as one says that."""
        if not isinstance(self._schema, dict):
            return _ANY
        keywords = constraints(self._schema) - {"type"}
        self.relaxed |= keywords - _LENGTHS
        if not keywords & _LENGTHS:
            return _ANY
        shortest, longest = (self._schema.get(name, "") for name in ("minLength", "maxLength"))
        return f"(?s:.{{{shortest or 0},{longest}}})"

    def _closed(self, shape: Tagged, pattern: str) -> str:
        """Text of a pattern up to the end of the value, which it does not have in it."""
        end, lines = shape.value_end, self._rules.lines
        mark = end.strip()
        if mark in self._rules.specials:  # which is in no text
            lines.append(f"{self._terminal}: /{pattern}/")
            return f"{self._terminal} {self._rules.text(end.lstrip())}"
        close = grammar.literal(mark)
        whole = f"{pattern}{grammar.literal(shape.pad)}{close}"
        lines.append(f"{self._terminal}: /{whole}/ & ~/{_ANY}{close}(?s:.+)/")
        after = end[end.index(mark) + len(mark) :]
        return " ".join(filter(None, [self._terminal, self._rules.text(after)]))


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
