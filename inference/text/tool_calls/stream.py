"""An answer's characters one at a time, and the parts that they become."""

import dataclasses
import json
from collections.abc import Callable, Generator, Sequence

SPACE = " \t\r\n"
MAX_NAME_CHARS = 512  # of a key or a name as JSON may spell it
_BARE = frozenset(SPACE + '{}[]:,"+-.0123456789truefalsnE')  # in JSON, outside of strings
_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")

Reader = Generator[None, str, str]
Judge = Generator[None, str, bool]
Matcher = Generator[None, str, str | None]


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
            is_line_start = c == "\n" or (is_line_start and c in SPACE)
        return _Json(self.brackets, depth, in_string, is_escaped, is_line_start)


class Stream:
    """What the readers of calls share: the next character, and what is certain so far.

    Attributes:
        parts: those that are certain.
        pending: characters that may be a call, or the blanks before one.
        num_calls: those that have begun.
        is_in_call: a call's arguments have begun and not ended; pending characters are no text.
        has_text: there was some.
    """

    def __init__(self, brackets: str):
        """`brackets`: a line that begins with one may be a call."""
        self.parts: list[Part] = []
        self.pending: list[str] = []
        self.num_calls = 0
        self.is_in_call = self.has_text = False
        self._brackets = brackets
        self._back = ""  # a character that is read again
        self._follows_call = False
        self.begin_line()

    # --- parts ------------------------------------------------------------------------------------

    def begin_line(self) -> None:
        self._is_line_start = True
        self._json = _Json(self._brackets)

    def forget(self, num_calls: int) -> None:
        """Drops what is pending, and all calls except for so many."""
        self.pending, self._back, self.is_in_call = [], "", False
        self.num_calls, self._follows_call = num_calls, False

    def drop(self) -> None:
        """Drops what is pending, which belongs to a call."""
        self.pending = []
        self._follows_call = True
        self.begin_line()

    def tell_text(self, text: str) -> int:
        """Adds text, without the blanks between calls; returns how many characters that are."""
        if self._follows_call and not (self.has_text and text.strip(SPACE)):
            text = text.lstrip(SPACE)
        if not text:
            return 0
        self.has_text = True
        if self._brackets:
            self._json = self._json.after(text)
        self._is_line_start = self._begins_line(text)
        self._follows_call = False
        if self.parts and self.parts[-1].index is None:
            self.parts[-1].text += text
        else:
            self.parts.append(Part(text))
        return len(text)

    def begin_call(self, name: str, arguments: str) -> None:
        """Adds a call, whose arguments begin so or are these, and drops what is pending."""
        self.parts.append(Part(arguments, self.num_calls, name))
        self.num_calls += 1
        self.drop()

    def tell_arguments(self, text: str) -> None:
        """Adds a part of the last call's arguments."""
        if not self.parts:
            self.parts.append(Part("", self.num_calls - 1))
        self.parts[-1].text += text

    def may_begin(self, before: str) -> bool:
        """Whether calls may begin behind what is held: a line does, within no other JSON."""
        return self._begins_line(before) and not self._json.after(before).depth

    def _begins_line(self, before: str) -> bool:
        _, newline, line = before.rpartition("\n")
        return not line.strip(SPACE) and (self._is_line_start or bool(newline))

    # --- characters -------------------------------------------------------------------------------

    def next(self) -> Reader:
        c, self._back = self._back, ""
        if not c:
            c = yield
        return c

    def hold(self) -> Reader:
        c = yield from self.next()
        self.pending.append(c)
        return c

    def put_back(self, c: str) -> None:
        """Has a character read again."""
        self._back = c

    def release(self) -> None:
        """Has the last character that is held read again."""
        self.put_back(self.pending.pop())

    def hold_released(self) -> Generator[None, str, None]:
        """Holds a character that was to be read again, so that a text never is."""
        if self._back:
            yield from self.hold()

    def hold_word(self) -> Reader:
        c = yield from self.hold()
        while c in SPACE:
            c = yield from self.hold()
        return c

    def hold_name(self) -> Reader:
        """A name of letters, digits and `_-.`; "" where it is longer than any."""
        name, c = "", (yield from self.hold_word())
        while c in _NAME and len(name) < MAX_NAME_CHARS:
            name += c
            c = yield from self.hold()
        self.release()
        return "" if c in _NAME else name

    def hold_string(self, max_chars: int | None) -> Reader:
        """A text of JSON behind its quote; "" where it is none, or longer than that."""
        read = ['"']
        while max_chars is None or len(read) < max_chars:
            c = yield from self.hold()
            read.append(c)
            if c == "\\":
                read.append((yield from self.hold()))
            elif c == '"':
                break
        try:
            return str(json.loads("".join(read)))
        except ValueError:
            return ""

    def matches(self, word: str) -> Judge:
        """Whether the next characters are those of a word whose first one was read."""
        for expected in word[1:]:
            if (yield from self.hold()) != expected:
                return False
        return True

    def match(self, marks: Sequence[str]) -> Matcher:
        """The mark that comes next, behind blanks; None: another text does. Marks have no blanks at
        their ends, and none begins another; an empty one comes at once.
        """
        if "" in marks:
            return ""
        read = yield from self.hold_word()
        while read not in marks:
            if not any(mark.startswith(read) for mark in marks):
                return None
            read += yield from self.hold()
        return read

    def next_until(self, end: str) -> Reader:
        """The text up to these characters, which are read, too."""
        read: list[str] = []
        while "".join(read[-len(end) :]) != end:
            read.append((yield from self.next()))
        return "".join(read[: -len(end)])

    def scan_object(self, read: Callable[[], Reader], take: Callable[[str], None]) -> Judge:
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

    def hold_object(self) -> Reader:
        """An object whose bracket was read; "" where JSON allows no such character."""
        read = ["{"]
        if (yield from self.scan_object(self.hold, read.append)):
            return "".join(read)
        self._back = ""  # it is held
        return ""
