"""What each technique is worth: one is added after another, and each is judged by a metric of its
own, named before it runs.

Every configuration serves the same requests with the same memory for its cache. Those before
'paged' reserve the longest request's room for each sequence.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from configs.cache import BLOCK_TOKENS
from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.model import ModelConfig
from inference.benchmark.requests import TimedRequest

NAIVE = "naive"
MAX_WAIT_S = 0.2  # of the first request in 'dynamic'


@dataclasses.dataclass(frozen=True)
class Ablation:
    """An engine that adds one technique to that of another ablation.

    Attributes:
        name: of the technique.
        engine: its whole configuration; None for 'naive', which has none.
        metric: the figure (`metrics.figures`) that the technique is meant to improve.
        is_cost: whether less of it is better.
        over: the ablation that it is compared with; None for the first.
        by_turns: whether both run in turn, since the gain is smaller than a machine's drift between
            two runs.
    """

    name: str
    engine: EngineConfig | None
    metric: str = "output_tok_s"
    is_cost: bool = False
    over: str | None = None
    by_turns: bool = False

    def config(self, model: ModelConfig) -> Config:
        assert self.engine is not None
        return Config(model, self.engine)

    def gain(self, before: float, after: float) -> float:
        """How many times better the metric became."""
        better, worse = (before, after) if self.is_cost else (after, before)
        return better / worse if worse else 1.0 if not better else float("inf")


def ablations(
    model: ModelConfig, base: EngineConfig, requests: Sequence[TimedRequest]
) -> tuple[Ablation, ...]:
    """Every ablation, in order: each engine is that of the one before with one change. Those that
    never mix prompts with decoding compile a step for every small number of chunks instead of the
    mixed steps.

    The cache holds half of what the requests would occupy together at their ends, if none shared a
    page, and at least the longest of them.

    Args:
        base: what the ablations leave alone: chunks beside decoding rows, rows, precision.
    """
    page = Config(model, base).page_tokens
    context = max(-(-request.num_tokens // BLOCK_TOKENS) for request in requests) * BLOCK_TOKENS
    if context > model.max_context:
        raise InputError(
            f"requests grow to {max(request.num_tokens for request in requests)} tokens, in whole "
            f"blocks {context}; the model's context holds {model.max_context}"
        )
    pages = sum(-(-request.num_tokens // page) for request in requests)
    paged = sum(model.page_bytes(page))
    cache_bytes = max(pages * paged // 2, context // page * paged)
    base = base.replace(max_context=context, cache_bytes=cache_bytes)
    reserving = base.replace(page_tokens=context, max_seqs=len(requests))
    num_reserved = min(n - 1 for n in Config(model, reserving).num_pages)
    mixed = base.shapes.prefill_chunks
    budget = base.scheduling.prefill_budget or base.shapes.chunk_tokens * min(mixed)
    unmixed = sorted({*range(1, min(8, max(mixed)))} - {*mixed})
    alone = tuple(sorted({*mixed, *unmixed[: 1 + len({*mixed})]}))  # no more than the mixed ones
    changes: tuple[tuple[str, dict[str, object], str, bool], ...] = (
        (
            "cached",
            dict(
                policy="continuous", page_tokens=context, max_seqs=1, prefix_cache=False,
                chunked_prefill=False, prefill_budget=None, prefill_chunks=alone, overlap=False,
            ),
            *("output_tok_s", False),
        ),
        ("static", dict(policy="static", max_seqs=num_reserved), "output_tok_s", False),
        ("dynamic", dict(policy="dynamic", max_wait_s=MAX_WAIT_S), "ttft_p50_s", True),
        ("continuous", dict(policy="continuous"), "output_tok_s", False),
        # The peak says how many fit; the mean also depends on how fast they come and go.
        ("paged", dict(page_tokens=page, max_seqs=len(requests)), "running_peak", False),
        ("prefix", dict(prefix_cache=True), "prefilled_tokens", True),
        (
            "chunked",
            dict(chunked_prefill=True, prefill_budget=budget, prefill_chunks=mixed),
            *("itl_p99_s", True),
        ),
        ("overlap", dict(overlap=True), "output_tok_s", False),
    )  # fmt: skip
    rungs = [Ablation(NAIVE, None)]
    for name, change, metric, is_cost in changes:
        base = base.replace(**change)
        # 'dynamic' trades throughput for latency, so 'static' is the one to compare with.
        over = "static" if name == "continuous" else rungs[-1].name
        rungs.append(Ablation(name, base, metric, is_cost, over, by_turns=name == "overlap"))
    return tuple(rungs)


@dataclasses.dataclass(frozen=True)
class AblationResult:
    """An ablation that ran: all its figures, as predicted before and as measured; and its metric
    for the ablation it is compared with, None where that did not run.
    """

    ablation: Ablation
    predicted: dict[str, float]
    measured: dict[str, float]
    predicted_before: float | None
    measured_before: float | None

    def as_json(self) -> dict[str, object]:
        ablation, metric = self.ablation, self.ablation.metric
        row: dict[str, object] = {"rung": ablation.name, "over": ablation.over, "metric": metric}
        row["less_is_better"] = ablation.is_cost
        for name, figures, before in (
            ("predicted", self.predicted, self.predicted_before),
            ("measured", self.measured, self.measured_before),
        ):
            gain = None if before is None else ablation.gain(before, figures[metric])
            row[name] = {
                "before": before,
                "after": figures[metric],
                "gain": gain,
                "figures": figures,
            }
        return row


def run(
    chosen: Sequence[Ablation],
    predict: Callable[[Ablation], dict[str, float]],
    measure: Callable[[Sequence[Ablation]], Sequence[dict[str, float]]],
) -> Iterator[AblationResult]:
    """Runs one ablation after another, each only once it was predicted.

    Args:
        measure: gives the figures of ablations that run by turns, or of one.
    """
    done: dict[str | None, AblationResult] = {}
    for ablation in chosen:
        predicted = predict(ablation)
        base = done.get(ablation.over)
        earlier = {} if base is None else base.measured
        if base is not None and ablation.by_turns:
            earlier, measured = measure([base.ablation, ablation])
        else:
            (measured,) = measure([ablation])
        before: tuple[float | None, float | None] = (None, None)
        if base is not None and ablation.metric in earlier:
            before = base.predicted[ablation.metric], earlier[ablation.metric]
        done[ablation.name] = AblationResult(ablation, predicted, measured, *before)
        yield done[ablation.name]


def half_page_waste(requests: Sequence[TimedRequest], page_tokens: int) -> float:
    """Expected share of the allocated room that is empty, where each sequence leaves half a page
    unfilled, shares none and gains its tokens at an even rate.
    """
    steps = sum(request.num_new_tokens for request in requests)
    live = sum(
        request.num_new_tokens * (len(request.prompt) + request.num_new_tokens / 2)
        for request in requests
    )
    return (page_tokens / 2) / (live / steps + page_tokens / 2)
