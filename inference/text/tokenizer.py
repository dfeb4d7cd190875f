"""Text to token ids and back: a thin wrapper around `tokenizers`, and the bytes of each token."""

import copy
import functools
import itertools
import json
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from configs.errors import InputError, shown
from inference.text import panics

if TYPE_CHECKING:  # an engine of token ids alone needs neither
    import tokenizers

    from inference.text.chat_template import Message
    from inference.text.infill import Infill
    from inference.text.quoting import Quoter


class MissingTokenizer(InputError):
    """A checkpoint has none: it serves prompts of token ids."""


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    Special tokens written out in a raw prompt are special tokens, as in transformers (unless the
    checkpoint sets `split_special_tokens`); in the messages of a conversation they are text
    (`inference/text/quoting.py`).

    Attributes:
        templates: further chat templates by name; "tool_use" is for conversations with tools.
        vocab_size: ids are below this, the rows of the model's embedding.
        special_tokens: {"bos_token": "<s>", ...}, as templates see them.
        added_tokens: those found in a text before it is cut, by id; special ones too.
        may_panic: it fails at some texts in a way that is costly to catch (`panics`).
        strips_first_space: the decoded text loses one leading space (SentencePiece's dummy prefix).
        byte_ids: SentencePiece's tokens of one byte each, for characters without a piece; runs of
            them are text together (`text_of_bytes`).
    """

    def __init__(
        self,
        backend: "tokenizers.Tokenizer",
        vocab_size: int,
        special_tokens: Mapping[str, str],
        template: str | None,
        templates: Mapping[str, str] = types.MappingProxyType({}),
    ):
        self.vocab_size = vocab_size
        self.special_tokens = dict(special_tokens)
        self.template = template
        self.templates = dict(templates)
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        spelling = _spelling(backend)
        self.strips_first_space, self.byte_ids = spelling.strips_first_space, spelling.byte_ids
        self._to_bytes = spelling.to_bytes
        self._bytes = dict(spelling.fixed)  # and of the tokens that were needed so far
        self.added_tokens: dict[int, tokenizers.AddedToken] = backend.get_added_tokens_decoder()
        self._special_ids = {id for id, token in self.added_tokens.items() if token.special}
        self.may_panic = panics.may_panic(backend)
        self._quoter: Quoter | None = None  # until a conversation needs it
        self.bos_id = self.special_id("bos_token")
        self.eos_id = self.special_id("eos_token")

    def check_same(self, other: "Tokenizer", owner: str = "the model that drafts") -> None:
        """Raises InputError, naming a token, if the tokenizer of `owner` has other tokens."""
        vocab, other_vocab = (tokenizer._backend.get_vocab() for tokenizer in (self, other))
        for token, id in vocab.items():
            if other_vocab.get(token) != id:
                raise InputError(
                    f"{owner} has another tokenizer: {shown(token)} is {id} here and "
                    f"{shown(other_vocab.get(token, 'absent'))} there"
                )

    def to_json(self) -> dict[str, Any]:
        settings: dict[str, object] = json.loads(self._backend.to_str())
        return settings

    def special_id(self, name: str) -> int | None:
        """The id of a token by its name ('bos_token'); None: there is none."""
        content = self.special_tokens.get(name)
        return None if content is None else self._backend.token_to_id(content)

    def token_id(self, content: str) -> int | None:
        """The id of a token of the model by its content; None: there is none."""
        id: int | None = self._backend.token_to_id(content)
        return id if id is not None and id < self.vocab_size else None

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Returns the token ids of a text, with BOS and the like if `add_special`.

        Raises:
            InputError: the text is not valid Unicode, or holds a token without an embedding.
        """
        return self._encode(self._backend, text, add_special)

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Returns the token ids of two texts, with the tokens that the tokenizer puts around and
        between them; raises as `encode`.
        """
        return self._encode(self._backend, first, True, second)

    def _encode(
        self,
        backend: "tokenizers.Tokenizer",
        text: str,
        add_special: bool = False,
        pair: str | None = None,
    ) -> list[int]:
        try:
            f"{text}{pair or ''}".encode()
        except UnicodeEncodeError as error:
            raise InputError(f"the text is not valid Unicode: {error.reason}") from None
        encoding = panics.guard(
            lambda: backend.encode(text, pair, add_special_tokens=add_special),
            "cannot encode text",
            self.may_panic,
        )
        ids: list[int] = encoding.ids
        if ids and max(ids) >= self.vocab_size and backend is self._backend:
            raise InputError(
                f"the text holds token {backend.id_to_token(max(ids))!r} (id {max(ids)}), "
                f"outside the model's vocabulary of {self.vocab_size}"
            )
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of token ids, as `tokenizers` decodes them; invalid UTF-8 becomes U+FFFD."""
        spelled = [(token in self.byte_ids, self.token_bytes(token, skip_special)) for token in ids]
        runs = itertools.groupby((pair for pair in spelled if pair[1]), lambda pair: pair[0])
        text = "".join(
            (text_of_bytes if is_run else _replaced)(b"".join(data for _, data in run))
            for is_run, run in runs
        )
        return text[1:] if self.strips_first_space and text.startswith(" ") else text

    def token_bytes(self, token: int, skip_special: bool = True) -> bytes:
        """The bytes of a token; empty for a skipped special token or an unassigned id."""
        if skip_special and token in self._special_ids:
            return b""
        cached = self._bytes.get(token)
        if cached is None:
            content = self._backend.id_to_token(token)
            cached = self._bytes[token] = b"" if content is None else self._to_bytes(content)
        return cached

    def specials_in(self, texts: Iterable[str]) -> dict[str, int]:
        """Ids of the special tokens that occur in some texts, by their own text."""
        special = {self.added_tokens[id].content: id for id in self._special_ids}
        listed = tuple(texts)
        return {word: id for word, id in special.items() if any(word in text for text in listed)}

    @functools.cached_property
    def longest_token(self) -> int:
        return max(len(self.token_bytes(token, False)) for token in range(self.vocab_size))

    @functools.cached_property
    def infill(self) -> "Infill | None":
        """Writes prompts for models that fill gaps; None without tokens for that."""
        from inference.text import infill, quoting  # most engines need neither

        layout = infill.of_tokenizer(self)
        if layout is None:
            return None
        quoter = quoting.Quoter(self._backend, layout.contents)
        around, text = self.encode("a"), self.encode("a", add_special=False)
        starts = (n for n in range(len(around)) if around[n : n + len(text)] == text)
        return infill.Infill(
            layout, functools.partial(quoter.encode_text, encode=self._encode),
            around[: next(starts, 0)], self.strips_first_space,
        )  # fmt: skip

    def encode_infill(self, prefix: str, suffix: str) -> list[int]:
        """Returns the token ids of a prompt whose answer belongs between the two texts.

        Raises:
            InputError: the model has no tokens for that, or as `encode`.
        """
        from inference.text.infill import MISSING, Gap

        if self.infill is None:
            raise InputError(MISSING)
        return self.infill.encode(Gap(prefix, suffix))

    def with_template(self, name: str | None) -> "Tokenizer":
        """Returns the tokenizer with the chat template of this name; itself where the name is None.

        Raises:
            InputError: the checkpoint has no such template; lists those it has.
        """
        if name is None:
            return self
        templates = self.templates
        if self.template is not None:
            templates = {"default": self.template} | templates
        if name not in templates:
            have = f"valid: {', '.join(templates)}" if templates else "this checkpoint has none"
            raise InputError(f"no chat template {name[:80]!r}; {have}")
        return self.with_template_text(templates[name])

    def with_template_text(self, template: str) -> "Tokenizer":
        chosen = copy.copy(self)
        chosen.template, chosen.templates = template, {}
        return chosen

    def template_for(self, tools: "Sequence[Message] | None") -> str | None:
        """The template of a conversation with or without tools."""
        return self.templates.get("tool_use", self.template) if tools else self.template

    def chat_text(
        self,
        messages: Sequence["Message"],
        add_generation_prompt: bool = True,
        tools: "Sequence[Message] | None" = None,
        documents: "Sequence[Message] | None" = None,
        variables: Mapping[str, object] = types.MappingProxyType({}),
    ) -> str:
        """Renders a conversation by the checkpoint's template, with further `variables` of that.

        Raises:
            InputError: there is no template, or as `chat_template.render`.
        """
        from inference.text import chat_template  # an engine of token ids needs no jinja2

        template = self.template_for(tools)
        if template is None:
            alternatives = f" but {', '.join(self.templates)}" if self.templates else ""
            raise InputError(
                f"this checkpoint has no chat template{alternatives}; give it a plain prompt"
            )
        return chat_template.render(
            template, messages, tools=tools, documents=documents, variables=variables,
            add_generation_prompt=add_generation_prompt, special_tokens=self.special_tokens,
        )  # fmt: skip

    def apply_chat_template(
        self,
        messages: Sequence["Message"],
        add_generation_prompt: bool = True,
        tools: "Sequence[Message] | None" = None,
        documents: "Sequence[Message] | None" = None,
        variables: Mapping[str, object] = types.MappingProxyType({}),
        continues: bool = False,
    ) -> list[int]:
        """Token ids of a conversation. Special tokens that the template writes are tokens; those in
        messages, tools, documents or variables are text. With `continues` they end with the last
        message's content, which is to go on; `add_generation_prompt` is false then.

        Raises:
            InputError: as `chat_text` and `encode`, the two cannot be told apart, or the template
                leaves out one of several system messages.
        """

        def write(messages: Any, tools: Any, documents: Any, variables: Any) -> str:
            opened = _with_end(messages) if continues else messages
            text = self.chat_text(opened, add_generation_prompt, tools, documents, variables)
            return _until_end(text) if continues else text

        return self._encode_chat(write, _check_systems, messages, tools, documents, variables)

    def encode_answer(
        self, messages: Sequence["Message"], tools: "Sequence[Message] | None" = None
    ) -> list[int]:
        """Token ids of what the template writes of the last message behind the prompt that the
        others make, with its end: encoded alone, as a token may have the end of one and the start
        of the other. Raises InputError as `apply_chat_template`, or if it stands elsewhere.
        """

        def write(messages: Any, tools: Any, documents: Any, variables: Any) -> str:
            prompt = self.chat_text(messages[:-1], True, tools)
            text = self.chat_text(messages, False, tools)
            if not text.startswith(prompt):
                raise InputError(
                    "the chat template does not write the answer behind the prompt that asks for "
                    "it (a thought that it expects may be missing: reasoning_content)"
                )
            return text.removeprefix(prompt)

        return self._encode_chat(write, lambda messages, text: None, messages, tools, None, {})

    def _encode_chat(
        self,
        write: Callable[..., str],
        check: Callable[[Sequence["Message"], str], None],
        messages: Sequence["Message"],
        tools: "Sequence[Message] | None",
        documents: "Sequence[Message] | None",
        variables: Mapping[str, object],
    ) -> list[int]:
        """Token ids of what `write` makes of messages, tools, documents and variables, control
        tokens in which are text; `check` may refuse its text.
        """
        from inference.text import quoting

        values = list(map(dict, messages)), tools, documents, dict(variables)
        text = write(*values)
        check(messages, text)
        if self._quoter is None:
            sources = filter(None, (self.template, *self.templates.values()))
            self._quoter = quoting.Quoter(self._backend, sources)
        mark = quoting.unused_mark(text)
        marked = self._quoter.mark(*values, mark)
        if marked != values:
            again = write(*marked)
            if self._quoter.has_quoted(text, again, mark):
                return self._quoter.encode(again, mark, self._encode)
        if self._backend.encode_special_tokens:  # in texts they are text, in the template tokens
            return self._quoter.encode(text, mark, self._encode)
        return self._encode(self._backend, text)


def _check_systems(messages: Sequence["Message"], text: str) -> None:
    """Raises InputError if a template's text lacks one of several system messages."""
    systems = [n for n, message in enumerate(messages) if message.get("role") == "system"]
    for index in systems if len(systems) > 1 else ():
        content = messages[index].get("content")
        if isinstance(content, str) and content.strip() not in text:
            raise InputError(
                f"messages[{index}] is a system message that the chat template leaves out; send "
                "one system message, before all others"
            )


_END = "\ue0f3\ue0e4"  # private use: where the content of an open message ends


def _with_end(messages: Sequence["Message"]) -> "list[Message]":
    *before, last = messages
    if not isinstance(last.get("content"), str):
        raise InputError("a message that is to go on has content")
    return [*before, {**last, "content": last["content"] + _END}]


def _until_end(text: str) -> str:
    before, end, _ = text.rpartition(_END)
    if not end:
        raise InputError("the chat template does not write the last message: it cannot go on")
    return before


class _Spelling(NamedTuple):
    """How a tokenizer spells bytes: those of a token's content, and `fixed` ones by tokens' ids."""

    to_bytes: Callable[[str], bytes]
    fixed: dict[int, bytes]
    byte_ids: frozenset[int] = frozenset()
    strips_first_space: bool = False


def _spelling(backend: "tokenizers.Tokenizer") -> _Spelling:
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
    steps = decoder.get("decoders", [decoder])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        # Added tokens are found in the text itself: their letters do not stand for bytes.
        added = backend.get_added_tokens_decoder()
        return _Spelling(
            _from_byte_level, {id: token.content.encode() for id, token in added.items()}
        )
    if set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} and kinds:
        strips = any(
            (step["type"] == "Strip" and step.get("start") == 1)
            or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
            for step in steps
        )
        values = _byte_values(backend) if "ByteFallback" in kinds else {}
        return _Spelling(_from_sentencepiece, values, frozenset(values), strips)
    raise InputError(
        f"tokenizer decoder {' + '.join(map(str, kinds))} is not supported; "
        "valid: byte-level BPE, SentencePiece"
    )


def byte_alphabet() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level BPE (Radford et al. 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + i) for i, byte in enumerate(unprintable)
    }


_BYTE_OF = {character: byte for byte, character in byte_alphabet().items()}


def _from_byte_level(content: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in content)
    except KeyError:
        return content.encode()  # as `tokenizers` has it


def _from_sentencepiece(content: str) -> bytes:
    return content.replace("▁", " ").encode()


def _byte_values(backend: "tokenizers.Tokenizer") -> dict[int, bytes]:
    names = [(f"<0x{byte:{case}}>", byte) for byte in range(256) for case in ("02X", "02x")]
    ids = [(backend.token_to_id(name), bytes([byte])) for name, byte in names]
    return {id: data for id, data in ids if id is not None}


def text_of_bytes(data: bytes) -> str:
    """The text of a whole run of byte tokens; U+FFFD for each byte of one that is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(data)


def _replaced(data: bytes) -> str:
    return data.decode(errors="replace")
