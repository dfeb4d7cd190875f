"""Prompts and conversations of a file or a command line, checked before any work."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from configs.errors import InputError
from inference.files import json_lines
from inference.request import FORMER_NAMES, SamplingParams
from inference.text import sampling_fields

if TYPE_CHECKING:  # reading a file needs neither
    from inference.text.chat_template import Message
    from inference.text.tokenizer import Tokenizer

_WANTED = 'one of {"prompt": text} and {"messages": [{"role": text, "content": text}, ...]}'
_OTHERS = ("id", "tools", "documents", "template", *sampling_fields.NAMES)
_SOON_ENCODED = 1 << 20  # characters: so many take less than a second


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One request: a text or a conversation, and how to sample. Errors name `where`; `template` is
    the name of a chat template, by default that for the conversation.
    """

    where: str
    params: SamplingParams
    text: str | None = None
    messages: "tuple[Message, ...]" = ()
    tools: "list[Message] | None" = None
    documents: "list[Message] | None" = None
    template: str | None = None
    id: str | int | None = None

    def encode(self, tokenizer: "Tokenizer", max_context: int) -> list[int]:
        """Returns its token ids, or refuses before encoding if they exceed `max_context` by far.

        Raises:
            InputError: it has none, or is far too long; names the request.
        """
        contents = (message.get("content") for message in self.messages)
        size = sum(len(text) for text in (self.text, *contents) if isinstance(text, str))
        if size > _SOON_ENCODED:
            max_bytes = max_context * tokenizer.longest_token
            if size > max_bytes:
                raise InputError(
                    f"{self.where} has {size} characters; the context of {max_context} tokens "
                    f"holds at most {max_bytes}"
                )
        try:
            if self.text is not None:
                return tokenizer.encode(self.text)
            return tokenizer.with_template(self.template).apply_chat_template(
                self.messages, tools=self.tools, documents=self.documents
            )
        except RecursionError:
            raise InputError(f"{self.where}: its messages are nested too deeply") from None
        except InputError as error:
            raise InputError(f"{self.where}: {error}") from None


def from_texts(texts: Sequence[str], params: SamplingParams) -> list[Prompt]:
    """A prompt for each text."""
    return [
        Prompt(f"prompt {n}", params, text=check_text(f"prompt {n}", text))
        for n, text in enumerate(texts, 1)
    ]


def from_file(name: str, params: SamplingParams) -> list[Prompt]:
    """Reads one prompt a line of JSONL; a line's sampling fields override `params`.

    Raises:
        InputError: names the first line that is not valid.
    """
    prompts: list[Prompt] = []
    line_of_id: dict[str | int, int] = {}
    lines = json_lines.read(name, ("prompt", "messages"), _OTHERS, _WANTED, FORMER_NAMES)
    for number, fields in lines:
        where = f"{name} line {number}"
        prompt = _parse(where, fields, params)
        if prompt.id is not None and line_of_id.setdefault(prompt.id, number) != number:
            raise InputError(
                f"{where}: id {prompt.id!r} is that of line {line_of_id[prompt.id]} as well"
            )
        prompts.append(prompt)
    return prompts


def as_message(prompt: Prompt) -> Prompt:
    """A text as the first message of a user; a conversation unchanged."""
    if prompt.text is None:
        return prompt
    message = {"role": "user", "content": prompt.text}
    return dataclasses.replace(prompt, text=None, messages=(message,))


def with_template(prompt: Prompt, name: str) -> Prompt:
    """The prompt with a chat template of this name, unless it names one itself."""
    return prompt if prompt.template else dataclasses.replace(prompt, template=name)


def check_text(where: str, text: str) -> str:
    """Returns the text; raises InputError if it is empty or has no UTF-8 form."""
    if not text:
        raise InputError(f"{where} is empty: at least one character is needed")
    return _check_unicode(where, text)


def _check_unicode(where: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # From the command line: invalid UTF-8. From JSON: half of a surrogate pair.
        raise InputError(
            f"{where} is not valid text: character {error.start} has no UTF-8 form"
        ) from None
    return text


def _parse(where: str, fields: dict[str, Any], params: SamplingParams) -> Prompt:
    if "prompt" in fields:
        if not isinstance(fields["prompt"], str):
            raise InputError(f"{where}: 'prompt' is a text, not {type(fields['prompt']).__name__}")
        check_text(f"{where}: 'prompt'", fields["prompt"])
        for name in ("tools", "documents", "template"):
            if fields.get(name) is not None:
                raise InputError(f"{where}: {name!r} goes with messages, not with a prompt")
    else:
        _check_messages(where, fields["messages"])
    return Prompt(
        where, _params(where, fields, params), fields.get("prompt"),
        tuple(fields.get("messages", ())), _list(where, fields, "tools"),
        _list(where, fields, "documents"), _template(where, fields), _id(where, fields),
    )  # fmt: skip


def _check_messages(where: str, messages: object) -> None:
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{where}: 'messages' is not {_WANTED}")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InputError(f"{where}: 'messages' is not {_WANTED}")
        content = message.get("content")
        if content is None and message.get("tool_calls"):
            content = ""
        if not isinstance(content, str):
            raise InputError(f"{where}: 'messages' is not {_WANTED}")
        for field, text in (("role", message["role"]), ("content", content)):
            _check_unicode(f"{where}: {field!r}", text)


def _params(where: str, fields: dict[str, object], params: SamplingParams) -> SamplingParams:
    settings = {name: value for name, value in fields.items() if name in sampling_fields.NAMES}
    try:
        return sampling_fields.override(params, settings)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _list(where: str, fields: dict[str, object], name: str) -> "list[Message] | None":
    value = fields.get(name)
    if value is not None and not (
        isinstance(value, list) and all(isinstance(item, dict) for item in value)
    ):
        raise InputError(f"{where}: {name!r} is a list of objects")
    return value


def _template(where: str, fields: dict[str, object]) -> str | None:
    name = fields.get("template")
    if name is not None and not isinstance(name, str):
        raise InputError(f"{where}: 'template' is the name of a chat template, not {name!r:.60}")
    return name


def _id(where: str, fields: dict[str, object]) -> str | int | None:
    id = fields.get("id")
    if id is not None and (isinstance(id, bool) or not isinstance(id, str | int)):
        raise InputError(f"{where}: 'id' is a text or a whole number, not {id!r:.60}")
    return _check_unicode(f"{where}: 'id'", id) if isinstance(id, str) else id
