"""Feeds requests to an engine as they arrive, and records when each of their tokens came."""

import dataclasses
import heapq
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from inference.benchmark.requests import TimedRequest
from inference.outputs import RequestOutput
from inference.planner.simulate import VirtualClock
from inference.request import SamplingParams
from inference.scheduling.scheduler import Scheduler
from inference.scheduling.step_schedule import StepRecord

_POLL_S = 1e-3  # sleep while the engine waits for a fuller batch

GREEDY = SamplingParams(ignore_eos=True)


class WallClock:
    """The machine's clock."""

    def now(self) -> float:
        """Seconds since a fixed moment."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class Server(Protocol):
    """An `Engine` or a `Simulator`, which serve requests step by step."""

    @property
    def scheduler(self) -> Scheduler:
        """Its `Scheduler`."""

    @property
    def records(self) -> deque[StepRecord]:
        """Of the steps that ran; they are taken out here."""

    def add_request(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Queues a prompt; returns the request's id."""

    def retain(self, tokens: Sequence[int]) -> None:
        """As `Engine.retain`."""

    def step(self, is_open: bool = False) -> Sequence[RequestOutput]:
        """Advances everything that can run; `is_open` says that more requests will come."""


@dataclasses.dataclass
class RequestRecord:
    """One request as it was served; times are seconds since the start of the run.

    Attributes:
        request: what was asked.
        arrival_s: when it came; in a closed workload, when another request had made way for it.
        token_s: when each token came.
        token_ids: the tokens.
        finish_reason: why it ended; None while it runs.
        num_cached_tokens: of the prompt, found in the cache.
    """

    request: TimedRequest
    arrival_s: float
    token_s: list[float] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    num_cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token."""
        return self.token_s[0] - self.arrival_s

    @property
    def e2e_s(self) -> float:
        """From arrival to the last token."""
        return self.token_s[-1] - self.arrival_s

    @property
    def intervals(self) -> list[tuple[float, float]]:
        """From each token to the next."""
        return list(itertools.pairwise(self.token_s))

    @property
    def gaps_s(self) -> list[float]:
        """Between consecutive tokens."""
        return [after - before for before, after in self.intervals]

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None where there is no other."""
        num_intervals = len(self.token_s) - 1
        return (self.token_s[-1] - self.token_s[0]) / num_intervals if num_intervals else None


@dataclasses.dataclass(frozen=True)
class Usage:
    """What running sequences held after a step that took `seconds`: how many they were, pages of
    their prompts, and distinct ones among these; of each page group the tokens that their pages
    have room for, and those written there.
    """

    seconds: float
    num_running: int
    num_prompt_pages: int
    num_distinct_pages: int
    num_allocated: tuple[int, ...]
    num_written: tuple[int, ...]


@dataclasses.dataclass
class Run:
    """A workload as it was served.

    Attributes:
        requests: each of them, in the order of arrival.
        seconds: from the first arrival to the last token.
        counters: what the scheduler counted meanwhile, by name.
        usage: after each step.
        records: of the steps.
    """

    requests: list[RequestRecord] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    counters: dict[str, int] = dataclasses.field(default_factory=dict)
    usage: list[Usage] = dataclasses.field(default_factory=list)
    records: list[StepRecord] = dataclasses.field(default_factory=list)

    @property
    def num_new_tokens(self) -> int:
        return sum(len(request.token_s) for request in self.requests)


def drive(
    server: Server,
    requests: Iterable[TimedRequest],
    clock: WallClock | VirtualClock,
    concurrency: int | None = None,
    params: SamplingParams = GREEDY,
    on_progress: Callable[[int], None] = lambda num_done: None,
) -> Run:
    """Serves every request from its arrival to its end, and the turns that follow it.

    Args:
        server: idle; refuses a request by an InputError.
        requests: in the order of arrival.
        concurrency: at most so many sessions at a time, the waits between turns included; a further
            one then arrives as another ends.
        on_progress: called with the number of requests that have ended.
    """
    due, open_ = deque(requests), dict[int, RequestRecord]()
    later: list[tuple[float, int, TimedRequest]] = []  # turns whose tools run, earliest first
    counted = dataclasses.asdict(server.scheduler.counters)
    server.records.clear()
    run, start = Run(), clock.now()

    def can_add() -> bool:
        return bool(due) and (concurrency is None or len(open_) + len(later) < concurrency)

    def next_arrival_s() -> float:
        arrivals = [arrival_s for arrival_s, _, _ in later[:1]]
        return min(arrivals + [due[0].arrival_s] if can_add() else arrivals, default=math.inf)

    def add(request: TimedRequest, arrival_s: float) -> None:
        request_params = dataclasses.replace(params, max_new_tokens=request.num_new_tokens)
        record = RequestRecord(request, arrival_s)
        open_[server.add_request(request.prompt, request_params)] = record
        run.requests.append(record)

    while due or later or open_:
        before = clock.now() - start
        while later and later[0][0] <= before:
            arrival_s, _, request = heapq.heappop(later)
            add(request, arrival_s)
        while can_add() and due[0].arrival_s <= before:
            request = due.popleft()
            # A request that came while a step ran has waited since its own time.
            add(request, request.arrival_s if concurrency is None else before)
        if not open_:
            clock.sleep(max(0.0, next_arrival_s() - before))
            continue
        num_steps = server.scheduler.counters.num_steps
        # At full concurrency none comes before another ends, so no batch need wait for more.
        outputs = server.step(is_open=can_add() or bool(later))
        after = clock.now() - start
        for output in outputs:
            record = open_[output.id]
            record.token_ids += output.token_ids
            record.token_s += [after] * len(output.token_ids)
            if output.finish_reason is not None:
                record.finish_reason = output.finish_reason
                record.num_cached_tokens = output.num_cached_tokens
                del open_[output.id]
                if record.request.turns and output.finish_reason == "length":
                    server.retain([*record.request.prompt, *record.token_ids])
                    turn = record.request.followed_by(record.token_ids, after)
                    heapq.heappush(later, (turn.arrival_s, output.id, turn))
                on_progress(len(run.requests) - len(open_))
        scheduler = server.scheduler
        shards = zip(*(shard.usage() for shard in scheduler.shards), strict=True)
        prompts, distinct, *num_pages = map(sum, shards)
        running, groups = len(scheduler.running), (tuple(num_pages[::2]), tuple(num_pages[1::2]))
        run.usage.append(Usage(after - before, running, prompts, distinct, *groups))
        while server.records:
            run.records.append(server.records.popleft())
        if not outputs and scheduler.counters.num_steps == num_steps:
            clock.sleep(min(_POLL_S, max(0.0, next_arrival_s() - after)))
    run.seconds = max(
        (record.token_s[-1] for record in run.requests if record.token_s), default=0.0
    )
    counters = dataclasses.asdict(server.scheduler.counters)
    del counters["peak_running"]  # of all time, not of this run
    run.counters = {name: value - counted[name] for name, value in counters.items()}
    return run
