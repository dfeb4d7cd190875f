"""The tokenizer of Mistral's own files, `tekken.json`: tokens as bytes, two of which make a third
where that has a rank, the lowest first, as in tiktoken.
"""

import base64
import binascii
from collections.abc import Iterator, Mapping
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from configs.errors import InputError, shown
from inference.checkpoints import mapped
from inference.families.shared.config_keys import Keys
from inference.text import panics
from inference.text.tokenizer import byte_alphabet

_NAMED = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}

# Special tokens by number, of files that list none.
_OLDER = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
_CHARACTERS = byte_alphabet()
_MOST_TOKENS, _MOST_BYTES = 1 << 20, 1024
_MOST_VALUES = 1 << 23  # of the file


def read(path: Path) -> tokenizers.Tokenizer:
    """Returns the tokenizer; raises an `InputError` if the file is unsound."""
    text = mapped.read_text(path, mapped.MAX_TOKENIZER_BYTES)
    keys = Keys(mapped.parse_json(text, str(path), _MOST_VALUES))
    return panics.guard(lambda: _built(keys), f"{path}: not a valid tokenizer")


def named(backend: tokenizers.Tokenizer) -> dict[str, object]:
    """Returns the special tokens that have a use, by the keys of `tokenizer_config.json`."""
    return {name: token for name, token in _NAMED.items() if backend.token_to_id(token) is not None}


def _built(keys: Keys) -> tokenizers.Tokenizer:
    config = keys.nested("config")
    if config is None or not isinstance(pattern := config.raw.get("pattern"), str):
        raise InputError("config: pattern is missing")
    special = _special(keys, config)
    size = config.integer("default_vocab_size", limit=_MOST_TOKENS)
    pieces = _pieces(keys, max(size - len(special), 0))
    vocabulary = {piece: rank for rank, piece in enumerate(pieces, len(special))}
    merges = _merges(vocabulary)
    vocabulary |= {token: number for number, token in enumerate(special)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in special]
    )
    first = _NAMED["bos_token"]
    if first in special:
        backend.post_processor = processors.TemplateProcessing(
            single=[first, "$A"], special_tokens=[(first, special.index(first))]
        )
    backend.encode("a")  # some patterns panic only here
    return backend


def _special(keys: Keys, config: Keys) -> list[str]:
    """Returns the tokens that no text has, by number; those without a name have one by it."""
    stated = keys.raw.get("special_tokens")
    entries = [{"rank": n, "token_str": name} for n, name in enumerate(_OLDER)]
    if stated is not None:
        if not isinstance(stated, list) or not all(isinstance(entry, dict) for entry in stated):
            raise InputError("special_tokens must list objects")
        entries = stated
    count = config.integer("default_num_special_tokens", len(entries), _MOST_TOKENS)
    special = [f"<SPECIAL_{number}>" for number in range(count)]
    for entry in entries:
        rank, name = entry.get("rank"), entry.get("token_str")
        if type(rank) is not int or not 0 <= rank < count or not isinstance(name, str) or not name:
            raise InputError(
                f"special_tokens: rank={shown(rank)} and token_str={shown(name)} are "
                f"no token of {count}"
            )
        special[rank] = name
    if len(set(special)) != count:
        raise InputError("special_tokens: two have one token_str")
    return special


def _pieces(keys: Keys, count: int) -> Iterator[str]:
    """Yields so many tokens by rank, their bytes as GPT-2 spells them."""
    entries = keys.raw.get("vocab")
    if not isinstance(entries, list) or len(entries) < count:
        raise InputError(f"vocab must list at least {count} tokens")
    for rank, entry in enumerate(entries[:count]):
        encoded = entry.get("token_bytes") if isinstance(entry, dict) else None
        try:
            piece = base64.b64decode(encoded if isinstance(encoded, str) else "", validate=True)
        except (binascii.Error, ValueError):
            piece = b""
        if not 0 < len(piece) <= _MOST_BYTES or entry.get("rank", rank) != rank:
            raise InputError(
                f"vocab: token {rank} must have this rank and, as base64, 1 to {_MOST_BYTES} bytes"
            )
        yield piece.decode("latin-1").translate(_CHARACTERS)


def _merges(ranks: Mapping[str, int]) -> list[tuple[str, str]]:
    """Returns every way to make a token of two others, by its rank, then by theirs."""
    merges = []
    for piece in ranks:
        cuts = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        pairs = [(ranks[a], ranks[b], a, b) for a, b in cuts if a in ranks and b in ranks]
        merges += [pair[2:] for pair in sorted(pairs)]
    return merges
