"""Thoughts at the beginning of answers: how families mark them, where one ends, and its text."""

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol

SPACE = " \t\r\n"
_END_TOKENS = 16  # a mark and the blanks behind it have at most so many


class Decoder(Protocol):
    """What a `Tokenizer` does for this module, which imports none."""

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str: ...


class Stage(enum.Enum):
    """Where an answer is."""

    BEFORE = "before"  # a thought may come
    WITHIN = "within"
    BEHIND = "behind"  # its thought, or it has none


class Segment(NamedTuple):
    """A part of an answer's text."""

    text: str
    is_thought: bool


class Marks(NamedTuple):
    """What stands before and behind a thought, as text.

    Attributes:
        between: what has to follow a closing before anything else.
        exits: how an answer may go on behind a thought that has to end.
        outside: marks that no thought has in it.
        answer_header: what stands before the text for the user.
        ends: end tokens of answers, beside those of the checkpoint.
    """

    opening: str
    closing: str
    between: str = ""
    exits: tuple[str, ...] = ("",)
    outside: tuple[str, ...] = ()
    answer_header: str = ""
    ends: tuple[str, ...] = ()

    def stage_after(self, tokenizer: "Decoder", prompt: Sequence[int]) -> Stage:
        """Returns where an answer to a prompt begins."""
        end = tokenizer.decode(prompt[-_END_TOKENS:], skip_special=False).rstrip(SPACE)
        if end.endswith(self.opening):
            return Stage.WITHIN
        return Stage.BEHIND if end.endswith(self.closing) else Stage.BEFORE

    def stage_within(self, message: str) -> Stage:
        """Returns where an answer goes on that has begun with a message."""
        is_open = message.rfind(self.opening) > message.rfind(self.closing)
        return Stage.WITHIN if is_open else Stage.BEHIND

    def shown(self, stage: Stage) -> tuple[str, ...]:
        """Marks that the text of an answer has."""
        return () if stage is Stage.BEHIND else (self.opening, self.closing)

    def reader(self, stage: Stage, divides: bool = True) -> "ThoughtReader":
        """Returns what reads an answer; unless it `divides` that, all of it is the answer."""
        return ThoughtReader(self, stage, divides)

    def progress(self, stage: Stage) -> "Progress":
        return Progress(self, stage)


THINK = Marks("<think>", "</think>")
MARKS = (
    THINK,
    Marks("[THINK]", "[/THINK]"),  # Magistral
    Marks("<seed:think>", "</seed:think>"),
    Marks("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    Marks("<|channel>thought", "<channel|>"),  # Gemma 4
    Marks("\u25c1think\u25b7", "\u25c1/think\u25b7"),  # Kimi
)


class Progress:
    """Where an answer is, token by token.

    Attributes:
        stage: of the answer.
        num_tokens: in the thought, without those of its marks; while it goes on, with those of what
            may become its closing.
        due: text that has to come before anything else.
    """

    due = ""

    def __init__(self, marks: Marks, stage: Stage):
        self._opening, self._closing = marks.opening.encode(), marks.closing.encode()
        self._first = stage
        self.reset()

    def reset(self) -> None:
        """Begins the answer again."""
        self.stage, self.num_tokens = self._first, 0
        self._text, self._sizes = b"", [0]

    def accept(self, token_bytes: bytes) -> None:
        """Takes the bytes of the next token, those of special ones included."""
        if self.stage is Stage.BEHIND:
            return
        self._text += token_bytes
        if self.stage is Stage.BEFORE:
            text = self._text.lstrip(SPACE.encode())
            if text.startswith(self._opening):
                self.stage, self._text = Stage.WITHIN, b""
            elif not self._opening.startswith(text):
                self.stage = Stage.BEHIND
            return
        self.num_tokens += 1
        longest = len(self._closing) - 1 + len(token_bytes)
        self._text = self._text[-longest:] if longest else b""
        self._sizes = [*self._sizes[-len(self._closing) :], len(token_bytes)]
        if (at := self._text.find(self._closing)) >= 0:
            size = len(self._text) - at
            while size > 0:
                size -= self._sizes.pop()
                self.num_tokens -= 1
            self.stage = Stage.BEHIND


class ThoughtReader:
    """Divides an answer's text as it comes. The parts are the same wherever it is cut; blanks at
    the ends of the thought, and before the answer behind it, belong to neither.
    """

    def __init__(self, marks: Marks, stage: Stage, divides: bool = True):
        self._marks = marks
        self._stage = stage if divides else Stage.BEHIND
        self._pending = ""  # may be a mark
        self._blanks: list[str] = []  # before it; joined later, since many may come one by one
        # Blanks are left out where nothing else came so far.
        self._is_blank = divides and stage is not Stage.BEFORE

    def push(self, text: str) -> list[Segment]:
        """Returns what is certain with further text: of the thought, and of the answer."""
        self._pending += text
        if self._stage is Stage.BEFORE:
            self._read_opening()
        thought = self._read_thought() if self._stage is Stage.WITHIN else ""
        answer = self._take() if self._stage is Stage.BEHIND else ""
        segments = Segment(thought, True), Segment(answer, False)
        return [segment for segment in segments if segment.text]

    def finish(self) -> list[Segment]:
        """Returns the rest at the end of the answer."""
        pending, self._pending = self._pending, ""
        is_thought = self._stage is Stage.WITHIN
        text = self._of_thought(pending) if is_thought else self._of_answer(pending)
        return [Segment(text, is_thought)] if text else []

    def _read_opening(self) -> None:
        opening, text = self._marks.opening, self._pending.lstrip(SPACE)
        if text.startswith(opening):
            self._begin(Stage.WITHIN, text[len(opening) :])
        elif not opening.startswith(text):
            self._stage = Stage.BEHIND
        elif not text:
            self._blanks.append(self._pending)
            self._pending = ""

    def _read_thought(self) -> str:
        before, closing, behind = self._pending.partition(self._marks.closing)
        if closing:
            thought = self._of_thought(before)
            self._begin(Stage.BEHIND, behind)
            return thought
        sizes = range(min(len(before), len(self._marks.closing) - 1), 0, -1)
        ends = (size for size in sizes if before.endswith(self._marks.closing[:size]))
        certain = before[: len(before) - next(ends, 0)]
        self._pending = before[len(certain) :]
        return self._of_thought(certain)

    def _begin(self, stage: Stage, pending: str) -> None:
        """Goes on behind a mark; blanks before it belong to nothing."""
        self._stage, self._pending, self._blanks, self._is_blank = stage, pending, [], True

    def _take(self) -> str:
        text, self._pending = self._pending, ""
        return self._of_answer(text)

    def _of_answer(self, text: str) -> str:
        text, self._blanks = "".join([*self._blanks, text]), []
        return self._shown(text)

    def _of_thought(self, text: str) -> str:
        """A thought's further text, without the blanks at its end."""
        text = self._shown(text)
        body = text.rstrip(SPACE)
        if not body:
            self._blanks.append(text)
            return ""
        thought = "".join([*self._blanks, body])
        self._blanks = [text[len(body) :]]
        return thought

    def _shown(self, text: str) -> str:
        if self._is_blank:
            text = text.lstrip(SPACE)
            self._is_blank = not text
        return text
