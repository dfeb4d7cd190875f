"""A workload's figures before it runs: the real scheduler's decisions, each step as long as the
cost model says, on a clock of their own.
"""

import dataclasses
from collections import deque
from collections.abc import Sequence as Tokens

import numpy as np

from configs.engine import Config
from configs.hardware.spec import HardwareSpec
from inference.outputs import RequestOutput
from inference.planner import report
from inference.request import SamplingParams
from inference.scheduling.scheduler import Scheduler
from inference.scheduling.sequence import History, Prefix, Sequence, cache_key
from inference.scheduling.step_output import Commit, StepOutput
from inference.scheduling.step_schedule import StepRecord, StepSchedule


class VirtualClock:
    """Time that passes only by `sleep`."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """Seconds since the start."""
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += max(0.0, seconds)


def simulated_output(schedule: StepSchedule) -> StepOutput[np.ndarray]:
    """What a device would return: token 0 wherever one is due; of drafts none is accepted."""
    width = schedule.shape.decode[1]
    num_rows = len(schedule.shards) * schedule.shape.num_rows
    num_emitted = np.zeros(num_rows, np.int32)
    for row, chunk in schedule.rows:
        num_emitted[row] = chunk.emits
    none = np.zeros((num_rows, width, 0), np.float32)
    tokens = np.zeros((num_rows, width), np.int32)
    return StepOutput(
        tokens, num_emitted, np.zeros(0, np.int32), np.zeros(0, np.int32), np.ones(num_rows, bool),
        tokens.astype(np.float32), none.astype(np.int32), none, none, none, none, none,
    )  # fmt: skip


@dataclasses.dataclass
class _StepInFlight:
    """A step that was given to the device, and when it starts and is done there."""

    schedule: StepSchedule
    started_at: float
    done_at: float


class Simulator:
    """Takes requests and steps as an `Engine` does, without a device, a model or time.

    Every generated token is 0, and requests end by their length alone.
    """

    def __init__(
        self, config: Config, scheduler: Scheduler, hardware: HardwareSpec, host_s: float = 0.0
    ):
        """`host_s` is what the host takes for a step; with `engine.scheduling.overlap` the device
        runs the step before meanwhile.
        """
        self.config = config
        self.scheduler = scheduler
        self.clock = VirtualClock()
        self.records: deque[StepRecord] = deque()
        self._hardware = hardware
        self._host_s = host_s
        self._steps: deque[_StepInFlight] = deque()
        self._next_id = 0
        self._requests: dict[int, int] = {}  # of a sequence that is not done, its request's id

    def add_request(self, prompt: Tokens[int], params: SamplingParams) -> int:
        """Queues a prompt; returns the request's id.

        Raises:
            InputError: it could not finish even alone.
        """
        first, *followers = [
            self._sequence(list(prompt), params) for _ in range(params.num_samples)
        ]
        first.lead(followers)
        for sequence in (first, *followers):
            self.scheduler.add(sequence)
            self._requests[sequence.id] = first.id
        return first.id

    def _sequence(self, tokens: list[int], params: SamplingParams) -> Sequence:
        self._next_id += 1
        key, history = cache_key(self.config.engine.cache, self._next_id), History(self.clock.now())
        return Sequence(
            self._next_id, params, tokens, len(tokens), prefix=Prefix(key), history=history
        )

    def retain(self, tokens: Tokens[int]) -> None:
        """As `Engine.retain`."""
        self.scheduler.retain(tokens)

    def step(self, is_open: bool = False) -> list[RequestOutput]:
        """As `Engine.step`: starts a step, and returns the outputs of the oldest one in flight."""
        schedule = self.scheduler.schedule(self.clock.now(), is_open)
        if schedule is not None:
            self._launch(schedule)
        if len(self._steps) <= (schedule is not None and self.config.engine.scheduling.overlap):
            return []
        return self._commit()

    def _launch(self, schedule: StepSchedule) -> None:
        self.clock.sleep(self._host_s)
        model, now = self.config.model, self.clock.now()
        record = StepRecord(schedule.shape, schedule.row_sizes, 0.0, 0.0)
        seconds = report.seconds(model, report.operations(self.config, record), self._hardware)
        started_at = max(now, self._steps[-1].done_at) if self._steps else now
        self._steps.append(_StepInFlight(schedule, started_at, started_at + seconds))

    def _commit(self) -> list[RequestOutput]:
        step = self._steps.popleft()
        self.clock.sleep(step.done_at - self.clock.now())
        schedule, seconds = step.schedule, step.done_at - step.started_at
        committed = self.scheduler.commit(schedule, simulated_output(schedule))
        self.scheduler.commits.clear()
        self.records.append(StepRecord(schedule.shape, schedule.row_sizes, seconds, self._host_s))
        if not self.scheduler.has_work:  # steps in flight serve no sequence any more
            self._steps.clear()
        return [self._output(commit) for commit in committed]

    def _output(self, commit: Commit) -> RequestOutput:
        id, finish = commit.sequence.id, commit.reason
        first = self._requests[id] if finish is None else self._requests.pop(id)
        num_cached = commit.sequence.prefix.num_hit_tokens or 0
        return RequestOutput(
            first, commit.tokens, "", finish, id - first, num_cached_tokens=num_cached
        )
