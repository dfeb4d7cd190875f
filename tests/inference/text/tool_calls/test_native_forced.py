"""Calls in the formats of families that a grammar forces: they are read as calls of the schemas."""

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
from inference.text.tool_calls.shapes import Bare, Tagged
from tests.inference.server.fake_engine import END, tokenizer
from tests.inference.text.test_grammar import permitted
from tests.inference.text.tool_calls import native
from tests.inference.text.tool_calls.test_parser import whole

SCHEMAS: dict = {
    "f": {"type": "object", "properties": {
        "s": {"type": "string"}, "n": {"$ref": "#/$defs/n"},
        "kind": {"enum": ["a", "b\n", "</parameter>", "'\"", 7]}, "is_x": {"type": "boolean"},
        "short": {"type": "string", "minLength": 1, "maxLength": 4}},
        "required": ["n", "kind"], "additionalProperties": False,
        "$defs": {"n": {"type": "integer", "maximum": 99}}},
    "g-1": {"type": "object", "properties": {
        "o": {"type": "object",
              "properties": {"k": {"enum": ["</parameter>", "</arg_value>", "x"]}},
              "required": ["k"], "additionalProperties": False},
        "t": {"type": "array", "items": {"type": ["null", "string"]}, "minItems": 1},
        "u": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "m": {"anyOf": [{"type": "integer", "minimum": 5}, {"const": "x"}]}, "any": {}},
        "required": ["o", "u"]},
    "empty": {"type": "object", "properties": {}, "additionalProperties": False},
}  # fmt: skip


@pytest.fixture(scope="module")
def grammars():
    return Grammars(tokenizer(), [END])


def ends_of(format) -> list[bytes]:
    """Texts that a walk takes where it can, so that it ends."""
    shape = FORMATS[format].shape
    ends = [shape.value_end.encode()] if isinstance(shape, Tagged) else []
    ends += [shape.quote.encode()] if isinstance(shape, Bare) else []
    return [*ends, b'"', b"]", b"}", b"'"]


def grammar_of(format, schemas, is_parallel=True, other=None) -> str:
    specials = tokenizer().specials_in(FORMATS[format].marks)
    assert bool(specials) == (format == "mistral")  # as the tokenizer here has them
    return constrain.of_calls(FORMATS[format], schemas, is_parallel, other, specials)


def follow(state, text: str) -> None:
    for token in tokenizer().encode(text, add_special=False):
        assert token in permitted(state), (text, token)
        state.accept(token)
    assert not state.has_failed


def walk(state, dice, ends) -> str:
    """A text that a grammar permits, at random."""
    tokens: list[int] = []
    while not state.is_complete and len(tokens) < 4000:
        choices = permitted(state)
        end = dice.choice(ends)
        if END in choices and dice.random() < 0.5:
            break
        if dice.random() < 0.3 and end[0] in choices:
            for token in end:
                if token not in permitted(state):
                    break
                tokens.append(token)
                state.accept(token)
            continue
        choices = [token for token in choices if token != END] or [END]
        tokens.append(dice.choice(choices))
        state.accept(tokens[-1])
    assert len(tokens) < 4000
    return tokenizer().decode((token for token in tokens if token != END), skip_special=False)


@pytest.mark.parametrize("format", native.FORMATS)
@pytest.mark.parametrize("is_parallel", [False, True])
def test_any_walk_is_read_as_calls_of_the_schemas(grammars, format, is_parallel):
    dice = random.Random(format)
    source = grammar_of(format, SCHEMAS, is_parallel)
    for _ in range(25):
        text = walk(grammars.start(source), dice, ends_of(format))
        parser = Parser(FORMATS[format], SCHEMAS)
        content, calls = whole(parser.push(text) + parser.finish())
        assert content == "" and calls and (is_parallel or len(calls) == 1), text
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
            is_tagged = isinstance(FORMATS[format].shape, Tagged)
            required = SCHEMAS[name].get("required", []) if is_tagged else []
            assert [*json.loads(arguments)][: len(required)] == required


WRITTEN = [("weather", {"city": "Zürich </p", "days": 2}), ("now", {}),
           ("web-search", {"filter": {"a": ["</"]}, "after": None})]  # fmt: skip


def written(format, *calls) -> str:
    """Calls as a grammar has them: literals of Python as JSON writes them, and one message."""
    writer = native.FORMATS[format]
    if FORMATS[format].is_message:
        return writer.write(calls[0]).removesuffix(FORMATS[format].closing)
    if not isinstance(writer, native.Python):
        return writer.write(*calls)
    return writer.write(*calls, spell=lambda value: json.dumps(value, ensure_ascii=False))


@pytest.mark.parametrize("format", native.FORMATS)
def test_calls_as_models_write_them_are_permitted(grammars, format):
    source = grammar_of(format, native.SCHEMAS)
    state = grammars.start(source)
    follow(state, written(format, *WRITTEN))
    assert state.is_complete or END in permitted(state)
    for wrong in ({}, {"days": 2}, {"city": "a", "days": "b"}):
        with pytest.raises(AssertionError):
            follow(grammars.start(source), written(format, ("weather", wrong)))
    alone = grammar_of(format, native.SCHEMAS, False)
    with pytest.raises(AssertionError):
        follow(grammars.start(alone), written(format, *WRITTEN) + written(format, WRITTEN[1]))


@pytest.mark.parametrize("format", native.FORMATS)
@pytest.mark.parametrize("other, text", [
    (grammar.of_json_schema({"type": "object"}), '{"q": 7}'),
    (grammar.of_json_schema({"type": "array"}), '["a", {}]'),
    (grammar.of_choices(["ja", "nein"]), "ja"),
])  # fmt: skip
def test_calls_or_something_else(grammars, format, other, text):
    source = grammar_of(format, native.SCHEMAS, True, other)
    for answer in (text, written(format, *WRITTEN)):
        state = grammars.start(source)
        follow(state, answer)
        assert state.is_complete or END in permitted(state)


def arguments(properties, **more) -> dict:
    return {"f": {"type": "object", "properties": properties, **more}}


@pytest.mark.parametrize("format, properties, more, names", [
    ("qwen3_coder", {"a": {"type": "string", "pattern": "^x+$"}}, {}, ["pattern"]),
    ("glm45", {"a": {"type": "string", "format": "uuid", "maxLength": 3}}, {}, ["format"]),
    ("seed_oss", {"a": {"type": "array", "items": {"type": "string", "pattern": "x"}}}, {}, []),
    ("pythonic", {"a": {"type": "string", "pattern": "^x+$"}}, {}, []),
    ("gemma4", {"a": {"type": "string", "pattern": "x"}, "b": {"type": "array", "minItems": 1}}, {},
     ["pattern"]),
    ("lfm2", {"a": {}}, {"dependentRequired": {"a": ["b"]}, "minProperties": 1},
     ["dependentRequired", "minProperties"]),
])  # fmt: skip
def test_what_is_not_obeyed_is_named(grammars, format, properties, more, names):
    source = grammar_of(format, arguments(properties, **more))
    assert grammar.relaxed(source) == names
    assert grammars.start(source)


@pytest.mark.parametrize("format, key", [
    ("qwen3_coder", "a>b"), ("glm45", "a</arg_key>"), ("minimax_m2", " a"), ("gemma4", "a:b"),
    ("pythonic", "a b"),
])  # fmt: skip
def test_names_of_parameters_that_cannot_be_written(grammars, format, key):
    properties = {key: {"type": "integer"}, "b": {"type": "null"}}
    with pytest.raises(InputError, match="no name of a parameter"):
        grammar_of(format, arguments(properties, required=[key]))
    assert grammars.start(grammar_of(format, arguments(properties, required=["b"])))
