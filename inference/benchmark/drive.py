"""Requests fed to an engine as they arrive, and what became of each of them, by the clock."""

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from inference.benchmark.requests import TimedRequest
from inference.planner.report import StepRecord
from inference.request import SamplingParams

_POLL_S = 1e-3  # between two looks at an engine that waits for a fuller batch

GREEDY = SamplingParams(ignore_eos=True)


class Clock(Protocol):
    """What tells the time and lets it pass."""

    def now(self) -> float:
        """Seconds since some moment."""

    def sleep(self, seconds: float) -> None:
        """Returns so many seconds later."""


class WallClock:
    """The machine's own."""

    def now(self) -> float:
        """Seconds since some moment."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Returns so many seconds later."""
        time.sleep(seconds)


class Update(Protocol):
    """News of one request."""

    @property
    def id(self) -> int:
        """The request's."""

    @property
    def token_ids(self) -> Sequence[int]:
        """New tokens."""

    @property
    def finish_reason(self) -> str | None:
        """Why it ended; None where it goes on."""


class Step(StepRecord, Protocol):
    """A step that ran, and the host's part of it."""

    @property
    def host_s(self) -> float:
        """Seconds of scheduling, building and committing."""


class Server(Protocol):
    """What serves requests step by step: an `Engine`, or a `Simulator`."""

    @property
    def scheduler(self) -> Any:
        """Its `Scheduler`."""

    @property
    def records(self) -> deque[Any]:
        """Each `Step` that ran; they are taken out here."""

    def add_request(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Queues a prompt; returns the request's id."""

    def step(self, is_open: bool = False) -> Sequence[Update]:
        """Advances all that can run; `is_open`: more requests will come."""


@dataclasses.dataclass
class Served:
    """One request as it was served; seconds since the start of the run.

    Attributes:
        request: what was asked.
        arrival_s: when it came; in a closed workload when a place was free for it.
        token_s: when each token was there.
        token_ids: the tokens.
        finish_reason: why it ended; None while it runs.
    """

    request: TimedRequest
    arrival_s: float
    token_s: list[float] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None

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
        others = len(self.token_s) - 1
        return (self.token_s[-1] - self.token_s[0]) / others if others else None


@dataclasses.dataclass(frozen=True)
class Sample:
    """What was held after a step that took `seconds`: sequences that ran, tokens of room in their
    pages, and tokens written there; pages of their prompts, and distinct ones among these.
    """

    seconds: float
    num_running: int
    num_allocated: int
    num_written: int
    num_prompt_pages: int
    num_distinct_pages: int


@dataclasses.dataclass
class Run:
    """A workload, served.

    Attributes:
        served: each request, in the order of arrival.
        seconds: from the first arrival to the last token.
        counters: what the scheduler counted meanwhile, by name.
        samples: one a step.
        records: of the steps.
    """

    served: list[Served] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    counters: dict[str, int] = dataclasses.field(default_factory=dict)
    samples: list[Sample] = dataclasses.field(default_factory=list)
    records: list[Step] = dataclasses.field(default_factory=list)

    @property
    def num_new_tokens(self) -> int:
        """Tokens generated."""
        return sum(len(each.token_s) for each in self.served)


def drive(
    server: Server,
    requests: Iterable[TimedRequest],
    clock: Clock,
    concurrency: int | None = None,
    params: SamplingParams = GREEDY,
    on_progress: Callable[[int], None] = lambda num_done: None,
) -> Run:
    """Serves the requests, each from its arrival on, to their ends.

    Args:
        server: idle; requests it refuses are InputErrors.
        requests: in the order of arrival.
        clock: the server's.
        concurrency: at most so many at a time: whoever comes then arrives as one ends.
        params: how to sample.
        on_progress: told of the number of requests that have ended.
    """
    due, open_ = deque(requests), dict[int, Served]()
    counted = dataclasses.asdict(server.scheduler.counters)
    server.records.clear()
    run, start = Run(), clock.now()

    def has_place() -> bool:
        return bool(due) and (concurrency is None or len(open_) < concurrency)

    while due or open_:
        before = clock.now() - start
        while has_place() and due[0].arrival_s <= before:
            request = due.popleft()
            own = dataclasses.replace(params, max_new_tokens=request.num_new_tokens)
            # One that could not be taken at its own time, since a step ran, has waited since then.
            served = Served(request, request.arrival_s if concurrency is None else before)
            open_[server.add_request(request.prompt, own)] = served
            run.served.append(served)
        if not open_:
            clock.sleep(max(0.0, due[0].arrival_s - before))
            continue
        num_steps = server.scheduler.counters.num_steps
        # Whoever waits for a place does not come before one ends: a batch need not wait for it.
        updates = server.step(is_open=has_place())
        after = clock.now() - start
        for update in updates:
            served = open_[update.id]
            served.token_ids += update.token_ids
            served.token_s += [after] * len(update.token_ids)
            if update.finish_reason is not None:
                served.finish_reason = update.finish_reason
                del open_[update.id]
                on_progress(len(run.served) - len(open_))
        scheduler = server.scheduler
        pages, running = scheduler.pages, scheduler.running
        held = *pages.use(running), *pages.prompt_use(running)
        run.samples.append(Sample(after - before, len(running), *held))
        while server.records:
            run.records.append(server.records.popleft())
        if not updates and scheduler.counters.num_steps == num_steps:
            clock.sleep(min(_POLL_S, max(0.0, due[0].arrival_s - after)) if due else _POLL_S)
    run.seconds = max((each.token_s[-1] for each in run.served if each.token_s), default=0.0)
    counters = dataclasses.asdict(server.scheduler.counters)
    del counters["peak_running"]  # of all time: no difference tells this run's
    run.counters = {name: value - counted[name] for name, value in counters.items()}
    return run
