"""Grammars of texts that are calls of tools and nothing else."""

import json
from collections.abc import Mapping

from configs.errors import InputError
from inference.text import grammar
from inference.text.tool_calls.formats import Format

MAX_CALLS = 32  # of one answer: there are models that would not end
_MORE = f"{{0,{MAX_CALLS - 1}}}"

Schemas = Mapping[str, dict[str, object]]  # of the arguments, by names of functions


def of_calls(format: Format, schemas: Schemas, is_parallel: bool, other: str | None = None) -> str:
    """One call of one of these functions, or several if `is_parallel`, with arguments that obey
    their JSON schemas; or a text of the grammar `other`. Raises InputError if the schemas are too
    long together.
    """
    num_chars = sum(len(json.dumps(schema)) for schema in schemas.values())
    if num_chars > grammar.MAX_CHARS:
        raise InputError(
            f"the schemas of functions have at most {grammar.MAX_CHARS} characters together, not "
            f"{num_chars}"
        )
    if other is None:
        return _lark(format, schemas, is_parallel, "start")
    schema = grammar.schema_of(other)
    if format.brackets and schema is not None:
        return _json_or(format, schemas, is_parallel, schema)
    return grammar.either(_lark(format, schemas, is_parallel, "calls"), "calls", other)


def _lark(format: Format, schemas: Schemas, is_parallel: bool, first: str) -> str:
    numbered = list(enumerate(schemas.items()))
    rules = [f"call: {' | '.join(f'call_{n}' for n, _ in numbered)}"]
    for n, (name, schema) in numbered:
        head = f'{{"name": {json.dumps(name)}, "{format.key}": '
        rules.append(f"call_{n}: {json.dumps(head)} arguments_{n} {json.dumps('}')}")
        rules.append(f"arguments_{n}: {grammar.json_rule(schema)}")
    return "\n".join([f"{first}: {_sequence(format, is_parallel)}", *rules])


def _json_or(format: Format, schemas: Schemas, is_parallel: bool, other: dict[str, object]) -> str:
    """Calls as JSON of a schema, or that of another one. Both begin with the same bracket, one
    token of llguidance's lexer, since it does not go back behind that.
    """
    options = [_call_schema(format, n, *schema) for n, schema in enumerate(schemas.items())]
    calls = {"anyOf": options}
    call, first = grammar.json_rule(calls), _sequence(format, is_parallel)
    if is_parallel and "[" in format.brackets:
        single = {"$ref": "#/$defs/call"}
        several = {"type": "array", "items": single, "minItems": 1, "maxItems": MAX_CALLS}
        call = grammar.json_rule({"$defs": {"call": calls}, "anyOf": [single, several]})
        first = "call"
    rules = f"start: calls | other\ncalls: {first}\ncall: {call}\n"
    return f"{rules}other: {grammar.json_rule(other)}"


def _call_schema(format: Format, n: int, name: str, schema: dict[str, object]) -> dict[str, object]:
    """Of a call; what a schema of arguments refers to is in itself."""
    return {
        "type": "object",
        "properties": {"name": {"const": name}, format.key: {"$id": f"arguments:{n}", **schema}},
        "required": ["name", format.key],
        "additionalProperties": False,
    }


def _sequence(format: Format, is_parallel: bool) -> str:
    if format.closing:
        call = f"{json.dumps(format.opening + chr(10))} call {json.dumps(chr(10) + format.closing)}"
        return f'{call} ("\\n" {call}){_MORE}' if is_parallel else call
    if not is_parallel:
        return "call"
    if "[" in format.brackets:
        return f'call | "[" call (", " call){_MORE} "]"'
    return f'call ("; " call){_MORE}'
