"""Whether answers are JSON of a schema, beside another judge."""

import json
import random

import jsonschema
import llguidance
import numpy as np
import pytest

from configs.errors import InputError
from inference.text import grammar, json_answers
from tests import schemas

FORMATS = jsonschema.FormatChecker(["date", "uuid", "ipv4", "email"])
NUM_CHARS = 2000  # of a text that is drawn


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({}, '{"b": [1, null, "\\u00e9é\\n\\u0000\x7f"]}', True),
        ({"const": 1.0}, "1", True),
        ({"enum": [2]}, "2.0", True),
        ({"type": "integer"}, "1e3", True),
        ({"type": "integer"}, "1.5", False),
        ({}, "1e400", False),  # no number of JSON's that is finite here
        ({}, "NaN", False),
        ({}, "[" * 100_000, False),
        ({}, '"\\ud800"', False),
        ({}, '{"a": 1, "a": 1}', False),
        ({}, "1" * 5000, False),
    ],
)
def test_spellings_do_not_matter_and_what_is_no_json_is_not_valid(schema, text, expected):
    assert json_answers.is_valid(schema, text) == expected


def test_keys_may_come_in_any_order_however_many_are_optional():
    properties = {f"k{n}": {"type": "null"} for n in range(24)}
    item = {"type": "object", "properties": properties, "required": ["k7", "k8"]}
    schema = {"type": "array", "items": item}
    backward = {"z": 1} | dict.fromkeys(reversed(properties))
    assert json_answers.is_valid(schema, json.dumps([backward, backward]))
    del backward["k8"]
    assert not json_answers.is_valid(schema, json.dumps([backward]))


@pytest.mark.parametrize("num", [40, pytest.param(1000, marks=pytest.mark.long)])
def test_random_values_are_valid_if_another_judge_says_so(num):
    dice, verdicts = random.Random(num), []
    for _ in range(num):
        schema = schemas.random_schema(dice)
        if grammar.relaxed(grammar.of_json_schema(schema)):
            continue
        value = shuffled(json.loads(drawn(schema, dice)), dice)
        judge = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
        for candidate in (value, *(changed(value, dice) for _ in range(3))):
            verdicts.append(judge.is_valid(candidate))
            text = json.dumps(candidate, indent=dice.choice((None, 2)))
            assert json_answers.is_valid(schema, text) == verdicts[-1], (schema, text)
    assert num < sum(verdicts) < len(verdicts) - num


def test_what_cannot_be_checked_is_an_error():
    for schema in ({"type": "array", "uniqueItems": True}, {"type": "wrong"}):
        with pytest.raises(InputError):
            json_answers.check_schema(schema)
        with pytest.raises(InputError):
            json_answers.is_valid(schema, "[]")


def drawn(schema: dict, dice: random.Random) -> str:
    """A text that the grammar of a schema permits, whose ends are likely."""
    tokens = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokens, grammar.of_json_schema(schema), log_level=0)
    text = bytearray()
    while True:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        permitted = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
        if tokens.eos_token in permitted and (len(permitted) == 1 or dice.random() < 0.3):
            return text.decode()
        plain = [byte for byte in permitted if 32 < byte < 127] or [
            byte for byte in permitted if byte < 256
        ]
        ends = [byte for byte in plain if chr(byte) in '"}],']
        choices = ends if ends and (dice.random() < 0.5 or len(text) > NUM_CHARS) else plain
        text.append(dice.choice(choices))
        assert matcher.consume_token(text[-1])


def shuffled(value, dice: random.Random):
    """A value with its keys in another order."""
    if isinstance(value, list):
        return [shuffled(item, dice) for item in value]
    if isinstance(value, dict):
        return {key: shuffled(value[key], dice) for key in dice.sample(list(value), len(value))}
    return value


def changed(value, dice: random.Random):
    """A value with something left out, added, or of another type."""
    change = dice.choice(("remove", "add", "within", "within"))
    if isinstance(value, dict) and value:
        key = dice.choice(list(value))
        without = {name: part for name, part in value.items() if name != key}
        return {
            "remove": without,
            "add": {**value, "more": 1},
            "within": {**without, key: changed(value[key], dice)},
        }[change]
    if isinstance(value, list) and value:
        within = [changed(value[0], dice), *value[1:]]
        return {"remove": value[:-1], "add": [*value, value[-1]], "within": within}[change]
    return dice.choice((None, 1, "x", -3.5, True, [], {}))
