"""Text to token ids and back: a thin wrapper over `tokenizers`, plus the bytes of each token."""

import contextlib
import json
import os
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from configs.errors import InputError
from inference import chat_template, quoting
from inference.checkpoints import mapped, text_files

_T = TypeVar("_T")

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    Special tokens written out in a raw prompt are taken as special tokens, as transformers does; in
    the messages of a conversation they are text (`inference/quoting.py`).

    Attributes:
        template: the chat template; None when there is none.
        templates: further ones by name; "tool_use" is the one for conversations with tools.
        vocab_size: ids are below this, the rows of the model's embedding.
        special_tokens: {"bos_token": "<s>", ...}, as templates see them.
        bos_id, eos_id: the tokenizer's own; None when it has none.
        strips_first_space: the decoded text loses one leading space (SentencePiece's dummy prefix).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
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
        self._to_bytes, self.strips_first_space = _byte_decoder(backend)
        self._special_ids = {
            token for token, added in backend.get_added_tokens_decoder().items() if added.special
        }
        self._bytes: dict[int, bytes] = {}
        self._quoter: quoting.Quoter | None = None  # until a conversation needs it
        self.bos_id = self._id("bos_token")
        self.eos_id = self._id("eos_token")

    def _id(self, name: str) -> int | None:
        content = self.special_tokens.get(name)
        return None if content is None else self._backend.token_to_id(content)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: what to encode.
            add_special: add what the tokenizer puts around a text, such as a BOS.

        Raises:
            InputError: the text is no valid Unicode, or holds a token the model has no embedding
                for.
        """
        return self._encode(self._backend, text, add_special)

    def _encode(
        self, backend: tokenizers.Tokenizer, text: str, add_special: bool = False
    ) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"the text is not valid Unicode: {error.reason}") from None
        encoding = guard(
            lambda: backend.encode(text, add_special_tokens=add_special), "cannot encode text"
        )
        ids: list[int] = encoding.ids
        if ids and max(ids) >= self.vocab_size and backend is self._backend:
            raise InputError(
                f"the text holds token {backend.id_to_token(max(ids))!r} (id {max(ids)}), "
                f"outside the model's vocabulary of {self.vocab_size}"
            )
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
        text = b"".join(self.token_bytes(token, skip_special) for token in ids).decode(
            errors="replace"
        )
        return text[1:] if self.strips_first_space and text.startswith(" ") else text

    def token_bytes(self, token: int, skip_special: bool = True) -> bytes:
        """The bytes of a token; none for a skipped special token or an unassigned id."""
        if skip_special and token in self._special_ids:
            return b""
        known = self._bytes.get(token)
        if known is None:
            content = self._backend.id_to_token(token)
            known = self._bytes[token] = b"" if content is None else self._to_bytes(content)
        return known

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
    ) -> str:
        """A conversation as the checkpoint's template writes it.

        Raises:
            InputError: there is no template, or as `chat_template.render`.
        """
        template = self.templates.get("tool_use", self.template) if tools else self.template
        if template is None:
            named = f" but {', '.join(self.templates)}" if self.templates else ""
            raise InputError(f"this checkpoint has no chat template{named}; give it a plain prompt")
        return chat_template.render(
            template,
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            special_tokens=self.special_tokens,
        )

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation. The special tokens that the template writes are tokens;
        those that messages, tools or documents hold are text.

        Raises:
            InputError: as `chat_text` and `encode`, or the two cannot be told apart.
        """
        text = self.chat_text(messages, add_generation_prompt, tools, documents)
        self._quoter = self._quoter or quoting.Quoter(self._backend)
        given = [list(map(dict, messages)), tools, documents]
        mark = quoting.free_mark(text)
        marked = self._quoter.mark(given, mark)
        if marked != given:
            again = self.chat_text(marked[0], add_generation_prompt, marked[1], marked[2])
            if self._quoter.split(text, again, mark):
                return self._quoter.encode(again, mark, self._encode)
        return self._encode(self._backend, text)


def from_directory(directory: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a Hugging Face directory.

    Raises:
        InputError: `tokenizer.json` is missing, or a file is unsound.
    """
    path = directory / "tokenizer.json"
    if not path.exists():
        raise InputError(
            f"{directory}: tokenizer.json is missing (save it from the fast tokenizer)"
        )
    config_path = directory / "tokenizer_config.json"
    config = mapped.read_json(config_path) if config_path.exists() else {}
    special_path = directory / "special_tokens_map.json"
    special = mapped.read_json(special_path) if special_path.exists() else {}
    # transformers reads the map only where the configuration has no `added_tokens_decoder`.
    first, second = (special, config) if "added_tokens_decoder" in config else (config, special)
    named = _special_tokens(first) | _special_tokens(second)
    backend = load_backend(path)
    guard(lambda: _add_tokens(backend, config, named), f"{config_path}: added_tokens_decoder")
    templates = _templates(directory, config)
    return Tokenizer(backend, vocab_size, named, templates.pop("default", None), templates)


def load_backend(path: Path) -> tokenizers.Tokenizer:
    """A `tokenizer.json`.

    Raises:
        InputError: the file is unsound.
    """
    text = mapped.read_text(path)
    with _muted():
        return guard(lambda: _tried(text), f"{path}: not a valid tokenizer")


def _tried(text: str) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(text)
    backend.encode("a")  # some files panic only here
    return backend


@contextlib.contextmanager
def _muted() -> Iterator[None]:
    """Nothing on stderr: a Rust panic writes its trace there before it is an exception."""
    try:
        kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    except OSError:  # there is no stderr
        yield
        return
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def guard(call: Callable[[], _T], message: str) -> _T:
    """Runs a call into `tokenizers`, whose Rust panics are no `Exception`s.

    Raises:
        InputError: the call failed or panicked.
    """
    try:
        return call()
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputError(f"{message}: {' '.join(str(error).split())[:300]}") from None


def _special_tokens(raw: Mapping[str, Any]) -> dict[str, str]:
    named = {}
    for name in _SPECIAL_NAMES:
        value = raw.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            named[name] = content
    return named


def _add_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]
) -> None:
    """Adds what only the configuration knows, as transformers does: by id, then by name."""
    listed = config.get("added_tokens_decoder", {})
    if not isinstance(listed, dict) or not all(isinstance(v, dict) for v in listed.values()):
        raise InputError("must be an object of id -> token")
    for index, token in sorted((int(key), token) for key, token in listed.items()):
        content = token.get("content")
        flags = {flag: token[flag] for flag in _FLAGS if flag in token}
        if not isinstance(content, str) or not content:
            raise InputError(f"token {index} has no content")
        if not all(isinstance(value, bool) for value in flags.values()):
            raise InputError(f"a flag of token {index} is neither true nor false")
        flags["special"] = flags.get("special", False) or content in named.values()
        backend.add_tokens([tokenizers.AddedToken(content, **flags)])
        if backend.token_to_id(content) != index:
            raise InputError(
                f"token {content[:80]!r} is listed as {index}, "
                f"the tokenizer has it as {backend.token_to_id(content)}"
            )
    unknown = [token for token in named.values() if backend.token_to_id(token) is None]
    backend.add_special_tokens(list(dict.fromkeys(unknown)))


def _templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name, "default" among them; files win over the configuration."""
    label = str(directory / "tokenizer_config.json")
    files = text_files.named_templates(directory)
    if (directory / text_files.TEMPLATE).exists():
        files["default"] = directory / text_files.TEMPLATE
    if files:
        return {name: mapped.read_text(path) for name, path in files.items()}
    value = config.get("chat_template")
    if isinstance(value, list):  # several templates by name
        value = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
    elif value is not None:
        value = {"default": value}
    for name, template in (value or {}).items():
        text_files.check_template_name(name, label)
        if not isinstance(template, str):
            raise InputError(f"{label}: chat_template must be a string")
    return value or {}


def _byte_decoder(backend: tokenizers.Tokenizer) -> tuple[Callable[[str], bytes], bool]:
    """How this tokenizer spells bytes, and whether it strips the first space."""
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
    steps = decoder.get("decoders", [decoder])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _from_byte_level, False
    if set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} and kinds:
        strips = any(
            (step["type"] == "Strip" and step.get("start") == 1)
            or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
            for step in steps
        )
        return _from_sentencepiece, strips
    raise InputError(
        f"tokenizer decoder {' + '.join(map(str, kinds))} is not supported; "
        "valid: byte-level BPE, SentencePiece"
    )


def byte_alphabet() -> dict[int, str]:
    """The printable character that byte-level BPE writes for each byte (Radford et al. 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }


_BYTE_OF = {character: byte for byte, character in byte_alphabet().items()}


def _from_byte_level(content: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in content)
    except KeyError:
        return content.encode()  # an added token, spelled as it is


def _from_sentencepiece(content: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(content)
    return bytes([int(byte[1], 16)]) if byte else content.replace("▁", " ").encode()
