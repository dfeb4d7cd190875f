"""Calls of a name and arguments between marks: a JSON object, or parameters one by one."""

import json
from collections.abc import Generator, Sequence

from inference.text.tool_calls import object_calls, values
from inference.text.tool_calls.shapes import NameThenJson, Tagged
from inference.text.tool_calls.stream import SPACE, Judge, Matcher, Reader, Stream
from inference.text.tool_calls.values import Parameters, Schemas


def read_block(
    stream: Stream, shape: NameThenJson | Tagged, closing: str, schemas: Schemas
) -> Generator[None, str, None]:
    """Reads successive calls to their closing, or JSON, which some models write in their place.
    Text that cannot belong to calls ends the block and is start.
    """
    c = yield from stream.hold_word()
    if c in "{[":
        yield from object_calls.read_block(stream, closing, schemas, c)
        return
    stream.release()
    head, tail = shape.head.strip(), shape.tail.strip()
    mark = yield from stream.match([head])
    while mark is not None:
        if mark == closing and mark:
            stream.drop()
            return
        if mark == tail and mark:
            stream.drop()
            marks = _marks(head, closing)
        elif isinstance(shape, NameThenJson):
            if not (yield from _read_json(stream, shape, schemas)):
                return
            marks = _marks(tail, head, closing)
        else:
            mark = yield from _read_tagged(stream, shape, _marks(tail, closing), schemas)
            if mark is None:
                return
            continue
        if not marks:
            return
        mark = yield from stream.match(marks)


def _marks(*marks: str) -> list[str]:
    return [mark for mark in marks if mark]


def _read_json(stream: Stream, shape: NameThenJson, schemas: Schemas) -> Judge:
    """A call behind its head, and whether it is one."""
    name = yield from stream.hold_name()
    name = name if name in schemas else name.removeprefix(shape.prefix)
    id_mark, name_end = shape.id_mark, shape.name_end.strip()
    if name not in schemas:
        return False
    mark = yield from stream.match(_marks(id_mark, name_end))
    if mark == id_mark and mark:
        yield from stream.hold_name()
        mark = yield from stream.match([name_end])
    if mark is None or (yield from stream.hold_word()) != "{":
        return False
    yield from object_calls.tell_arguments(stream, name)
    return True


def _read_tagged(stream: Stream, shape: Tagged, ends: Sequence[str], schemas: Schemas) -> Matcher:
    """A call behind its head, to the one of `ends` that comes next; None: another text does."""
    name = yield from stream.hold_name()
    if name not in schemas or (yield from stream.match([shape.name_end.strip()])) is None:
        return None
    key_begin, separator = shape.key_begin.strip(), ""
    mark = yield from stream.match([key_begin, *ends])
    if mark is None:
        return None
    stream.begin_call(name, "{")
    stream.is_in_call, parameters = True, Parameters(schemas[name])
    while mark == key_begin:
        key = (yield from stream.next_until(shape.key_end.strip())).strip()
        begins = [shape.value_begin, *_marks(shape.text_begin)]
        mark = yield from stream.match(begins)
        if mark is None:
            break
        stream.pending = []
        kinds, before = parameters.types(key), f"{separator}{json.dumps(key, ensure_ascii=False)}: "
        if mark == shape.text_begin if shape.text_begin else kinds == values.TEXT:
            stream.tell_arguments(before + '"')
            yield from tell_text(stream, shape.value_end.strip(), shape.pad)
            stream.tell_arguments('"')
        else:
            text = yield from _next_value(stream, shape.value_end.strip())
            pad = shape.pad
            text = text.removeprefix(pad).removesuffix(pad)
            stream.tell_arguments(before + values.to_json(text, kinds))
        separator = ", "
        mark = yield from stream.match([key_begin, *ends])
    stream.tell_arguments("}")
    stream.is_in_call = False
    return mark


def tell_text(stream: Stream, end: str, pad: str = "") -> Generator[None, str, None]:
    """Adds a value, to its end and the pad before that, to a text of JSON."""
    ends = {end, pad + end}
    start = yield from stream.next()
    if pad and start == pad:
        start = ""
    while start not in ends:
        if start and not any(end.startswith(start) for end in ends):
            stream.tell_arguments(json.dumps(start[0], ensure_ascii=False)[1:-1])
            start = start[1:]
        else:
            start += yield from stream.next()


def _next_value(stream: Stream, end: str) -> Reader:
    """A value that may be JSON, up to its end, which is read, too. Within a string of JSON, which
    has no line ends, the same characters are no end.
    """
    read: list[str] = []
    begins_json, in_string, is_escaped = None, False, False
    while True:
        c = yield from stream.next()
        if in_string and c < " ":
            if "".join(read[-len(end) :]) == end:
                stream.put_back(c)
                break
            in_string = False
        read.append(c)
        if begins_json is None and c not in SPACE:
            begins_json = c in '"[{'
        if in_string:
            in_string = is_escaped or c != '"'
            is_escaped = c == "\\" and not is_escaped
        else:
            in_string = bool(begins_json) and c == '"'
        if not in_string and "".join(read[-len(end) :]) == end:
            break
    return "".join(read[: -len(end)])
