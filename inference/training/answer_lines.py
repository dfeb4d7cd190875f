"""Files of what is to be answered, and how: JSONL, as sequences of at most a window."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from configs.errors import InputError
from inference.checkpoints.load import Progress
from inference.files import json_lines
from inference.training import answers
from inference.training.answers import MESSAGES, Answered, Encoder

_MAX_BYTES, _MAX_LINE_CHARS = 1 << 30, 4 << 20
_ANSWERS = f'one of {{{MESSAGES}}} and {{"prompt": text, "completion": text}}'
_PREFERENCES = f'{{"prompt": text or {MESSAGES}, "chosen": text, "rejected": text}}'


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
    keys: tuple[Sequence[str], Sequence[str], str],
    encode: Callable[[dict[str, Any]], list[Answered]],
    window: int,
    enough: Callable[[Sequence[bool]], bool],
    progress: Progress | None,
) -> Lines:
    """Sequences of lines; those without an answer within the window are left out if others of the
    line are `enough`.
    """
    lines = list(json_lines.read(name, *keys, max_bytes=_MAX_BYTES, max_line_chars=_MAX_LINE_CHARS))
    sequences, num_cut = [], 0
    for done, (number, fields) in enumerate(lines, 1):
        try:
            whole = encode(fields)
        except RecursionError:
            raise InputError(f"{name} line {number}: it is nested too deeply") from None
        except InputError as error:
            raise InputError(f"{name} line {number}: {error}") from None
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
