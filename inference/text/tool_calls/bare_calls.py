"""Calls with bare keys and texts between marks: `call:f{a:<|"|>x<|"|>,b:[1,true]}`."""

import json
from collections.abc import Generator

from inference.text.tool_calls import literals, marked_calls, object_calls, values
from inference.text.tool_calls.shapes import Bare
from inference.text.tool_calls.stream import SPACE, Judge, Reader, Stream
from inference.text.tool_calls.values import Parameters, Schemas

_CLOSING = {"{": "}", "[": "]"}


def read_block(
    stream: Stream, shape: Bare, closing: str, schemas: Schemas
) -> Generator[None, str, None]:
    """Reads a call to its closing, or JSON, which some models write in its place. Text that cannot
    belong to calls ends the block and is held.
    """
    c = yield from stream.hold_word()
    if c in "{[":
        yield from object_calls.read_block(stream, closing, schemas, c)
        return
    stream.release()
    if (yield from stream.match([shape.head])) is None:
        return
    name = yield from stream.hold_name()
    if name not in schemas or (yield from stream.hold_word()) != "{":
        return
    stream.begin_call(name, "{")
    stream.is_in_call = True
    arguments = _Arguments(stream, shape.quote, closing, Parameters(schemas[name]))
    yield from arguments.read()
    stream.is_in_call = False
    if arguments.are_whole and (yield from stream.match([closing])) is not None:
        stream.drop()


class _Arguments:
    """Reads a call's arguments behind their bracket, and adds them as JSON. Text that cannot belong
    to them ends them, and is held.

    Attributes:
        are_whole: all brackets were closed.
    """

    def __init__(self, stream: Stream, quote: str, closing: str, parameters: Parameters):
        self._stream = stream
        self._quote = quote
        self._closing = closing
        self._parameters = parameters
        self._brackets = ["}"]  # what closes each open one
        self._separator = ""

    @property
    def are_whole(self) -> bool:
        return not self._brackets

    def read(self) -> Generator[None, str, None]:
        stream, goes_on = self._stream, True
        while self._brackets and goes_on:
            c = yield from self._next_word()
            if c == self._brackets[-1]:
                stream.tell_arguments(self._brackets.pop())
                self._separator = ", "
            elif c != "," or not self._separator:
                goes_on = yield from self._read_item(c)
        stream.tell_arguments("".join(reversed(self._brackets)))

    def _read_item(self, c: str) -> Judge:
        """Whether an item that begins so comes; its bracket may stay open."""
        before, is_text = self._separator, False
        if self._brackets[-1] == "}":
            key = yield from self._read_key(c)
            if key is None:
                return False
            before += f"{json.dumps(key, ensure_ascii=False)}: "
            is_text = len(self._brackets) == 1 and self._parameters.types(key) == values.TEXT
            c = yield from self._next_word()
        if c == self._quote[0] and not (yield from self._matches_quote()):
            return False
        self._separator = ", "
        if c == self._quote[0] or c == '"':
            self._stream.tell_arguments(before + '"')
            if c == '"':
                yield from self._tell_json_text()
            else:
                yield from marked_calls.tell_text(self._stream, self._quote)
            self._stream.tell_arguments('"')
        elif c in _CLOSING:
            self._stream.tell_arguments(before + c)
            self._brackets.append(_CLOSING[c])
            self._separator = ""
        else:
            text = (yield from self._next_until(c, ",]}" + self._quote[0])).strip()
            value = None if is_text else literals.to_json(text)
            self._stream.tell_arguments(before + (value or json.dumps(text, ensure_ascii=False)))
        return True

    def _read_key(self, c: str) -> Generator[None, str, str | None]:
        """A key that begins so, and the colon behind it; None: it is none."""
        if c == self._quote[0]:
            if not (yield from self._matches_quote()):
                return None
            key = yield from self._stream.next_until(self._quote)
        elif c == '"':
            key = yield from self._stream.next_until('"')
        else:
            key = (yield from self._next_until(c, ":,{}[]" + self._quote[0])).strip()
        c = yield from self._next_word()
        if c == ":":
            return key
        if c == self._quote[0]:
            yield from self._matches_quote()
        else:
            self._stream.put_back(c)
        return None

    def _matches_quote(self) -> Judge:
        """Whether a quote comes, whose first character was read, or else the call's closing or any
        other text, which are held.
        """
        self._stream.pending = []
        self._stream.put_back(self._quote[0])
        mark = yield from self._stream.match([self._quote, self._closing])
        if mark is not None:
            self._stream.drop()
        return mark == self._quote

    def _tell_json_text(self) -> Generator[None, str, None]:
        while (c := (yield from self._stream.next())) != '"':
            escape = (yield from self._stream.next()) if c == "\\" else ""
            self._stream.tell_arguments(c + escape if escape else literals.quoted(c))

    def _next_until(self, first: str, ends: str) -> Reader:
        """Text from `first` on to one of these characters, which is read again."""
        read = first
        while read[-1] not in ends:
            read += yield from self._stream.next()
        self._stream.put_back(read[-1])
        return read[:-1]

    def _next_word(self) -> Reader:
        c = yield from self._stream.next()
        while c in SPACE:
            c = yield from self._stream.next()
        return c
