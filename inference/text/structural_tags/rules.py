"""Writes rules in Lark of texts that free text and fixed parts make up.

llguidance's lexer takes the longest lexeme and never goes back. So free text is one lexeme together
with the first fixed text behind it, and has that text nowhere else in it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from configs.errors import InputError, shown
from inference.text import grammar
from inference.text.tool_calls.call_rules import CallRules
from inference.text.tool_calls.shapes import Tagged

ANY = "(?s:.*)"
_MAX_RULES, _MAX_CHARS = 512, 1 << 20
_STYLES = {
    "qwen_xml": Tagged("<parameter=", ">", "</parameter>", name_end=""),
    "minimax_xml": Tagged('<parameter name="', '">', "</parameter>", name_end=""),
    "glm_xml": Tagged(
        "<arg_key>", "</arg_key>", "</arg_value>", name_end="", value_begin="<arg_value>"
    ),
}


class Exit(NamedTuple):
    """What may follow a part: a fixed text, and the rules of all behind it.

    Attributes:
        literal: empty where what follows begins with no fixed text.
        behind: in Lark.
        is_end: nothing follows: the text ends.
    """

    literal: str
    behind: str = ""
    is_end: bool = False


END = Exit("", is_end=True)
CLOSED = Exit("")


class Rules:
    """Rules of one structural tag.

    Attributes:
        lines: the rules so far.
        parts: other grammars that these refer to.
    """

    def __init__(self, specials: Mapping[str, int]):
        """`specials`: ids of special tokens that fixed texts have in them, by their text."""
        self.lines: list[str] = []
        self.parts: list[dict[str, str]] = []
        self._calls = {name: CallRules(shape, specials) for name, shape in _STYLES.items()}
        self._specials = sorted(specials, key=len, reverse=True)
        self._count = self._num_chars = 0

    def written(self, start: str) -> str:
        """The grammar whose texts are those of the rule `start`."""
        parameters = (line for rules in self._calls.values() for line in rules.lines)
        text = "\n".join([f"start: {start}", *self.lines, *parameters])
        if not self.parts:
            return text
        return json.dumps({"grammars": [{"lark_grammar": text}, *self.parts]})

    def rule(self, text: str, kind: str = "part") -> str:
        """Names a rule; one of the kind `TEXT` is a lexeme."""
        self._count += 1
        self._num_chars += len(text)
        if self._count > _MAX_RULES:
            raise InputError(f"a structural tag has at most {_MAX_RULES} rules: use fewer formats")
        if self._num_chars > _MAX_CHARS:
            raise InputError(f"a structural tag, written out, has at most {_MAX_CHARS} characters")
        self.lines.append(f"{kind}_{self._count}: {text}")
        return f"{kind}_{self._count}"

    def text(self, text: str) -> str:
        return self._calls["qwen_xml"].text(text)

    def follow(self, exits: Sequence[Exit]) -> str:
        """All that may follow a part that ends by itself."""
        if len(exits) == 1:
            return f"{self.text(exits[0].literal)} {exits[0].behind}"
        options = (f"{self.text(exit.literal)} {exit.behind}".strip() or '""' for exit in exits)
        return self.rule(" | ".join(options))

    def json(self, schema: dict[str, Any]) -> str:
        return self.rule(grammar.json_rule(schema))

    def parameters(self, schema: dict[str, Any], style: str) -> str:
        """An object's properties between tags, such as `<parameter=NAME>value</parameter>`."""
        self._count += 1
        self._calls[style].add(self._count, "", schema)
        return f"call_{self._count}"

    def refer(self, text: str) -> str:
        """A text of another grammar, as `grammar.of_lark` writes it."""
        name = f"grammar_{len(self.parts)}"
        self.parts.append({"name": name, "lark_grammar": text})
        return f"@{name}"

    def regex(self, pattern: str, excludes: Sequence[str]) -> str:
        """A match of a pattern, without some texts."""
        return self.rule(self._body(pattern, excludes), "TEXT")

    def free(
        self,
        exits: Sequence[Exit],
        excludes: Sequence[str],
        stops: Sequence[str],
        pattern: str = f"/{ANY}/",
    ) -> str:
        """Text of a pattern, without `excludes`, up to the first of some fixed texts.

        Args:
            exits: those that end it, and what is behind each.
            stops: those that may not be in it; the texts of `exits` are among them.
        """
        if any(not exit.literal and not exit.is_end for exit in exits):
            raise InputError(
                "free text has no end: any_text, regex and triggered_tags need a tag around them "
                "with an end, a const_string or a tag behind them, or the end of the answer"
            )
        for exit in exits:
            if hidden := next((stop for stop in stops if stop in exit.literal[:-1]), None):
                raise InputError(
                    f"free text never ends with {shown(exit.literal)}, because it ends with "
                    f"{shown(hidden)} before"
                )
        body = self.rule(self._body(pattern, excludes), "TEXT")
        listed = "|".join(map(grammar.literal, stops))
        options = []
        for exit in exits:
            special, after = self._special(exit.literal)
            if exit.is_end or special:
                before = self.rule(f"{body} & ~/{ANY}({listed}){ANY}/", "TEXT") if stops else body
                options.append(f"{before} {special} {self.text(after)} {exit.behind}")
            else:
                ended = f"({body} {json.dumps(exit.literal)}) & ~/{ANY}({listed})(?s:.+)/"
                options.append(f"{self.rule(ended, 'TEXT')} {exit.behind}")
        return f"({' | '.join(options)})"

    def _body(self, pattern: str, excludes: Sequence[str]) -> str:
        if not excludes:
            return pattern
        listed = "|".join(map(grammar.literal, excludes))
        return f"{pattern} & ~/{ANY}({listed}){ANY}/"

    def _special(self, literal: str) -> tuple[str, str]:
        """The special token that a fixed text begins with, and the text behind it."""
        for word in self._specials:
            if literal.startswith(word):
                return self.text(word), literal[len(word) :]
            if word in literal:
                raise InputError(
                    f"{shown(literal)} has the special token {shown(word)} within it: free text "
                    "ends with text, or with a special token first"
                )
        return "", literal
