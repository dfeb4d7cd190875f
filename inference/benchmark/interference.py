"""What a long prompt does to requests that are decoding when it comes."""

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

from configs.cache import BLOCK_TOKENS
from configs.engine import EngineConfig
from configs.errors import InputError
from configs.model import ModelConfig
from inference.benchmark import metrics
from inference.benchmark.drive import Run
from inference.benchmark.requests import TimedRequest, random_tokens

UNDISTURBED, CHUNKED, UNCHUNKED, APART = "undisturbed", "chunked", "unchunked", "apart"
TOGETHER_WAYS = CHUNKED, UNCHUNKED  # on the chips that decode

_PROMPT, _NEW = 64, 256  # tokens of each running request
_ARRIVES = 0.3  # of the time that the running requests take by themselves


@dataclasses.dataclass(frozen=True)
class Interference:
    """Time between tokens of `num_running` requests before a prompt of `num_tokens` comes, and
    while it is prefilled.
    """

    num_running: int
    num_tokens: int

    def __post_init__(self) -> None:
        for name in ("num_running", "num_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"interference's {name} is at least 1, not {getattr(self, name)}")

    def engine(self, model: ModelConfig, base: EngineConfig, way: str) -> EngineConfig:
        """One with room for everything; a step of the chunked way computes `base`'s budget of the
        prompt, or else one chunk.
        """
        context = -(-(max(self.num_tokens, _PROMPT + _NEW) + 1) // BLOCK_TOKENS) * BLOCK_TOKENS
        if context > model.max_context:
            raise InputError(
                f"a prompt of {self.num_tokens} tokens beside others of {_PROMPT + _NEW} needs a "
                f"context of {context}, the model's holds {model.max_context}"
            )
        room = (self.num_running + 1) * context
        per_token = sum(model.page_bytes(1))
        least = base.shapes.chunk_tokens * min(base.shapes.prefill_chunks)
        budget = base.scheduling.prefill_budget or least
        return base.replace(
            max_seqs=self.num_running + 1, max_context=context, prefix_cache=False,
            cache_bytes=max(1, room * per_token), chunked_prefill=way != UNCHUNKED,
            prefill_budget=budget if way == CHUNKED else None,
        )  # fmt: skip

    def undisturbed(self, vocab_size: int) -> list[TimedRequest]:
        rng = random.Random(0)
        return [
            TimedRequest(0.0, random_tokens(_PROMPT, vocab_size, rng), _NEW)
            for _ in range(self.num_running)
        ]

    def disturbed(self, vocab_size: int, seconds: float) -> list[TimedRequest]:
        """The same, and the long prompt; `seconds` is what they took alone."""
        prompt = random_tokens(self.num_tokens, vocab_size, random.Random(1))
        return [*self.undisturbed(vocab_size), TimedRequest(_ARRIVES * seconds, prompt, 1)]

    def predicted_apart(
        self, vocab_size: int, serve: Callable[[list[TimedRequest]], Run], transfer_s: float
    ) -> dict[str, float]:
        """Figures of chips of their own for prompts, beside the undisturbed: those that decode do
        so as if alone, and the prompt waits for its pages.

        Args:
            serve: the run that one engine is expected to have.
            transfer_s: seconds that the prompt's pages take.
        """
        undisturbed = _medians([_gaps_alone(serve(self.undisturbed(vocab_size)))])
        prompt = self.disturbed(vocab_size, 0.0)[-1]
        ttft_s = serve([prompt]).requests[0].ttft_s + transfer_s + undisturbed["itl_p50_s"]
        return undisturbed | {"ttft_s": ttft_s, "times_undisturbed": 1.0}

    def measure(
        self,
        vocab_size: int,
        serve: Callable[[str, list[TimedRequest]], list[Run]],
        ways: Sequence[str] = TOGETHER_WAYS,
    ) -> dict[str, object]:
        """Figures of each way to run prompts, beside the undisturbed.

        Args:
            serve: (way, requests) -> runs on the engine that `engine` describes.
            ways: such as `CHUNKED`.
        """
        alone = serve(CHUNKED, self.undisturbed(vocab_size))
        figures: dict[str, Any] = {UNDISTURBED: _medians([_gaps_alone(run) for run in alone])}
        seconds = metrics.quantile([run.seconds for run in alone], 0.5)
        usual = figures[UNDISTURBED]["itl_p99_s"]
        for way in ways:
            runs = serve(way, self.disturbed(vocab_size, seconds))
            gaps = _medians([_gaps_beside(run) for run in runs])
            long = metrics.quantile([run.requests[-1].ttft_s for run in runs], 0.5)
            figures[way] = gaps | {"ttft_s": long, "times_undisturbed": gaps["itl_p99_s"] / usual}
        return figures


def _gaps_alone(run: Run) -> list[float]:
    """Seconds between tokens, once every request has its first."""
    start = max(request.token_s[0] for request in run.requests)
    return _gaps(run, start, run.seconds)


def _gaps_beside(run: Run) -> list[float]:
    """Seconds between tokens of the others, where the last request's prefill falls there."""
    long = run.requests[-1]
    decoding = dataclasses.replace(run, requests=run.requests[:-1])
    gaps = _gaps(decoding, long.arrival_s, long.token_s[0])
    if not gaps:
        raise InputError("the running requests ended before the long prompt came: run fewer tokens")
    return gaps


def _gaps(run: Run, start: float, stop: float) -> list[float]:
    return [
        after - before
        for request in run.requests
        for before, after in request.intervals
        if after > start and before < stop
    ]


def _medians(runs: list[list[float]]) -> dict[str, float]:
    return metrics.medians(
        [
            {f"itl_p{percent}_s": metrics.quantile(gaps, percent / 100) for percent in (50, 99)}
            for gaps in runs
        ]
    )
