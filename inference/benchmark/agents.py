"""Sessions of agents: turns that begin with all that came before, and tools between them."""

import dataclasses
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from configs.workload import Workload
from inference.benchmark import metrics, requests
from inference.benchmark.drive import RequestRecord, Run
from inference.benchmark.requests import TimedRequest, Turn


def sessions(workload: Workload, vocab_size: int, max_context: int) -> list[TimedRequest]:
    """The first turns of a workload of agents, with the turns that follow each.

    A session ends before the turn that would not fit into `max_context` tokens.

    Raises:
        InputError: a first turn does not fit.
    """
    assert workload.kind == "agents" and workload.turns is not None
    rng = random.Random(workload.seed + 1)
    first_turns = requests.generate(workload, vocab_size, max_context)
    opened = []
    for request in first_turns:
        turns, num_tokens = [], request.num_tokens
        for _ in range(workload.turns.draw(rng) - 1):
            num_result, num_new = workload.result.draw(rng), workload.output.draw(rng)
            num_tokens += num_result + num_new
            if num_tokens > max_context:
                break
            wait_s = rng.expovariate(1 / workload.tool_s) if workload.tool_s else 0.0
            result = requests.random_tokens(num_result, vocab_size, rng)
            turns.append(Turn(wait_s, result, num_new))
        opened.append(dataclasses.replace(request, turns=tuple(turns)))
    return opened


def num_requests(load: Iterable[TimedRequest]) -> int:
    """Turns of all sessions."""
    return sum(1 + len(request.turns) for request in load)


def by_turn(runs: Sequence[Run], page_tokens: int) -> list[dict[str, float]]:
    """Figures of each turn, the first one first, over the requests of all runs.

    `hit_rate` is the share of the prompt that was cached, `new_tokens` the mean of other tokens.
    `kept_share` is the cached share of the whole pages which the turn before left behind.
    """
    turns: dict[int, list[RequestRecord]] = defaultdict(list)
    for run in runs:
        for record in run.requests:
            turns[record.request.turn].append(record)
    rows = []
    for turn, records in sorted(turns.items()):
        ttfts = [record.ttft_s for record in records]
        num_prompt = sum(len(record.request.prompt) for record in records)
        num_cached = sum(record.num_cached_tokens for record in records)
        # An answer's last token is not computed, and what its last step fills is not cached.
        num_left = sum((r.request.num_earlier_tokens - 2) // page_tokens for r in records)
        row: dict[str, float] = {
            "turn": turn + 1,
            "requests": len(records) / len(runs),
            "prompt_tokens": num_prompt / len(records),
            "new_tokens": (num_prompt - num_cached) / len(records),
            "hit_rate": num_cached / num_prompt,
            "ttft_p50_s": statistics.median(ttfts),
            "ttft_p99_s": metrics.quantile(ttfts, 0.99),
        }
        if turn:
            row["kept_share"] = min(1.0, num_cached / max(1, page_tokens * num_left))
        rows.append(row)
    return rows
