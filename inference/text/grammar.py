"""What a text has to be: JSON of a schema, a match of a regular expression, one of some choices, a
text of a grammar, or one without some words.

A grammar says of each token whether it may come next (llguidance). It is text, as
`SamplingParams.grammar` holds it; the functions here write it.
"""

import collections
import importlib.util
import json
import re
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from configs.errors import InputError, shown
from inference.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

MAX_CHARS = 1 << 16
_MAX_RULES = 512  # llguidance follows them by recursion; longer ones than these are as few
_RULE = re.compile(r"\w(?:\.-?\d+|\[[^\]\n]{0,120}\]|\{[^}\n]{0,120}\})?\s*:")
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_MAX_KEPT_BYTES = 256 << 20  # of compiled grammars; each takes about so much, and by its text:
_GRAMMAR_BYTES, _CHAR_BYTES = 32 << 10, 256
_LIMITS: dict[str, Any] = {  # a fifth of llguidance's own: of what one grammar may cost
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 40_000,
    "step_max_items": 10_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
}
_SIGNS = frozenset("\\.+*?()|[]{}^$#&-~/\"'<>!@%")  # of regular expressions
_SPACE = "[ ]?"  # what JSON may have between its parts: without an end, models find none


def is_available() -> bool:
    """Whether llguidance is installed."""
    return importlib.util.find_spec("llguidance") is not None


def of_json_schema(schema: dict[str, Any]) -> str:
    """JSON that a schema describes.

    Raises:
        InputError: it is too long, or nested too deeply.
    """
    import llguidance

    options: Any = {"whitespace_pattern": _SPACE}
    try:
        text = json.dumps(schema)
        _check_length("the schema", text)
        return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=options)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"the schema cannot be read: {_reason(str(error))}") from None


def of_regex(pattern: str) -> str:
    """A whole text that matches a regular expression.

    Raises:
        InputError: it is too long.
    """
    import llguidance

    _check_length("the regular expression", pattern)
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def of_choices(choices: Iterable[str]) -> str:
    """One of some texts.

    Raises:
        InputError: they are too long, or one is empty.
    """
    import llguidance

    each = list(choices)
    if not each or not all(each):
        raise InputError("choices are texts, each of at least one character")
    quoted = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in each)
    _check_length("the list of choices", quoted)
    # As one lexeme: of rules, llguidance follows no more than 2000 side by side.
    return llguidance.LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {quoted}")


def of_lark(text: str) -> str:
    """A text of a grammar in Lark, as llguidance has it.

    Raises:
        InputError: it is too long, or has too many rules.
    """
    import llguidance

    _check_rules(text)
    return llguidance.LLMatcher.grammar_from_lark(text)


def is_gbnf(text: str) -> bool:
    """Whether a grammar is written as llama.cpp has it."""
    return _GBNF_RULE.search(text) is not None


def of_gbnf(text: str) -> str:
    """The same in llama.cpp's GBNF; a long one takes half a second.

    Raises:
        InputError: it is too long, has too many rules, or cannot be read.
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
    """Any text that holds none of these, however its tokens divide it.

    Raises:
        InputError: they are too long, or one is empty.
    """
    import llguidance

    each = list(words)
    if not each or not all(each):
        raise InputError("the words are texts, each of at least one character")
    listed = "|".join(map(_literal, each))
    _check_length("the list of words", listed)
    return llguidance.LLMatcher.grammar_from_lark(
        f"start: TEXT\nTEXT: /(?s:.*)/ & ~/(?s:.*)({listed})(?s:.*)/"
    )


def either(rules: str, name: str, other: str) -> str:
    """What the rule of this name describes in Lark, or another grammar, as the functions above
    write it.
    """
    found = json.loads(other)["grammars"][0] if other.startswith("{") else {"lark_grammar": other}
    first = {"lark_grammar": f"start: {name} | @other\n{rules}"}
    return json.dumps({"grammars": [first, {**found, "name": "other"}]})


def schema_of(text: str) -> dict[str, Any] | None:
    """The schema of a grammar that `of_json_schema` wrote; None of another one."""
    if not text.startswith("{"):
        return None
    found: dict[str, Any] | None = json.loads(text)["grammars"][0].get("json_schema")
    return found


def json_rule(schema: dict[str, Any]) -> str:
    """A rule's text in Lark: JSON of a schema, as `of_json_schema` has it."""
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": _SPACE}})


def _check_rules(text: str) -> None:
    _check_length("the grammar", text)
    num_rules = len(_RULE.findall(text))
    if num_rules > _MAX_RULES:
        raise InputError(f"the grammar has at most {_MAX_RULES} rules, not {num_rules}")


def _literal(text: str) -> str:
    """A text as a part of a regular expression within slashes."""
    return "".join(f"\\x{{{ord(c):x}}}" if c in _SIGNS or c < " " else c for c in text)


class Grammar:
    """One text as it grows.

    Attributes:
        has_failed: a token came that it does not permit, or it costs more than it may.
        is_complete: nothing can follow.
    """

    def __init__(self, matcher: "llguidance.LLMatcher", num_words: int):
        self.has_failed = matcher.is_error()
        self.is_complete = False
        self._matcher = matcher
        self._num_words = num_words

    def mask(self) -> np.ndarray:
        """u32[words], bit v % 32 of word v // 32: token v may be next. No bit is set once it has
        failed.
        """
        found = np.zeros(self._num_words, np.int32)
        if not self.has_failed:
            self._matcher.unsafe_compute_mask_ptr(found.ctypes.data, found.nbytes)
            self.has_failed = self._matcher.is_error()
        return found.view(np.uint32) * np.uint32(not self.has_failed)

    def accept(self, token: int) -> None:
        """The next token is this."""
        if self.has_failed or not self._matcher.consume_token(token):
            self.has_failed = True
        else:
            self.is_complete = self._matcher.is_stopped()


class Grammars:
    """Compiles grammars for a tokenizer, and keeps the latest. Several threads may."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_ids: Iterable[int],
        max_kept_bytes: int = _MAX_KEPT_BYTES,
    ):
        """`eos_ids` end a text that is complete; of compiled grammars so many bytes are kept.

        Raises:
            InputError: llguidance is not installed.
        """
        if not is_available():
            raise InputError("grammars need llguidance: pip install '.[serve]'")
        import llguidance

        self._llguidance = llguidance
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Vocabulary(tokenizer)),
            n_vocab=tokenizer.vocab_size,
            eos_token=sorted(eos_ids) or [0],
        )
        self._num_words = -(-tokenizer.vocab_size // 32)
        self._lock = threading.Lock()
        self._kept: collections.OrderedDict[str, Any] = collections.OrderedDict()
        self._kept_bytes, self._max_kept_bytes = 0, max_kept_bytes

    def start(self, grammar: str, tokens: Sequence[int] = ()) -> Grammar:
        """The text of a grammar after some tokens.

        Raises:
            InputError: it cannot be compiled, or does not permit these tokens.
        """
        found = Grammar(self._compiled(grammar).deep_copy(), self._num_words)
        for token in tokens:
            found.accept(token)
        if found.has_failed or found.is_complete:
            raise InputError(f"the grammar permits nothing after {len(tokens)} tokens of an output")
        return found

    def _compiled(self, grammar: str) -> "llguidance.LLMatcher":
        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
                return self._kept[grammar]
        limits = self._llguidance.LLParserLimits(**_LIMITS)
        matcher = self._llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise InputError(f"the grammar cannot be compiled: {_reason(matcher.get_error())}")
        with self._lock:
            if grammar not in self._kept:  # another thread may have been faster
                self._kept[grammar] = matcher
                self._kept_bytes += _num_bytes(grammar)
            while self._kept_bytes > self._max_kept_bytes:
                self._kept_bytes -= _num_bytes(self._kept.popitem(last=False)[0])
        return matcher


class _Vocabulary:
    """A tokenizer as llguidance reads it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer):
        self.eos_token_id = tokenizer.eos_id or 0
        ids = range(tokenizer.vocab_size)
        self.tokens = [tokenizer.token_bytes(id, skip_special=False) for id in ids]
        self.special_token_ids = [
            id for id in ids if self.tokens[id] and not tokenizer.token_bytes(id)
        ]
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("texts are encoded")
        return self._encode(text, add_special=False)


def _num_bytes(grammar: str) -> int:
    """What a grammar takes once it is compiled, about."""
    return _GRAMMAR_BYTES + _CHAR_BYTES * len(grammar)


def _check_length(what: str, text: str) -> None:
    if len(text) > MAX_CHARS:
        raise InputError(f"{what} has at most {MAX_CHARS} characters, not {len(text)}")


def _reason(error: str) -> str:
    """The line that says what is wrong, without the trace behind it."""
    lines = [line for line in error.splitlines() if line.strip()]
    return shown(lines[0])[1:-1] if lines else "no reason is given"
