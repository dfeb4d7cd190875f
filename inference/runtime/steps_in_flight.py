"""Steps from their scheduling to their commit: what the device runs, what waits for tokens or an
executable, and how long each took.
"""

import dataclasses
import time
from collections import deque

import jax
import numpy as np

from inference.runtime import batch
from inference.runtime.batch import Inputs
from inference.runtime.model_runner import ModelRunner
from inference.runtime.packed_output import PackedOutput
from inference.scheduling.scheduler import Scheduler
from inference.scheduling.sequence import SequenceFault, Status, blame
from inference.scheduling.step_output import StepOutput
from inference.scheduling.step_schedule import StepRecord, StepSchedule
from inference.scheduling.step_shapes import StepShape
from sharding import hosts

_NUM_RECENT = 8  # steps of a shape
_MIN_LEAD_S = 1e-3  # the host's own clocks and threads
_MOST_LEAD = 1 / 8  # of a step: of a shorter one, waiting gains less than a wrong guess costs
_MAX_FAILURES = 2  # of the device in a row: then they are no passing ones


@dataclasses.dataclass
class StepInFlight:
    """A step and its times, on the clock of `time.perf_counter`."""

    schedule: StepSchedule
    inputs: Inputs
    schedule_s: float  # what the host took to schedule and build it
    output: PackedOutput | None = None  # once it is launched
    launched_at: float = 0.0
    done_at: float | None = None  # where that was seen before its output was fetched
    fetched_at: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(queries for queries, _ in self.schedule.row_sizes)

    @property
    def is_needed(self) -> bool:
        """Whether it still has to run: for a sequence, for the pages that it transfers, or for
        adapters that it loads.
        """
        sequences = [chunk.sequence for _, chunk in self.schedule.rows]
        sequences += [
            admission.sequence for shard in self.schedule.shards for admission in shard.admissions
        ]
        is_live = any(sequence.status is not Status.FINISHED for sequence in sequences)
        return is_live or any(self.schedule.transfers) or bool(self.schedule.adapter_loads)


class StepsInFlight:
    """The steps that were scheduled and are not committed yet, oldest first.

    Attributes:
        waiting: a step that cannot be launched yet: its grammars have to see tokens of the step
            before it, or its executable is compiled once the outputs of the steps before it were
            returned.
        records: of the newest steps that were committed.
        compile_s: seconds spent compiling so far; no step's time includes it.
    """

    def __init__(self, scheduler: Scheduler, model_runner: ModelRunner):
        self._scheduler = scheduler
        self._model_runner = model_runner
        self._steps: deque[StepInFlight] = deque()
        self._last_done_at = 0.0  # of the steps that were committed
        self._recent: dict[StepShape, deque[tuple[int, float]]] = {}  # tokens and seconds
        self._lead_s = 0.0  # that the host took to schedule and launch a step; the most, decaying
        self._away_since = 0.0  # when the host turned to something else than steps
        # That launching a waiting step took, while another was processed.
        self._waiting_launch_s = 0.0
        self._num_failures = 0  # of the device in a row
        self.waiting: StepInFlight | None = None
        self.records: deque[StepRecord] = deque(maxlen=4096)
        self.compile_s = 0.0

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def is_done(self) -> bool:
        """Whether the device has finished the oldest of them."""
        output = self._steps[0].output
        return output is not None and self._model_runner.is_done(output)

    def clear(self) -> None:
        self._steps.clear()
        self.waiting = None

    def note_success(self, is_fetched: bool) -> None:
        """Notes that the device finished the fetched step, if any. A success while another step
        waits for its executable ends no row of failures: compiling that may fail after each
        success.
        """
        awaits_executable = self.waiting and not self._model_runner.is_ready(self.waiting.schedule)
        if is_fetched and not awaits_executable:
            self._num_failures = 0

    def is_passing(self, error: BaseException) -> bool:
        """Counts a failure of the device, not of the host; returns whether it may pass."""
        if not isinstance(error, jax.errors.JaxRuntimeError):
            return False
        self._num_failures += 1
        if self._num_failures < _MAX_FAILURES and hosts.current().count == 1:
            return True
        self._num_failures = 0
        return False

    def slack_s(self) -> float:
        """Seconds for which no step needs to be scheduled: until the one in flight ends, if it
        takes as long as the fastest of the last of its shape (with fewer tokens: at least a share
        of that), less the host's time to schedule and launch the next; 0 for short steps. Requests
        that come within them are in the next step. Asked every few milliseconds, as a step may be
        faster.
        """
        self.note_done()
        if len(self._steps) != 1 or self.waiting is not None:
            return 0.0
        (step,) = self._steps
        recent = self._recent.get(step.schedule.shape)
        if step.done_at is not None or recent is None:
            return 0.0
        expected_s = min(s * min(1.0, step.num_tokens / tokens) for tokens, s in recent)
        lead_s = _MIN_LEAD_S + 1.5 * self._lead_s
        if lead_s > _MOST_LEAD * expected_s:
            return 0.0
        self.look_away()
        began_at = max(step.launched_at, self._last_done_at)
        return max(0.0, began_at + expected_s - lead_s - self._away_since)

    def look_away(self) -> None:
        self._away_since = time.perf_counter()

    def note_done(self) -> None:
        """Dates the steps that the device finished while the host did something else."""
        for step in self._steps:
            assert step.output is not None
            if step.done_at is None and self._model_runner.is_done(step.output):
                step.done_at = max(step.launched_at, self._away_since)

    def launch(self, is_open: bool) -> bool:
        """Schedules and launches a step; False where there is nothing to do, or where the step in
        flight comes first: its tokens are needed, or its outputs before compiling.
        """
        step, self.waiting = self.waiting, None
        if step is None or not step.is_needed:
            step = self._schedule(is_open)
        if step is None:
            return False
        if self._steps and step.schedule.awaits_tokens:
            self.waiting = step
            return False
        return self._start(step)

    def launch_waiting(self) -> None:
        """Launches the held step if its executable exists; the tokens before it are committed."""
        start = time.perf_counter()
        step, self.waiting = self.waiting, None
        if step is not None and step.is_needed:
            self._start(step, may_compile=False)
        self._waiting_launch_s = time.perf_counter() - start

    def _start(self, step: StepInFlight, may_compile: bool = True) -> bool:
        start, compile_s = time.perf_counter(), self.compile_s
        if not hosts.current().broadcast(self._model_runner.is_ready(step.schedule)):
            if self._steps or not may_compile:
                self.waiting = step
                return False
            self._compile(step.schedule)
        step.launched_at = time.perf_counter()
        while step.output is None:
            try:
                step.output = self._model_runner.launch(step.schedule, step.inputs)
            except SequenceFault as fault:
                self._scheduler.fail(fault)
        lead_s = step.schedule_s + time.perf_counter() - start - (self.compile_s - compile_s)
        self._lead_s = max(lead_s, 0.9 * self._lead_s)
        self._steps.append(step)
        return True

    def fetch(self) -> tuple[StepInFlight, StepOutput[np.ndarray]]:
        """Waits for the oldest step and removes it; returns it with its output."""
        step = self._steps[0]
        assert step.output is not None
        output = self._model_runner.wait(step.output)
        step.fetched_at = time.perf_counter()
        return self._steps.popleft(), output

    def record(self, step: StepInFlight) -> None:
        """Records a step whose output was fetched and has been processed just now."""
        host_s = step.schedule_s + time.perf_counter() - step.fetched_at - self._waiting_launch_s
        done_at = step.done_at or step.fetched_at
        seconds = done_at - max(step.launched_at, self._last_done_at)
        schedule = step.schedule
        self.records.append(StepRecord(schedule.shape, schedule.row_sizes, seconds, host_s))
        recent = self._recent.setdefault(schedule.shape, deque(maxlen=_NUM_RECENT))
        recent.append((step.num_tokens, seconds))
        self._last_done_at = done_at
        if self._scheduler.draft_policy is not None:
            self._scheduler.draft_policy.took(schedule.shape, hosts.current().broadcast(seconds))
        if not self._scheduler.has_work:  # steps in flight serve no sequence any more
            self._steps.clear()

    def _shorten_prompts(self) -> None:
        """Has prompts that are computed give up the pages that their budgets have no room for."""
        for sequence in self._scheduler.choosing:
            start = time.perf_counter()
            self._model_runner.prepare_observer()
            self.compile_s += time.perf_counter() - start
            try:
                weight_S = self._model_runner.observe(sequence)
            except jax.errors.JaxRuntimeError:  # the device's, not the sequence's
                raise
            except BaseException as error:
                self._scheduler.fail(blame(sequence, error))
            else:
                self._scheduler.shorten(sequence, weight_S)

    def _schedule(self, is_open: bool) -> StepInFlight | None:
        self._shorten_prompts()
        start = time.perf_counter()
        schedule = self._scheduler.schedule(hosts.current().now(), is_open)
        if schedule is None:
            return None
        while True:
            try:
                inputs = batch.build(schedule, self._model_runner.config)
            except SequenceFault as fault:
                self._scheduler.fail(fault)
            else:
                return StepInFlight(schedule, inputs, time.perf_counter() - start)

    def _compile(self, schedule: StepSchedule) -> None:
        start = time.perf_counter()
        self._model_runner.prepare(schedule)
        self.compile_s += time.perf_counter() - start
