"""What a text has to be: JSON of a schema, a match of a regular expression, one of some choices, a
text of a grammar, or one without some words.

A grammar says of each token whether it may come next (llguidance). It is text, as
`SamplingParams.grammar` holds it; the functions here write it.
"""

import collections
import importlib.util
import json
import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from configs.errors import InputError, reason
from inference.text import panics
from inference.text.json_schema.lower import lower
from inference.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

MAX_CHARS = 1 << 16
_MAX_LOWERED_CHARS = 1 << 20
_MAX_RULES = 512  # llguidance follows them by recursion; longer ones than these are as few
_RULE = re.compile(r"\w(?:\.-?\d+|\[[^\]\n]{0,120}\]|\{[^}\n]{0,120}\})?\s*:")
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_MAX_KEPT_BYTES = 256 << 20  # of compiled grammars; each takes about so much, and by its text:
_GRAMMAR_BYTES, _CHAR_BYTES = 32 << 10, 256
LIMITS: dict[str, Any] = {  # a fifth of llguidance's own: of what one grammar may cost
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 40_000,
    "step_max_items": 10_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
_SCHEMA = re.compile(r"%json\s+")
_REASON_CHARS = 300
_RELAXED = re.compile(r'(?<!\\)"\$comment": "relaxed: ([a-zA-Z, ]+)"')
_REGEX_ERROR = re.compile(
    r"regex parse error:\n {4}(?P<pattern>.*)\n[\s\S]*?^error: (?P<what>.*)", re.MULTILINE
)
_EXCERPT = re.compile(r"\s*(\d+ \||\^+$)")  # of a grammar, and what points into it
_UNSATISFIED = "doesn't satisfy the grammar"
_COSTS = re.compile("too many|too complex|too large|limit|max is", re.IGNORECASE)
_SIGNS = frozenset("\\.+*?()|[]{}^$#&-~/\"'<>!@%")  # of regular expressions
_NOTHING = "permits no text: a part of it that has to come permits nothing, or has no end"
_SPACE = "[ ]?"  # what JSON may have between its parts: without an end, models find none


def is_available() -> bool:
    """Whether llguidance is installed."""
    return importlib.util.find_spec("llguidance") is not None


def of_json_schema(schema: dict[str, object]) -> str:
    """JSON of a schema, except for keywords that `relaxed` names. Raises InputError if it is too
    long, nested too deeply, no schema, or cannot be obeyed.
    """
    written = {"name": "json_schema", "json_schema": _lowered(schema)}
    return json.dumps({"grammars": [written]})


def relaxed(grammar: str) -> list[str]:
    """Keywords of a grammar's schemas that some of its texts do not obey, such as `uniqueItems`."""
    parts = [grammar]
    if grammar.startswith("{"):  # as text, what Lark has in quotes
        parts += filter(
            None, (part.get("lark_grammar") for part in json.loads(grammar)["grammars"])
        )
    names = (
        name for part in parts for match in _RELAXED.findall(part) for name in match.split(", ")
    )
    return sorted(set(names))


def of_regex(pattern: str) -> str:
    """A whole text that matches a pattern; raises InputError if it is too long."""
    import llguidance

    _check_length("the regular expression", pattern)
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def in_slashes(pattern: str) -> str:
    """A pattern as a lexeme in Lark; raises InputError if it is too long."""
    lark: str = json.loads(of_regex(pattern))["grammars"][0]["lark_grammar"]
    return lark.removeprefix("start: ")


def of_choices(choices: Iterable[str]) -> str:
    """One of some texts; raises InputError if they are too long, or one is empty."""
    import llguidance

    texts = _filled("choices", choices)
    quoted = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in texts)
    _check_length("the list of choices", quoted)
    # As one lexeme: of rules, llguidance follows no more than 2000 side by side.
    return llguidance.LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {quoted}")


def of_lark(text: str) -> str:
    """A text of a Lark grammar, as llguidance has it. Raises InputError if it is too long, has too
    many rules, or a schema within it cannot be obeyed.
    """
    import llguidance

    _check_rules(text)
    return llguidance.LLMatcher.grammar_from_lark(_with_lowered_schemas(text))


def is_gbnf(text: str) -> bool:
    """Whether a grammar is written as llama.cpp has it."""
    return _GBNF_RULE.search(text) is not None


def of_gbnf(text: str) -> str:
    """The same in llama.cpp's GBNF; a long one takes half a second. Raises InputError if it is too
    long, has too many rules, or cannot be read.
    """
    from llguidance import gbnf_to_lark

    _check_rules(text)
    try:
        return of_lark(gbnf_to_lark.gbnf_to_lark(text))
    except InputError:
        raise
    except RecursionError:
        raise InputError("the grammar is nested too deeply") from None
    except Exception as error:  # it raises plain ones
        raise InputError(f"the grammar cannot be read: {_reason(str(error))}") from None


def without(words: Iterable[str]) -> str:
    """Any text without these words, however its tokens divide it. Raises InputError if they are too
    long, or one is empty.
    """
    import llguidance

    return llguidance.LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {terminal_without(words)}")


def terminal_without(words: Iterable[str]) -> str:
    """A terminal of Lark: any text without these words. Raises as `without`."""
    listed = "|".join(map(literal, _filled("the words", words)))
    _check_length("the list of words", listed)
    return f"/(?s:.*)/ & ~/(?s:.*)({listed})(?s:.*)/"


def either(rules: str, name: str, other: str) -> str:
    """A Lark rule of this name that permits its own text, or that of another grammar."""
    return _joined(f"start: {name} | @other\n{rules}", "other", other)


def behind(text: str, specials: Mapping[str, int], other: str) -> str:
    """A text, and then one of another grammar; `specials` as in `rule_text`."""
    if not text:
        return other
    return _joined(f"start: {rule_text(text, specials)} @behind", "behind", other)


def rule_text(text: str, specials: Mapping[str, int]) -> str:
    """A text in a rule of Lark; `specials`: ids of special tokens in it, by their own text."""
    words = sorted(map(re.escape, specials), key=len, reverse=True)
    parts = re.split(f"({'|'.join(words)})", text) if words else [text]
    quoted = (
        f"<[{specials[part]}]>" if part in specials else json.dumps(part, ensure_ascii=False)
        for part in parts if part
    )  # fmt: skip
    return " ".join(quoted)


def _joined(rules: str, name: str, other: str) -> str:
    """Rules in Lark that refer to another grammar by a name."""
    is_list = other.startswith("{")
    first, *more = json.loads(other)["grammars"] if is_list else [{"lark_grammar": other}]
    return json.dumps({"grammars": [{"lark_grammar": rules}, {**first, "name": name}, *more]})


def schema_of(text: str) -> dict[str, object] | None:
    """The schema of a grammar that `of_json_schema` wrote; None of another one."""
    if not text.startswith("{"):
        return None
    schema: dict[str, object] | None = json.loads(text)["grammars"][0].get("json_schema")
    return schema


def json_rule(schema: dict[str, Any]) -> str:
    """A rule's text in Lark: JSON of a schema, as `of_json_schema` has it."""
    return "%json " + json.dumps(_lowered(schema))


def _with_lowered_schemas(text: str) -> str:
    parts, end = [], 0
    for match in _SCHEMA.finditer(text):
        is_quoted = text.count('"', text.rfind("\n", 0, match.start()) + 1, match.start()) % 2
        if match.start() < end or is_quoted:
            continue
        try:
            schema, after = json.JSONDecoder().raw_decode(text, match.end())
        except (ValueError, RecursionError):
            continue  # the compiler says what is wrong with it
        if isinstance(schema, dict):
            options = schema.get("x-guidance", {})
            parts += [text[end : match.end()], json.dumps(_lowered(schema, options))]
            end = after
    return "".join([*parts, text[end:]])


def _lowered(schema: dict[str, Any], options: Any = None) -> dict[str, object]:
    try:
        text = json.dumps(schema, allow_nan=False)
        _check_length("the schema", text)
        options = {"whitespace_pattern": _SPACE} if options is None else dict(options)
        lowered = lower(json.loads(text), options)
        _check_length("the schema, written out,", json.dumps(lowered), _MAX_LOWERED_CHARS)
    except InputError:
        raise
    except RecursionError:
        raise InputError("the schema is nested too deeply") from None
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise InputError(f"the schema cannot be read: {reason(error)}") from None
    return lowered


def _check_rules(text: str) -> None:
    _check_length("the grammar", text)
    num_rules = len(_RULE.findall(text))
    if num_rules > _MAX_RULES:
        raise InputError(f"the grammar has at most {_MAX_RULES} rules, not {num_rules}")


def _filled(what: str, texts: Iterable[str]) -> list[str]:
    listed = list(texts)
    if not listed or not all(listed):
        raise InputError(f"{what} are texts, each of at least one character")
    return listed


def literal(text: str) -> str:
    """A text as a part of a regular expression within slashes."""
    return "".join(f"\\x{{{ord(c):x}}}" if c in _SIGNS or c < " " else c for c in text)


class GrammarError(Exception):
    """llguidance broke at a text, by an exception or a panic."""


class Grammar:
    """One text as it grows.

    Attributes:
        has_failed: a token was not permitted, no token of the vocabulary continues the text, or it
            costs too much; nothing may follow.
        failure: which of these, in a sentence; empty where it has not failed, or llguidance broke.
    """

    def __init__(self, matcher: "llguidance.LLMatcher", vocab_size: int, has_end: bool):
        """`has_end`: a token of the vocabulary ends a text; else the matcher's end is behind it."""
        self.has_failed = False
        self.failure = ""
        self.is_complete = False
        self._matcher = matcher
        self._num_words = _num_words(vocab_size)
        self._num_matcher_words = _num_words(vocab_size + (not has_end))
        self._last_word = np.uint32((1 << 32) - 1 >> -vocab_size % 32)

    room = 0  # every token may decide what comes next

    def mask(self) -> np.ndarray:
        """u32[words]: token v may be next if bit v % 32 of word v // 32 is set; no bit is once it
        failed. Raises GrammarError if llguidance broke.
        """
        mask_X = np.zeros(self._num_matcher_words, np.int32)
        words_X = mask_X.view(np.uint32)[: self._num_words]
        if not self.has_failed:
            self._guard(self._matcher.unsafe_compute_mask_ptr, mask_X.ctypes.data, mask_X.nbytes)
            words_X[-1] &= self._last_word
            if self._matcher.is_error() or not words_X.any():
                self._fail(_failure(self._matcher))
        return words_X * np.uint32(not self.has_failed)

    def start_over(self, tokens: Sequence[int]) -> None:
        self._matcher.reset()
        self.has_failed, self.is_complete = self._matcher.is_error(), False
        for token in tokens:
            self.accept(token)

    def accept(self, token: int) -> None:
        """Appends a token to the text; raises GrammarError if llguidance broke."""
        if self.has_failed or not self._guard(self._matcher.consume_token, token):
            self._fail(_failure(self._matcher))
        else:
            self.is_complete = self._matcher.is_stopped()

    def _fail(self, why: str) -> None:
        if not self.has_failed:
            self.has_failed, self.failure = True, f"its grammar {why}"
            logging.warning("an answer ends: %s", self.failure)

    def _guard(self, call: Callable[..., object], *arguments: object) -> object:
        try:
            return panics.guard(lambda: call(*arguments), "llguidance", holds_stderr=False)
        except InputError as error:
            self.has_failed = True
            raise GrammarError(str(error)) from None


class Grammars:
    """Compiles grammars for a tokenizer, and keeps the latest. Several threads may."""

    def __init__(
        self, tokenizer: Tokenizer, eos_ids: Iterable[int], max_kept_bytes: int = _MAX_KEPT_BYTES
    ):
        """`eos_ids` end a complete text; without any, one ends where nothing can follow. Raises
        InputError if llguidance is not installed.
        """
        if not is_available():
            raise InputError("grammars need llguidance: pip install '.[serve]'")
        import llguidance

        ends, self._vocab_size = sorted(eos_ids), tokenizer.vocab_size
        self._llguidance = llguidance
        self._has_end = bool(ends)
        # llguidance needs an end, which no token of the model may be where it has none.
        self._eos_ids = ends or [self._vocab_size]
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Vocabulary(tokenizer, self._eos_ids[-1])),
            n_vocab=self._vocab_size + (not self._has_end),
            eos_token=self._eos_ids,
        )
        self._lock = threading.Lock()
        self._cached: collections.OrderedDict[str, Any] = collections.OrderedDict()
        self._kept_bytes, self._max_kept_bytes = 0, max_kept_bytes

    def start(self, grammar: str, tokens: Sequence[int] = ()) -> Grammar:
        """The text of a grammar after some tokens. Raises InputError if it cannot be compiled,
        permits no text, costs more than it may, or does not permit these tokens.
        """
        text = Grammar(self._compiled(grammar).deep_copy(), self._vocab_size, self._has_end)
        for token in tokens:
            text.accept(token)
        if text.has_failed or text.is_complete:
            raise InputError(f"the grammar permits nothing after {len(tokens)} tokens of an output")
        return text

    def _compiled(self, grammar: str) -> "llguidance.LLMatcher":
        with self._lock:
            if grammar in self._cached:
                self._cached.move_to_end(grammar)
                return self._cached[grammar]
        message = "the grammar cannot be compiled"
        matcher, failure = panics.guard(lambda: self._compile(grammar), message, holds_stderr=False)
        if failure:
            raise InputError(f"the grammar {failure}")
        with self._lock:
            if grammar not in self._cached:  # another thread may have been faster
                self._cached[grammar] = matcher
                self._kept_bytes += _num_bytes(grammar)
            while self._kept_bytes > self._max_kept_bytes:
                self._kept_bytes -= _num_bytes(self._cached.popitem(last=False)[0])
        return matcher

    def _compile(self, grammar: str) -> tuple["llguidance.LLMatcher", str]:
        """Compiles a grammar and begins a text; returns why there is none, or "". A grammar that
        costs too much often fails at its first token, as llguidance looks ahead from there.
        """
        limits = self._llguidance.LLParserLimits(**LIMITS)
        compiled = self._llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if compiled.is_error():
            return compiled, f"cannot be compiled: {_reason(compiled.get_error())}"
        matcher = compiled.deep_copy()
        first = _first(matcher.compute_bitmask(), self._eos_ids)
        if not matcher.is_error() and first is not None and matcher.consume_token(first):
            matcher.compute_bitmask()
        return compiled, _failure(matcher) if matcher.is_error() else ""


def _first(mask: bytes, eos_ids: Sequence[int]) -> int | None:
    """The first token that is permitted and does not end the text."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    bits[list(eos_ids)] = 0
    return int(bits.argmax()) if bits.any() else None


class _Vocabulary:
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, end: int):
        self.eos_token_id = end
        ids = range(tokenizer.vocab_size)
        self.tokens = [tokenizer.token_bytes(id, skip_special=False) for id in ids]
        self.tokens += [b""] * (end + 1 - tokenizer.vocab_size)
        self.special_token_ids = [
            id for id in ids if self.tokens[id] and not tokenizer.token_bytes(id)
        ]
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("texts are encoded")
        return self._encode(text, add_special=False)


def _num_words(num_tokens: int) -> int:
    return -(-num_tokens // 32)


def _num_bytes(grammar: str) -> int:
    """What a grammar takes once it is compiled, about."""
    return _GRAMMAR_BYTES + _CHAR_BYTES * len(grammar)


def _check_length(what: str, text: str, max_chars: int = MAX_CHARS) -> None:
    if len(text) > max_chars:
        raise InputError(f"{what} has at most {max_chars} characters, not {len(text)}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{what} holds half of a surrogate pair, which is no character") from None


def _failure(matcher: "llguidance.LLMatcher") -> str:
    error = _reason(matcher.get_error())
    if error.startswith("NoExtension") or not matcher.is_error():
        return _NOTHING
    if _UNSATISFIED in error:  # the mask left none to draw
        return "permits no token that the request's other constraints permit"
    return f"costs more than it may: {error}" if _COSTS.search(error) else f"has failed: {error}"


def _reason(error: str) -> str:
    """What is wrong, in one line, without the state and the excerpts behind it."""
    error = error.split("<non-verbose/>")[0].split("<state>")[0]
    if (match := _REGEX_ERROR.search(error)) is not None:
        return f"invalid regular expression {match['pattern']}: {match['what']}"[:_REASON_CHARS]
    lines = (line.strip() for line in error.splitlines() if not _EXCERPT.match(line))
    return " ".join(line for line in lines if line)[:_REASON_CHARS] or "no reason is given"
