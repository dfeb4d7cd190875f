"""Figures of a served workload: latencies, rates, use of the cache, the host's time."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from configs.errors import InputError
from inference.benchmark.drive import RequestRecord, Run, Usage


@dataclasses.dataclass(frozen=True)
class SloTargets:
    """Service level objectives of a request, in seconds; None sets no limit.

    Attributes:
        ttft_s: to the first token.
        itl_s: between its tokens, at the 99th percentile.
    """

    ttft_s: float | None = None
    itl_s: float | None = None

    def __post_init__(self) -> None:
        for name, limit in dataclasses.asdict(self).items():
            if limit is not None and not 0 < limit < math.inf:
                raise InputError(f"slo_{name} is a number of seconds above 0, not {limit}")

    def is_met(self, request: RequestRecord) -> bool:
        gaps = request.gaps_s
        slow = self.itl_s is not None and bool(gaps) and quantile(gaps, 0.99) > self.itl_s
        return not slow and (self.ttft_s is None or request.ttft_s <= self.ttft_s)


NO_SLO = SloTargets()


def quantile(values: Iterable[float], share: float) -> float:
    """The least value that at least this share of the values do not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def figures(run: Run, slo: SloTargets = NO_SLO) -> dict[str, float]:
    """Every figure of a run, by name; times in seconds, rates a second.

    Raises:
        InputError: a request failed, so that no rate means anything.
    """
    if any(request.finish_reason == "error" for request in run.requests):
        raise InputError("the model gave non-finite logits: there is no rate to tell")
    latencies = {
        "ttft": [request.ttft_s for request in run.requests],
        "tpot": [request.tpot_s for request in run.requests if request.tpot_s is not None],
        "itl": [gap for request in run.requests for gap in request.gaps_s],
        "e2e": [request.e2e_s for request in run.requests],
    }
    by_name: dict[str, float] = {
        "seconds": run.seconds,
        "output_tok_s": run.num_new_tokens / run.seconds,
        "requests_s": len(run.requests) / run.seconds,
    }
    for name, values in latencies.items():
        by_name[f"{name}_mean_s"] = statistics.fmean(values) if values else 0.0
        for percent in (50, 90, 99):
            by_name[f"{name}_p{percent}_s"] = quantile(values, percent / 100)
    num_met = sum(slo.is_met(request) for request in run.requests)
    by_name |= {
        "goodput_share": num_met / len(run.requests),
        "goodput_requests_s": num_met / run.seconds,
    }
    return by_name | _memory(run) | _counted(run)


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of every figure."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def _memory(run: Run) -> dict[str, float]:
    """What running sequences held, weighted by the steps' times."""
    seconds = sum(sample.seconds for sample in run.usage)

    def mean(of: Callable[[Usage], int]) -> float:
        return sum(of(usage) * usage.seconds for usage in run.usage) / seconds

    def waste(groups: slice) -> float:
        allocated = mean(lambda usage: sum(usage.num_allocated[groups]))
        written = mean(lambda usage: sum(usage.num_written[groups]))
        return 1 - written / allocated if allocated else 0.0

    prompts = mean(lambda usage: usage.num_prompt_pages)
    count = len(run.usage[0].num_allocated)
    by_group = {f"kv_waste_{g}": waste(slice(g, g + 1)) for g in range(count)}
    return {
        "kv_waste": waste(slice(None)),
        **(by_group if count > 1 else {}),
        "prompt_sharing": 1 - mean(lambda u: u.num_distinct_pages) / prompts if prompts else 0.0,
        "running_mean": mean(lambda u: u.num_running),
        # Of steps, not of seconds: neither the first prompts nor the last answers move it.
        "running_p50": quantile((sample.num_running for sample in run.usage), 0.5),
        "running_peak": max(sample.num_running for sample in run.usage),
    }


def _counted(run: Run) -> dict[str, float]:
    counters: dict[str, Any] = run.counters
    prompt_tokens = counters["num_prompt_tokens"]
    return {
        "hit_rate": counters["num_cached_tokens"] / prompt_tokens if prompt_tokens else 0.0,
        "prefilled_tokens": counters["num_prefilled_tokens"],
        "preemptions": counters["num_preemptions"],
        "spilled_pages": counters["num_offloaded_pages"],
        "restored_pages": counters["num_restored_pages"],
        "steps": counters["num_steps"],
        "host_step_s": statistics.median(record.host_s for record in run.records),
    }
