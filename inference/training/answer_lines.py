"""Files of what is to be answered, and how: JSONL, as sequences of at most a window."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from configs.errors import InputError
from inference.checkpoints.load import Progress
from inference.files import json_lines
from inference.training import answers
from inference.training.answers import MESSAGES, Answered, Encoder

_MAX_BYTES, _MAX_LINE_CHARS = 1 << 30, 4 << 20
_ANSWERS = f'one of {{{MESSAGES}}} and {{"prompt": text, "completion": text}}'
_PROMPTS = f'one of {{{MESSAGES}}} and {{"prompt": text}}, with whatever its reward reads'
_PREFERENCES = f'{{"prompt": text or {MESSAGES}, "chosen": text, "rejected": text}}'

_Keys = tuple[Sequence[str], Sequence[str] | None, str]  # of `json_lines.read`
_Line = TypeVar("_Line")


class Lines(NamedTuple):
    """What a file holds.

    Attributes:
        sequences: of each line, at least one; of preferences the answer that is chosen, and the
            other.
        num_cut: sequences that were longer than a window, and end with it.
    """

    sequences: list[list[Answered]]
    num_cut: int


def of_answers(name: str, encoder: Encoder, window: int, progress: Progress | None = None) -> Lines:
    """Conversations, of which every answer is learned, and completions of prompts.

    Raises:
        InputError: the file cannot be read; or, with the number of the line, it is neither, or
            cannot be encoded, or all its answers are beyond the window.
    """

    def encode(fields: dict[str, Any]) -> list[Answered]:
        tools = answers.checked_tools(fields.get("tools"))
        if "messages" in fields:
            _check_only(fields, "prompt", "messages")
            return encoder.conversation(answers.checked_messages(fields["messages"]), tools)
        _check_only(fields, "tools", "completion")
        prompt, completion = (answers.checked_text(key, fields.get(key)) for key in _COMPLETION)
        return [encoder.completion(prompt, completion)]

    keys = ("messages", "completion"), ("prompt", "tools", "id"), _ANSWERS
    return _read(name, keys, encode, window, any, progress)


def of_preferences(
    name: str, encoder: Encoder, window: int, progress: Progress | None = None
) -> Lines:
    """Prompts or conversations, of each the answer that is chosen, and one that is not.

    Raises:
        InputError: as `of_answers`, or a line's two answers are equal.
    """

    def encode(fields: dict[str, Any]) -> list[Answered]:
        tools = answers.checked_tools(fields.get("tools"))
        if "prompt" in fields:
            _check_only(fields, "tools", "prompt")
            prompt = answers.checked_text("prompt", fields["prompt"])
            texts = (answers.checked_text(key, fields.get(key)) for key in _PAIR)
            pair = [encoder.completion(prompt, text) for text in texts]
        else:
            messages = answers.checked_messages(fields["messages"])
            pair = [
                encoder.last_answer([*messages, _as_answer(key, fields.get(key))], tools)
                for key in _PAIR
            ]
        if pair[0] == pair[1]:
            raise InputError("the answer that is chosen and the one that is rejected are equal")
        return pair

    keys = ("prompt", "messages"), ("tools", "id", *_PAIR), _PREFERENCES
    return _read(name, keys, encode, window, all, progress)


class Prompt(NamedTuple):
    """A line with a prompt.

    Attributes:
        tokens: of the prompt, as an engine is given it.
        fields: of the line.
    """

    tokens: list[int]
    fields: dict[str, Any]


def of_prompts(
    name: str,
    encoder: Encoder,
    most_tokens: int,
    check: Callable[[dict[str, Any]], None] = lambda fields: None,
) -> list[Prompt]:
    """Prompts to answer, of texts or of conversations.

    Args:
        most_tokens: of a prompt.
        check: raises InputError for fields that a reward cannot use.

    Raises:
        InputError: the file cannot be read; or, with the number of the line, it is neither, cannot
            be encoded, is longer, or the check fails.
    """

    def encode(fields: dict[str, Any]) -> Prompt:
        if "messages" in fields:
            tools = answers.checked_tools(fields.get("tools"))
            tokens = encoder.prompt(answers.checked_messages(fields["messages"]), tools)
        else:
            tokens = encoder.text(answers.checked_text("prompt", fields["prompt"]))
        if not 0 < len(tokens) <= most_tokens:
            raise InputError(
                f"the prompt has {len(tokens)} tokens, and training.window less "
                f"training.max_new_tokens is {most_tokens}: leave the line out, or --set "
                "training.window"
            )
        check(fields)
        return Prompt(tokens, fields)

    return [
        _of_line(f"{name} line {number}", encode, fields)
        for number, fields in _lines(name, (("prompt", "messages"), None, _PROMPTS))
    ]


_COMPLETION, _PAIR = ("prompt", "completion"), ("chosen", "rejected")


def _as_answer(key: str, value: object) -> dict[str, object]:
    """A text, or a message, as the assistant's message."""
    if not isinstance(value, dict):
        return {"role": "assistant", "content": answers.checked_text(key, value)}
    message = answers.checked_message(value)
    if message["role"] != "assistant":
        raise InputError(f"{key!r} is a message of the role assistant, not {message['role']}")
    return message


def _check_only(fields: dict[str, Any], other: str, key: str) -> None:
    if other in fields:
        raise InputError(f"{other!r} does not go with {key!r}")


def _read(
    name: str,
    keys: _Keys,
    encode: Callable[[dict[str, Any]], list[Answered]],
    window: int,
    enough: Callable[[Sequence[bool]], bool],
    progress: Progress | None,
) -> Lines:
    """Sequences of lines; those without an answer within the window are left out if others of the
    line are `enough`.
    """
    lines = _lines(name, keys)
    sequences, num_cut = [], 0
    for done, (number, fields) in enumerate(lines, 1):
        whole = _of_line(f"{name} line {number}", encode, fields)
        cut = [sequence.cut(window + 1) for sequence in whole]
        has_answer = [any(sequence.is_answer) for sequence in cut]
        if not enough(has_answer):
            first = whole[has_answer.index(False)].is_answer.index(True)
            raise InputError(
                f"{name} line {number}: an answer begins at token {first}, behind "
                f"training.window={window}: leave the line out, or --set training.window"
            )
        num_cut += sum(a != b for a, b in zip(whole, cut, strict=True))
        sequences.append([one for one, has in zip(cut, has_answer, strict=True) if has])
        if progress:
            progress(done, len(lines), "encoding answers")
    return Lines(sequences, num_cut)


def _lines(name: str, keys: _Keys) -> list[tuple[int, dict[str, Any]]]:
    """The number and the object of each line, as `json_lines.read`."""
    return list(json_lines.read(name, *keys, max_bytes=_MAX_BYTES, max_line_chars=_MAX_LINE_CHARS))


def _of_line(
    where: str, encode: Callable[[dict[str, Any]], _Line], fields: dict[str, Any]
) -> _Line:
    """What a line encodes to; errors begin with where it is."""
    try:
        return encode(fields)
    except RecursionError:
        raise InputError(f"{where}: it is nested too deeply") from None
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
