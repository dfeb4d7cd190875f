"""Calls that are JSON objects with a name and arguments, one by one or in a list."""

import json
from collections.abc import Collection, Generator

from inference.text.tool_calls.stream import MAX_NAME_CHARS, SPACE, Judge, Reader, Stream

_ARGUMENTS = ("arguments", "parameters")
_NAMES = ("name", "tool_name")
_IGNORED = ("id", "type", "tool_call_id")  # texts that some models write beside a name


def read_block(
    stream: Stream, closing: str, names: Collection[str], first: str = ""
) -> Generator[None, str, None]:
    """Reads successive calls from `first` on, which is held, to their closing. A character that
    cannot belong to them ends the block and is held.
    """
    is_list, begins_call, num = False, True, 0
    c = first or (yield from stream.hold())
    while True:
        if c == "{":
            if not (yield from _read_call(stream, names)):
                return
            num, begins_call = num + 1, False
        elif c == "[" and not (num or is_list):
            is_list = True
        elif c == "]" and is_list and num:
            is_list = False
            stream.drop()
        elif c in ",;" and num and not begins_call:
            begins_call = True
        elif closing and c == closing[0]:
            if (yield from stream.matches(closing)) and num:
                stream.drop()
            return
        elif c not in SPACE:
            return
        c = yield from stream.hold()


def _read_call(stream: Stream, names: Collection[str]) -> Judge:
    """An object behind its bracket, and whether it is a call, which then is told."""
    name, arguments = None, None
    c = yield from stream.hold_word()
    while c == '"':
        key = yield from stream.hold_string(MAX_NAME_CHARS)
        if (yield from stream.hold_word()) != ":":
            return False
        c = yield from stream.hold_word()
        if key in _ARGUMENTS and arguments is None:
            if c == "{" and name is not None:
                if (yield from tell_arguments(stream, name)):
                    yield from stream.scan_object(stream.next, lambda c: None)
                return True
            arguments = yield from _hold_arguments(stream, c)
            if not arguments:
                return False
        elif c == '"' and (key in _IGNORED or (key in _NAMES and name is None)):
            value = yield from stream.hold_string(MAX_NAME_CHARS)
            if key in _NAMES:
                name = value
                if name not in names:
                    return False
        else:
            return False
        c = yield from stream.hold_word()
        if c == ",":
            c = yield from stream.hold_word()
            if c != '"':
                return False
        elif c != "}":
            return False
    if c != "}" or name is None:
        return False
    stream.begin_call(name, arguments or "{}")
    return True


def tell_arguments(stream: Stream, name: str) -> Judge:
    """Of a call, from their bracket on, which is held."""
    stream.begin_call(name, "{")
    return (yield from stream.scan_object(stream.next, stream.tell_arguments))


def _hold_arguments(stream: Stream, first: str) -> Reader:
    """Those that begin with this character, as JSON; "" where they are none."""
    if first == '"':  # JSON within JSON
        arguments = yield from stream.hold_string(None)
    elif first == "{":
        arguments = yield from stream.hold_object()
    else:
        return "{}" if first == "n" and (yield from stream.matches("null")) else ""
    return arguments if _is_object(arguments) else ""


def _is_object(text: str) -> bool:
    try:
        text.encode()
        return isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
