"""Answers that are messages on channels, as gpt-oss writes them ("harmony"): a header says whether
a message is a thought, a text or a call.
"""

import enum
import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

from inference.text.thoughts import SPACE, Decoder, Segment, Stage

_END_TOKENS = 16  # the header at a prompt's end has at most so many
_MAX_NAME = 512  # characters of a recipient
_GAP = "\n\n"  # between two thoughts, and between two texts
_EVERYONE = ("all", "user")  # recipients of texts
_NO_ARGUMENTS = "{}"  # of a call whose message is empty


class Channels(NamedTuple):
    """Marks of messages, and names of channels, as text.

    Attributes:
        start, channel, constrain, message: before the parts of a header: the role, the channel, the
            type of the content, and the content.
        closing: behind a message that another one follows.
        ends: behind the last one; each is an end token.
        thought, answer, calls: channels.
        functions: before the names of functions that are recipients.
    """

    start: str = "<|start|>"
    channel: str = "<|channel|>"
    constrain: str = "<|constrain|>"
    message: str = "<|message|>"
    closing: str = "<|end|>"
    ends: tuple[str, ...] = ("<|return|>", "<|call|>")
    role: str = "assistant"
    thought: str = "analysis"
    answer: str = "final"
    calls: str = "commentary"
    functions: str = "functions."

    @property
    def texts(self) -> tuple[str, ...]:
        """All marks."""
        return (*self.outside, self.closing)

    @property
    def outside(self) -> tuple[str, ...]:
        """Marks that no thought has in it."""
        return (self.start, self.channel, self.constrain, self.message, *self.ends)

    @property
    def opening(self) -> str:
        return self.header(self.thought)

    @property
    def answer_header(self) -> str:
        return self.header(self.answer)

    @property
    def between(self) -> str:
        """What follows a closing, before the next header."""
        return self.start + self.role

    @property
    def exits(self) -> tuple[str, ...]:
        """How an answer may go on behind a thought that has to end: with a text, or a call."""
        return (
            self.between + self.answer_header, f"{self.between}{self.channel}{self.calls}"
        )  # fmt: skip

    def header(self, channel: str) -> str:
        return f"{self.channel}{channel}{self.message}"

    def call_header(self, recipient: str) -> str:
        """The header of a call in the one spelling that formats of calls know."""
        return (
            f"{self.channel}{self.calls} to={recipient} {self.constrain}json{self.message}"
        )  # fmt: skip

    def stage_after(self, tokenizer: Decoder, prompt: Sequence[int]) -> Stage:
        """Returns where an answer to a prompt begins."""
        end = tokenizer.decode(prompt[-_END_TOKENS:], skip_special=False).rstrip(SPACE)
        if end.endswith(self.opening):
            return Stage.WITHIN
        return Stage.BEHIND if end.endswith(self.message) else Stage.BEFORE

    def stage_within(self, message: str) -> Stage:
        """Returns where an answer goes on that has begun with a message, which is a text."""
        return Stage.BEHIND

    def shown(self, stage: Stage) -> tuple[str, ...]:
        """Marks that the text of an answer has."""
        return self.texts

    def reader(self, stage: Stage, divides: bool = True) -> "ChannelReader":
        return ChannelReader(self, stage, divides)

    def progress(self, stage: Stage) -> "ChannelProgress":
        return ChannelProgress(self, stage)


class _Kind(enum.Enum):
    """What a message is."""

    THOUGHT = "thought"
    TEXT = "text"
    CALL = "call"


class _Message(NamedTuple):
    """A message by its header; without one it is a text."""

    kind: _Kind = _Kind.TEXT
    recipient: str = ""


class _Headers:
    """Finds the headers of messages in a text, character by character. Marks behind which no header
    comes are text.

    Attributes:
        message: that the text is in; None: before the first one.
        pending: characters that may be the end of a message and the header of the next.
        has_false_mark: the message has marks that are text.
    """

    def __init__(self, layout: Channels, stage: Stage):
        self._layout = layout
        first = {Stage.WITHIN: _Message(_Kind.THOUGHT), Stage.BEHIND: _Message()}
        self.message: _Message | None = first.get(stage)
        self.pending = ""
        self.has_false_mark = False

    @property
    def has_mark(self) -> bool:
        """Whether a whole mark is pending: the message has ended, unless no header follows."""
        return self._has_mark(self.pending)

    def _has_mark(self, text: str) -> bool:
        return any(mark in text for mark in self._layout.texts)

    def push(self, character: str) -> tuple[str, str]:
        """Returns text that is certain to belong to the message so far, and the marks and header
        behind it that this character completes, or "".
        """
        if self.message is not None and not self.pending and character != self._layout.start[0]:
            return character, ""
        text, pending = "", self.pending + character
        whole, partial = _patterns(self._layout, self.message is None)
        while not partial.fullmatch(pending):
            if self.message is None:
                self.message = _Message()
                whole, partial = _patterns(self._layout, False)
                continue
            size = max(pending.find(self._layout.start[0], 1), 0) or len(pending)
            text, pending = text + pending[:size], pending[size:]
        self.pending = pending
        self.has_false_mark |= self._has_mark(text)
        match = whole.fullmatch(pending) if pending.endswith(self._layout.message) else None
        if match is None:
            return text, ""
        recipient = match["to"] or match["behind"] or match["alone"]
        self.pending, self.message = "", self._read(recipient, match["on"])
        self.has_false_mark = False
        return text, pending

    def _read(self, recipient: str | None, channel: str | None) -> _Message:
        is_thought = channel == self._layout.thought
        target = "" if recipient in _EVERYONE else recipient or ""
        if target.startswith(self._layout.functions) or (target and not is_thought):
            return _Message(_Kind.CALL, target)
        return _Message(_Kind.THOUGHT if is_thought else _Kind.TEXT)


class ChannelReader:
    """Divides an answer's text as it comes. The parts are the same wherever it is cut; blanks at
    both ends of a message belong to nothing, and an empty line is put between two of a kind.

    The answer has the calls, as messages with the header `Channels.call_header`.
    """

    def __init__(self, layout: Channels, stage: Stage, divides: bool = True):
        """`divides`: thoughts and headers are no part of the answer."""
        self._layout = layout
        self._divides = divides
        self._headers = _Headers(layout, stage)
        self._blanks: list[str] = []  # at the end of what was told
        self._is_blank = True  # the message, so far
        self._has_text: set[_Kind] = set()
        self._segments: list[Segment] = []

    def push(self, text: str) -> list[Segment]:
        """Returns what is certain with further text."""
        for character in text:
            before = self._headers.message
            certain, header = self._headers.push(character)
            self._tell(certain, before.kind if before else _Kind.TEXT)
            if header:
                self._begin(header, before)
        return self._take()

    def finish(self) -> list[Segment]:
        """Returns the rest at the end of the answer, without a header that was cut off."""
        headers, pending = self._headers, self._headers.pending
        message = headers.message or _Message()
        if not headers.has_mark:
            self._tell(pending, message.kind)
        elif not self._divides:
            self._add(pending, is_thought=False)
        if message.kind is _Kind.TEXT and not (headers.has_mark or self._is_blank):
            self._add("".join(self._blanks), is_thought=False)
        if message.kind is _Kind.CALL and self._is_blank:
            self._add(_NO_ARGUMENTS, is_thought=False)
        headers.pending, self._blanks = "", []
        return self._take()

    def _begin(self, header: str, before: _Message | None) -> None:
        """Begins the message behind a header."""
        message = self._headers.message
        assert message is not None
        if before is not None and before.kind is _Kind.CALL:
            self._add(_NO_ARGUMENTS * self._is_blank + self._layout.ends[-1], is_thought=False)
        elif message.kind is _Kind.CALL and before is not None and not self._divides:
            self._add(self._layout.closing, is_thought=False)  # so that a thought ends for `Parser`
        self._blanks, self._is_blank = [], True
        if message.kind is _Kind.CALL:
            self._add(self._layout.call_header(message.recipient), is_thought=False)
        elif not self._divides:
            self._add(header, is_thought=False)

    def _tell(self, text: str, kind: _Kind) -> None:
        """Adds text of a message."""
        if kind is _Kind.CALL or not self._divides:
            self._is_blank &= not text.strip(SPACE)
            self._add(text, is_thought=False)
            return
        if self._is_blank:
            text = text.lstrip(SPACE)
        body = text.rstrip(SPACE)
        if not body:  # joined later, since many may come one by one
            self._blanks.append(text)
            return
        gap = _GAP if self._is_blank and kind in self._has_text else ""
        self._is_blank = False
        self._has_text.add(kind)
        self._add("".join([gap, *self._blanks, body]), kind is _Kind.THOUGHT)
        self._blanks = [text[len(body) :]]

    def _add(self, text: str, is_thought: bool) -> None:
        if not text:
            return
        segments = self._segments
        if segments and segments[-1].is_thought is is_thought:
            text = segments.pop().text + text
        segments.append(Segment(text, is_thought))

    def _take(self) -> list[Segment]:
        segments, self._segments = self._segments, []
        return segments


class ChannelProgress:
    """Where an answer is, token by token; another thought may follow any message.

    Attributes:
        stage: within a thought, or before one.
        num_tokens: in thoughts, without those of marks and headers.
        due: text that has to come before the next header.
    """

    def __init__(self, layout: Channels, stage: Stage):
        self._layout = layout
        self._first = stage
        self.reset()

    def reset(self) -> None:
        """Begins the answer again."""
        self._headers = _Headers(self._layout, self._first)
        self._num_before = 0  # tokens of thoughts that have ended
        self._sizes: list[int] = []  # of the tokens of this one

    @property
    def due(self) -> str:
        whole = self._layout.closing + self._layout.between
        return whole[whole.find(self._pending) + len(self._pending) :] if self._pending else ""

    @property
    def _pending(self) -> str:
        """Marks that have ended a message, and what follows them, before the next header."""
        headers = self._headers
        return headers.pending if headers.has_mark and not headers.has_false_mark else ""

    @property
    def stage(self) -> Stage:
        message = self._headers.message
        is_open = message is not None and message.kind is _Kind.THOUGHT and not self._pending
        return Stage.WITHIN if is_open else Stage.BEFORE

    @property
    def num_tokens(self) -> int:
        return self._num_before + len(self._sizes) - _num_last(self._sizes, len(self._pending))

    def accept(self, token_bytes: bytes) -> None:
        """Takes the bytes of the next token, those of special ones included."""
        size = len(token_bytes)
        self._add(size)
        for n, character in enumerate(token_bytes.decode("latin-1"), 1):  # marks are ASCII
            _, header = self._headers.push(character)
            if header:
                num = len(self._sizes) - _num_last(self._sizes, len(header) + size - n)
                self._num_before, self._sizes = self._num_before + num, []
                if n < size:
                    self._add(size - n)

    def _add(self, size: int) -> None:
        message = self._headers.message
        if message is not None and message.kind is _Kind.THOUGHT and size:
            self._sizes.append(size)


def _num_last(sizes: Sequence[int], num_bytes: int) -> int:
    """How many last tokens have some of so many last bytes."""
    num = 0
    while num_bytes > 0 and num < len(sizes):
        num += 1
        num_bytes -= sizes[-num]
    return num


class _Pattern(NamedTuple):
    """Regular expressions of a text, and of its beginnings."""

    whole: str
    partial: str

    def __or__(self, other: "_Pattern") -> "_Pattern":
        return _Pattern(
            f"(?:{self.whole}|{other.whole})", f"(?:{self.partial}|{other.partial})"
        )  # fmt: skip

    @property
    def maybe(self) -> "_Pattern":
        return _Pattern(f"(?:{self.whole})?", self.partial)


def _word(text: str) -> _Pattern:
    partial = ""
    for character in reversed(text):
        partial = f"(?:{re.escape(character)}{partial})?"
    return _Pattern(re.escape(text), partial)


def _run(characters: str, shortest: int, longest: int, name: str = "") -> _Pattern:
    """So many of some characters; `name`: of the group that has them."""
    opening = f"(?P<{name}>" if name else "(?:"
    return _Pattern(
        f"{opening}[{characters}]{{{shortest},{longest}}})", f"[{characters}]{{0,{longest}}}"
    )  # fmt: skip


def _all(*parts: _Pattern) -> _Pattern:
    """One after the other."""
    partial = ""
    for part in reversed(parts):
        partial = f"(?:{part.partial}|{part.whole}{partial})"
    return _Pattern("".join(part.whole for part in parts), partial)


@functools.lru_cache(maxsize=8)
def _patterns(layout: Channels, is_first: bool) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Patterns of the marks and the header before a message, the first one or another, and of
    everything that may become such.
    """
    blank, name = _run(SPACE, 0, 4), "!-;=-~"  # in ASCII, without "<"
    end = functools.reduce(_Pattern.__or__, map(_word, (layout.closing, *layout.ends)))
    # A role has no "=": otherwise "to=" could begin anywhere within it, which takes quadratic time.
    start = _all(_word(layout.start), _run("a-z", 1, 1), _run("!-;>-~", 0, _MAX_NAME))
    on = _all(_word(layout.channel), _run("a-z_", 1, 64, "on"))
    to, behind, alone = (
        _all(blank, _word("to="), _run(name, 1, _MAX_NAME, group))
        for group in ("to", "behind", "alone")
    )
    kind = _all(blank, _word(layout.constrain).maybe, blank, _run(name, 0, 64)).maybe
    header = _all(to.maybe, on, behind.maybe, kind) | _all(alone, kind) | _word("")
    before = (start | _word(layout.role)).maybe if is_first else _all(end.maybe, blank, start) | end
    pattern = _all(blank if is_first else _word(""), before, blank, header, blank,
                   _word(layout.message))  # fmt: skip
    partial = re.sub(r"\(\?P<\w+>", "(?:", pattern.partial)  # a name stands there several times
    return re.compile(pattern.whole, re.ASCII), re.compile(partial, re.ASCII)
