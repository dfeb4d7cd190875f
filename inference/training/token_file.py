"""Texts as one file of token ids in the cache, which is mapped: encoded once."""

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from configs.errors import InputError
from inference.checkpoints import converted, safetensors_file
from inference.checkpoints.load import Progress
from inference.files import atomic, cache_directory, digests
from inference.text.tokenizer import Tokenizer
from inference.training.start import Vocabulary

_PIECE_CHARS = 1 << 20  # encoded at once: `tokenizers` takes some 300 bytes a token
_FORMAT = "2"
_TENSOR = "tokens"


def of_texts(
    texts: Sequence[str], vocabulary: Vocabulary, progress: Progress | None = None
) -> tuple[np.ndarray, str]:
    """The token ids of documents one after the other, each followed by the tokenizer's end token if
    it has one: mapped, uint16 or (of a larger vocabulary) int32.

    Returns:
        The ids, and a digest that names texts and tokenizer.

    Raises:
        InputError: as `Tokenizer.encode`, or the cache cannot be written.
    """
    digest = _digest(texts, vocabulary.identity)
    tokenizer = vocabulary.tokenizer
    tokens = cached(digest, lambda: _encoded(texts, tokenizer, progress), tokenizer.vocab_size)
    return tokens, digest


def cached(digest: str, make: Callable[[], np.ndarray], vocab_size: int) -> np.ndarray:
    """Token ids as `of_texts` returns them, made if the cache holds none of that digest; raises
    InputError if it cannot be written.
    """
    path = cache_directory.path() / "tokens" / f"{digest[:32]}.safetensors"
    if path.exists():
        try:
            return converted.map_kept(path)[_TENSOR]
        except InputError as error:
            logging.warning("%s; text is encoded again", error)
    tokens = make().astype(_dtype(vocab_size))
    try:
        with atomic.open_file(path, is_kept=True) as file:
            tensors = {_TENSOR: (tokens.shape, tokens.dtype.name)}
            safetensors_file.write_header(file, tensors, digests.UNSEALED)
            file.write(tokens.data)
            digests.seal(file)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
    return safetensors_file.map_arrays(path)[_TENSOR]


def _dtype(vocab_size: int) -> type[np.uint16 | np.int32]:
    return np.uint16 if vocab_size <= 1 << 16 else np.int32


def _digest(texts: Sequence[str], identity: bytes) -> str:
    whole = hashlib.sha256(_FORMAT.encode() + hashlib.sha256(identity).digest())
    for text in texts:
        whole.update(hashlib.sha256(text.encode()).digest())
    return whole.hexdigest()


def _encoded(texts: Sequence[str], tokenizer: Tokenizer, progress: Progress | None) -> np.ndarray:
    dtype = _dtype(tokenizer.vocab_size)
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    parts, done, total = [], 0, sum(map(len, texts))
    for text in texts:
        for piece in _pieces(text):
            parts.append(np.asarray(tokenizer.encode(piece, add_special=False), dtype))
            done += len(piece)
            if progress:
                progress(done, total, "encoding text")
        parts.append(np.asarray(end, dtype))
    return np.concatenate(parts)


def _pieces(text: str) -> Iterator[str]:
    """A long text in parts that end with a line, where there are lines."""
    start = 0
    while start < len(text):
        stop = len(text)
        if stop - start > _PIECE_CHARS:
            stop = text.rfind("\n", start, start + _PIECE_CHARS) + 1 or start + _PIECE_CHARS
        yield text[start:stop]
        start = stop
