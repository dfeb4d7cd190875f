"""Calls of tools in a text as it streams: what is one, and what only looks like it."""

from collections.abc import Generator

from inference.text.layouts import Layout
from inference.text.thoughts import SPACE, THINK
from inference.text.tool_calls import bare_calls, literal_calls, marked_calls, object_calls
from inference.text.tool_calls.formats import Format
from inference.text.tool_calls.shapes import Bare, Literals, Objects
from inference.text.tool_calls.stream import Part, Stream
from inference.text.tool_calls.values import Schemas


class Parser:
    """Reads one answer. The parts are the same wherever its text is cut.

    A call is told as soon as its name is known and its arguments begin; it stays one, whatever
    follows. Until then it may turn out to be text (JSON of another shape, an unknown function).
    Blanks before a call belong to it.

    A thought, between its marks, is text. An opening behind the beginning of an answer may be no
    more than a word: from the first call behind it on nothing is told until the closing comes, and
    where none does, calls are calls.

    Nothing is evaluated: names, and arguments that come before a name, are read as JSON.
    """

    def __init__(
        self, format: Format, schemas: Schemas, thinks: bool = False, thought: Layout = THINK
    ):
        """`schemas`: of the arguments of callable functions; if `thinks`, the prompt has opened a
        thought, which `thought` marks.
        """
        self._format = format
        self._schemas = schemas
        self._marks = thought
        self._openings = (*format.openings, thought.opening)
        self._stream = Stream(format.brackets)
        self._thought: list[str] | None = None  # characters behind an opening that may be a word
        self._num_told = self._num_before = 0  # of these; of the calls before them
        self._machine = self._read_all(thinks)
        next(self._machine)

    def push(self, text: str) -> list[Part]:
        """What is certain with further text."""
        for character in text:
            thought = self._thought
            self._machine.send(character)
            if thought is not None:
                thought.append(character)
                if "".join(thought[-len(self._marks.closing) :]) == self._marks.closing:
                    self._end_thought(thought)
        return self._take()

    def finish(self) -> list[Part]:
        stream = self._stream
        if not stream.is_in_call:
            self._tell("".join(stream.pending))
        stream.pending, self._thought = [], None
        return self._take()

    def _take(self) -> list[Part]:
        parts = self._stream.parts
        num = len(parts) if self._thought is None else self._num_certain()
        self._stream.parts = parts[num:]
        return parts[:num]

    def _num_certain(self) -> int:
        """Parts before the first call within a thought that may be none."""
        parts = self._stream.parts
        calls = (
            nth for nth, part in enumerate(parts)
            if part.index is not None and part.index >= self._num_before
        )  # fmt: skip
        return next(calls, len(parts))

    def _end_thought(self, thought: list[str]) -> None:
        """It was one: all of it is text, and the answer goes on behind it."""
        del self._stream.parts[self._num_certain() :]
        self._thought = None
        self._stream.forget(self._num_before)
        self._tell("".join(thought[self._num_told :]))
        self._stream.begin_line()
        self._machine = self._read_all(thinks=False)
        next(self._machine)

    def _read_all(self, thinks: bool) -> Generator[None, str, None]:
        openings, brackets, stream = self._format.openings, self._format.brackets, self._stream
        if thinks:
            yield from self._tell_thought()
        while True:
            pending = "".join(stream.pending)
            opening = next((mark for mark in openings if pending.endswith(mark)), "")
            if self._thought is None and pending.endswith(self._marks.opening):
                is_first = not (stream.has_text or stream.num_calls)
                is_first &= pending.strip(SPACE) == self._marks.opening
                self._tell(pending)
                stream.pending = []
                if is_first:
                    yield from self._tell_thought()
                else:
                    self._thought, self._num_told = [], 0
                    self._num_before = stream.num_calls
            elif opening:
                self._keep(pending, len(opening))
                yield from self._read_block("")
            elif pending and pending[-1] in brackets and stream.may_begin(pending[:-1]):
                self._keep(pending, 1)
                yield from self._read_block(pending[-1])
            else:
                size = max(_overlap(pending, mark) for mark in self._openings)
                self._keep(pending, size)
                c = yield from stream.hold()
                while not size and c in SPACE:  # there may be many
                    c = yield from stream.hold()

    def _read_block(self, first: str) -> Generator[None, str, None]:
        """Reads calls behind their opening, or from the bracket `first` on."""
        stream, shape, closing = self._stream, self._format.shape, self._format.closing
        if isinstance(shape, Objects):
            yield from object_calls.read_block(stream, closing, self._schemas, first)
        elif isinstance(shape, Literals):
            yield from literal_calls.read_block(stream, closing, self._schemas, first)
        elif isinstance(shape, Bare):
            yield from bare_calls.read_block(stream, shape, closing, self._schemas)
        else:
            yield from marked_calls.read_block(stream, shape, closing, self._schemas)
        yield from stream.hold_released()

    def _tell_thought(self) -> Generator[None, str, None]:
        end, last = self._marks.closing, ""
        while last != end:
            c = yield from self._stream.next()
            last = (last + c)[-len(end) :]
            self._tell(c)
        self._stream.begin_line()

    def _keep(self, pending: str, num_last: int) -> None:
        """Holds so many last characters and the blanks before them, and tells the rest."""
        end = len(pending[: len(pending) - num_last].rstrip(SPACE))
        self._tell(pending[:end])
        self._stream.pending = [pending[end:]]

    def _tell(self, text: str) -> None:
        is_thought = self._thought is not None and self._stream.num_calls == self._num_before
        num = self._stream.tell_text(text)
        if is_thought:
            self._num_told += num


def _overlap(text: str, word: str) -> int:
    """Length of the longest end of a text that is the beginning of a word, and not all of it."""
    sizes = range(min(len(text), len(word) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(word[:size])), 0)
