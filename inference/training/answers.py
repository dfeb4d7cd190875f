"""What a model is to answer: conversations and completions as token ids, and which of these the
model itself would write.

An answer is what an engine would have to produce behind the prompt that it would be given: by the
model's chat template, up to the first end token, which is included.
"""

import functools
import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from configs.errors import InputError, shown
from inference.text.chat_template import THOUGHT_FIELDS, Message
from inference.text.end_tokens import EndTokens
from inference.text.tool_calls import prompting
from inference.training.start import Vocabulary

MESSAGE = '{"role": text, "content": text}'
MESSAGES = f'"messages": [{MESSAGE}, ...]'

_ROLES = "system", "developer", "user", "assistant", "tool"


class Answered(NamedTuple):
    """One sequence: its tokens, which of them the model would write, after the first, and figures
    of each token after the first, by their names.
    """

    tokens: list[int]
    is_answer: list[bool]
    figures: Mapping[str, np.ndarray] = {}

    def cut(self, num_tokens: int) -> "Answered":
        return Answered(self.tokens[:num_tokens], self.is_answer[:num_tokens])


class Encoder:
    """Encodes as the engine of a model would be asked, with the model's `vocabulary`."""

    def __init__(self, vocabulary: Vocabulary):
        self._tokenizer = vocabulary.tokenizer
        self._end_ids = frozenset(EndTokens(vocabulary.tokenizer, vocabulary.eos_ids))

    def conversation(
        self, messages: Sequence[dict[str, object]], tools: Sequence[dict[str, object]] | None
    ) -> list[Answered]:
        """Every message of the assistant, except those of weight 0, as an answer to those before
        it. Where the template writes earlier messages in the same way later on, as most do, that is
        one sequence.

        Raises:
            InputError: there is no such message, or as `last_answer`.
        """
        template = self._tokenizer.template_for(tools)
        messages, tools = prompting.prepare(messages, tools, template)
        sequences: list[Answered] = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or message.get("weight") == 0:
                continue
            prompt, answer = self._answer(messages[: number + 1], tools)
            is_answer = [False] * len(prompt)
            if sequences and prompt[: len(sequences[-1].tokens)] == sequences[-1].tokens:
                before = sequences.pop().is_answer
                is_answer[: len(before)] = before
            sequences.append(Answered(prompt + answer, is_answer + [True] * len(answer)))
        if not sequences:
            raise InputError("no message of the role assistant, which is what is learned")
        return sequences

    def last_answer(
        self, messages: Sequence[dict[str, object]], tools: Sequence[dict[str, object]] | None
    ) -> Answered:
        """The last message as the answer to those before it.

        Raises:
            InputError: there is no template, or it writes the answer without an end, or as several
                messages; or as `Tokenizer.encode_answer`.
        """
        template = self._tokenizer.template_for(tools)
        prepared, tools = prompting.prepare(messages, tools, template)
        if 0 < _num_calls(prepared[-1]) < (num_calls := _num_calls(messages[-1])):
            raise InputError(
                f"the answer has {num_calls} calls, and the chat template writes each as a message "
                "of its own: leave it at the first"
            )
        prompt, answer = self._answer(prepared, tools)
        return Answered(prompt + answer, [False] * len(prompt) + [True] * len(answer))

    def completion(self, prompt: str, text: str) -> Answered:
        """A text that continues another one, and the tokenizer's end token; raises InputError as
        `Tokenizer.encode`.
        """
        tokenizer = self._tokenizer
        before, tokens = tokenizer.encode(prompt), tokenizer.encode(prompt + text)
        end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
        if tokens[: len(before)] == before:
            answer = tokens[len(before) :] + end
        else:  # a token has the end of the prompt and the start of the answer, or the prompt an end
            answer = tokenizer.encode(text, add_special=False) + end
        return Answered(before + answer, [False] * len(before) + [True] * len(answer))

    def prompt(
        self, messages: Sequence[dict[str, object]], tools: Sequence[dict[str, object]] | None
    ) -> list[int]:
        """Messages as the engine is given them to answer; raises InputError without a template, or
        as that does.
        """
        prepared, tools = prompting.prepare(messages, tools, self._tokenizer.template_for(tools))
        apply = functools.partial(self._tokenizer.apply_chat_template, tools=tools)
        return prompting.encode(apply, prepared)

    def text(self, prompt: str) -> list[int]:
        return self._tokenizer.encode(prompt)

    def _answer(
        self, messages: Sequence[dict[str, object]], tools: Sequence[Message] | None
    ) -> tuple[list[int], list[int]]:
        """Token ids of the prompt of the last message, and of this."""
        if len(messages) < 2:
            raise InputError("the first message is an answer, before which there is nothing")
        apply = functools.partial(self._tokenizer.apply_chat_template, tools=tools)
        prompt = prompting.encode(apply, messages[:-1])
        whole = prompting.encode(apply, messages, add_generation_prompt=False)
        behind = whole[len(prompt) :]
        if whole[: len(prompt)] != prompt:
            behind = prompting.encode(self._tokenizer.encode_answer, messages, tools=tools)
        ends = (place for place, token in enumerate(behind) if token in self._end_ids)
        end = next(ends, None)
        if end is None:
            raise InputError("the chat template ends the answer with none of the end tokens")
        return prompt, behind[: end + 1]


def checked_messages(value: object) -> list[dict[str, object]]:
    """Messages as templates take them; raises InputError if they are none."""
    if not isinstance(value, list) or not value:
        raise InputError(f"not {MESSAGES}")
    return list(map(checked_message, value))


def checked_message(value: object) -> dict[str, object]:
    """A message as templates take it; raises InputError if it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise InputError(f"a message is {MESSAGE}, not {shown(value)}")
    role, content, calls = value["role"], value.get("content"), value.get("tool_calls")
    if role not in _ROLES:
        raise InputError(f"a message has the role {shown(role)}; valid: {', '.join(_ROLES)}")
    if not (isinstance(content, str) or (content is None and calls)):
        raise InputError(f"the content of a message of the role {role} is no text")
    if value.get("weight") not in (None, 0, 1):
        raise InputError(f"the weight of a message is 0 or 1, not {shown(value['weight'])}")
    _check_texts(value, "name", "tool_call_id", *THOUGHT_FIELDS)
    if calls is not None:
        _check_calls(calls)
    role = "system" if role == "developer" else role  # as the server has it
    return {**value, "role": role, "content": content or ""}


def checked_text(name: str, value: object) -> str:
    """Returns a text that is not empty; raises InputError if it is something else."""
    if not isinstance(value, str) or not value:
        raise InputError(f"{name!r} is a text of at least one character, not {shown(value)}")
    return value


def checked_tools(value: object) -> list[dict[str, object]] | None:
    """Returns tools, if any; raises InputError if they are no list of functions."""
    is_list = isinstance(value, list) and all(
        isinstance(tool, dict) and isinstance(tool.get("function"), dict) for tool in value
    )
    if value is not None and not is_list:
        raise InputError('\'tools\' is a list of {"type": "function", "function": {...}}')
    return value or None  # type: ignore[return-value]


def _check_calls(calls: object) -> None:
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        raise InputError(
            '\'tool_calls\' is a list of {"type": "function", "function": {"name": text, '
            '"arguments": text or object}}'
        )
    for call in calls:
        _check_texts(call, "id")


def _is_call(value: object) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), str | dict)
    )


def _check_texts(fields: dict[str, object], *names: str) -> None:
    """Raises InputError if one of these is there and no text."""
    for name in names:
        if not isinstance(fields.get(name), str | None):
            raise InputError(
                f"{name!r} of a message or a call is a text, not {shown(fields[name])}"
            )


def _num_calls(message: dict[str, Any]) -> int:
    return len(message.get("tool_calls") or ())


def digest(identity: bytes, sequences: Iterable[Answered]) -> str:
    """Names sequences of a vocabulary that `identity` names."""
    whole = hashlib.sha256(hashlib.sha256(identity).digest())
    for sequence in sequences:
        row = np.array(list(itertools.chain((len(sequence.tokens),), *sequence[:2])), np.int32)
        whole.update(row.tobytes())
    return whole.hexdigest()
