"""Streaming text: whole characters only, and nothing that may begin a stop string."""

import codecs
from collections.abc import Iterable, Sequence

from inference.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns one sequence's tokens into text as they arrive.

    Without a stop, all that `push` and `flush` return, joined, is `tokenizer.decode` of all ids.

    A stop string may not begin within the first `min_tokens` tokens.

    Attributes:
        stopped: the stop string that was met; it and what follows are not returned.
        num_tokens: tokens taken, the one that completed the stop string included; later ones are
            ignored.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        skip_special: bool = True,
    ):
        self.stopped: str | None = None
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._stop = tuple(text for text in stop if text)
        self._min_tokens = min_tokens
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # may be the beginning of a stop string
        self._at_start = tokenizer.strips_first_space

    def push(self, ids: Iterable[int]) -> str:
        """Text that is now certain."""
        text = ""
        for token in ids:
            if self.stopped is not None:
                break
            self.num_tokens += 1
            data = self._tokenizer.token_bytes(token, self._skip_special)
            text += self._release(self._decoder.decode(data))
        return text

    def flush(self) -> str:
        """The rest, at the end of the sequence."""
        if self.stopped is not None:
            return ""
        text = self._release(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        return text if self.stopped is not None else text + held

    def _release(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            text = text.removeprefix(" ")
        if not self._stop or not text or self.num_tokens <= self._min_tokens:
            return text
        text = self._held + text
        found = [(text.find(stop), stop) for stop in self._stop if stop in text]
        if found:
            start, self.stopped = min(found, key=lambda hit: (hit[0], -len(hit[1])))
            self._held = ""
            return text[:start]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`, and is not all of it."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
