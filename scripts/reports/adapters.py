"""Measures what adapters cost a step.

    python -m scripts.reports.adapters [--model=smollm2-135m] [--weights=bfloat16] [--rounds=5]

prints one line for decode and one for prefill. The same prompts are served in turn by an engine
without adapters and by one whose sequences have them: 32 sequences that decode with 8 adapters of
rank 16 on all matrices, and prompts of 500 tokens of one new token each.
"""

import argparse
import functools
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from inference.adapters import modules
from inference.engine import Engine
from inference.request import SamplingParams
from inference.runtime.adapter_weights import AdapterWeights, Factors, Place

_STREAMS, _ADAPTERS, _RANK = 32, 8, 16
_PROMPT, _TOKENS = 64, 48  # of a sequence that decodes
_PROMPTS, _LONG = 8, 500  # prompts, and the tokens of each, that measure prefill


def main() -> None:
    """Prints the ratios of time with adapters to time without."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="as --model of the scripts")
    parser.add_argument("--weights", default=None, help="as --weights of the scripts")
    parser.add_argument("--rounds", type=int, default=5, help="of each kind")
    options = parser.parse_args()
    plain, adapted = (_engine(options.model, options.weights, slots) for slots in (0, _ADAPTERS))
    names = [f"adapter-{n}" for n in range(_ADAPTERS)]
    for seed, name in enumerate(names):
        adapted.adapters.add(name, _random(adapted, seed))
    for label, measure in (
        (f"a decode step of {_STREAMS} sequences", _decode_s),
        (f"{_PROMPTS} prompts of {_LONG} tokens", _prefill_s),
    ):
        base, other = (
            functools.partial(measure, plain, [None]),
            functools.partial(measure, adapted, names),
        )
        without, with_them, ratio = _compared(base, other, options.rounds)
        print(
            f"{label}: {1e3 * without:.1f} ms by an engine without adapters, {1e3 * with_them:.1f} "
            f"ms with {_ADAPTERS} of rank {_RANK}, {ratio:.3f} x"
        )


def _compared(
    base: Callable[[], float], other: Callable[[], float], rounds: int
) -> tuple[float, float, float]:
    """Medians of both, in turn, after one of each that is not counted, and of their ratio."""
    base(), other()
    pairs = [(base(), other()) for _ in range(rounds)]
    ratio = statistics.median(second / first for first, second in pairs)
    first_s, second_s = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
    return first_s, second_s, ratio


def _engine(model: str, weights: str | None, slots: int) -> Engine:
    engine = Engine.from_model(
        model, weights=weights, max_seqs=_STREAMS, slots=slots, rank=_RANK, max_context=1024,
        decode_rows=(1, _STREAMS), prefix_cache=False,
    )  # fmt: skip
    engine.warm_up()
    return engine


def _random(engine: Engine, seed: int) -> AdapterWeights:
    """An adapter of all matrices."""
    generator = np.random.default_rng(seed)

    def draw(rows: int, columns: int) -> np.ndarray:
        return generator.standard_normal((rows, columns), np.float32) * np.float32(0.02)

    factors: dict[Place, Factors] = {}
    for module in modules.modules_of(engine.config.model).values():
        down_RD = draw(_RANK, module.shape[1])
        for place, _ in module.places:
            factors[place] = Factors(down_RD, draw(place.shape[0], _RANK))
    return AdapterWeights(Path(f"random-{seed}"), str(seed), _RANK, factors)


def _serve(
    engine: Engine, names: list[str] | list[None], num_prompts: int, length: int, num_new: int
) -> list[float]:
    """Moments at which steps that answered all sequences were done."""
    dice = random.Random(0)
    for n in range(num_prompts):
        prompt = [dice.randrange(100, 40_000) for _ in range(length)]
        params = SamplingParams(
            max_new_tokens=num_new, ignore_eos=True, adapter=names[n % len(names)]
        )
        engine.add_request(prompt, params)
    times = []
    while engine.scheduler.has_work:
        if len(engine.step()) == num_prompts:
            times.append(time.perf_counter())
    return times


def _decode_s(engine: Engine, names: list[str] | list[None]) -> float:
    """Median seconds between two tokens of a sequence while all decode."""
    times = _serve(engine, names, _STREAMS, _PROMPT, _TOKENS)
    return statistics.median(b - a for a, b in zip(times[1:], times[2:], strict=False))


def _prefill_s(engine: Engine, names: list[str] | list[None]) -> float:
    """Seconds until all prompts are answered."""
    start = time.perf_counter()
    _serve(engine, names, _PROMPTS, _LONG, 1)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
