"""Text as it streams: whole characters only, and nothing that may be the start of a stop string."""

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

from inference.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns one sequence's tokens into text as they arrive.

    Without stop strings, the joined texts of `push` and `flush` are `tokenizer.decode` of all ids,
    special tokens included unless `skip_special`; except byte tokens behind which a run of them
    turns out not to be UTF-8, as whole characters are not held back for that. No stop string may
    begin within the first `min_tokens` tokens.

    Attributes:
        stopped: the stop string that was found; neither it nor what follows is returned.
        num_tokens: tokens decoded, with the one that completed the stop string; later ones are
            ignored.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        skip_special: bool = True,
        shown_ids: Iterable[int] = (),
    ):
        """`shown_ids`: special tokens that are text even with `skip_special`."""
        self.stopped: str | None = None
        self.num_tokens = 0
        self._stop = tuple(stop)
        self._starts = {text[:size] for text in stop for size in range(1, len(text))}
        self._min_tokens = min_tokens
        self._skip_special = skip_special
        self._shown_ids = frozenset(shown_ids)
        self._decoder = incremental_decoder(tokenizer)
        self._pending = ""  # may be the start of a stop string
        self._at_start = tokenizer.strips_first_space

    def push(self, ids: Iterable[int]) -> str:
        """Decodes tokens; returns the text that is certain now."""
        text = ""
        for token in ids:
            if self.stopped is not None:
                break
            self.num_tokens += 1
            skips = self._skip_special and token not in self._shown_ids
            text += self._until_stop(self._decoder.decode(token, skips))
        return text

    def flush(self) -> str:
        """The rest of the text, at the end of the sequence."""
        if self.stopped is not None:
            return ""
        text = self._until_stop(self._decoder.finish())
        pending, self._pending = self._pending, ""
        return text if self.stopped is not None else text + pending

    def _until_stop(self, text: str) -> str:
        """The pending and this text, up to what may be a stop string."""
        if self._at_start and text:
            self._at_start = False
            text = text.removeprefix(" ")
        if not self._stop or not text or self.num_tokens <= self._min_tokens:
            return text
        text = self._pending + text
        hits = [(text.find(stop), stop) for stop in self._stop if stop in text]
        if hits:
            start, self.stopped = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
            self._pending = ""
            return text[:start]
        keep = self._overlap(text)
        self._pending = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _overlap(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string, in time independent of
        their number.
        """
        longest = min(len(text), max(map(len, self._stop)) - 1)
        sizes = range(longest, 0, -1)
        return next((size for size in sizes if text[-size:] in self._starts), 0)


class IncrementalDecoder(Protocol):
    """Whole characters of tokens, one token at a time."""

    def decode(self, token: int, skip_special: bool = True) -> str:
        """The text that is certain with a further token."""

    def finish(self) -> str:
        """What stands for bytes that no token completed."""


def incremental_decoder(tokenizer: Tokenizer) -> IncrementalDecoder:
    """A decoder for a text that begins, leading space included."""
    return _ByteFallback(tokenizer) if tokenizer.byte_ids else _Utf8(tokenizer)


class _Utf8:
    """Each token continues the bytes of those before it."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def decode(self, token: int, skip_special: bool = True) -> str:
        return self._decoder.decode(self._tokenizer.token_bytes(token, skip_special))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _ByteFallback:
    """Tokens are whole characters, except `byte_ids`. In a run of these each byte is replaced from
    the first one on that UTF-8 does not allow.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._is_broken = False

    def decode(self, token: int, skip_special: bool = True) -> str:
        data = self._tokenizer.token_bytes(token, skip_special)
        if token not in self._tokenizer.byte_ids:
            # A token without text, such as a special one, ends no run.
            return self.finish() + data.decode() if data else ""
        if self._is_broken:
            return "\ufffd"
        try:
            return self._decoder.decode(data)
        except UnicodeDecodeError:
            self._is_broken = True
            return self._replaced() + "\ufffd"

    def finish(self) -> str:
        self._is_broken = False
        return self._replaced()

    def _replaced(self) -> str:
        pending, _ = self._decoder.getstate()
        self._decoder.reset()
        return "\ufffd" * len(pending)
