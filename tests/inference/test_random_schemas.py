"""What a model of random weights draws, under random schemas, is JSON of these schemas."""

import json
import random

import jsonschema
import pytest

from inference.request import SamplingParams
from inference.text import grammar
from tests import fakes, schemas
from tests.inference.server.fake_engine import END, VOCAB, tokenizer

pytestmark = pytest.mark.quick_code

# Not its "time", which refuses the lower-case z that RFC 3339 permits.
FORMATS = jsonschema.FormatChecker(["date", "uuid", "ipv4", "email"])
MODEL = fakes.llama(vocab_size=VOCAB, max_context=2048)
SETTINGS = {
    "max_seqs": 16, "decode_rows": (16,), "page_tokens": 16, "chunk_tokens": 16, "grammars": True,
    "prefill_chunks": (1,),
}  # fmt: skip


@pytest.mark.parametrize("num", [40, pytest.param(1000, marks=pytest.mark.long)])
def test_whatever_is_drawn_is_json_of_its_schema(num):
    dice = random.Random(num)
    asked = [schemas.random_schema(dice) for _ in range(num)]
    params = [
        SamplingParams(
            max_new_tokens=2000, temperature=dice.choice((0.7, 1.0, 1.5)), seed=n,
            grammar=grammar.of_json_schema(schema),
        )
        for n, schema in enumerate(asked)
    ]  # fmt: skip
    engine = fakes.engine(MODEL, shapes="one", tokenizer=tokenizer(), eos_ids=(END,), **SETTINGS)
    texts = set()
    for schema, answer in zip(asked, engine.generate([[1, 2]] * num, params), strict=True):
        assert answer.finish_reason == "stop", (schema, answer.text)
        check = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
        check.validate(json.loads(answer.text))
        texts.add(answer.text)
    assert len(texts) > num / 2


def test_schemas_differ_and_are_schemas():
    found = [schemas.random_schema(random.Random(n)) for n in range(200)]
    for schema in found:
        jsonschema.Draft202012Validator.check_schema(schema)
    text = json.dumps(found)
    words = (
        "anyOf allOf prefixItems $ref pattern format multipleOf oneOf not if uniqueItems contains "
        "dependentRequired propertyNames patternProperties minProperties unevaluatedProperties"
    )
    for word in words.split():
        assert f'"{word}"' in text
    assert len({json.dumps(schema) for schema in found}) == len(found)
