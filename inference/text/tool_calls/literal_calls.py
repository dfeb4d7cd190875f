"""Calls as Python has them, in a list: `[f(a=1, b="x"), g()]`. Their arguments are literals."""

import json
from collections.abc import Generator

from inference.text.tool_calls import literals, object_calls
from inference.text.tool_calls.stream import SPACE, Judge, Reader, Stream
from inference.text.tool_calls.values import Schemas


def read_block(
    stream: Stream, closing: str, schemas: Schemas, first: str = ""
) -> Generator[None, str, None]:
    """Reads a list of calls from `first` on, which is held, or calls in lines, to their closing; or
    JSON, which some models write in their place. Text that cannot belong to calls ends the block
    and is held.
    """
    if (first or (yield from stream.hold_word())) != "[":
        if closing:
            yield from _read_lines(stream, closing, schemas)
        return
    is_json = (yield from stream.hold_word()) == "{"
    stream.release()
    if is_json:
        yield from object_calls.read_block(stream, closing, schemas, "[")
        return
    c = ","
    while c == ",":
        if not (yield from _read_call(stream, schemas)):
            return
        c = yield from stream.hold_word()
    if c != "]":
        return
    stream.drop()
    if closing and (yield from stream.match([closing])) is not None:
        stream.drop()


def _read_lines(stream: Stream, closing: str, schemas: Schemas) -> Generator[None, str, None]:
    """Reads calls from the first character of a name on, which is held."""
    c = ""
    while c != closing[0]:
        stream.release()
        if not (yield from _read_call(stream, schemas)):
            return
        c = yield from stream.hold_word()
    if (yield from stream.matches(closing)):
        stream.drop()


def _read_call(stream: Stream, schemas: Schemas) -> Judge:
    """Whether a call comes, which is whole then or has begun."""
    name = yield from stream.hold_name()
    if name not in schemas or (yield from stream.hold_word()) != "(":
        return False
    key, c = yield from _hold_key(stream)
    if c == ")":
        stream.begin_call(name, "{}")
        return True
    if not key:
        return False
    stream.begin_call(name, "{")
    stream.is_in_call, separator = True, ""
    while key:
        stream.tell_arguments(f"{separator}{json.dumps(key)}: ")
        c = yield from _read_value(stream)
        separator, key = ", ", ""
        stream.pending = []
        if c == ",":
            key, c = yield from _hold_key(stream)
        elif c != ")":
            stream.put_back(c)
    stream.tell_arguments("}")
    stream.is_in_call = False
    if c == ")":
        stream.drop()
    return c == ")"


def _hold_key(stream: Stream) -> Generator[None, str, tuple[str, str]]:
    """A parameter's name and its "=", or the bracket behind the last one; ("", "") of neither."""
    if (yield from stream.hold_word()) == ")":
        return "", ")"
    stream.release()
    key = yield from stream.hold_name()
    c = (yield from stream.hold_word()) if key else ""
    return (key, c) if c == "=" else ("", "")


def _read_value(stream: Stream) -> Reader:
    """Adds a value; returns the character behind it. What is no literal is a text."""
    c = yield from _next_word(stream)
    if c in "'\"":
        stream.tell_arguments('"')
        yield from _tell_text(stream, c)
        stream.tell_arguments('"')
        return (yield from _next_word(stream))
    read, depth, quote = "", 0, ""
    while quote or depth or c not in ",)]}":
        if quote and c == "\\":
            read += c
            c = yield from stream.next()
        elif quote:
            quote = "" if c == quote else quote
        elif c in "'\"":
            quote = c
        else:
            depth += (c in "([{") - (c in ")]}")
        read += c
        c = yield from stream.next()
    stream.tell_arguments(literals.to_json(read) or json.dumps(read.strip(), ensure_ascii=False))
    return c


def _tell_text(stream: Stream, quote: str) -> Generator[None, str, None]:
    """Adds a text behind its quote, as it comes."""
    while (c := (yield from stream.next())) != quote:
        if c == "\\":
            escape = yield from stream.next()
            for _ in range(literals.num_digits(escape)):
                escape += yield from stream.next()
            try:
                c = literals.character(escape)
            except ValueError:
                c += escape
        stream.tell_arguments(literals.quoted(c))


def _next_word(stream: Stream) -> Reader:
    c = yield from stream.next()
    while c in SPACE:
        c = yield from stream.next()
    return c
