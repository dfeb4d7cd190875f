"""What to continue: prompts and conversations of flags or a file, checked before any work."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from configs.errors import InputError
from inference.request import SamplingParams
from scripts import inputs, templates
from scripts.flags import sampling_flags

_WANTED = 'one of {"prompt": text} and {"messages": [{"role": text, "content": text}, ...]}'
_MAX_BYTES = 64 << 20  # of a file
_MORE = ("id", "tools", "documents", "template")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One request: a text, or the messages of a conversation, and how to sample.

    Attributes:
        where: names it in errors.
        template: name of the chat template; None takes the one for the conversation.
        id: as its line gives it; None where it gives none.
    """

    where: str
    params: SamplingParams
    text: str | None = None
    messages: tuple[dict[str, Any], ...] = ()
    tools: list[Any] | None = None
    documents: list[Any] | None = None
    template: str | None = None
    id: str | int | None = None

    def encode(self, tokenizer: Any) -> list[int]:
        """Its token ids.

        Raises:
            InputError: there are none; names the request.
        """
        try:
            if self.text is not None:
                return tokenizer.encode(self.text)
            return templates.choose(tokenizer, self.template).apply_chat_template(
                self.messages, tools=self.tools, documents=self.documents
            )
        except RecursionError:
            raise InputError(f"{self.where}: its messages are nested too deeply") from None
        except InputError as error:
            raise InputError(f"{self.where}: {error}") from None


def from_texts(texts: Sequence[str], params: SamplingParams) -> list[Prompt]:
    """One prompt a text."""
    return [
        Prompt(f"prompt {n}", params, text=check_text(f"prompt {n}", text))
        for n, text in enumerate(texts, 1)
    ]


def from_file(name: str, params: SamplingParams) -> list[Prompt]:
    """One prompt a line of JSONL, blank lines aside; a line's own sampling fields come first.

    Raises:
        InputError: names the first line that is not valid.
    """
    prompts: list[Prompt] = []
    seen: dict[str | int, int] = {}
    lines = inputs.read_text(name, _MAX_BYTES).split("\n")  # not at U+2028, as splitlines
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{name} line {number}"
        prompt = _parse(where, line, params)
        if prompt.id is not None and seen.setdefault(prompt.id, number) != number:
            raise InputError(f"{where}: id {prompt.id!r} is that of line {seen[prompt.id]} as well")
        prompts.append(prompt)
    if not prompts:
        raise InputError(f"{name}: no line holds a request")
    return prompts


def as_message(prompt: Prompt) -> Prompt:
    """A text as the first message of a user; a conversation as it is."""
    if prompt.text is None:
        return prompt
    message = {"role": "user", "content": prompt.text}
    return dataclasses.replace(prompt, text=None, messages=(message,))


def with_template(prompt: Prompt, name: str) -> Prompt:
    """With a chat template of this name, unless it names one itself."""
    return prompt if prompt.template else dataclasses.replace(prompt, template=name)


def check_text(where: str, text: str) -> str:
    """The text, when it is one.

    Raises:
        InputError: it is empty, or no UTF-8 stands for it.
    """
    if not text:
        raise InputError(f"{where} is empty: at least one character is needed")
    return _check_unicode(where, text)


def _check_unicode(where: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # From the command line: a byte that is no UTF-8. From JSON: half of an escaped pair.
        raise InputError(
            f"{where} is not valid text: character {error.start} has no UTF-8 form"
        ) from None
    return text


def _parse(where: str, line: str, params: SamplingParams) -> Prompt:
    try:
        given = json.loads(line, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise InputError(f"{where} is not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits; deep nesting
        raise InputError(f"{where} is not JSON: {error}") from None
    if not isinstance(given, dict) or len({"prompt", "messages"} & set(given)) != 1:
        raise InputError(f"{where} is not {_WANTED}")
    known = ("prompt", "messages", *_MORE, *sampling_flags.FIELDS)
    unknown = [name for name in given if name not in known]
    if unknown:
        raise InputError(f"{where}: {unknown[0]!r:.60} is not one of {', '.join(known)}")
    if "prompt" in given:
        if not isinstance(given["prompt"], str):
            raise InputError(f"{where}: 'prompt' is a text, not {type(given['prompt']).__name__}")
        check_text(f"{where}: 'prompt'", given["prompt"])
    else:
        _check_messages(where, given["messages"])
    return Prompt(
        where,
        _params(where, given, params),
        given.get("prompt"),
        tuple(given.get("messages", ())),
        _list(where, given, "tools"),
        _list(where, given, "documents"),
        _template(where, given),
        _id(where, given),
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"it has the key {name[:60]!r} twice")
        found[name] = value
    return found


def _check_messages(where: str, messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{where}: 'messages' is not {_WANTED}")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InputError(f"{where}: 'messages' is not {_WANTED}")
        content = message.get("content")
        if content is None and message.get("tool_calls"):
            content = ""  # the calls are what it says
        if not isinstance(content, str):
            raise InputError(f"{where}: 'messages' is not {_WANTED}")
        for field, text in (("role", message["role"]), ("content", content)):
            _check_unicode(f"{where}: {field!r}", text)


def _params(where: str, given: dict[str, Any], params: SamplingParams) -> SamplingParams:
    own = {name: value for name, value in given.items() if name in sampling_flags.FIELDS}
    try:
        return sampling_flags.override(params, own)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _list(where: str, given: dict[str, Any], name: str) -> list[Any] | None:
    value = given.get(name)
    if value is not None and not (
        isinstance(value, list) and all(isinstance(item, dict) for item in value)
    ):
        raise InputError(f"{where}: {name!r} is a list of objects")
    if value is not None and "messages" not in given:
        raise InputError(f"{where}: {name!r} goes with messages, not with a prompt")
    return value


def _template(where: str, given: dict[str, Any]) -> str | None:
    name = given.get("template")
    if name is not None and not isinstance(name, str):
        raise InputError(f"{where}: 'template' is the name of a chat template, not {name!r:.60}")
    if name is not None and "messages" not in given:
        raise InputError(f"{where}: 'template' goes with messages, not with a prompt")
    return name


def _id(where: str, given: dict[str, Any]) -> str | int | None:
    own = given.get("id")
    if own is not None and (isinstance(own, bool) or not isinstance(own, str | int)):
        raise InputError(f"{where}: 'id' is a text or a whole number, not {own!r:.60}")
    return _check_unicode(f"{where}: 'id'", own) if isinstance(own, str) else own
