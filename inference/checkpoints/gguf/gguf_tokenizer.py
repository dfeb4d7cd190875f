"""A tokenizer rebuilt from a GGUF file's metadata.

The rebuilt `tokenizer.json` is cached with the converted weights: finding a large vocabulary's
merges takes seconds.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from configs.errors import InputError, shown
from configs.model import ModelConfig
from inference.checkpoints import converted, mapped, tokenizer_files
from inference.checkpoints import text_files as names
from inference.checkpoints.gguf import gguf_file
from inference.checkpoints.gguf.gguf_scan import Header, StringArray
from inference.checkpoints.gguf.pretokenizers import FAMILY_DEFAULTS, SPLITS
from inference.files import atomic, digests
from inference.text import panics
from inference.text.infill import GGUF_NAMES
from inference.text.tokenizer import MissingTokenizer, Tokenizer

_FORMAT = 3  # of the cached file; a new number when the rebuilding changes
_MAX_TOKEN_CHARS = 1024  # every way to cut a token in two is tried; real ones have some 100
_PRE = "tokenizer.ggml.pre"
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    **{f"{name}_token": f"{name}_token_id" for name in GGUF_NAMES},
}


def load_tokenizer(header: Header, vocab_size: int) -> Tokenizer:
    """The tokenizer a file describes, from the cache when it was rebuilt before.

    Raises:
        MissingTokenizer: it describes none.
        InputError: its kind is not supported, or its metadata is unsound.
    """
    return _tokenizer(header, _load(header), vocab_size)


def rebuilt(header: Header, vocab_size: int) -> Tokenizer:
    """As `load_tokenizer`, without its cache."""
    backend = panics.guard(lambda: _build(header), f"{header.path}: cannot rebuild the tokenizer")
    return _tokenizer(header, backend, vocab_size)


def _tokenizer(header: Header, backend: tokenizers.Tokenizer, vocab_size: int) -> Tokenizer:
    templates = _templates(header)
    special = _special_tokens(header, backend)
    return Tokenizer(backend, vocab_size, special, templates.pop("default", None), templates)


def text_files(header: Header, config: ModelConfig, eos_ids: Sequence[int]) -> dict[str, bytes]:
    """The tokenizer as files that load without the GGUF; raises as `load_tokenizer`."""
    backend, ids = _load(header), _special_ids(header)
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_context,
        "clean_up_tokenization_spaces": False,
        **_special_tokens(header, backend),
    }
    generation = {"eos_token_id": list(eos_ids)} | {
        f"{name}_id": ids[name] for name in ("bos_token", "pad_token") if name in ids
    }
    files = {
        "tokenizer.json": backend.to_str(),
        "tokenizer_config.json": json.dumps(described, indent=1, ensure_ascii=False) + "\n",
        names.GENERATION: json.dumps(generation, indent=1) + "\n",
    }
    for name, template in _templates(header).items():
        place = names.TEMPLATE if name == "default" else f"{names.TEMPLATES}/{name}.jinja"
        files[place] = template
    return {name: text.encode() for name, text in files.items()}


def _load(header: Header) -> tokenizers.Tokenizer:
    if "tokenizer.ggml.model" not in header.metadata:
        raise MissingTokenizer(f"{header.path}: tokenizer.ggml.model is missing")
    kind = header.metadata["tokenizer.ggml.model"]
    if isinstance(kind, str) and kind == "gpt2" and _PRE not in header.metadata:
        logging.warning(
            "%s: %s is missing: texts are cut as %r cuts them, the default of %s",
            header.path, _PRE, pre_tokenizer(header), header.metadata.get("general.architecture"),
        )  # fmt: skip
    path = converted.place(header.path, *header.fingerprints) / f"tokenizer-{_FORMAT}.json"
    if (backend := _cached(path)) is not None:
        return backend
    backend = panics.guard(lambda: _build(header), f"{header.path}: cannot rebuild the tokenizer")
    try:
        with atomic.open_file(path, is_kept=True) as file:
            file.write(digests.sealed(backend.to_str()))
    except OSError as error:
        logging.warning("the tokenizer is not cached: %s: %s", path, error.strerror)
    return backend


def _special_tokens(header: Header, backend: tokenizers.Tokenizer) -> dict[str, str]:
    return {name: str(backend.id_to_token(i)) for name, i in _special_ids(header).items()}


def _templates(header: Header) -> dict[str, str]:
    """Chat templates by name; the one without a name is the default."""
    prefix, templates = "tokenizer.chat_template", {}
    for key in header.metadata:
        if key == prefix or key.startswith(f"{prefix}."):
            name = key.removeprefix(prefix).removeprefix(".") or "default"
            names.check_template_name(name, str(header.path))
            templates[name] = gguf_file.string_metadata(header, key) or ""
    return templates


def _cached(path: Path) -> tokenizers.Tokenizer | None:
    if not path.exists():
        return None
    try:
        sealed = mapped.read_text(path, mapped.MAX_TOKENIZER_BYTES)
        return tokenizer_files.parse_backend(digests.opened(sealed.encode(), str(path)), path)
    except InputError as error:
        logging.warning("%s; the tokenizer is built again", error)
        return None


def _special_ids(header: Header) -> dict[str, int]:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    count = tokens.count if isinstance(tokens, StringArray) else 0
    ids = {}
    for name, key in _SPECIAL_KEYS.items():
        token = header.metadata.get(f"tokenizer.ggml.{key}")
        if token is None:
            continue
        if not isinstance(token, int) or not 0 <= token < count:
            raise InputError(
                f"{header.path}: tokenizer.ggml.{key}={shown(token)} is outside the vocabulary"
            )
        ids[name] = token
    return ids


def _build(header: Header) -> tokenizers.Tokenizer:
    tokens = header.strings("tokenizer.ggml.tokens")
    for index, token in enumerate(tokens):
        if len(token) > _MAX_TOKEN_CHARS:
            raise InputError(
                f"token {index} has {len(token)} characters; at most {_MAX_TOKEN_CHARS} are valid"
            )
    special = {name: tokens[token] for name, token in _special_ids(header).items()}
    kind = gguf_file.string_metadata(header, "tokenizer.ggml.model")
    if kind == "gpt2":
        backend, adds_bos = _byte_level(header, tokens)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(header, tokens, special.get("unk_token")), True
    elif kind == "gemma4":
        backend, adds_bos = _merging(header, tokens, special.get("unk_token")), True
    else:
        raise InputError(
            f"tokenizer model {shown(kind)} is not supported; valid: gpt2, llama, gemma4"
        )
    _add_tokens(backend, header, tokens)
    _add_template(backend, header, special, adds_bos)
    return backend


def _ids(tokens: list[str]) -> dict[str, int]:
    ids: dict[str, int] = {}
    for index, token in enumerate(tokens):
        ids.setdefault(token, index)
    return ids


def pre_tokenizer(header: Header) -> str:
    """The name of how texts are cut; where the file has none, that of its architecture."""
    family = str(header.metadata.get("general.architecture"))
    return gguf_file.string_metadata(header, _PRE) or FAMILY_DEFAULTS.get(family, "default")


def _byte_level(header: Header, tokens: list[str]) -> tuple[tokenizers.Tokenizer, bool]:
    name = pre_tokenizer(header)
    split = SPLITS.get(name)
    if split is None:
        raise InputError(
            f"pre-tokenizer {shown(name)} is not supported; valid: {', '.join(SPLITS)}"
        )
    merges = [merge.partition(" ")[::2] for merge in header.strings("tokenizer.ggml.merges")]
    backend = tokenizers.Tokenizer(
        models.BPE(_ids(tokens), merges, ignore_merges=split.whole_words)
    )
    if split.composes:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, split.adds_bos


def _sentencepiece(header: Header, tokens: list[str], unknown: str | None) -> tokenizers.Tokenizer:
    is_gemma = str(header.metadata.get("general.architecture")).startswith("gemma")
    # llama.cpp writes Gemma's runs of spaces as spaces; the model knows them as runs of "▁".
    tokens = [token.replace(" ", "▁") if token.isspace() else token for token in tokens]
    if is_gemma:  # its scores do not follow the order of its merges; its ids do
        ranks = -np.arange(len(tokens), dtype=np.float64)
    else:
        ranks = np.asarray(header.metadata.get("tokenizer.ggml.scores", ()), np.float64)
    if len(ranks) != len(tokens):
        raise InputError(f"tokenizer.ggml.scores has {len(ranks)} entries for {len(tokens)} tokens")
    ids = _ids(tokens)
    adds_prefix = bool(header.metadata.get("tokenizer.ggml.add_space_prefix", True))
    return _of_characters(ids, _merges(ids, ranks.tolist()), unknown, adds_prefix)


def _merging(header: Header, tokens: list[str], unknown: str | None) -> tokenizers.Tokenizer:
    """Gemma 4's: SentencePiece's characters and bytes, with merges that are listed."""
    merges = []
    for merge in header.strings("tokenizer.ggml.merges"):
        cut = merge.find(" ", 1)
        merges.append((merge[:cut], merge[cut + 1 :]))
    return _of_characters(_ids(tokens), merges, unknown, adds_prefix=False)


def _of_characters(
    ids: dict[str, int], merges: list[tuple[str, str]], unknown: str | None, adds_prefix: bool
) -> tokenizers.Tokenizer:
    """A vocabulary of characters, with bytes for those it lacks, and "▁" for spaces."""
    backend = tokenizers.Tokenizer(
        models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    replace_spaces = normalizers.Replace(" ", "▁")
    steps: list[decoders.Decoder] = [
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
    ]  # fmt: skip
    if adds_prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace_spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = replace_spaces
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges(ids: Mapping[str, int], ranks: list[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best first, as SentencePiece ranks them."""
    ranked = []
    for token, index in ids.items():
        for cut in range(1, len(token)):
            first, second = ids.get(token[:cut]), ids.get(token[cut:])
            if first is not None and second is not None:
                key = (-ranks[index], -cut, cut - len(token), index, first, second)
                ranked.append((key, token[:cut], token[cut:]))
    ranked.sort()
    return [(first, second) for _, first, second in ranked]


def _add_tokens(backend: tokenizers.Tokenizer, header: Header, tokens: list[str]) -> None:
    kinds = np.asarray(header.metadata.get("tokenizer.ggml.token_type", np.ones(len(tokens))))
    if len(kinds) != len(tokens):
        raise InputError(
            f"tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens"
        )
    # Control tokens take the blanks after them: by the model's name, as in llama.cpp.
    model = str(header.metadata.get("general.name", "")).lower()
    strips, added = "phi-3" in model or "phi3" in model, []
    for index in np.flatnonzero(np.isin(kinds, (_UNKNOWN, _CONTROL, _USER_DEFINED))):
        # A token spelled otherwise in the vocabulary (Gemma's runs of spaces) is found by merging.
        if backend.token_to_id(tokens[index]) == index:
            special = kinds[index] != _USER_DEFINED
            rstrip = strips and tokens[index] not in ("<unk>", "<s>", "<|endoftext|>")
            added.append(
                AddedToken(tokens[index], normalized=False, special=bool(special), rstrip=rstrip)
            )
    backend.add_tokens(added)


def _add_template(
    backend: tokenizers.Tokenizer, header: Header, special: Mapping[str, str], adds_bos: bool
) -> None:
    first = header.metadata.get("tokenizer.ggml.add_bos_token", adds_bos)
    last = header.metadata.get("tokenizer.ggml.add_eos_token", False)
    before = [special["bos_token"]] if first and "bos_token" in special else []
    after = [special["eos_token"]] if last and "eos_token" in special else []
    if before or after:
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(token, backend.token_to_id(token)) for token in before + after],
        )
