"""Schemas: what their grammars permit, what is relaxed and named, and what is refused."""

import json

import jsonschema
import pytest

from configs.errors import InputError
from inference.text import grammar
from inference.text.grammar import Grammars
from tests.inference.server.fake_engine import END, tokenizer

OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}}
WORDS = {"enum": ["a", "b", "c"]}
LIST = {"type": "array", "items": WORDS, "uniqueItems": True}
SWITCH = {
    "type": "object", "properties": {"k": WORDS, "v": {"type": "null"}}, "required": ["k"],
    "additionalProperties": False,
    "if": {"properties": {"k": {"const": "a"}}}, "then": {"required": ["v"]},
}  # fmt: skip
TWO = {"properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "additionalProperties": False}


WIDE = {"properties": {f"{n}": {"$ref": "#/$defs/a"} for n in range(10)}}  # 10^8 within depth 8


@pytest.fixture(scope="module")
def grammars():
    return Grammars(tokenizer(), [END])


def permits(grammars, schema, text: str) -> bool:
    state = grammars.start(grammar.of_json_schema(schema))
    for token in [*text.encode(), END]:
        words = state.mask()
        if not words[token // 32] >> (token % 32) & 1:
            return False
        state.accept(token)
    return not state.has_failed


# Schemas, texts of each and texts that are not, by the other judge too.
EXACT = [
    # Formats that nobody checks, and keywords that nobody knows, are annotations.
    ({"type": "string", "format": "path"}, ['"x"'], ["1"]),
    ({"type": "integer", "format": "int64"}, ["12"], ['"12"']),
    ({"type": "string", "nullable": True, "x-order": 3, "discriminator": {}}, ['"x"'], ["null"]),
    # Numbers are written digit by digit.
    ({"type": "integer", "minimum": 9007199254740994}, ["9007199254740994"], ["9007199254740993"]),
    ({"type": "integer", "exclusiveMinimum": 9007199254740993 - 2}, ["9007199254740992"],
     ["9007199254740991"]),
    ({"type": "integer", "exclusiveMaximum": 2**53}, [str(2**53 - 1)], [str(2**53)]),
    ({"const": 9007199254740994}, ["9007199254740994"], ["9007199254740992"]),
    ({"enum": [0.1, 12.5]}, ["0.1", "12.5"], ["0.2", "12"]),
    ({"type": "number", "multipleOf": 0.01, "maximum": 1}, ["0.5", "-3"], ["0.505", "2"]),
    # No name comes twice in another spelling.
    (OPEN, ['{"a":1,"b":"x"}', '{"aa":"\\u001b"}'], ['{"a":"x"}', '{"\\u0061":"x"}']),
    ({"allOf": [OPEN, {"properties": {"b": {"type": "null"}}}]}, ['{"a":1,"b":null,"c":1}'],
     ['{"\\u0061":"x"}', '{"b":1}']),
    (OPEN | {"patternProperties": {"^x": {"type": "null"}}}, ['{"xy":null,"b":1}'],
     ['{"\\u0078":1}', '{"x":1}']),
    ({"type": "object", "required": ["a"]}, ['{"a":1}'], ["{}", '{"b":1}']),
    # Each item once, where they are few.
    (LIST, ["[]", '["c", "a"]', '["b","a","c"]'], ['["a", "a"]', '["a","b","c","a"]']),
    ({**LIST, "items": {"$ref": "#/$defs/w"}, "$defs": {"w": WORDS}}, ['["a"]'], ['["a","a"]']),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, ["[3]"], ["[3,3]"]),
    # One of several.
    ({"oneOf": [{"type": "string"}, {"type": "null"}]}, ['"x"', "null"], ["1"]),
    ({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {
        k: {"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]} for k in "ab"}},
     ['{"k":"a"}', '{"k":"b","x":[]}'], ['{"k":"c"}', "{}"]),
    ({"oneOf": [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 3}]},
     ["2", "6"], ["3", "5"]),
    ({"type": "object", **TWO, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
     ['{"a":null}', '{"b":null}'], ["{}", '{"a":null,"b":null}']),
    ({"anyOf": [{"minimum": 3}, {"maximum": 1}], "type": "integer", "oneOf": [{"maximum": 9}]},
     ["1", "3"], ["2", "10"]),
    # What is not.
    ({"not": {"type": ["object", "array", "string", "null"]}}, ["1", "true"], ['"x"', "[1]"]),
    ({"type": "string", "not": {"enum": ["ab", "", "b"]}}, ['"a"', '"abc"', '"ba"'],
     ['""', '"ab"', '"b"']),
    ({"type": "object", "not": {"required": ["a"]}}, ["{}", '{"b":1}'], ['{"a":1}']),
    ({"type": "integer", "not": {"enum": [2, 3]}, "minimum": 0, "maximum": 9}, ["1", "4"], ["3"]),
    (SWITCH, ['{"k":"a","v":null}', '{"k":"b"}'], ['{"k":"a"}']),
    ({**SWITCH, "else": {"properties": {"v": False}}}, ['{"k":"b"}'], ['{"k":"b","v":null}']),
    # What depends on names, and how many there are.
    ({"type": "object", **TWO, "dependentRequired": {"a": ["b"]}}, ["{}", '{"b":null}'],
     ['{"a":null}']),
    ({"type": "object", **TWO, "dependentSchemas": {"a": {"required": ["b"]}}},
     ['{"a":null,"b":null}'], ['{"a":null}']),
    ({"type": "object", **TWO, "minProperties": 1, "maxProperties": 1}, ['{"a":null}'],
     ["{}", '{"a":null,"b":null}']),
    ({**OPEN, "minProperties": 1, "maxProperties": 2}, ['{"a":1}', '{"b":1}', '{"a":1,"b":1}'],
     ["{}", '{"a":1,"b":1,"c":1}']),
    ({"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": WORDS},
     ['{"ab":"a"}'], ['{"abc":"a"}', '{"ab":"x"}']),
    ({"type": "object", "propertyNames": {"enum": ["a"]}}, ['{"a":[]}', "{}"], ['{"b":1}']),
    ({"allOf": [OPEN], "type": "object", "properties": {"b": {}}, "unevaluatedProperties": False},
     ['{"a":1,"b":1}'], ['{"c":1}']),
    ({"type": "array", "items": {"enum": [1, None]}, "contains": {"type": "null"}},
     ["[null]", "[1,null,1]"], ["[]", "[1,1]"]),
    ({"prefixItems": [{"type": "null"}], "type": "array", "unevaluatedItems": False}, ["[null]"],
     ["[null,1]"]),
    # Words of older drafts, and references to any place.
    ({"$ref": "#/components/x", "components": {"x": {"type": "string", "format": "path"}}},
     ['"x"'], ["1"]),
    ({"$ref": "#x", "$defs": {"y": {"$anchor": "x", "type": "null"}}}, ["null"], ["1"]),
    ({"const": {"b": [1], "a": None}}, ['{"b":[1],"a":null}'], ['{"b":[1]}']),
    ({"type": ["string", "null"], "maxLength": 1}, ["null", '"a"'], ['"ab"']),
    ({"type": "object", "properties": {"a": False}, "additionalProperties": False}, ["{}"],
     ['{"a":1}']),
]  # fmt: skip


@pytest.mark.parametrize("schema, right, wrong", EXACT, ids=lambda value: None)
def test_a_grammar_says_what_the_schema_says(grammars, schema, right, wrong):
    assert not grammar.relaxed(grammar.of_json_schema(schema))
    judge = jsonschema.Draft202012Validator(schema)
    for text in right:
        assert judge.is_valid(json.loads(text)) and permits(grammars, schema, text), text
    for text in wrong:
        assert not judge.is_valid(json.loads(text)) and not permits(grammars, schema, text), text


def test_words_of_older_drafts(grammars):
    old = {
        "type": "object", "dependencies": {"a": ["b"]}, "additionalProperties": False,
        "properties": {"a": {"type": "integer", "minimum": 3, "exclusiveMinimum": True},
                       "b": {"items": [{"type": "null"}], "additionalItems": False}},
    }  # fmt: skip
    assert permits(grammars, old, '{"a":4,"b":[null]}')
    for text in ('{"a":4}', '{"a":3,"b":[]}', '{"b":[null,1]}'):
        assert not permits(grammars, old, text), text


def test_schemas_within_another_grammar(grammars):
    state = grammars.start(grammar.of_lark(
        'start: "%json {}" %json {"const": 3, "format": "path"}\n  | "b" %json {"oneOf": [true]}'
    ))  # fmt: skip
    for token in b"%json {}3":
        state.accept(token)
    assert not state.has_failed
    with pytest.raises(InputError, match="^const=-9223372036854775808: has at most 18 digits"):
        grammar.of_lark('start: "a" %json {"const": -9223372036854775808}')


@pytest.mark.parametrize("schema, relaxed", [
    ({"type": "array", "uniqueItems": True}, ["uniqueItems"]),
    ({**LIST, "items": {"enum": list("abcdefgh")}}, ["uniqueItems"]),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["oneOf"]),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ["maximum", "minimum"]),
    ({"type": "object", "minProperties": 2}, ["minProperties"]),
    ({"oneOf": [{"const": f"{n}"} for n in range(1000)]}, []),
    ({"oneOf": [{"type": "string", "maxLength": n} for n in range(1000)]}, ["oneOf"]),
])  # fmt: skip
def test_what_is_relaxed_is_named(grammars, schema, relaxed):
    whole = {"type": "object", "properties": {"x": schema}, "title": '"$comment": "relaxed: not"'}
    for text in (grammar.of_json_schema(whole), f"start: {grammar.json_rule(whole)}"):
        assert grammar.relaxed(text) == relaxed
        grammars.start(text)


@pytest.mark.parametrize("schema, problem", [
    ({"minimum": 9007199254740993}, "^minimum=9007199254740993: would become 9007199254740992"),
    ({"enum": [{"a": [9007199254740993]}]}, "^enum=9007199254740993: would become"),
    ({"const": -(2**63)}, "^const=-9223372036854775808: has at most 18 digits"),  # it would crash
    ({"properties": {"a": {"maximum": 1e300}}}, r"^properties\.a\.maximum=1e\+300: has at most 18"),
    ({"const": 1e-40}, "30 behind it"), ({"multipleOf": 0.07}, "^multipleOf=0.07: "),
    ({"multipleOf": 0}, "is above 0"), ({"multipleOf": 10**400}, "at most 18 digits"),
    ({"multipleOf": 1000003}, "at most 10000 units"),
    ({"type": "number", "exclusiveMinimum": 2**53}, '"type": "integer"'),
    ({"not": {"pattern": "a"}}, "^not: is too much to say the opposite of"),
    ({"not": {"$ref": "#/$defs/a"}, "$defs": {"a": WIDE}}, "^not: is too much"),
    ({"allOf": [{"$ref": "#/$defs/a"}], "unevaluatedProperties": False,
      "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}] * 10}}}, "unevaluatedProperties: is"),
    ({"if": {"multipleOf": 2}, "then": False}, "^if: is too much"),
    ({"contains": {}, "minContains": 2}, "minContains=2: is not supported"),
    ({"$dynamicRef": "#a"}, "use .ref"), ({"$ref": "#/a"}, "does not exist"),
    ({"$ref": "x.json"}, "is not fetched"), ({"$ref": "#"}, "permits no text"),
    ({"type": "x"}, "^type='x': is one of null"), ({"properties": []}, "is an object"),
    ({"items": 3}, "^items=3: is no schema"), ({"maxLength": 1.5}, "is a whole number"),
    ({"enum": []}, "nsatisfiable"), ({"type": "array", "minItems": 2, "maxItems": 1}, "minItems"),
    ({**LIST, "minItems": 4}, "there are 3 different items"),
    ({"type": "string", "pattern": "(?=a)b\\d"}, r"expression \(\?=a\)b\[0-9\]: look-around"),
    ({"const": float("nan")}, "cannot be read"), ({"const": "\ud800"}, "cannot be compiled"),
])  # fmt: skip
def test_what_cannot_be_obeyed_is_refused(grammars, schema, problem):
    with pytest.raises(InputError, match=problem) as caught:
        grammars.start(grammar.of_json_schema(schema))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
