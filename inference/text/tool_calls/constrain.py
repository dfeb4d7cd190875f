"""Grammars of texts that are calls of tools and nothing else."""

import json
import types
from collections.abc import Mapping

from configs.errors import InputError
from inference.text import grammar
from inference.text.tool_calls.call_rules import CallRules
from inference.text.tool_calls.formats import Format
from inference.text.tool_calls.shapes import Literals, Objects, Tagged
from inference.text.tool_calls.values import Schemas

MAX_CALLS = 32  # of one answer: there are models that would not end
_MORE = f"{{0,{MAX_CALLS - 1}}}"


def of_calls(
    format: Format,
    schemas: Schemas,
    is_parallel: bool,
    other: str | None = None,
    specials: Mapping[str, int] = types.MappingProxyType({}),
    header: str = "",
) -> str:
    """One call of one of these functions, or several if `is_parallel`, with arguments that obey
    their JSON schemas; or a text of the grammar `other`.

    Args:
        specials: ids of special tokens that the format's marks or the header have in them, by their
            text.
        header: of a message for the user, where answers have such: before texts of `other`, and
            before calls that are no messages of their own.

    Raises:
        InputError: the schemas are too long together, or one cannot be obeyed.
    """
    num_chars = sum(len(json.dumps(schema)) for schema in schemas.values())
    if num_chars > grammar.MAX_CHARS:
        raise InputError(
            f"the schemas of functions have at most {grammar.MAX_CHARS} characters together, not "
            f"{num_chars}"
        )
    if not format.is_message:
        text = _calls(format, schemas, is_parallel, other, specials)
        return grammar.behind(header, specials, text)
    if other is not None:
        other = grammar.behind(header, specials, other)
    return _calls(format, schemas, is_parallel, other, specials)


def _calls(
    format: Format,
    schemas: Schemas,
    is_parallel: bool,
    other: str | None,
    specials: Mapping[str, int],
) -> str:
    if other is None:
        return _lark(format, schemas, is_parallel, "start", specials)
    schema = grammar.schema_of(other)
    if format.brackets and isinstance(format.shape, Objects) and schema is not None:
        return _json_or(format, format.shape, schemas, is_parallel, schema)
    return grammar.either(_lark(format, schemas, is_parallel, "calls", specials), "calls", other)


def _lark(
    format: Format, schemas: Schemas, is_parallel: bool, first: str, specials: Mapping[str, int]
) -> str:
    rules = CallRules(format.shape, specials)
    for n, (name, schema) in enumerate(schemas.items()):
        rules.add(n, name, schema)
    calls = " | ".join(f"call_{n}" for n, _ in enumerate(schemas))
    lines = [f"{first}: {_sequence(format, is_parallel, rules)}", f"call: {calls}", *rules.lines]
    return "\n".join(lines)


def _json_or(
    format: Format, shape: Objects, schemas: Schemas, is_parallel: bool, other: dict[str, object]
) -> str:
    """Calls as JSON of a schema, or that of another one. Both begin with the same bracket, one
    token of llguidance's lexer, since it does not go back behind that.
    """
    options = [_call_schema(shape, n, *schema) for n, schema in enumerate(schemas.items())]
    calls = {"anyOf": options}
    call = grammar.json_rule(calls)
    first = _sequence(format, is_parallel, CallRules(shape, {}))
    if is_parallel and "[" in format.brackets:
        single = {"$ref": "#/$defs/call"}
        several = {"type": "array", "items": single, "minItems": 1, "maxItems": MAX_CALLS}
        call = grammar.json_rule({"$defs": {"call": calls}, "anyOf": [single, several]})
        first = "call"
    rules = f"start: calls | other\ncalls: {first}\ncall: {call}\n"
    return f"{rules}other: {grammar.json_rule(other)}"


def _call_schema(shape: Objects, n: int, name: str, schema: dict[str, object]) -> dict[str, object]:
    """Of a call; what a schema of arguments refers to is in itself."""
    return {
        "type": "object",
        "properties": {
            shape.name_key: {"const": name},
            shape.key: {"$id": f"arguments:{n}", **schema},
        },
        "required": [shape.name_key, shape.key],
        "additionalProperties": False,
    }


def _sequence(format: Format, is_parallel: bool, rules: CallRules) -> str:
    """One call, or several, with the format's text around them."""
    opening, closing = format.opening + format.gap, format.gap + format.closing
    if format.is_message:
        return f"{rules.text(opening)} call"
    if isinstance(format.shape, Tagged):
        closing = format.closing  # a call ends with its line
    between, call = rules.text(format.between), "call"
    if isinstance(format.shape, Literals | Objects) and format.shape.is_list:
        calls = f'"[" call (", " call){_MORE} "]"' if is_parallel else '"[" call "]"'
        return f"{rules.text(opening)} {calls} {rules.text(closing)}"
    if format.brackets:
        if is_parallel and "[" in format.brackets:
            return f'call | "[" call (", " call){_MORE} "]"'
        return f"call ({between} call){_MORE}" if is_parallel else call
    if format.is_section and is_parallel:
        call = f"call ({between} call){_MORE}"
        is_parallel = False
    whole = f"{rules.text(opening)} {call} {rules.text(closing)}"
    return f"{whole} ({between} {whole}){_MORE}" if is_parallel else whole
