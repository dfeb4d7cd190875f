"""One idea more a rung, each judged on its own metric, named before it runs.

Every rung serves the same requests with the same memory for its cache. Those below 'paged' reserve
the longest request's room for each sequence.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from configs.cache import BLOCK_TOKENS
from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.model import ModelConfig
from inference.benchmark.requests import TimedRequest

NAIVE = "naive"
MAX_WAIT_S = 0.2  # of the first request in 'dynamic'


@dataclasses.dataclass(frozen=True)
class Rung:
    """An engine and what it is judged by.

    Attributes:
        name: of what it adds.
        engine: the whole of it; None for 'naive', which has none.
        metric: the figure (`metrics.figures`) that the addition is for.
        is_cost: whether less of it is better.
        over: the rung it is compared with; None for the first.
        by_turns: both run in turn, the one below again: what it gains is less than a machine
            drifts meanwhile.
    """

    name: str
    engine: EngineConfig | None
    metric: str = "output_tok_s"
    is_cost: bool = False
    over: str | None = None
    by_turns: bool = False

    def config(self, model: ModelConfig) -> Config:
        """Its engine and the model."""
        assert self.engine is not None
        return Config(model, self.engine)

    def with_engine(self, **changes: Any) -> "Rung":
        """The same with fields of its engine changed."""
        assert self.engine is not None
        return dataclasses.replace(self, engine=dataclasses.replace(self.engine, **changes))

    def gain(self, before: float, after: float) -> float:
        """How many times better the metric became."""
        better, worse = (before, after) if self.is_cost else (after, before)
        return better / worse if worse else 1.0 if not better else float("inf")


def rungs(
    model: ModelConfig, base: EngineConfig, requests: Sequence[TimedRequest]
) -> tuple[Rung, ...]:
    """Every rung, lowest first: the engine of each is that of the one below and one change. Those
    that compute prompts alone have a program for every small number of tiles, in place of mixed
    ones.

    The cache holds half of what the requests would take up together at their ends, each in pages of
    its own.

    Args:
        model: to be served.
        base: what the ladder does not set: tiles beside decoding rows, rows, precision.
        requests: to be served.
    """
    page = Config(model, base).page_tokens
    context = max(-(-request.num_tokens // BLOCK_TOKENS) for request in requests) * BLOCK_TOKENS
    if context > model.max_context:
        raise InputError(
            f"requests grow to {max(request.num_tokens for request in requests)} tokens, in whole "
            f"blocks {context}; the model's context holds {model.max_context}"
        )
    pages = sum(-(-request.num_tokens // page) for request in requests)
    paged = sum(group.bytes_per_page(model.dtype, page) for group in model.page_groups)
    base = dataclasses.replace(base, max_context=context, cache_bytes=pages * paged // 2)
    reserving = dataclasses.replace(base, page_tokens=context, max_seqs=len(requests))
    num_reserved = min(n - 1 for n in Config(model, reserving).num_pages)
    budget = base.prefill_budget or base.tile_tokens * min(base.prefill_tiles)
    mixed = base.prefill_tiles
    others = sorted({*range(1, min(8, max(mixed)))} - {*mixed})
    alone = tuple(sorted({*mixed, *others[: 1 + len({*mixed})]}))  # no more than mixed ones were
    changes: tuple[tuple[str, dict[str, Any], str, bool], ...] = (
        (
            "cached",
            dict(
                policy="continuous", page_tokens=context, max_seqs=1, prefix_cache=False,
                chunked_prefill=False, prefill_budget=None, prefill_tiles=alone, overlap=False,
            ),
            *("output_tok_s", False),
        ),
        ("static", dict(policy="static", max_seqs=num_reserved), "output_tok_s", False),
        ("dynamic", dict(policy="dynamic", max_wait_s=MAX_WAIT_S), "ttft_p50_s", True),
        ("continuous", dict(policy="continuous"), "output_tok_s", False),
        # How many fit: their mean would tell how fast they come and go, too.
        ("paged", dict(page_tokens=page, max_seqs=len(requests)), "running_peak", False),
        ("prefix", dict(prefix_cache=True), "prefilled_tokens", True),
        (
            "chunked",
            dict(chunked_prefill=True, prefill_budget=budget, prefill_tiles=mixed),
            *("itl_p99_s", True),
        ),
        ("overlap", dict(overlap=True), "output_tok_s", False),
    )  # fmt: skip
    found = [Rung(NAIVE, None)]
    for name, change, metric, is_cost in changes:
        base = dataclasses.replace(base, **change)
        # 'dynamic' trades batches for latency; what batches cost is what 'static' shows.
        over = "static" if name == "continuous" else found[-1].name
        found.append(Rung(name, base, metric, is_cost, over, by_turns=name == "overlap"))
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class Climbed:
    """A rung that ran: all its figures, as predicted before and as measured; its metric on the rung
    it is compared with, None where that did not run.
    """

    rung: Rung
    predicted: dict[str, float]
    measured: dict[str, float]
    predicted_before: float | None
    measured_before: float | None

    def as_json(self) -> dict[str, Any]:
        """Its row."""
        rung, metric = self.rung, self.rung.metric
        row: dict[str, Any] = {"rung": rung.name, "over": rung.over, "metric": metric}
        row["less_is_better"] = rung.is_cost
        for name, found, before in (
            ("predicted", self.predicted, self.predicted_before),
            ("measured", self.measured, self.measured_before),
        ):
            gain = None if before is None else rung.gain(before, found[metric])
            row[name] = {"before": before, "after": found[metric], "gain": gain, "figures": found}
        return row


def climb(
    steps: Sequence[Rung],
    predict: Callable[[Rung], dict[str, float]],
    measure: Callable[[Sequence[Rung]], Sequence[dict[str, float]]],
) -> Iterator[Climbed]:
    """Runs one rung after another, each only after it was predicted; `measure` takes those that
    run by turns, and gives the figures of each.
    """
    done: dict[str | None, Climbed] = {}
    for rung in steps:
        predicted = predict(rung)
        below = done.get(rung.over)
        earlier = {} if below is None else below.measured
        if below is not None and rung.by_turns:
            earlier, measured = measure([below.rung, rung])
        else:
            (measured,) = measure([rung])
        before: tuple[float | None, float | None] = (None, None)
        if below is not None and rung.metric in earlier:
            before = below.predicted[rung.metric], earlier[rung.metric]
        done[rung.name] = Climbed(rung, predicted, measured, *before)
        yield done[rung.name]


def half_page_waste(requests: Sequence[TimedRequest], page_tokens: int) -> float:
    """Expected share of held room that is empty where each sequence leaves half a page open and
    shares none: what is held while its tokens come, evenly.
    """
    steps = sum(request.num_new_tokens for request in requests)
    live = sum(
        request.num_new_tokens * (len(request.prompt) + request.num_new_tokens / 2)
        for request in requests
    )
    return (page_tokens / 2) / (live / steps + page_tokens / 2)
