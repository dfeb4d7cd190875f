"""The tokens that end a sequence: those that a checkpoint lists, its tokenizer's own, and the one
with which its chat template closes an answer, which authors forget to list.
"""

import logging
import re
import threading
from collections.abc import Iterable, Iterator, Set

from configs.errors import InputError
from inference.text import layouts
from inference.text.tokenizer import Tokenizer

# Words that no template looks for.
_QUESTION, _THOUGHT, _ANSWER = "questionable", "thoughtful", "answerable"
_CONTROL = re.compile(r"<[|｜].+[|｜]>")  # the form of a token that nobody writes in a text


class EndTokens(Set[int]):
    """Ids of end tokens. A thread waits for the slow process that renders a template."""

    def __init__(self, tokenizer: Tokenizer | None, listed: Iterable[int]):
        """`listed`: those that the checkpoint lists; without a tokenizer there are no others."""
        self._ids = list(dict.fromkeys(listed))
        self._tokenizer = tokenizer
        self._thread = threading.Thread(target=self._join, name="end tokens", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[int]:
        return iter(self._joined())

    def __contains__(self, token: object) -> bool:
        return token in self._joined()

    def __len__(self) -> int:
        return len(self._joined())

    def _joined(self) -> list[int]:
        self._thread.join()
        return self._ids

    def _join(self) -> None:
        """Adds those that are not listed, and says which."""
        if self._tokenizer is None:
            return
        sources = {
            "its tokenizer's end": self._tokenizer.eos_id,
            "the end of an answer in its chat template": of_template(self._tokenizer),
        }
        layout = layouts.of_template(self._tokenizer.template)
        for mark in layout.ends if layout is not None else ():
            sources[f"{mark} ends messages in its chat template"] = self._tokenizer.token_id(mark)
        names = []
        for source, token in sources.items():
            if token is not None and token < self._tokenizer.vocab_size and token not in self._ids:
                self._ids.append(token)
                content = self._tokenizer.token_bytes(token, skip_special=False).decode(
                    errors="replace"
                )
                names.append(f"{content!r} ({token}), {source}")
        if names:
            logging.warning(
                "end tokens: the checkpoint lists %s; joined by %s",
                ", ".join(map(str, self._ids[: -len(names)])) or "none",
                " and ".join(names),
            )


def of_template(tokenizer: Tokenizer) -> int | None:
    """The token by which the chat template closes an answer; None if it is text or unclear."""
    answer = {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT}
    try:
        text = tokenizer.chat_text([{"role": "user", "content": _QUESTION}, answer], False)
    except InputError:  # no template, or one that wants another conversation
        return None
    before, _, behind = text.rpartition(_ANSWER)
    behind = behind.lstrip()
    contents = {
        token.content: id
        for id, token in tokenizer.added_tokens.items()
        if token.content.strip() and behind.startswith(token.content)
        if token.special or _CONTROL.fullmatch(token.content)
    }
    closing = max(contents, key=len, default="")
    is_within = _THOUGHT in before and closing in before.rpartition(_THOUGHT)[2]
    return None if not closing or is_within else contents[closing]
