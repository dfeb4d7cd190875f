"""Formats of structural tags: each writes its rules, and checks its fields."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from configs.errors import InputError, shown
from inference.text import grammar
from inference.text.structural_tags.rules import CLOSED, END, Exit, Rules

Style = Literal["json", "qwen_xml", "minimax_xml", "glm_xml"]
Text = Annotated[str, Meta(min_length=1)]
Texts = Annotated[list[Text], Meta(min_length=1)]
Formats = Annotated[list["Format"], Meta(min_length=1)]
Tags = Annotated[list["Tag"], Meta(min_length=1)]


class _Part(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", kw_only=True):
    """A part of a text."""

    def write(self, rules: Rules, exits: Sequence[Exit]) -> str:
        """Rules of the part and of what follows it."""
        raise NotImplementedError

    def heads(self, rules: Rules, exits: Sequence[Exit]) -> list[Exit]:
        """The same as exits of what stands before."""
        return [Exit("", rules.rule(self.write(rules, exits)))]


class ConstString(_Part, tag="const_string"):
    """A fixed text."""

    value: Text

    def write(self, rules: Rules, exits: Sequence[Exit]) -> str:
        return f"{rules.text(self.value)} {rules.follow(exits)}"

    def heads(self, rules: Rules, exits: Sequence[Exit]) -> list[Exit]:
        return [Exit(self.value, rules.follow(exits))]


class JsonSchema(_Part, tag="json_schema"):
    """JSON of a schema, or an object as parameters between tags."""

    json_schema: dict[str, Any] | bool
    style: Style = "json"

    def write(self, rules: Rules, exits: Sequence[Exit]) -> str:
        if self.json_schema is False:
            raise InputError("json_schema: false permits no JSON")
        schema = {} if self.json_schema is True else self.json_schema
        if self.style == "json":
            return f"{rules.json(schema)} {rules.follow(exits)}"
        return f"{rules.parameters(schema, self.style)} {rules.follow(exits)}"


class Parameters(_Part, tag="qwen_xml_parameter"):
    """An older name of JSON's style `qwen_xml`."""

    json_schema: dict[str, Any]

    def write(self, rules: Rules, exits: Sequence[Exit]) -> str:
        return f"{rules.parameters(self.json_schema, 'qwen_xml')} {rules.follow(exits)}"


class Regex(_Part, tag="regex"):
    """A match of a regular expression; without the text that ends it, where there is one."""

    pattern: Text
    excludes: list[Text] = []

    def write(self, rules: Rules, exits: Sequence[Exit]) -> str:
        pattern = grammar.in_slashes(self.pattern)
        literals = [exit.literal for exit in exits]
        if all(literals):
            return rules.free(exits, self.excludes, literals, pattern)
        return f"{rules.regex(pattern, self.excludes)} {rules.follow(exits)}"


class Grammar(_Part, tag="grammar"):
    """A text of a grammar, in Lark or GBNF."""

    grammar: Text

    def write(self, rules: Rules, exits: Sequence[Exit]) -> str:
        write = grammar.of_gbnf if grammar.is_gbnf(self.grammar) else grammar.of_lark
        return f"{rules.refer(write(self.grammar))} {rules.follow(exits)}"


class AnyText(_Part, tag="any_text"):
    """Free text, up to the first text that ends it."""

    excludes: list[Text] = []

    def write(self, rules: Rules, exits: Sequence[Exit]) -> str:
        return rules.free(exits, self.excludes, _literals(exits))


class InOrder(_Part, tag="sequence"):
    """Parts one behind the other."""

    elements: Formats

    def write(self, rules: Rules, exits: Sequence[Exit]) -> str:
        return self.elements[0].write(rules, self._behind_first(rules, exits))

    def heads(self, rules: Rules, exits: Sequence[Exit]) -> list[Exit]:
        return self.elements[0].heads(rules, self._behind_first(rules, exits))

    def _behind_first(self, rules: Rules, exits: Sequence[Exit]) -> Sequence[Exit]:
        for element in reversed(self.elements[1:]):
            exits = element.heads(rules, exits)
        return exits


class Or(_Part, tag="or"):
    """One of several parts."""

    elements: Formats

    def write(self, rules: Rules, exits: Sequence[Exit]) -> str:
        return f"({' | '.join(element.write(rules, exits) for element in self.elements)})"

    def heads(self, rules: Rules, exits: Sequence[Exit]) -> list[Exit]:
        return [head for element in self.elements for head in element.heads(rules, exits)]


class _Repeated(_Part):
    content: "Format"

    def _write(self, rules: Rules, exits: Sequence[Exit], times: str) -> str:
        return f"({self.content.write(rules, [CLOSED])}){times} {rules.follow(exits)}"


class Optional(_Repeated, tag="optional"):
    """A part, or nothing."""

    def write(self, rules: Rules, exits: Sequence[Exit]) -> str:
        return self._write(rules, exits, "?")


class Plus(_Repeated, tag="plus"):
    """A part, at least once."""

    def write(self, rules: Rules, exits: Sequence[Exit]) -> str:
        return self._write(rules, exits, "+")


class Star(_Repeated, tag="star"):
    """A part, any number of times."""

    def write(self, rules: Rules, exits: Sequence[Exit]) -> str:
        return self._write(rules, exits, "*")


class Tag(_Part, tag="tag"):
    """A part between two fixed texts, the second of which is one of `end`."""

    begin: str
    content: "Format"
    end: str | Texts

    def closed(self, rules: Rules) -> str:
        """All of it behind `begin`."""
        ends = [self.end] if isinstance(self.end, str) else self.end
        return self.content.write(rules, [Exit(end) for end in ends])

    def write(self, rules: Rules, exits: Sequence[Exit]) -> str:
        return f"{rules.text(self.begin)} {self.closed(rules)} {rules.follow(exits)}"

    def heads(self, rules: Rules, exits: Sequence[Exit]) -> list[Exit]:
        return [Exit(self.begin, rules.rule(f"{self.closed(rules)} {rules.follow(exits)}"))]


class TriggeredTags(_Part, tag="triggered_tags"):
    """Free text until a trigger: it is the beginning of a tag, and free text follows that again."""

    triggers: Texts
    tags: Tags
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: list[Text] = []

    def write(self, rules: Rules, exits: Sequence[Exit]) -> str:
        self._check_triggers(exits)
        contents = [(tag, rules.rule(tag.closed(rules))) for tag in self.tags]
        first = ""
        if self.at_least_one:
            first = rules.rule(
                " | ".join(f"{rules.text(tag.begin)} {content}" for tag, content in contents)
            )
            if self.stop_after_first:
                return f"{first} {rules.follow(exits)}"
        heads = [
            Exit(trigger, rules.rule(" | ".join(
                f"{rules.text(tag.begin[len(trigger):])} {content}"
                for tag, content in contents if tag.begin.startswith(trigger)
            )))
            for trigger in self.triggers
        ]  # fmt: skip
        stops = [*self.triggers, *_literals(exits)]
        if self.stop_after_first:
            after = rules.follow(exits)
            once = [Exit(trigger, f"{content} {after}") for trigger, content, _ in heads]
            return rules.free([*once, *exits], self.excludes, stops)
        tagged = rules.free(heads, self.excludes, stops)
        return f"{first} {tagged}* {rules.free(exits, self.excludes, stops)}"

    def _check_triggers(self, exits: Sequence[Exit]) -> None:
        """Each tag has one trigger, each trigger a tag, and none comes before another text."""
        for tag in self.tags:
            matches = [t for t in self.triggers if tag.begin.startswith(t)]
            if len(matches) != 1:
                raise InputError(
                    f"triggers: exactly one of them has to begin the tag {shown(tag.begin)}, not "
                    f"{len(matches)}"
                )
        for trigger in self.triggers:
            if not any(tag.begin.startswith(trigger) for tag in self.tags):
                raise InputError(f"triggers: {shown(trigger)} begins no tag")
            for literal in _literals(exits):
                if trigger in literal:
                    raise InputError(
                        f"triggers: {shown(trigger)} is a part of {shown(literal)}, which ends the "
                        "text around the tags"
                    )


class TagsWithSeparator(_Part, tag="tags_with_separator"):
    """Tags with a fixed text between them, and nothing else."""

    tags: Tags
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False

    def write(self, rules: Rules, exits: Sequence[Exit]) -> str:
        tag = rules.rule(" | ".join(tag.write(rules, [CLOSED]) for tag in self.tags))
        more = "" if self.stop_after_first else f"({rules.text(self.separator)} {tag})*"
        times = "" if self.at_least_one else "?"
        return f"({tag} {more}){times} {rules.follow(exits)}"


Format = (
    ConstString | JsonSchema | Parameters | Regex | Grammar | AnyText | InOrder | Or | Optional
    | Plus | Star | Tag | TriggeredTags | TagsWithSeparator
)  # fmt: skip


class Structure(msgspec.Struct, forbid_unknown_fields=True):
    """A tag of vLLM's older form, whose content is JSON of a schema."""

    begin: Text
    schema: dict[str, Any] | bool
    end: str


def of_structures(structures: Iterable[Structure], triggers: list[str]) -> TriggeredTags:
    """The same in the newer form."""
    tags = [
        Tag(begin=tag.begin, content=JsonSchema(json_schema=tag.schema), end=tag.end)
        for tag in structures
    ]
    return TriggeredTags(triggers=triggers, tags=tags)


# Values of fields that list some.
VALUES = {
    "type": sorted(str(kind.__struct_config__.tag) for kind in get_args(Format)),
    "style": get_args(Style),
}
_READER = msgspec.json.Decoder(Format)


def as_json(format: Format) -> str:
    """A format as text; raises InputError if it is too long."""
    text = msgspec.json.encode(format).decode()
    if len(text) > grammar.MAX_CHARS:
        raise InputError(f"it has at most {grammar.MAX_CHARS} characters, not {len(text)}")
    return text


def of_json(text: str, specials_in: Callable[[list[str]], Mapping[str, int]]) -> str:
    """The grammar of a format that `as_json` wrote.

    Args:
        specials_in: returns ids of special tokens that occur in texts, by their own text.

    Raises:
        InputError: a part permits nothing that can be forced, or it has too many parts.
    """
    rules = Rules(specials_in([text]))
    return rules.written(_READER.decode(text).write(rules, [END]))


def _literals(exits: Iterable[Exit]) -> list[str]:
    return [exit.literal for exit in exits if exit.literal]
