"""Grammars of calls: what they permit, and that what they permit is read as these calls."""

import json
import random

import jsonschema
import pytest

from configs.errors import InputError
from inference.text import grammar
from inference.text.grammar import Grammars
from inference.text.tool_calls import constrain
from inference.text.tool_calls.formats import FORMATS
from inference.text.tool_calls.parser import Parser
from tests.inference.server.fake_engine import END, tokenizer
from tests.inference.text.test_grammar import follow, permitted
from tests.inference.text.tool_calls.test_parser import whole

SCHEMAS = {
    "f": {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"],
          "additionalProperties": False, "$defs": {"n": {"type": "integer", "maximum": 99}}},
    "g-1": {"type": "object", "properties": {"s": {"enum": ["x\"}\n", "</tool_call>"]},
                                             "t": {"type": "array", "items": {"type": "null"}}},
            "additionalProperties": False, "required": ["s"]},
}  # fmt: skip
QUESTION = {
    "type": "object",
    "properties": {"q": {"$ref": "#/$defs/n"}},
    "required": ["q"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "integer", "maximum": 9}},
}
ONE, OTHER = '{"name": "f", "KEY": {"a": 7}}', '{"name": "g-1", "KEY": {"s":"</tool_call>"}}'
WRITTEN = {
    "hermes": (f"<tool_call>\n{ONE}\n</tool_call>", f"\n<tool_call>\n{OTHER}\n</tool_call>"),
    "llama3_json": (ONE, f"; {OTHER}"),
    "json": (f"[{ONE}", f", {OTHER}]"),
}


@pytest.fixture(scope="module")
def grammars():
    return Grammars(tokenizer(), [END])


@pytest.mark.parametrize("name", WRITTEN)
def test_one_call_or_several(grammars, name):
    format = FORMATS[name]
    first, more = (text.replace("KEY", format.shape.key) for text in WRITTEN[name])
    state = grammars.start(constrain.of_calls(format, SCHEMAS, True))
    follow(state, first)
    assert (END in permitted(state)) == (name != "json")
    follow(state, more)
    assert END in permitted(state)
    alone = first.strip("[")
    follow(grammars.start(constrain.of_calls(format, SCHEMAS, True)), alone)
    state = grammars.start(constrain.of_calls(format, SCHEMAS, False))
    follow(state, alone)
    assert state.is_complete or permitted(state) == [END]
    for wrong in ("Well", " ", alone.replace('"f"', '"g"'), alone.replace("7", "700")):
        state = grammars.start(constrain.of_calls(format, SCHEMAS, False))
        with pytest.raises(AssertionError):
            follow(state, wrong)


@pytest.mark.parametrize("name", WRITTEN)
def test_there_are_not_too_many_calls(grammars, name):
    format = FORMATS[name]
    first, more = (text.replace("KEY", format.shape.key).rstrip("]") for text in WRITTEN[name])
    state = grammars.start(constrain.of_calls(format, SCHEMAS, True))
    follow(state, first + more * (constrain.MAX_CALLS - 1))
    with pytest.raises(AssertionError):
        follow(state, more)


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("other, text", [
    (grammar.of_json_schema({"type": "array"}), "[1, null]"),
    (grammar.of_json_schema(QUESTION), '{"q": 7}'), (grammar.of_json_schema(QUESTION), '{"q":7}'),
    (grammar.of_json_schema({"type": "object"}), '{"name": "f", "n": [{}]}'),
    (grammar.of_json_schema({"type": "array"}), '[{"name": "f", "n": 1}, {"q":1}]'),
    (grammar.of_regex("[0-9]+"), "123"),
    (grammar.of_choices(["ja", "nein"]), "ja"), (grammar.of_lark('start: "a" start?'), "aa"),
])  # fmt: skip
def test_calls_or_something_else(grammars, name, other, text):
    format = FORMATS[name]
    source = constrain.of_calls(format, SCHEMAS, True, other)
    for asked, num_calls in (
        ("".join(WRITTEN[name]).replace("KEY", format.shape.key), 2),
        (text, 0),
    ):
        state = grammars.start(source)
        follow(state, asked)
        assert END in permitted(state)
        parser = Parser(format, SCHEMAS)
        told, calls = whole(parser.push(asked) + parser.finish())
        assert len(calls) == num_calls and told == (asked if not num_calls else "")


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("is_parallel", [False, True])
def test_calls_or_an_object_and_nothing_else(grammars, name, is_parallel):
    format = FORMATS[name]
    source = constrain.of_calls(format, SCHEMAS, is_parallel, grammar.of_json_schema(QUESTION))
    first, more = (text.replace("KEY", format.shape.key) for text in WRITTEN[name])
    wrongs = ['{"q": 10}', '{"q": 1}; {"name"', first.replace("7", "700"),
              first.replace('"f"', '"h"')]  # fmt: skip
    for wrong in wrongs if is_parallel else [*wrongs, first.strip("[") + more]:
        with pytest.raises(AssertionError):
            follow(grammars.start(source), wrong)
    follow(grammars.start(source), first.strip("["))


@pytest.mark.parametrize("name", WRITTEN)
def test_an_object_beside_too_many_calls(grammars, name):
    format = FORMATS[name]
    first, more = (text.replace("KEY", format.shape.key).rstrip("]") for text in WRITTEN[name])
    source = constrain.of_calls(format, SCHEMAS, True, grammar.of_json_schema(QUESTION))
    state = grammars.start(source)
    follow(state, first + more * (constrain.MAX_CALLS - 1))
    with pytest.raises(AssertionError):
        follow(state, more)


def test_schemas_are_not_too_long_together():
    each = {"type": "object", "description": "x" * (grammar.MAX_CHARS // 3)}
    answer = grammar.of_json_schema(QUESTION)
    for format in FORMATS.values():
        assert constrain.of_calls(format, {"a": each, "b": each}, True)
        for other in (None, answer):
            with pytest.raises(InputError, match="at most 65536 characters together, not 65"):
                constrain.of_calls(format, {"a": each, "b": each, "c": each}, True, other)


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("is_parallel", [False, True])
def test_any_walk_is_read_as_calls_of_the_schemas(grammars, name, is_parallel):
    dice, format = random.Random(name), FORMATS[name]
    source = constrain.of_calls(format, SCHEMAS, is_parallel)
    for _ in range(8):
        state, tokens = grammars.start(source), []
        while not state.is_complete and len(tokens) < 4000:
            choices = permitted(state)
            ends = [token for token in (END, *b'"]') if token in choices]
            tokens.append(dice.choice(ends if ends and dice.random() < 0.5 else choices))
            state.accept(tokens[-1])
        parser = Parser(format, SCHEMAS)
        text = tokenizer().decode(tokens)
        told, calls = whole(parser.push(text) + parser.finish())
        assert told == "" and len(calls) >= 1 and (is_parallel or len(calls) == 1), text
        for called, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[called])
