"""Parses bodies; errors name the field."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import inspect

from configs.errors import shown
from inference.server.protocol.dialects.translate import renamed, translate
from inference.server.protocol.errors import ApiError, invalid, missing
from inference.server.protocol.fields import MAX_PROMPTS

Body = TypeVar("Body", bound=msgspec.Struct)

_KEY = "(?:`?key`? in )?"
_PLACE = re.compile(rf"(?P<what>.*?)(?: - at {_KEY}`{_KEY}\$\.?(?P<where>.*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_CHOICE = re.compile("Invalid enum value (.*)", re.DOTALL)
_STEP = re.compile(r"\w+|\[\d+\]")  # of a place: messages[0].role
_WORDS = {
    "int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false",
    "array": "a list", "object": "an object", "null": "null", ">=": "from", "<=": "up to",
    ">": "above",
}  # fmt: skip
_WORD = re.compile(r"`(\w+(?: \| \w+)*)`|(>=|<=|>)")  # `int | null`
_MAX_TOKEN_ID = 2**31 - 1
_MAX_WALKED = 65536  # items of a list that are converted; no field takes more


class Parsed(NamedTuple):
    """A parsed request.

    Attributes:
        ignored: names of fields without effect.
        names: declared field -> field of another server that the client sent instead.
    """

    request: Any
    ignored: list[str]
    names: dict[str, str]


def parse(body: bytes, kind: type[Body]) -> Parsed:
    """Parses a request of type `kind`; raises an `ApiError` (400) that names the field."""
    try:
        fields = msgspec.json.decode(body)
    except msgspec.ValidationError as error:  # numbers that nothing here can hold
        raise ApiError(400, f"the body has a number out of range: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ApiError(400, "the body is not valid JSON") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body is not a JSON object")
    body_here, ignored, names = translate(fields, kind.__struct_encode_fields__)
    try:
        whole = {name: _whole(value) for name, value in body_here.items()}
        request = msgspec.convert(whole, kind)
    except msgspec.ValidationError as error:
        raise renamed(invalid_field(error, kind), names) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    return Parsed(request, ignored, names)


def query(params: Mapping[str, str], kind: type[Body]) -> Body:
    """Parses the query of a URL; raises an `ApiError` (400) that names the parameter."""
    try:
        return msgspec.convert(dict(params), kind, strict=False)
    except msgspec.ValidationError as error:
        raise invalid_field(error, kind) from None


def prompts(value: Any, param: str = "prompt", limit: int = MAX_PROMPTS) -> list[str | list[int]]:
    """The prompts of a field: a text, token ids, or a list of at most `limit` of one of the two.

    Raises:
        ApiError: 400, the field has another form.
    """
    prompts = [value] if isinstance(value, str) or _are_ids(value) else value
    if not isinstance(prompts, list) or not prompts:
        raise invalid(param, "is a text, token ids, or a list of one of the two, not empty")
    if len(prompts) > limit:
        raise invalid(param, f"is a list of at most {limit}, not {len(prompts)}")
    is_text = isinstance(prompts[0], str)
    for prompt in prompts:
        if not (isinstance(prompt, str) if is_text else _are_ids(prompt)):
            raise invalid(param, "is a text, token ids, or a list of one of the two")
        if not prompt:
            raise invalid(param, "is empty: at least one token is needed")
    return prompts


def check_ids(ids: list[int], vocab_size: int, param: str) -> list[int]:
    """Returns the ids; raises an `ApiError` (400) if one is not in the vocabulary."""
    if max(ids, default=0) >= vocab_size:
        why = f"holds a token id that is out of vocabulary, {max(ids)}; ids are below {vocab_size}"
        raise invalid(param, why)
    return ids


def _are_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and set(map(type, value)) == {int}
        and min(value) >= 0
        and max(value) <= _MAX_TOKEN_ID
    )


def _whole(value: Any) -> Any:
    """Converts whole floats to ints, also in lists: in JSON, 68.0 is 68."""
    if isinstance(value, list):
        is_short = len(value) <= _MAX_WALKED
        is_walked = is_short and not {float, list}.isdisjoint(map(type, value))
        return [_whole(item) for item in value] if is_walked else value
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**63
    return int(value) if is_whole else value


def invalid_field(error: msgspec.ValidationError, kind: Any, root: str = "") -> ApiError:
    """The error of a field of a type `kind`, which lies in the field `root` of the request."""
    match = _PLACE.fullmatch(str(error))
    assert match is not None  # it matches anything
    what, where = match["what"], ".".join(filter(None, (root, match["where"]))) or None
    if absent := _MISSING.fullmatch(what):
        return missing(f"{where}.{absent[1]}" if where else absent[1])
    if where and (choice := _CHOICE.fullmatch(what)):
        steps = _STEP.findall(match["where"] or "")
        valid = dict.fromkeys(_choices(inspect.type_info(kind), steps))
        if valid:
            return invalid(where, f"is one of {', '.join(map(str, valid))}, not {choice[1][:80]}")
    where = where and where.replace("[...]", "")  # a value of a mapping
    what = _WORD.sub(lambda match: _in_words(match[1] or match[2]), what)
    message = f"{where}: {what[0].lower()}{what[1:]}" if where else what
    return ApiError(400, message.replace("`", ""), where, "invalid_value")


def _choices(kind: inspect.Type, steps: list[str]) -> Iterator[object]:
    """Yields the values that a field may have, `steps` into a type."""
    match kind:
        case inspect.Metadata(type=inner):
            yield from _choices(inner, steps)
        case inspect.UnionType(types=types):
            for option in types:
                yield from _choices(option, steps)
        case inspect.LiteralType(values=values) if not steps:
            yield from values
        case inspect.ListType(item_type=item) if steps:
            yield from _choices(item, steps[1:])
        case inspect.StructType(fields=fields) if steps:
            for field in fields:
                if field.encode_name == steps[0]:
                    yield from _choices(field.type, steps[1:])


def _in_words(names: str) -> str:
    return " or ".join(_WORDS.get(name, name) for name in names.split(" | "))


def check_model(requested: str | None, *served: str) -> None:
    """Raises an `ApiError` (404) unless the requested model is a served one."""
    if requested is not None and requested not in served:
        names = f"{served[0]} is" if len(served) == 1 else f"{', '.join(served)} are"
        raise ApiError(
            404, f"the model {shown(requested)} is not served here: {names}", "model",
            "model_not_found",
        )  # fmt: skip


def as_header(name: str) -> str:
    """A field's name in characters that a header permits."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "_-.") else "?" for c in name[:64])
