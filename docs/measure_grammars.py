"""What grammars cost a token, and whether answers of a real model to random schemas are valid.

    PYTHONPATH=. python docs/measure_grammars.py --schemas=1000

prints one line each. 16 sequences decode side by side, in turn by an engine without grammars and by
one whose sequences have one. Status 1: an answer that was not cut off is not valid.
"""

import json
import random
import statistics
import sys
import time

import jsonschema
from absl import app, flags

from inference.engine import Engine
from inference.request import SamplingParams
from inference.text import grammar
from tests import schemas

_MODEL = flags.DEFINE_string("model", "smollm2-135m", "As --model of the scripts.")
_SCHEMAS = flags.DEFINE_integer("schemas", 1000, "How many of them.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Of each kind.")

_STREAMS, _PROMPT, _TOKENS, _MAX_TOKENS = 16, 64, 48, 1000
_LONG = {  # no text of it ends within the tokens that are timed
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 20, "maxLength": 40},
        "scores": {"type": "array", "items": {"type": "integer"}, "minItems": 200},
    },
    "required": ["title", "scores"],
    "additionalProperties": False,
}


def main(argv: list[str]) -> None:
    """Prints both."""
    del argv
    plain, engine = _engine(grammars=False), _engine(grammars=True)
    free = SamplingParams(max_new_tokens=_TOKENS, ignore_eos=True)
    bound = SamplingParams(max_new_tokens=_TOKENS, grammar=grammar.of_json_schema(_LONG))
    _step_s(plain, free)
    _step_s(engine, bound)
    pairs = [(_step_s(plain, free), _step_s(engine, bound)) for _ in range(_ROUNDS.value)]
    ratio = statistics.median(with_it / without for without, with_it in pairs)
    free_ms, bound_ms = (1e3 * statistics.median(each) for each in zip(*pairs, strict=True))
    print(
        f"a step of {_STREAMS} sequences: {free_ms:.1f} ms by an engine without grammars, "
        f"{bound_ms:.1f} ms with, {ratio:.3f} x"
    )
    if _SCHEMAS.value:
        sys.exit(_answers(engine, _SCHEMAS.value))


def _engine(grammars: bool) -> Engine:
    found = Engine.from_model(
        _MODEL.value, max_seqs=_STREAMS, grammars=grammars, max_context=2048,
        decode_rows=(_STREAMS,), prefill_chunks=(1,),
    )  # fmt: skip
    found.warm_up()
    return found


def _step_s(engine: Engine, params: SamplingParams) -> float:
    """Median seconds between two tokens of a sequence while all decode."""
    dice = random.Random(0)
    prompts = [[dice.randrange(100, 40_000) for _ in range(_PROMPT)] for _ in range(_STREAMS)]
    for prompt in prompts:
        engine.add_request(prompt, params)
    times = []
    while engine.scheduler.has_work:
        if len(engine.step()) == _STREAMS:
            times.append(time.perf_counter())
    return statistics.median(b - a for a, b in zip(times[1:], times[2:], strict=False))


def _answers(engine: Engine, num: int) -> int:
    """Prints what came of random schemas; 1 where an answer that was not cut off is not valid."""
    dice = random.Random(num)
    asked = [schemas.random_schema(dice) for _ in range(num)]
    params = [
        SamplingParams(
            max_new_tokens=_MAX_TOKENS, temperature=1.0, seed=n,
            grammar=grammar.of_json_schema(schema),
        )
        for n, schema in enumerate(asked)
    ]  # fmt: skip
    num_valid = num_cut = num_tokens = 0
    for index, answer in engine.as_completed(["Some JSON:\n"] * num, params):
        num_tokens += len(answer.token_ids)
        if answer.finish_reason == "length":
            num_cut += 1
        elif answer.finish_reason == "stop" and _is_valid(answer.text, asked[index]):
            num_valid += 1
        else:
            print(f"not valid ({answer.finish_reason}): {answer.text!r}", file=sys.stderr)
    num_whole = num - num_cut
    print(
        f"{num} schemas: {num_valid} valid of {num_whole} whole, beside {num_cut} cut off at "
        f"{_MAX_TOKENS} tokens; {num_tokens} tokens"
    )
    return int(num_valid != num_whole or not num_whole)


def _is_valid(text: str, schema: schemas.Schema) -> bool:
    try:
        return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    except ValueError:
        return False


if __name__ == "__main__":
    app.run(main)
