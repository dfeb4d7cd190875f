"""What grammars cost a token.

    python -m scripts.reports.grammars [--model=smollm2-135m] [--rounds=5]

prints one line. 16 sequences decode side by side, in turn by an engine without grammars and by one
whose sequences have one.
"""

import random
import statistics
import time

from absl import app, flags

from inference.engine import Engine
from inference.request import SamplingParams
from inference.text import grammar

_MODEL = flags.DEFINE_string("model", "smollm2-135m", "As --model of the scripts.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Of each kind.")

_STREAMS, _PROMPT, _TOKENS = 16, 64, 48
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
    """Prints it."""
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


if __name__ == "__main__":
    app.run(main)
