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
from inference.scheduler import Plan, Scheduler
from inference.shapes import StepShape


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


class Simulator:
    """Takes requests and steps as an `Engine` does, without a device, a model or time.

    Every generated token is 0; requests whose text matters to their end (stop tokens) are none for
    it.
    """

    def __init__(
        self, config: Config, scheduler: Scheduler, hardware: HardwareSpec, host_s: float = 0.0
    ):
        """`host_s` is what the host takes for a step: beside the device's time, or with
        `engine.overlap` during it.
        """
        self.config = config
        self.scheduler = scheduler
        self.clock = VirtualClock()
        self.records: deque[StepRecord] = deque()
        self._hardware = hardware
        self._host_s = host_s
        self._next_id = 0

    def add_request(self, prompt: Tokens[int], params: SamplingParams) -> int:
        """Queues a prompt; returns the request's id.

        Raises:
            InputError: it could not finish even alone.
        """
        self._next_id += 1
        tokens = list(prompt)
        self.scheduler.add(request.Sequence(self._next_id, params, tokens, len(tokens)))
        return self._next_id

    def step(self, is_open: bool = False) -> list[Update]:
        """One step, or nothing where the scheduler waits; `is_open`: more requests will come."""
        plan = self.scheduler.schedule()
        if plan is None:
            return []
        record = self._record(plan)
        self.records.append(record)
        self.clock.sleep(record.seconds)
        return [
            Update(sequence.id, tokens, sequence.finish_reason)
            for sequence, tokens in self.scheduler.commit(plan, Output.of(plan))
        ]

    def _record(self, plan: Plan) -> StepRecord:
        rows = tuple(
            (row.length, row.sequence.num_computed_tokens + row.offset + row.length)
            for row in (*plan.decode, *plan.tiles)
        )
        record = StepRecord(plan.shape, rows, 0.0, self._host_s)
        model = self.config.model
        device_s = report.seconds(model, report.operations(model, record), self._hardware)
        is_hidden = self.config.engine.overlap
        seconds = max(device_s, self._host_s) if is_hidden else device_s + self._host_s
        return dataclasses.replace(record, seconds=seconds)
