"""Text as it streams: whole characters only, and nothing that may be the start of a stop string."""

import codecs
from collections.abc import Iterable, Sequence

from inference.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns one sequence's tokens into text as they arrive.

    Without stop strings, the texts that `push` and `flush` return are, joined, `tokenizer.decode`
    of all ids, special tokens included unless `skip_special`. No stop string may begin within the
    first `min_tokens` tokens.

    Attributes:
        stopped: the stop string that was found; neither it nor what follows is returned.
        num_tokens: tokens decoded, including the one that completed the stop string; later ones are
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
        self._stop = tuple(stop)
        self._starts = {text[:size] for text in stop for size in range(1, len(text))}
        self._min_tokens = min_tokens
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""  # may be the start of a stop string
        self._at_start = tokenizer.strips_first_space

    def push(self, ids: Iterable[int]) -> str:
        """Decodes tokens; returns the text that is certain now."""
        text = ""
        for token in ids:
            if self.stopped is not None:
                break
            self.num_tokens += 1
            data = self._tokenizer.token_bytes(token, self._skip_special)
            text += self._until_stop(self._decoder.decode(data))
        return text

    def flush(self) -> str:
        """The rest of the text, at the end of the sequence."""
        if self.stopped is not None:
            return ""
        text = self._until_stop(self._decoder.decode(b"", final=True))
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
        found = [(text.find(stop), stop) for stop in self._stop if stop in text]
        if found:
            start, self.stopped = min(found, key=lambda hit: (hit[0], -len(hit[1])))
            self._pending = ""
            return text[:start]
        keep = self._overlap(text)
        self._pending = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _overlap(self, text: str) -> int:
        """Length of the longest suffix of `text` that begins a stop string, and is not all of it.
        Its time does not depend on how many there are.
        """
        longest = min(len(text), max(map(len, self._stop)) - 1)
        sizes = range(longest, 0, -1)
        return next((size for size in sizes if text[-size:] in self._starts), 0)
