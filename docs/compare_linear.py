"""The native library beside XLA alone, on this machine's CPU.

    PYTHONPATH=. python docs/compare_linear.py [--model=smollm2-135m] [--requests=1,8,32]

Two engines of one process serve the same closed loads by turns: output rate and median decode step
with each number of requests, then seconds to the first token of one prompt of 500. Medians of 3
turns, 5 for the last.
"""

import statistics
import time

import numpy as np
from absl import app, flags

from inference.engine import Engine
from inference.files import local_machine
from inference.request import SamplingParams

_MODEL = flags.DEFINE_string("model", "smollm2-135m", "a model, as scripts.generate takes it")
_REQUESTS = flags.DEFINE_list("requests", ["1", "8", "32"], "numbers of requests at a time")
_PROMPT = flags.DEFINE_integer("prompt_tokens", 64, "tokens of each prompt")
_NEW = flags.DEFINE_integer("new_tokens", 48, "tokens generated for each")
_LONG_PROMPT, _TURNS, _LONG_TURNS = 500, 3, 5


def main(arguments: list[str]) -> None:
    """Prints a table."""
    del arguments
    counts = [int(count) for count in _REQUESTS.value]
    sizes = dict(max_seqs=max(counts), cache_bytes=1 << 30, seed=1)
    sizes["max_context"] = max(_LONG_PROMPT, _PROMPT.value) + _NEW.value + 1
    engines = {
        name: Engine.from_model(_MODEL.value, linear=name, attention=name, **sizes)
        for name in ("reference", "ffi_cpu")
    }
    print(f"{_MODEL.value} on {local_machine.processor()}, {local_machine.num_cores()} cores")
    for count in counts:
        found = _by_turns(engines, _TURNS, lambda *both: _serve(*both, count))  # noqa: B023
        rates = {name: statistics.median(rate for rate, _ in each) for name, each in found.items()}
        steps = {name: statistics.median(step for _, step in each) for name, each in found.items()}
        print(
            f"{count} requests: {_pair(rates, 'tokens/s', 1)}, "
            f"step {_pair(steps, 'ms', 1e3, falls=True)}"
        )
    found = _by_turns(engines, _LONG_TURNS, lambda *both: (_first_token(*both), 0.0))
    seconds = {name: statistics.median(s for s, _ in each) for name, each in found.items()}
    print(f"prompt of {_LONG_PROMPT}: {_pair(seconds, 'ms', 1e3, falls=True)}")


def _by_turns(engines, turns, measure):  # noqa: ANN001, ANN202
    """What `measure` finds of each engine, after a turn that compiles."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for turn in range(turns + 1):
        for name, engine in engines.items():
            result = measure(engine, np.random.default_rng(turn))
            if turn:
                found[name].append(result)
    return found


def _serve(engine: Engine, drawn: np.random.Generator, count: int) -> tuple[float, float]:
    """Tokens a second, and the median of the steps that decode all requests."""
    prompts = [_prompt(engine, drawn, _PROMPT.value) for _ in range(count)]
    before, start = len(engine.records), time.perf_counter()
    engine.generate(prompts, SamplingParams(max_new_tokens=_NEW.value, ignore_eos=True))
    seconds = time.perf_counter() - start
    records = list(engine.records)[before:]
    steps = [r.seconds for r in records if not r.shape.prefill[0] and len(r.rows) == count]
    return count * _NEW.value / seconds, statistics.median(steps)


def _first_token(engine: Engine, drawn: np.random.Generator) -> float:
    prompt, start = _prompt(engine, drawn, _LONG_PROMPT), time.perf_counter()
    engine.generate([prompt], SamplingParams(max_new_tokens=1))
    return time.perf_counter() - start


def _prompt(engine: Engine, drawn: np.random.Generator, length: int) -> list[int]:
    return drawn.integers(engine.config.model.vocab_size, size=length).tolist()


def _pair(values: dict[str, float], unit: str, times: float, falls: bool = False) -> str:
    before, after = values["reference"], values["ffi_cpu"]
    ratio = before / after if falls else after / before
    return f"{before * times:.1f} -> {after * times:.1f} {unit} (x {ratio:.2f})"


if __name__ == "__main__":
    app.run(main)
