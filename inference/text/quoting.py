"""Control tokens that users write stay text; only those that the chat template writes are tokens.

The conversation is rendered a second time with a mark inside every control token that its messages
hold, and at the ends of texts which could become one together with the template's text. What still
reads as a control token in that rendering was written by the template.

Control tokens are the special tokens, and other added tokens that a template writes (the turns of
DeepSeek R1's distillations). In the assistant's own messages the latter remain tokens: templates
look for them there (`</think>`), and the model did generate tokens.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken

from configs.errors import InputError
from inference.text.chat_template import Message

# Cuneiform: letters without case, which no template strips as blanks and Python prints unescaped.
_MARKS = range(0x12000, 0x12399)
_ALIASES = range(0x100000, 0x10FFFE)  # private use


class Quoter:
    """Tells a tokenizer's control tokens in messages from those that chat templates write.

    A token of a single character cannot hold a mark: it is a token wherever it stands.
    """

    def __init__(self, backend: tokenizers.Tokenizer, templates: Iterable[str]):
        self._backend = backend
        added: list[AddedToken] = list(backend.get_added_tokens_decoder().values())
        source = "\n".join(templates)
        long = [token for token in added if len(token.content) > 1]
        special = [token.content for token in long if token.special]
        written = [
            token.content
            for token in long
            if not token.special and token.content.strip() and token.content in source
        ]
        self._names = special + written
        self._all, self._special = _Marker(self._names), _Marker(special)
        self._pattern = self._all.pattern
        self._aliased: _AliasedTokenizer | None = None

    def mark(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        documents: Sequence[Message] | None,
        variables: Mapping[str, object],
        mark: str,
    ) -> tuple[list[Message], list[Message] | None, list[Message] | None, dict[str, object]]:
        """Marks the texts that hold control tokens; other arguments are returned as they are."""
        marked = [
            (self._special if message.get("role") == "assistant" else self._all).mark(message, mark)
            for message in messages
        ]
        unmarked = tools, documents, variables
        return marked, *(self._all.mark(value, mark) for value in unmarked)

    def has_quoted(self, rendered: str, marked: str, mark: str) -> bool:
        """Whether a marked rendering has control tokens that are text; raises InputError if they
        differ by more than the marks.
        """
        if marked.replace(mark, "") != rendered:
            match = self._pattern.search(rendered)
            raise InputError(
                "a message holds a control token of the model, and the chat template reads it: "
                f"leave {repr(match[0]) if match else 'it'} out"
            )
        return self._pattern.findall(marked) != self._pattern.findall(rendered)

    def encode_text(self, text: str, encode: Callable[..., list[int]]) -> list[int]:
        """Token ids of a text, all of whose control tokens are text."""
        if not self._pattern.search(text):
            return encode(self._backend, text)
        mark = unused_mark(text)
        return self.encode(self._all.mark(text, mark), mark, encode)

    def encode(self, marked: str, mark: str, encode: Callable[..., list[int]]) -> list[int]:
        """Token ids of a marked rendering: `encode(backend, text)` gives those of plain text."""
        self._aliased = self._aliased or _AliasedTokenizer(self._backend, self._names)
        return self._aliased.encode(self._pattern, marked, mark, encode)


class _Marker:
    def __init__(self, names: list[str]):
        longest_first = sorted(names, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._starts = frozenset(name[:end] for name in names for end in range(1, len(name)))
        self._ends = frozenset(name[start:] for name in names for start in range(1, len(name)))
        self._longest = max(map(len, names), default=0)

    def mark(self, value: object, mark: str) -> Any:
        if isinstance(value, str):
            return self._mark_ends(self._mark_tokens(value, mark), mark)
        if isinstance(value, Mapping):
            return {
                # Templates look keys up, so that only those with a whole token are marked.
                self._mark_tokens(key, mark) if isinstance(key, str) else key: self.mark(item, mark)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.mark(item, mark) for item in value]
        return value

    def _mark_tokens(self, text: str, mark: str) -> str:
        return self.pattern.sub(lambda match: match[0][0] + mark + match[0][1:], text)

    def _mark_ends(self, text: str, mark: str) -> str:
        """Marks a text that starts or ends with a part of a token, inside of strippable blanks."""
        bare = text.strip()
        sizes = range(1, min(self._longest, len(bare) + 1))
        if any(bare[:size] in self._ends for size in sizes):
            at = text.index(bare)
            text = text[:at] + mark + text[at:]
        if any(bare[-size:] in self._starts for size in sizes):
            at = len(text.rstrip())
            text = text[:at] + mark + text[at:]
        return text


def unused_mark(rendered: str) -> str:
    """A character that a rendering does not hold."""
    used = set(rendered)
    mark = next((chr(code) for code in _MARKS if chr(code) not in used), None)
    if mark is None:
        raise InputError("the conversation uses every sign of cuneiform, and control tokens")
    return mark


class _AliasedTokenizer:
    """The tokenizer with an alias, a character of private use, for each control token: the
    template's act as tokens, down to the blanks they strip; the users' are text to the whole
    pipeline.
    """

    def __init__(self, backend: tokenizers.Tokenizer, names: list[str]):
        self._alias = {name: chr(code) for name, code in zip(names, _ALIASES, strict=False)}
        self._copy = tokenizers.Tokenizer(backend.model)  # the vocabulary itself is shared
        if backend.normalizer is not None:
            self._copy.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._copy.pre_tokenizer = backend.pre_tokenizer
        added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        tokens = dict(sorted(added.items()))
        contents = [self._alias.get(t.content, t.content) for t in tokens.values()]
        self._copy.add_tokens(
            [
                AddedToken(
                    content, single_word=t.single_word, lstrip=t.lstrip, rstrip=t.rstrip,
                    normalized=t.normalized, special=False,
                )
                for content, t in zip(contents, tokens.values(), strict=True)
            ]
        )  # fmt: skip
        ids_of_tokens = zip(contents, tokens, strict=True)
        self._ids = {self._copy.token_to_id(content): token for content, token in ids_of_tokens}
        unknown = getattr(backend.model, "unk_token", None)
        word_ids = {self._copy.token_to_id(name) for name in self._alias if name != unknown}
        self._forbidden = word_ids - {None}  # words of the vocabulary itself, by the copy's ids

    def encode(
        self, pattern: re.Pattern[str], marked: str, mark: str, encode: Callable[..., list[int]]
    ) -> list[int]:
        if not set(marked).isdisjoint(self._alias.values()):
            raise InputError("a message holds control tokens beside characters above U+100000")
        text = pattern.sub(lambda match: self._alias[match[0]], marked).replace(mark, "")
        ids = encode(self._copy, text)
        if not self._forbidden.isdisjoint(ids):  # the vocabulary has it as a word too
            raise InputError("a message holds a control token that this tokenizer knows as a word")
        return [self._ids.get(token, token) for token in ids]
