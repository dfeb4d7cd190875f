"""A conversation that grows by a message and an answer at a time, or stays as it was."""

import json
import os
from typing import Any

from configs.errors import InputError
from inference import files
from scripts import prompts, targets


class Conversation:
    """The messages so far.

    Attributes:
        messages: {"role", "content"} each, the system's first where there is one.
        num_tokens: of what the model was given last, and its answer.
    """

    def __init__(self, tokenizer: Any, max_context: int):
        self.messages: list[dict[str, str]] = []
        self.num_tokens = 0
        self._num_tokens_before = 0  # the message that is being answered
        self._tokenizer = tokenizer
        self._max_context = max_context

    def ask(self, text: str) -> list[int]:
        """Token ids of the conversation with a message of the user's, which stays.

        The whole of it each time: what of it is computed already is for the engine to find.

        Raises:
            InputError: the message is no text, the template refuses it, or there is no room; then
                it does not stay.
        """
        prompts.check_text("the message", text)
        asked = [*self.messages, {"role": "user", "content": text}]
        ids = self._tokenizer.apply_chat_template(asked)
        if len(ids) >= self._max_context:
            raise InputError(
                f"the context holds {self._max_context} tokens, with this message the conversation "
                f"has {len(ids)}: the message was not kept; /reset starts over"
            )
        self._num_tokens_before = self.num_tokens
        self.messages, self.num_tokens = asked, len(ids)
        return ids

    def answer(self, text: str, num_tokens: int) -> None:
        """The answer to the last message."""
        self.messages.append({"role": "assistant", "content": text})
        self.num_tokens += num_tokens

    def withdraw(self) -> None:
        """The last message goes: it has no answer."""
        self.messages.pop()
        self.num_tokens = self._num_tokens_before

    def reset(self) -> None:
        """Back to the system's message."""
        self.messages = self._system()
        self.num_tokens = 0

    def instruct(self, text: str) -> None:
        """Another message of the system's, or none; the rest stays."""
        if text:
            prompts.check_text("the message", text)
        rest = self.messages[len(self._system()) :]
        self.messages = [{"role": "system", "content": text}] * bool(text) + rest

    def _system(self) -> list[dict[str, str]]:
        return [message for message in self.messages[:1] if message["role"] == "system"]

    @property
    def num_free_tokens(self) -> int:
        """What the context still holds."""
        return self._max_context - self.num_tokens

    def save(self, name: str) -> None:
        """Writes the messages as a line that `generate --input` takes; whole or not at all.

        Raises:
            InputError: the file cannot be written.
        """
        path = targets.check(f"/save {name}", os.path.expanduser(name))
        line = json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n"
        try:
            with files.atomic_file(path) as file:
                file.write(line.encode())
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from None
