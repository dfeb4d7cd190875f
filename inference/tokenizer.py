"""Text to token ids and back: a thin wrapper over `tokenizers`, plus the bytes of each token."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from configs.errors import InputError
from inference import chat_template
from inference.checkpoints import mapped

_T = TypeVar("_T")

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    Special tokens written out in a text are taken as special tokens, in raw prompts and in chat
    messages alike, as transformers does.

    Attributes:
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
    ):
        self.vocab_size = vocab_size
        self.special_tokens = dict(special_tokens)
        self.template = template
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self._to_bytes, self.strips_first_space = _byte_decoder(backend)
        self._special_ids = {
            token for token, added in backend.get_added_tokens_decoder().items() if added.special
        }
        self._bytes: dict[int, bytes] = {}
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
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"the text is not valid Unicode: {error.reason}") from None
        encoding = guard(
            lambda: self._backend.encode(text, add_special_tokens=add_special), "cannot encode text"
        )
        ids: list[int] = encoding.ids
        if ids and max(ids) >= self.vocab_size:
            raise InputError(
                f"the text holds token {self._backend.id_to_token(max(ids))!r} (id {max(ids)}), "
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
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as the checkpoint's template writes it.

        Raises:
            InputError: there is no template, or as `chat_template.render`.
        """
        if self.template is None:
            raise InputError("this checkpoint has no chat template; give it a plain prompt")
        return chat_template.render(
            self.template,
            messages,
            add_generation_prompt=add_generation_prompt,
            special_tokens=self.special_tokens,
        )

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation; the template writes its own special tokens.

        Raises:
            InputError: as `chat_text` and `encode`.
        """
        return self.encode(self.chat_text(messages, add_generation_prompt), add_special=False)


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
    return Tokenizer(
        load_backend(path),
        vocab_size,
        _special_tokens(special | {k: v for k, v in config.items() if v is not None}),
        _template(directory, config),
    )


def load_backend(path: Path) -> tokenizers.Tokenizer:
    """A `tokenizer.json`.

    Raises:
        InputError: the file is unsound.
    """
    text = mapped.read_text(path)
    return guard(lambda: tokenizers.Tokenizer.from_str(text), f"{path}: not a valid tokenizer")


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


def _template(directory: Path, config: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.exists():
        return mapped.read_text(path)
    value = config.get("chat_template")
    if isinstance(value, list):  # several templates by name
        by_name = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value = by_name.get("default")
    if value is not None and not isinstance(value, str):
        raise InputError(f"{directory / 'tokenizer_config.json'}: chat_template must be a string")
    return value


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
