"""Whether a whole answer is JSON of a schema, by the library that makes structured outputs so."""

import functools
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from configs.errors import InputError
from inference.files import json_lines
from inference.text import grammar

if TYPE_CHECKING:
    import llguidance


def check_schema(schema: Mapping[str, object]) -> None:
    """Raises InputError if there is no telling what is JSON of a schema: as
    `grammar.of_json_schema`, or it has keywords that a grammar relaxes, or llguidance is missing.
    """
    if not grammar.is_available():
        raise InputError("schemas are checked by llguidance: pip install '.[serve]'")
    if relaxed := grammar.relaxed(grammar.of_json_schema(dict(schema))):
        raise InputError(f"{', '.join(relaxed)} of the schema cannot be checked: leave it out")


def is_valid(schema: Mapping[str, object], text: str) -> bool:
    """Whether a text is JSON of a schema: with any spaces, escapes, order of keys and spelling of
    numbers.

    Raises:
        InputError: as `check_schema`; or the schema cannot be compiled, or costs too much.
    """
    matcher = _compiled(json.dumps(schema)).deep_copy()
    try:
        value = json.loads(text, object_pairs_hook=json_lines.unique_keys, parse_float=_number)
        is_permitted = _Walk(matcher).consume(value) is not None and matcher.is_accepting()
    except (ValueError, RecursionError):  # half of a surrogate pair is one, too
        return False
    _check(matcher)
    return is_permitted


@functools.lru_cache(maxsize=256)
def _compiled(schema: str) -> "llguidance.LLMatcher":
    import llguidance

    parsed = json.loads(schema, parse_float=_number)
    check_schema(parsed)
    limits = llguidance.LLParserLimits(**grammar.LIMITS)
    text = grammar.of_json_schema(parsed)
    matcher = llguidance.LLMatcher(_byte_tokenizer(), text, log_level=0, limits=limits)
    _check(matcher)
    return matcher


def _check(matcher: "llguidance.LLMatcher") -> None:
    if matcher.is_error():
        why = " ".join(matcher.get_error().split())
        raise InputError(f"the schema cannot be checked: {why[:300]}")


@functools.cache
def _byte_tokenizer() -> "llguidance.LLTokenizer":
    import llguidance

    return llguidance.LLTokenizer("byte")


class _Walk:
    """Feeds a value to a grammar, which permits the keys of an object in one order alone."""

    def __init__(self, matcher: "llguidance.LLMatcher"):
        self._matcher, self._num_bytes = matcher, 0

    def consume(self, value: Any) -> str | None:
        """The text of a value as the grammar permits it next, which it is fed; or None, and the
        grammar is where it was.
        """
        start, written = self._num_bytes, _text(value)
        if self._feed(written):
            return written
        self._return_to(start)
        text = None
        if isinstance(value, list):
            text = self._items(value)
        elif isinstance(value, dict):
            text = self._members(value)
        if text is None:
            self._return_to(start)
        return text

    def _items(self, items: list[Any]) -> str | None:
        texts: list[str] = []
        for item in items:
            text = self.consume(item) if self._feed(", " if texts else "[") else None
            if text is None:
                return None
            texts.append(text)
        return f"[{', '.join(texts)}]" if self._feed("]") else None

    def _members(self, fields: dict[str, Any]) -> str | None:
        """Of the keys that may come next, first the one behind which all others of them still may:
        keys that are optional may be left out, and then cannot come any more.
        """
        waiting, texts = dict(fields), list[str]()
        if not self._feed("{"):
            return None
        while waiting:
            comma = ", " if texts else ""
            possible = [key for key in waiting if self._permits(comma + _key(key))]
            for key in possible:
                start, later = self._num_bytes, [name for name in possible if name != key]
                self._feed(comma + _key(key))
                text = self.consume(waiting[key])
                if text is not None and all(self._permits(", " + _key(name)) for name in later):
                    texts.append(_key(key) + text)
                    del waiting[key]
                    break
                self._return_to(start)
                if text is not None:
                    waiting[key] = json.loads(text)  # in the order of keys that is permitted
            else:
                return None
        return f"{{{', '.join(texts)}}}" if self._feed("}") else None

    def _permits(self, text: str) -> bool:
        start, is_permitted = self._num_bytes, self._feed(text)
        self._return_to(start)
        return is_permitted

    def _feed(self, text: str) -> bool:
        """Feeds a text as far as it is permitted; returns whether all of it is."""
        tokens = _byte_tokenizer().tokenize_str(text)
        num_fed = self._matcher.try_consume_tokens(tokens)
        self._num_bytes += num_fed
        return num_fed == len(tokens)

    def _return_to(self, num_bytes: int) -> None:
        self._matcher.rollback(self._num_bytes - num_bytes)
        self._num_bytes = num_bytes


def _number(text: str) -> float:
    """A number that is whole as an integer, which JSON Schema says it is, of 1.0 and 1e5 too."""
    number = float(text)
    return int(number) if number.is_integer() else number


def _key(name: str) -> str:
    return f"{_text(name)}: "


def _text(value: object) -> str:
    """JSON as grammars spell it: of all characters only those of control are escaped."""
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    text.encode()
    return text
