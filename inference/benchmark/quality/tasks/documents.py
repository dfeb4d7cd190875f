"""Documents of a task, a JSON object a line, in the form that the task is published in."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from configs.errors import InputError, shown
from inference.benchmark.quality.tasks import instructions
from inference.files import user_files

# Whether each criterion is met, by the name of a metric: the share of those met over all documents.
Verdict = Mapping[str, Sequence[bool]]

_MAX_BYTES = 256 << 20
_NUM_NEW, _NUM_NEW_IFEVAL = 256, 1280  # as lm-eval has them


@dataclasses.dataclass(frozen=True)
class Choice:
    """A text with several ends, of which the `label`-th is right."""

    text: str
    choices: tuple[str, ...]
    label: int


@dataclasses.dataclass(frozen=True)
class Question:
    """A text, the judge of an answer to it, and where an answer ends."""

    text: str
    judge: Callable[[str], Verdict]
    stop: tuple[str, ...] = ()
    max_new_tokens: int = _NUM_NEW


Document = Choice | Question


class _Line(msgspec.Struct, frozen=True):
    def document(self) -> Document | None:
        """Returns the line's document, or None if no check here can judge an answer to it.

        Raises:
            InputError: a field is invalid.
        """
        raise NotImplementedError


class _Choices(_Line, frozen=True):
    text: str
    choices: tuple[str, ...]
    label: int

    def document(self) -> Choice:
        if not self.text.strip():
            raise InputError("a text that choices end is not empty")
        if len(self.choices) < 2 or not all(self.choices):
            raise InputError("choices are at least 2 texts, none of which is empty")
        if not 0 <= self.label < len(self.choices):
            raise InputError(f"label is from 0 to {len(self.choices) - 1}, not {self.label}")
        return Choice(self.text, self.choices, self.label)


class _ExactMatch(_Line, frozen=True):
    text: str
    target: str
    stop: tuple[str, ...] = ()

    def document(self) -> Question:
        return Question(self.text, functools.partial(_exact_match, self.target), self.stop)


class _Gsm8k(_Line, frozen=True):
    """GSM8K, Cobbe et al. 2021, arXiv 2110.14168: the answer's last line is its number."""

    question: str
    answer: str

    def document(self) -> Question:
        target = _STRICT.search(self.answer)
        if target is None:
            raise InputError("an answer ends in #### and a number")
        text = f"Question: {self.question}\nAnswer:"
        return Question(text, functools.partial(_number_match, target[1]), ("Question:",))


class _IfEval(_Line, frozen=True):
    """IFEval, Zhou et al. 2023, arXiv 2311.07911."""

    prompt: str
    instruction_id_list: tuple[str, ...]
    kwargs: tuple[dict[str, Any], ...]

    def document(self) -> Question | None:
        if not instructions.UNCHECKED.isdisjoint(self.instruction_id_list):
            return None
        checks = instructions.read(self.prompt, self.instruction_id_list, self.kwargs)
        judge = functools.partial(instructions.judge, checks)
        return Question(self.prompt, judge, max_new_tokens=_NUM_NEW_IFEVAL)


_FORMATS: tuple[type[_Line], ...] = (_Choices, _ExactMatch, _Gsm8k, _IfEval)
_FIELDS = {
    format: frozenset(field.name for field in msgspec.structs.fields(format) if field.required)
    for format in _FORMATS
}
_WANTED = ", or ".join(", ".join(sorted(fields)) for fields in _FIELDS.values())


def read(path: str) -> tuple[list[Document], int]:
    """Returns a file's documents, all of the form of the first, and the number of those left out,
    because no check here can judge their answers.

    Raises:
        InputError: the file is unreadable, has no document that can be judged, or a line has
            another form.
    """
    lines = user_files.read_text(path, _MAX_BYTES).split("\n")
    documents: list[Document] = []
    left_out = 0
    format: type[_Line] | None = None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            format = format or _format(line)
            document = msgspec.json.decode(line, type=format).document()
        except (msgspec.MsgspecError, InputError, RecursionError) as error:
            raise InputError(f"{path} line {number}: {error}") from None
        if document is None:
            left_out += 1
        else:
            documents.append(document)
    if not documents and left_out:
        raise InputError(f"{path}: no check here can judge any of its {left_out} documents")
    if not documents:
        raise InputError(f"{path}: no line holds a document; each has {_WANTED}")
    return documents, left_out


def _format(line: str) -> type[_Line]:
    names = msgspec.json.decode(line, type=dict[str, msgspec.Raw]).keys()
    for format, fields in _FIELDS.items():
        if fields <= names:
            return format
    raise InputError(f"a document has {_WANTED}, not {shown(', '.join(names))}")


# As lm-eval's tasks of GSM8K find numbers, and what these leave out of them.
_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_IGNORED = re.compile(r",|\$|\.$")


def _number_match(target: str, answer: str) -> Verdict:
    """Compares the target with the number behind #### (strict), and with the answer's last number
    (flexible).
    """
    strict, numbers = _STRICT.search(answer), _FLEXIBLE.findall(answer)
    answers = {
        "exact_match_strict": "" if strict is None else strict[1],
        "exact_match_flexible": numbers[-1] if numbers else "",
    }
    number = _IGNORED.sub("", target)
    return {name: [_IGNORED.sub("", text) == number] for name, text in answers.items()}


def _exact_match(target: str, answer: str) -> Verdict:
    return {"exact_match": [answer == target]}
