"""Grammars of texts that are calls of tools and nothing else."""

import json
from collections.abc import Mapping
from typing import Any

from inference.text import grammar
from inference.text.tool_calls.formats import Format

MAX_CALLS = 32  # of one answer: there are models that would not end
_MORE = f"{{0,{MAX_CALLS - 1}}}"

Schemas = Mapping[str, dict[str, Any]]  # of the arguments, by names of functions


def of_calls(format: Format, schemas: Schemas, is_parallel: bool) -> str:
    """One call of one of these functions, or several, with arguments that their schemas describe.

    Args:
        format: how calls are written.
        schemas: JSON schemas of objects.
        is_parallel: whether there may be several.
    """
    return _lark(format, schemas, is_parallel, "start")


def of_calls_or(format: Format, schemas: Schemas, is_parallel: bool, answer: str) -> str:
    """The same, or a text of another grammar."""
    calls = _lark(format, schemas, is_parallel, "calls")
    return grammar.either(calls, "calls", answer)


def _lark(format: Format, schemas: Schemas, is_parallel: bool, first: str) -> str:
    """In Lark: `first` describes it."""
    numbered = list(enumerate(schemas.items()))
    rules = [f"call: {' | '.join(f'call_{n}' for n, _ in numbered)}"]
    for n, (name, schema) in numbered:
        head = f'{{"name": {json.dumps(name)}, "{format.key}": '
        rules.append(f"call_{n}: {json.dumps(head)} arguments_{n} {json.dumps('}')}")
        rules.append(f"arguments_{n}: {grammar.json_rule(schema)}")
    return "\n".join([f"{first}: {_sequence(format, is_parallel)}", *rules])


def _sequence(format: Format, is_parallel: bool) -> str:
    """Of calls, in Lark."""
    if format.closing:
        one = f"{json.dumps(format.opening + chr(10))} call {json.dumps(chr(10) + format.closing)}"
        return f'{one} ("\\n" {one}){_MORE}' if is_parallel else one
    if not is_parallel:
        return "call"
    if "[" in format.brackets:
        return f'call | "[" call (", " call){_MORE} "]"'
    return f'call ("; " call){_MORE}'
