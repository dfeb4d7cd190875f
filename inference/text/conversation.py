"""A conversation that grows by a message and its answer at a time."""

import json
import os

from configs.errors import InputError
from inference.files import user_files
from inference.text import prompts
from inference.text.tokenizer import Tokenizer


class Conversation:
    """The messages so far.

    Attributes:
        num_tokens: of the last prompt and its answer.
    """

    def __init__(self, tokenizer: Tokenizer, max_context: int):
        self.messages: list[dict[str, str]] = []
        self.num_tokens = 0
        self._num_tokens_before = 0  # without the message that is being answered
        self._tokenizer = tokenizer
        self._max_context = max_context

    def ask(self, text: str) -> list[int]:
        """Adds a user's message; returns token ids of the conversation, for the prefix cache.
        Raises InputError, and adds none, if it is invalid, the template refuses it, or the context
        has no room.
        """
        prompts.check_text("the message", text)
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self._tokenizer.apply_chat_template(messages)
        if len(ids) >= self._max_context:
            raise InputError(
                f"the context holds {self._max_context} tokens, with this message the conversation "
                f"has {len(ids)}: the message was not kept; /reset starts over"
            )
        self._num_tokens_before = self.num_tokens
        self.messages, self.num_tokens = messages, len(ids)
        return ids

    def answer(self, text: str, num_tokens: int) -> None:
        self.messages.append({"role": "assistant", "content": text})
        self.num_tokens += num_tokens

    def withdraw(self) -> None:
        """Removes the last message, which has no answer."""
        self.messages.pop()
        self.num_tokens = self._num_tokens_before

    def reset(self) -> None:
        self.messages = self._system()
        self.num_tokens = 0

    def instruct(self, text: str) -> None:
        """Replaces the system's message, or removes it where the text is empty."""
        if text:
            prompts.check_text("the message", text)
        turns = self.messages[len(self._system()) :]
        self.messages = [{"role": "system", "content": text}] * bool(text) + turns

    def _system(self) -> list[dict[str, str]]:
        return [message for message in self.messages[:1] if message["role"] == "system"]

    @property
    def num_free_tokens(self) -> int:
        return self._max_context - self.num_tokens

    def save(self, name: str) -> None:
        """Writes a line for `generate --input`, atomically; raises InputError if that fails."""
        path = user_files.check_target(f"/save {name}", os.path.expanduser(name))
        line = json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n"
        user_files.write({path: line.encode()})
