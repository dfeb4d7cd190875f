"""Calls that a request forces, drawn by an engine with random weights: each is a call of the
schemas, in every format.
"""

import copy
import json
import random

import jsonschema
import msgspec
import pytest
import tokenizers
from tokenizers import AddedToken

from inference.request import SamplingParams
from inference.server.protocol import tools
from inference.server.protocol.fields import ChatRequest
from inference.text import grammar
from inference.text.tokenizer import Tokenizer
from inference.text.tool_calls import constrain
from inference.text.tool_calls.formats import FORMATS
from inference.text.tool_calls.parser import Parser
from inference.text.tool_calls.shapes import Bare, Literals, Tagged
from tests import fakes, schemas
from tests.inference.server.fake_engine import END, tokenizer
from tests.inference.test_random_schemas import FORMATS as TEXT_FORMATS
from tests.inference.text.tool_calls.test_parser import whole

pytestmark = pytest.mark.quick_code

NAMES = ("search", "get_weather", "f-1")
CHOICES = ("required", "named", "one call")


def with_special_marks() -> Tokenizer:
    """The bytes, and the marks of all formats as special tokens."""
    backend = tokenizers.Tokenizer.from_str(json.dumps(tokenizer().to_json()))
    marks = {mark.strip() for format in FORMATS.values() for mark in format.marks}
    special = sorted(mark for mark in marks if len(mark) > 5 and " " not in mark)
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in special])
    size = backend.get_vocab_size()
    return Tokenizer(backend, size, tokenizer().special_tokens, None)


def request(dice: random.Random, choice: str) -> tools.OfferedTools:
    """What a chat with random functions permits."""
    offered = [
        {"type": "function", "function": {"name": name, "parameters": schemas.arguments(dice)}}
        for name in NAMES
    ]
    named = {"type": "function", "function": {"name": dice.choice(NAMES)}}
    fields = {
        "messages": [{"role": "user", "content": "?"}], "tools": offered,
        "tool_choice": named if choice == "named" else "required",
        "parallel_tool_calls": choice == "required",
    }  # fmt: skip
    return tools.read(msgspec.convert(fields, ChatRequest))


def without(schema: dict, keywords: set[str]) -> dict:
    """A schema without keywords of the arguments together, and of each parameter."""
    properties = {
        name: {key: value for key, value in part.items() if key not in keywords}
        for name, part in schema["properties"].items()
    }
    part = {key: value for key, value in schema.items() if key not in keywords}
    return copy.deepcopy({**part, "properties": properties})


def check(format, offer: tools.OfferedTools, relaxed: set[str], answer) -> int:
    """The number of calls of an answer, all of which obey their schemas."""
    assert answer.finish_reason == "stop"
    if not isinstance(format.shape, Bare | Literals | Tagged):
        assert not relaxed  # JSON obeys all of these schemas
    parser = Parser(format, offer.schemas)
    content, calls = whole(parser.push(answer.text) + parser.finish())
    assert content == "" and calls and (offer.is_parallel or len(calls) == 1)
    for name, arguments in calls:
        schema = without(offer.schemas[name], relaxed)
        validator = jsonschema.Draft202012Validator(schema, format_checker=TEXT_FORMATS)
        validator.validate(json.loads(arguments))
    return len(calls)


def answered(words: Tokenizer, num: int, seed: int):
    """`check`'s arguments: cases in turns of formats and choices, and what is drawn for them."""
    dice, cases, params = random.Random(seed), [], []
    for n in range(num):
        format = list(FORMATS.values())[n % len(FORMATS)]
        offer = request(dice, CHOICES[n % len(CHOICES)])
        specials = words.specials_in(format.marks)
        source = constrain.of_calls(format, offer.schemas, offer.is_parallel, None, specials)
        cases.append((format, offer, set(grammar.relaxed(source))))
        params.append(SamplingParams(
            max_new_tokens=8000, temperature=1.0, seed=n, grammar=source,
            shown_special_ids=tuple(specials.values()),
        ))  # fmt: skip
    engine = fakes.engine(
        fakes.llama(vocab_size=words.vocab_size, max_context=8192), shapes="one", tokenizer=words,
        eos_ids=(END,), max_seqs=32, decode_rows=(32,), page_tokens=16, chunk_tokens=16,
        prefill_chunks=(1,), grammars=True,
    )  # fmt: skip
    for case, answer in zip(cases, engine.generate([[1, 2]] * num, params), strict=True):
        yield *case, answer


@pytest.mark.parametrize("num", [60, pytest.param(500, marks=pytest.mark.long)])
def test_every_forced_call_obeys_its_schema(num):
    """Half of the answers have marks that are special tokens; `-m "" -s` shows the figure."""
    num_calls, failures = 0, []
    for seed, words in enumerate((tokenizer(), with_special_marks())):
        for format, offer, relaxed, answer in answered(words, num // 2, seed):
            try:
                num_calls += check(format, offer, relaxed, answer)
            except (AssertionError, ValueError, jsonschema.ValidationError) as error:
                why = f"{answer.finish_reason} {answer.text} {error}"
                failures.append((format.name, offer.schemas, relaxed, why[:2000]))
    print(f"{num - len(failures)} of {num} answers are calls of their schemas, {num_calls} calls")
    assert not failures, failures[0]
    assert num_calls > num  # some answers have several
