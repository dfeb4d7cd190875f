"""The tokenizer of a directory: `tokenizer.json`, and what the files beside it add; or, where there
is none, Mistral's `tekken.json`.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from configs.errors import InputError, shown
from inference.checkpoints import mapped, text_files
from inference.checkpoints.hf import tekken
from inference.text import panics
from inference.text.tokenizer import MissingTokenizer, Tokenizer

_FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")
# Those that transformers knows by name, in the order it adds them.
_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
_LISTED = "added_tokens_decoder"
_ID = re.compile(r"\d{1,9}", re.ASCII)


def load_tokenizer(directory: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer and the chat templates of a directory.

    Raises:
        MissingTokenizer: there is no `tokenizer.json`, and no `tekken.json`.
        InputError: a file is unsound.
    """
    path = directory / text_files.TOKENIZER
    config_path = directory / text_files.TOKENIZER_CONFIG
    config = _read(config_path)
    if path.exists():
        backend = parse_backend(mapped.read_text(path, mapped.MAX_TOKENIZER_BYTES), path)
    elif (tekken_path := directory / text_files.TEKKEN).exists():
        backend = tekken.read(tekken_path)
        config = tekken.named(backend) | config
    else:
        raise MissingTokenizer(f"{path} is missing (save it from the fast tokenizer)")
    special_tokens = panics.guard(lambda: _add_tokens(backend, directory, config), str(config_path))
    backend.encode_special_tokens = config.get("split_special_tokens") is True
    templates = _templates(directory, config)
    return Tokenizer(backend, vocab_size, special_tokens, templates.pop("default", None), templates)


def parse_backend(text: str, path: Path) -> tokenizers.Tokenizer:
    """Parses a `tokenizer.json`, which errors name by `path`; raises an `InputError`."""
    return panics.guard(lambda: _tried(text), f"{path}: not a valid tokenizer")


def _tried(text: str) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(text)
    backend.encode("a")  # some files panic only here
    return backend


def _read(path: Path) -> dict[str, object]:
    return mapped.read_json(path) if path.exists() else {}


def _add_tokens(
    backend: tokenizers.Tokenizer, directory: Path, config: Mapping[str, object]
) -> dict[str, str]:
    """Adds what only the files beside `tokenizer.json` know, as transformers does: tokens that are
    listed, by id; then those with a name, and the extra ones, all of which are special.

    Returns:
        The tokens with a name.
    """
    added = backend.get_added_tokens_decoder()
    # Older files, which transformers reads where none are listed.
    older = {} if _LISTED in config else _read(directory / "special_tokens_map.json")
    special_tokens, extra = _special_tokens(config, older)
    if _LISTED in config:
        listed = _listed(config[_LISTED])
    else:
        contents = {token.content for token in (*special_tokens.values(), *extra)}
        listed = _older(_read(directory / "added_tokens.json"), contents) | added
    names = {token.content for token in special_tokens.values()}
    names |= {token.content for token in added.values() if token.special}  # once special, for ever
    for token in listed.values():
        token.special = token.special or token.content in names
    backend.add_tokens([token for _, token in sorted(listed.items())])
    for index, token in listed.items():
        if added.get(index) is not token and backend.token_to_id(token.content) != index:
            raise InputError(
                f"{_LISTED}: token {shown(token.content)} is listed as {index}, "
                f"the tokenizer has it as {backend.token_to_id(token.content)}"
            )
    flags = {token.content: token for token in listed.values()}
    special = [
        flags.get(token.content, token) if name in _NAMES else token
        for name, token in special_tokens.items()
    ]
    backend.add_special_tokens([token for token in special + extra if token.content])
    return {name: token.content for name, token in special_tokens.items()}


def _special_tokens(
    config: Mapping[str, Any], older: Mapping[str, object]
) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    """Tokens with a name, transformers' own before those of the model, and those without one."""
    keys = {**config, **older}
    extra = keys.get("extra_special_tokens") or keys.get("additional_special_tokens") or []
    if not isinstance(extra, dict | list):
        raise InputError("extra_special_tokens must be a list or an object of tokens")
    model_names = [key for key in keys if key.endswith("_token") and key not in _NAMES]
    raw = {name: keys.get(name) for name in (*_NAMES, *model_names)}
    if isinstance(extra, dict):
        raw, extra = raw | extra, []
    elif older.get("extra_special_tokens"):
        extra = [*(config.get("extra_special_tokens") or []), *extra]
    special = {name: token for name, value in raw.items() if (token := _token(value, special=True))}
    return special, [token for value in extra if (token := _token(value, special=True))]


def _listed(value: object) -> dict[int, AddedToken]:
    """Tokens by id, with all their flags."""
    if not isinstance(value, dict) or not all(isinstance(v, dict) for v in value.values()):
        raise InputError(f"{_LISTED}: must be an object of id -> token")
    listed = {}
    for index, raw in value.items():
        if not _ID.fullmatch(index):
            raise InputError(f"{_LISTED}: {shown(index)} is no id")
        token = _token(raw, special=False)
        if token is None or not token.content:
            raise InputError(f"{_LISTED}: token {index} has no content")
        listed[int(index)] = token
    return listed


def _older(value: Mapping[str, Any], special: set[str]) -> dict[int, AddedToken]:
    """`added_tokens.json`: ids by text."""
    for content, index in value.items():
        if isinstance(index, bool) or not isinstance(index, int) or index < 0 or not content:
            raise InputError(f"added_tokens.json: {shown(content)} has {shown(index)}, not an id")
    return {
        index: AddedToken(content, normalized=content not in special, special=content in special)
        for content, index in value.items()
    }


def _token(raw: object, special: bool) -> AddedToken | None:
    """A token spelled out, or its text alone; None where it is neither."""
    if isinstance(raw, str):
        return AddedToken(raw, normalized=False, special=special)
    if not isinstance(raw, dict) or not isinstance(content := raw.get("content"), str):
        return None
    flags = {flag: raw[flag] for flag in _FLAGS if flag in raw}
    if not all(isinstance(value, bool) for value in flags.values()):
        raise InputError(f"a flag of token {shown(content)} is neither true nor false")
    return AddedToken(content, **flags | ({"special": True} if special else {}))


def _templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name, "default" among them; files win over the configuration."""
    label = str(directory / text_files.TOKENIZER_CONFIG)
    files = text_files.named_templates(directory)
    if (directory / text_files.TEMPLATE).exists():
        files["default"] = directory / text_files.TEMPLATE
    if files:
        return {name: mapped.read_text(path) for name, path in files.items()}
    value = config.get("chat_template")
    if isinstance(value, list):  # several templates by name
        if not all(isinstance(item, dict) for item in value):
            raise InputError(f"{label}: chat_template lists {{name, template}} objects")
        value = {item.get("name"): item.get("template") for item in value}
    elif value is not None:
        value = {"default": value}
    for name, template in (value or {}).items():
        text_files.check_template_name(name, label)
        if not isinstance(template, str):
            raise InputError(f"{label}: chat_template must be a string")
    return value or {}
