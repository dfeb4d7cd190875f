"""A workload's figures before it runs: the real scheduler's decisions, each step as long as the
cost model says, on a clock of their own.
"""

import dataclasses
from collections import deque
from collections.abc import Sequence as Tokens

import numpy as np

from configs.engine import Config
from configs.hardware.spec import HardwareSpec
from inference import request
from inference.planner import report
from inference.request import SamplingParams
from inference.scheduling.scheduler import Scheduler
from inference.scheduling.step_schedule import Plan
from inference.scheduling.step_shapes import StepShape


class VirtualClock:
    """Time that passes only where somebody lets it."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """Seconds since the start."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Lets them pass."""
        self._now += max(0.0, seconds)


@dataclasses.dataclass(frozen=True)
class Update:
    """News of one request after a step."""

    id: int
    token_ids: list[int]
    finish_reason: str | None


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One step as it would run."""

    shape: StepShape
    rows: tuple[tuple[int, int], ...]
    seconds: float
    host_s: float


@dataclasses.dataclass(frozen=True)
class Output:
    """What a device would return: token 0 wherever one is due."""

    tokens: np.ndarray  # i32[R, W]
    logprobs: np.ndarray  # f32[R, W]
    num_emitted: np.ndarray  # i32[R]
    finite: np.ndarray  # bool[R]
    top_ids: np.ndarray  # i32[R, W, 0]
    top_logprobs: np.ndarray  # f32[R, W, 0]

    @classmethod
    def of(cls, plan: Plan) -> "Output":
        """One token for each row that emits; of drafts none is accepted."""
        rows, width = plan.shape.num_rows, plan.shape.decode[1]
        num_emitted = np.zeros(rows, np.int32)
        num_emitted[: len(plan.decode)] = 1
        first = plan.shape.decode[0]
        num_emitted[first : first + len(plan.tiles)] = [tile.emits for tile in plan.tiles]
        none = np.zeros((rows, width, 0), np.int32)
        tokens = np.zeros((rows, width), np.int32)
        logprobs = tokens.astype(np.float32)
        return cls(
            tokens, logprobs, num_emitted, np.ones(rows, bool), none, none.astype(np.float32)
        )


@dataclasses.dataclass
class _Flight:
    """A step that was given to the device, and when it is done."""

    plan: Plan
    rows: tuple[tuple[int, int], ...]
    began: float
    done: float


class Simulator:
    """Takes requests and steps as an `Engine` does, without a device, a model or time.

    Every generated token is 0, and requests end by their length alone.
    """

    def __init__(
        self, config: Config, scheduler: Scheduler, hardware: HardwareSpec, host_s: float = 0.0
    ):
        """`host_s` is what the host takes for a step; with `engine.overlap` the device runs the
        step before meanwhile.
        """
        self.config = config
        self.scheduler = scheduler
        self.clock = VirtualClock()
        self.records: deque[StepRecord] = deque()
        self._hardware = hardware
        self._host_s = host_s
        self._flights: deque[_Flight] = deque()
        self._next_id = 0

    def add_request(self, prompt: Tokens[int], params: SamplingParams) -> int:
        """Queues a prompt; returns the request's id.

        Raises:
            InputError: it could not finish even alone.
        """
        self._next_id += 1
        tokens, key = list(prompt), request.cache_key(self.config.engine, self._next_id)
        self.scheduler.add(
            request.Sequence(
                self._next_id, params, tokens, len(tokens), arrival_s=self.clock.now(),
                cache_key=key,
            )
        )  # fmt: skip
        return self._next_id

    def step(self, is_open: bool = False) -> list[Update]:
        """As `Engine.step`: starts a step, and returns the news of the oldest one in flight."""
        plan = self.scheduler.schedule(self.clock.now(), is_open)
        if plan is not None:
            self._launch(plan)
        if len(self._flights) <= (plan is not None and self.config.engine.overlap):
            return []
        return self._land()

    def _launch(self, plan: Plan) -> None:
        self.clock.sleep(self._host_s)
        rows = tuple((row.length, row.start + row.length) for row in (*plan.decode, *plan.tiles))
        model, now = self.config.model, self.clock.now()
        step = report.operations(model, StepRecord(plan.shape, rows, 0.0, 0.0))
        began = max(now, self._flights[-1].done) if self._flights else now
        done = began + report.seconds(model, step, self._hardware)
        self._flights.append(_Flight(plan, rows, began, done))

    def _land(self) -> list[Update]:
        flight = self._flights.popleft()
        self.clock.sleep(flight.done - self.clock.now())
        news = self.scheduler.commit(flight.plan, Output.of(flight.plan))
        seconds = flight.done - flight.began
        self.records.append(StepRecord(flight.plan.shape, flight.rows, seconds, self._host_s))
        if not self.scheduler.has_work:  # a step in flight serves nobody any more
            self._flights.clear()
        return [Update(sequence.id, tokens, sequence.finish_reason) for sequence, tokens in news]
