"""A tokenizer as the metadata of a `.gguf` file: the inverse of `gguf_tokenizer`."""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from configs.errors import InputError, shown
from inference.checkpoints.checkpoint import Checkpoint
from inference.checkpoints.gguf import gguf_tokenizer
from inference.checkpoints.gguf.export.export_metadata import Metadata
from inference.checkpoints.gguf.gguf_checkpoint import GgufFile
from inference.checkpoints.gguf.gguf_scan import Header, StringArray
from inference.checkpoints.gguf.pretokenizers import GPT2, SPLITS
from inference.text.infill import GGUF_NAMES
from inference.text.tokenizer import MissingTokenizer, Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_PREFIX = "tokenizer."
# Texts that tell tokenizers apart: words, digits, cases, spaces, line ends, scripts, bytes.
_SAMPLES = (
    "Hello, world! It's 12345.67 o'clock;  isn't  it?\n\n\tYes.   \r\n x",
    "naïve café ÀÉÎ straße Ωμέγα Привет мир 東京都 こんにちは 한국어 שלום",
    "def f(x_1):\n    return x_1**2  # 0x7F\n\n\n", "CamelCaseWORDs don't DON'T we'll WE'LL",
    "🙂🙃 e\u0301 \u00a0 \u200b ½ ² ٣", " leading and trailing ", "a", "",
)  # fmt: skip


def metadata(checkpoint: Checkpoint) -> Metadata:
    """What a file says of a checkpoint's tokenizer: of a `.gguf` file as it was, of others tokens,
    merges, types and templates; nothing where there is none.

    Raises:
        InputError: it cannot be expressed.
    """
    if isinstance(checkpoint, GgufFile):
        header = checkpoint.header
        return {
            key: header.strings(key) if isinstance(value, StringArray) else value
            for key, value in header.metadata.items()
            if key.startswith(_PREFIX)
        }
    with contextlib.suppress(MissingTokenizer):
        return _of_tokenizer(checkpoint.load_tokenizer(), checkpoint)
    logging.warning("%s has no tokenizer: nor has the file", checkpoint.config.name)
    return {}


def compare(header: Header, checkpoint: Checkpoint) -> None:
    """Raises an `InputError` if the tokenizer of a written file cuts a text in another way."""
    try:
        original = checkpoint.load_tokenizer()
    except MissingTokenizer:
        return
    rebuilt = gguf_tokenizer.rebuilt(header, checkpoint.config.vocab_size)
    for text in (*_SAMPLES, *original.special_tokens.values()):
        if rebuilt.encode(text) != original.encode(text):
            raise InputError(
                f"the tokenizer cannot be expressed in a .gguf file: {shown(text)} would be cut in "
                "another way"
            )


def _of_tokenizer(tokenizer: Tokenizer, checkpoint: Checkpoint) -> Metadata:
    raw = tokenizer.to_json()
    model, size = raw["model"], checkpoint.config.vocab_size
    if model.get("type") != "BPE":
        raise _refused(f"its model is {shown(model.get('type'))}, not BPE")
    merges = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge)
              for merge in model["merges"]]  # fmt: skip
    added = {token["id"]: token for token in raw["added_tokens"]}
    texts = {id: token for token, id in model["vocab"].items()}
    texts |= {id: token["content"] for id, token in added.items()}
    if texts and max(texts) >= size:
        raise _refused(f"token {max(texts)} is beyond the {size} rows of the embedding")
    tokens = [texts.get(id, f"[PAD{id}]") for id in range(size)]
    ids = {name: token for name in tokenizer.special_tokens
           if (token := tokenizer.special_id(name)) is not None}  # fmt: skip
    types = [_type(id, tokens[id], id in texts, added.get(id), ids.get("unk_token"), model)
             for id in range(size)]  # fmt: skip
    entries: Metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        **(_pieces(raw, merges, tokens) if model.get("byte_fallback") else _bytes(raw, merges)),
        **_ends(ids, checkpoint.eos_ids),
        **_around(tokenizer, ids),
    }
    for name, template in ({"": tokenizer.template} | tokenizer.templates).items():
        if template is not None:
            entries[f"tokenizer.chat_template{'.' if name else ''}{name}"] = template
    return entries


def _refused(why: str) -> InputError:
    return InputError(f"the tokenizer cannot be expressed in a .gguf file: {why}")


def _type(
    id: int, text: str, is_used: bool, added: Mapping[str, object] | None, unknown: int | None,
    model: Mapping[str, object],
) -> int:  # fmt: skip
    if not is_used:
        return _UNUSED
    if id == unknown and model.get("byte_fallback"):
        return _UNKNOWN
    if added is not None:
        return _CONTROL if added["special"] else _USER_DEFINED
    is_byte = text.startswith("<0x") and text.endswith(">") and len(text) == 6
    return _BYTE if model.get("byte_fallback") and is_byte else _NORMAL


def _bytes(raw: Mapping[str, Any], merges: Sequence[tuple[str, ...]]) -> Metadata:
    """A vocabulary of bytes, by the name that llama.cpp has for how it cuts a text."""
    normal = raw.get("normalizer") or {}
    composes = normal.get("type") == "NFC"
    if normal and not composes:
        raise _refused(f"its normalizer is {shown(normal.get('type'))}")
    cut = tuple(_patterns(raw.get("pre_tokenizer") or {}))
    whole = bool(raw["model"].get("ignore_merges"))
    for name, split in SPLITS.items():
        if (split.patterns, split.whole_words, split.composes) == (cut, whole, composes):
            return {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": name,
                "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
            }
    raise _refused(f"llama.cpp has no name for how it cuts texts, {shown(' then '.join(cut))}")


def _patterns(node: Mapping[str, Any]) -> list[str]:
    """What isolates its matches, one after the other."""
    kind = node.get("type")
    if kind == "Sequence":
        return [pattern for part in node["pretokenizers"] for pattern in _patterns(part)]
    if kind == "ByteLevel" and not node.get("add_prefix_space"):
        return [GPT2] if node.get("use_regex", True) else []
    if kind == "Digits":
        return [r"\p{N}" if node.get("individual_digits") else r"\p{N}+"]
    if kind == "Split" and node.get("behavior") == "Isolated" and not node.get("invert"):
        return [pattern for pattern in node["pattern"].values()]
    raise _refused(f"its pre-tokenizer has {shown(kind)}")


def _pieces(
    raw: Mapping[str, Any], merges: Sequence[tuple[str, ...]], tokens: Sequence[str]
) -> Metadata:
    """A vocabulary of SentencePiece's: what is merged first has the highest score."""
    ranks: dict[str, int] = {}
    for pair in merges:
        ranks.setdefault("".join(pair), len(ranks))
    scores = [-float(ranks.get(token, len(ranks) + id)) for id, token in enumerate(tokens)]
    prepends = "Prepend" in str(raw.get("normalizer")) or (
        (raw.get("pre_tokenizer") or {}).get("prepend_scheme") in ("always", "first")
    )
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.add_space_prefix": prepends,
    }


def _ends(ids: Mapping[str, int], eos_ids: Sequence[int]) -> Metadata:
    """The tokens with a name, and three at most that end a sequence."""
    keys = {"bos_token": "bos", "unk_token": "unknown", "pad_token": "padding"}
    keys |= {f"{name}_token": name for name in GGUF_NAMES}
    entries: Metadata = {
        f"tokenizer.ggml.{key}_token_id": ids[name] for name, key in keys.items() if name in ids
    }
    eos = ids.get("eos_token")
    ends = sorted(eos_ids, key=lambda id: id != eos) or ([] if eos is None else [eos])
    for key, id in zip(("eos", "eot", "eom"), ends, strict=False):
        entries[f"tokenizer.ggml.{key}_token_id"] = id
    if len(ends) > 3:
        logging.warning("a .gguf file names three end tokens: %s are left out", ends[3:])
    return entries


def _around(tokenizer: Tokenizer, ids: Mapping[str, int]) -> Metadata:
    """What is put before and behind a text."""
    text = tokenizer.encode("a")
    bare = tokenizer.encode("a", add_special=False)
    first, last = text[:1] != bare[:1], text[-1:] != bare[-1:]
    if (first and text[0] != ids.get("bos_token")) or (last and text[-1] != ids.get("eos_token")):
        raise _refused("it puts other tokens around a text than its first and its last")
    return {"tokenizer.ggml.add_bos_token": first, "tokenizer.ggml.add_eos_token": last}
