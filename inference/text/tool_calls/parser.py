"""Calls of tools in a text as it streams: what is one, and what only looks like it."""

import dataclasses
import json
from collections.abc import Callable, Collection, Generator

from inference.text.tool_calls.formats import Format

_SPACE = " \t\r\n"
_BARE = frozenset(_SPACE + '{}[]:,"+-.0123456789truefalsnE')  # in JSON, outside of strings
_ARGUMENTS = ("arguments", "parameters")
_THOUGHT = ("<think>", "</think>")
_IGNORED = ("id", "type")  # texts that some models write beside a name
_MAX_NAME_CHARS = 512  # of a key or a name as JSON may spell it

_Reader = Generator[None, str, str]
_Judge = Generator[None, str, bool]


@dataclasses.dataclass
class Part:
    """New text of an answer, or (with its `index`) a part of a call's JSON arguments, the first of
    which has the function's `name`.
    """

    text: str
    index: int | None = None
    name: str | None = None


@dataclasses.dataclass(frozen=True)
class _Json:
    """JSON that began with a line of a text and has not ended.

    Attributes:
        brackets: it begins with one of these.
        depth: how many brackets are open; 0: there is none.
        is_line_start: only blanks stand before, in this line.
    """

    brackets: str
    depth: int = 0
    in_string: bool = False
    is_escaped: bool = False
    is_line_start: bool = True

    def after(self, text: str) -> "_Json":
        """What it is behind further text; where one comes that no JSON has there, it was none."""
        depth, in_string, is_escaped = self.depth, self.in_string, self.is_escaped
        is_line_start = self.is_line_start
        for c in text:
            if not depth:
                depth = int(is_line_start and c in self.brackets)
            elif in_string:
                in_string = is_escaped or c != '"'
                is_escaped = c == "\\" and not is_escaped
                if c < " ":
                    depth, in_string, is_escaped = 0, False, False
            elif c not in _BARE:
                depth = 0
            elif c == '"':
                in_string = True
            else:
                depth += (c in "{[") - (c in "}]")
            is_line_start = c == "\n" or (is_line_start and c in _SPACE)
        return _Json(self.brackets, depth, in_string, is_escaped, is_line_start)


class Parser:
    """Reads one answer. The parts are the same wherever its text is cut.

    A call is told as soon as its name is known and its arguments begin; it stays one, whatever
    follows. Until then it may turn out to be text (JSON of another shape, an unknown function).
    Blanks before a call belong to it.

    A thought, between `<think>` and `</think>`, is text. A `<think>` behind the beginning of an
    answer may be no more than a word: from the first call behind it on nothing is told until
    `</think>` comes, and where none does, calls are calls.

    Nothing is evaluated: names, and arguments that come before a name, are read as JSON.
    """

    def __init__(self, format: Format, names: Collection[str], thinks: bool = False):
        """`names` are callable functions; if `thinks`, the prompt has opened a thought."""
        self._format = format
        self._names = names
        self._parts: list[Part] = []
        self._pending: list[str] = []  # may be a call, or the blanks before one
        self._back = ""  # a character that is read again
        self._num_calls = 0
        self._has_text = self._follows_call = False
        self._is_line_start = True
        self._json = _Json(format.brackets)  # that the text is in
        self._thought: list[str] | None = None  # characters behind a `<think>` that may be a word
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
                if "".join(thought[-len(_THOUGHT[1]) :]) == _THOUGHT[1]:
                    self._end_thought(thought)
        return self._take()

    def finish(self) -> list[Part]:
        self._tell("".join(self._pending))
        self._pending, self._thought = [], None
        return self._take()

    def _take(self) -> list[Part]:
        num = len(self._parts) if self._thought is None else self._num_certain()
        parts, self._parts = self._parts[:num], self._parts[num:]
        return parts

    def _num_certain(self) -> int:
        """Parts before the first call within a thought that may be none."""
        calls = (
            nth for nth, part in enumerate(self._parts)
            if part.index is not None and part.index >= self._num_before
        )  # fmt: skip
        return next(calls, len(self._parts))

    def _end_thought(self, thought: list[str]) -> None:
        """It was one: all of it is text, and the answer goes on behind it."""
        del self._parts[self._num_certain() :]
        self._thought, self._pending, self._back = None, [], ""
        self._num_calls, self._follows_call = self._num_before, False
        self._tell("".join(thought[self._num_told :]))
        self._is_line_start = True
        self._json = _Json(self._format.brackets)
        self._machine = self._read_all(thinks=False)
        next(self._machine)

    # --- text -------------------------------------------------------------------------------------

    def _read_all(self, thinks: bool) -> Generator[None, str, None]:
        opening, brackets = self._format.opening, self._format.brackets
        if thinks:
            yield from self._tell_thought()
        while True:
            pending = "".join(self._pending)
            if self._thought is None and pending.endswith(_THOUGHT[0]):
                is_first = not (self._has_text or self._num_calls)
                is_first &= pending.strip(_SPACE) == _THOUGHT[0]
                self._tell(pending)
                self._pending = []
                if is_first:
                    yield from self._tell_thought()
                else:
                    self._thought, self._num_told = [], 0
                    self._num_before = self._num_calls
            elif opening and pending.endswith(opening):
                self._keep(pending, len(opening))
                yield from self._read_block("")
            elif pending and pending[-1] in brackets and self._may_begin(pending[:-1]):
                self._keep(pending, 1)
                yield from self._read_block(pending[-1])
            else:
                size = max(_overlap(pending, opening), _overlap(pending, _THOUGHT[0]))
                self._keep(pending, size)
                c = yield from self._hold()
                while not size and c in _SPACE:  # there may be many
                    c = yield from self._hold()

    def _tell_thought(self) -> Generator[None, str, None]:
        end, last = _THOUGHT[1], ""
        while last != end:
            c = yield from self._next()
            last = (last + c)[-len(end) :]
            self._tell(c)
        self._is_line_start = True
        self._json = _Json(self._format.brackets)

    def _keep(self, pending: str, num_last: int) -> None:
        """Holds so many last characters and the blanks before them, and tells the rest."""
        end = len(pending[: len(pending) - num_last].rstrip(_SPACE))
        self._tell(pending[:end])
        self._pending = [pending[end:]]

    def _may_begin(self, before: str) -> bool:
        """Whether calls may begin behind what is held: a line does, within no other JSON."""
        return self._begins_line(before) and not self._json.after(before).depth

    def _begins_line(self, before: str) -> bool:
        _, newline, line = before.rpartition("\n")
        return not line.strip(_SPACE) and (self._is_line_start or bool(newline))

    def _tell(self, text: str) -> None:
        if self._follows_call and not (self._has_text and text.strip(_SPACE)):
            text = text.lstrip(_SPACE)
        if not text:
            return
        self._has_text = True
        if self._thought is not None and self._num_calls == self._num_before:
            self._num_told += len(text)
        if self._format.brackets:
            self._json = self._json.after(text)
        self._is_line_start = self._begins_line(text)
        self._follows_call = False
        if self._parts and self._parts[-1].index is None:
            self._parts[-1].text += text
        else:
            self._parts.append(Part(text))

    def _drop(self) -> None:
        self._pending = []
        self._follows_call = self._is_line_start = True
        self._json = _Json(self._format.brackets)

    # --- calls ------------------------------------------------------------------------------------

    def _read_block(self, first: str) -> Generator[None, str, None]:
        """Reads successive calls from `first` on, which is held, to their closing. A character that
        cannot belong to them ends the block and is held.
        """
        closing, is_list, begins_call, num = self._format.closing, False, True, 0
        c = first or (yield from self._hold())
        while True:
            if c == "{":
                if not (yield from self._read_call()):
                    return
                num, begins_call = num + 1, False
            elif c == "[" and not (num or is_list):
                is_list = True
            elif c == "]" and is_list and num:
                is_list = False
                self._drop()
            elif c in ",;" and num and not begins_call:
                begins_call = True
            elif closing and c == closing[0]:
                if (yield from self._matches(closing)) and num:
                    self._drop()
                return
            elif c not in _SPACE:
                return
            c = yield from self._hold()

    def _read_call(self) -> _Judge:
        """An object behind its bracket, and whether it is a call, which then is told."""
        name, arguments = None, None
        c = yield from self._hold_word()
        while c == '"':
            key = yield from self._hold_string(_MAX_NAME_CHARS)
            if (yield from self._hold_word()) != ":":
                return False
            c = yield from self._hold_word()
            if key in _ARGUMENTS and arguments is None:
                if c == "{" and name is not None:
                    yield from self._tell_arguments(name)
                    return True
                arguments = yield from self._hold_arguments(c)
                if not arguments:
                    return False
            elif c == '"' and (key in _IGNORED or (key == "name" and name is None)):
                value = yield from self._hold_string(_MAX_NAME_CHARS)
                if key == "name":
                    name = value
                    if name not in self._names:
                        return False
            else:
                return False
            c = yield from self._hold_word()
            if c == ",":
                c = yield from self._hold_word()
                if c != '"':
                    return False
            elif c != "}":
                return False
        if c != "}" or name is None:
            return False
        self._begin_call(name, arguments or "{}")
        self._drop()
        return True

    def _begin_call(self, name: str, arguments: str) -> None:
        self._parts.append(Part(arguments, self._num_calls, name))
        self._num_calls += 1

    def _tell_arguments(self, name: str) -> Generator[None, str, None]:
        """Of a call, from their bracket on, which is held, and what follows in its object."""
        self._begin_call(name, "{")
        self._drop()
        index = self._num_calls - 1

        def tell(c: str) -> None:
            if not self._parts:
                self._parts.append(Part("", index))
            self._parts[-1].text += c

        if (yield from self._scan_object(self._next, tell)):
            yield from self._scan_object(self._next, lambda c: None)

    def _hold_arguments(self, first: str) -> _Reader:
        """Those that begin with this character, as JSON; "" where they are none."""
        if first == '"':  # JSON within JSON
            arguments = yield from self._hold_string(None)
        elif first == "{":
            read = [first]
            if not (yield from self._scan_object(self._hold, read.append)):
                self._back = ""  # it is held
                return ""
            arguments = "".join(read)
        else:
            return "{}" if first == "n" and (yield from self._matches("null")) else ""
        return arguments if _is_object(arguments) else ""

    def _scan_object(self, read: Callable[[], _Reader], take: Callable[[str], None]) -> _Judge:
        """Passes an object behind its bracket to `take`. Returns False at a character that JSON
        does not allow there, which is read again.
        """
        depth, in_string = 1, False
        while depth:
            c = yield from read()
            if not in_string and c not in _BARE:
                self._back = c
                return False
            take(c)
            if c == '"':
                in_string = not in_string
            elif in_string:
                if c == "\\":
                    take((yield from read()))
            else:
                depth += (c in "{[") - (c in "}]")
        return True

    # --- characters -------------------------------------------------------------------------------

    def _next(self) -> _Reader:
        c, self._back = self._back, ""
        if not c:
            c = yield
        return c

    def _hold(self) -> _Reader:
        c = yield from self._next()
        self._pending.append(c)
        return c

    def _hold_word(self) -> _Reader:
        c = yield from self._hold()
        while c in _SPACE:
            c = yield from self._hold()
        return c

    def _hold_string(self, max_chars: int | None) -> _Reader:
        """A text of JSON behind its quote; "" where it is none, or longer than that."""
        read = ['"']
        while max_chars is None or len(read) < max_chars:
            c = yield from self._hold()
            read.append(c)
            if c == "\\":
                read.append((yield from self._hold()))
            elif c == '"':
                break
        try:
            return str(json.loads("".join(read)))
        except ValueError:
            return ""

    def _matches(self, word: str) -> _Judge:
        """Whether the next characters are those of a word whose first one was read."""
        for expected in word[1:]:
            if (yield from self._hold()) != expected:
                return False
        return True


def opens_thought(prompt: str) -> bool:
    """Whether an answer to this prompt, of which the end is enough, begins in a thought."""
    return prompt.rstrip(_SPACE).endswith(_THOUGHT[0])


def _is_object(text: str) -> bool:
    try:
        text.encode()
        return isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _overlap(text: str, word: str) -> int:
    """Length of the longest end of a text that is the beginning of a word, and not all of it."""
    sizes = range(min(len(text), len(word) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(word[:size])), 0)
