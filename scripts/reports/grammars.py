"""Measures what grammars cost a token.

    python -m scripts.reports.grammars [--model=smollm2-135m] [--rounds=5]

prints one line. 16 sequences decode side by side, in turn by an engine without grammars and by one
whose sequences have one.
"""

import argparse
import random
import statistics
import time

from inference.engine import Engine
from inference.request import SamplingParams
from inference.text import grammar

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


def main() -> None:
    """Prints the ratio of steps with grammars to steps without."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="as --model of the scripts")
    parser.add_argument("--rounds", type=int, default=5, help="of each kind")
    options = parser.parse_args()
    plain, engine = (_engine(options.model, grammars) for grammars in (False, True))
    free = SamplingParams(max_new_tokens=_TOKENS, ignore_eos=True)
    bound = SamplingParams(max_new_tokens=_TOKENS, grammar=grammar.of_json_schema(_LONG))
    _step_s(plain, free)
    _step_s(engine, bound)
    pairs = [(_step_s(plain, free), _step_s(engine, bound)) for _ in range(options.rounds)]
    ratio = statistics.median(with_it / without for without, with_it in pairs)
    free_ms, bound_ms = (1e3 * statistics.median(steps) for steps in zip(*pairs, strict=True))
    print(
        f"a step of {_STREAMS} sequences: {free_ms:.1f} ms by an engine without grammars, "
        f"{bound_ms:.1f} ms with, {ratio:.3f} x"
    )


def _engine(model: str, grammars: bool) -> Engine:
    engine = Engine.from_model(
        model, max_seqs=_STREAMS, grammars=grammars, max_context=2048,
        decode_rows=(_STREAMS,), prefill_chunks=(1,),
    )  # fmt: skip
    engine.warm_up()
    return engine


def _step_s(engine: Engine, params: SamplingParams) -> float:
    """Returns median seconds between two tokens of a sequence while all decode."""
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
    main()
