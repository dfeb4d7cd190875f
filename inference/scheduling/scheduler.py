"""Which sequences run next, how many tokens each, on which pages. Integers only: no device, no
randomness; time comes in as an argument.

Running sequences decode in every step; what the prefill rectangle can take goes to prompts. A
waiting sequence starts where the batch policy allows it, where it finds pages, and where all that
run are expected to find pages until they end (`admission_control`). Should pages run out
nevertheless, the last in rank is preempted and resumed later.

The samples of one request are forked from the first of them, where the prompt ends. Beams of one
search wait for each other, running or not: a preempted beam is computed again from its tokens, and
only then does the search choose how all of them continue. Where that leaves no sequence that can
run, the last in rank is preempted for those that wait.

A step may be scheduled while the one before it is in flight: its tokens then count as computed, and
each row that samples as one token, whose value only the device knows.
"""

from collections.abc import Callable

import numpy as np

from configs.engine import Config
from configs.errors import InputError
from inference.kv_pages.prefix_cache import Match
from inference.scheduling.admission_control import AdmissionControl
from inference.scheduling.batch_policy import WholeBatches
from inference.scheduling.page_manager import PageManager
from inference.scheduling.queue import WaitingQueue
from inference.scheduling.sequence import FinishReason, Sequence, Status
from inference.scheduling.slot_manager import SlotManager
from inference.scheduling.step_output import StepOutput, StepResults
from inference.scheduling.step_schedule import Counters, Decisions, StepBuilder, StepSchedule
from inference.scheduling.step_shapes import enumerate_shapes

_STEPS_TO_LOOK_AGAIN = 16  # for room: windows slide, outputs turn out longer or shorter


class Scheduler:
    """Queue, slots and pages of an engine."""

    def __init__(
        self, config: Config, should_offload: Callable[[int], bool] = lambda num_tokens: True
    ):
        """`should_offload`: as `PageManager` takes it."""
        self._config = config
        self._engine = config.engine
        self.shapes = enumerate_shapes(config.engine)
        self.pages = PageManager(config, should_offload)
        self.waiting = WaitingQueue(config.engine.max_overtakes)
        self.counters = Counters()
        self._slots = SlotManager(config, self.pages)
        self.running = self._slots.running  # by rank
        self._admission_control = AdmissionControl(config, self.pages)
        self._batches: WholeBatches | None = None
        if config.engine.policy != "continuous":
            self._batches = WholeBatches(config, self.pages.pool.num_usable_pages)
        self._is_refused = False  # the next to admit found no room, and none has left since

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence.

        Raises:
            InputError: it could not finish even alone.
        """
        self._check_fits(sequence)
        self.waiting.add(sequence)
        self._is_refused = False

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Starts `child`, a second continuation of its parent's tokens. Shares full pages, copies
        the open one; without room it waits.

        Raises:
            InputError: it could not finish even alone.
        """
        self._check_fits(child)
        if not self._slots.fork(parent, child):
            self.waiting.add(child)

    def apply(self, decisions: Decisions) -> None:
        """Does what a search decided when its beams were committed; nothing of them is in
        flight.
        """
        for sequence, reason in decisions.ended:
            self.finish(sequence, reason)
        for parent, child in decisions.forks:
            self.fork(parent, child)
        for sequence, token, logprob in decisions.chosen:
            sequence.choose(token, logprob)
            self._slots.rewrite(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Frees slot and pages of a running sequence, which resumes from what stays cached. Of
        steps in flight only its sampled tokens will count.
        """
        sequence.num_preemptions += 1
        self.counters.num_preemptions += 1
        self._suspend(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence in whatever state it is and frees its slot and pages."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        else:
            self._slots.stop(sequence)
            self._is_refused = False
        sequence.status, sequence.finish_reason = Status.FINISHED, reason
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and not sequence.scores:
            self._admission_control.lengths.record(sequence.num_output_tokens)
        if not self._engine.prefix_cache:
            self.pages.drop(sequence)

    def start_over(self) -> None:
        """The device lost its cache: nothing is in flight or cached, and all sequences wait."""
        for sequence in list(self.running):
            self._suspend(sequence)
        for sequence in self.waiting:
            sequence.num_rows_in_flight = sequence.num_awaited_tokens = 0
        self.pages.finish_schedule()
        self.pages.prefix_cache.clear()

    def schedule(self, now: float = 0.0, is_open: bool = False) -> StepSchedule | None:
        """Schedules the next step; None where nothing can run.

        Args:
            now: seconds, on the clock of `Sequence.arrival_s`.
            is_open: more requests will come, which whole batches may wait for.
        """
        self._fork_from_leaders()
        decoding = [sequence for sequence in self.running if not sequence.is_prefilling]
        if decoding and all(s.needs_commit and s.num_awaited_tokens for s in decoding):
            return None  # a step without them would only split the batch
        may_start = self._batches is None or self._batches.may_start(
            self.waiting, bool(self.running), now, is_open
        )
        step = StepBuilder(self._engine, bool(decoding))
        self._schedule_sequences(step, may_start)
        if not step.decode and not step.prefill:
            self._make_room()
            return None
        return self._finish_schedule(step)

    def commit(
        self, schedule: StepSchedule, output: StepOutput[np.ndarray]
    ) -> list[tuple[Sequence, list[int]]]:
        """Takes a step's results into its sequences; returns those that have new tokens or
        candidates or have ended, with their new tokens.

        Args:
            schedule: the step, the oldest one that is not committed.
            output: what the device returned.
        """
        committed: list[tuple[Sequence, list[int]]] = []
        results = StepResults(schedule, output)
        for row, chunk in schedule.rows:
            sequence = chunk.sequence
            sequence.num_rows_in_flight -= 1
            sequence.num_awaited_tokens -= chunk.emits
            if sequence.status is Status.FINISHED:
                continue
            tokens, reason = results.commit(row, chunk)
            if reason is not None:
                self.finish(sequence, reason)
            elif sequence.status is Status.RUNNING:
                self.pages.cache(sequence)
            if tokens or reason is not None or sequence.candidates:
                committed.append((sequence, tokens))
        return committed

    def check_integrity(self) -> None:
        """Raises RuntimeError where slots or pages do not add up."""
        self._slots.check_integrity()
        if any(s.pages or s.slot is not None for s in self.waiting):
            raise RuntimeError("a waiting sequence holds pages or a slot")

    def _suspend(self, sequence: Sequence) -> None:
        """Makes a running sequence wait."""
        self._slots.stop(sequence)
        self._is_refused = False
        sequence.status, sequence.drafts = Status.WAITING, ()
        sequence.prompt_logprobs.clear()
        sequence.prompt_top_logprobs.clear()
        self.waiting.add(sequence)

    def _check_fits(self, sequence: Sequence) -> None:
        """Limits a new sequence to the context; raises InputError where it cannot finish."""
        sequence.max_length = min(sequence.max_length, self._config.max_context)
        width = max(1, sequence.params.beam_width)
        peak = self._config.peak_pages(sequence.max_length)
        usable = self.pages.pool.num_usable_pages
        if any(width * n > most for n, most in zip(peak, usable, strict=True)):
            what = f"a request of {sequence.max_length} tokens"
            if width > 1:  # resumed beams may share nothing
                what = f"a beam search of {width} beams of {sequence.max_length} tokens"
            raise InputError(
                f"{what} never fits into the cache of {min(usable)} pages; raise engine.cache_bytes"
            )

    def _admit_next(self, num_free_chunks: int) -> Sequence | None:
        """Starts the next waiting sequence, if it can."""
        is_same = self._is_refused and self.counters.num_steps % _STEPS_TO_LOOK_AGAIN
        if not self.waiting or not self._slots.free_slots or is_same:
            return None
        found: dict[int, Match] = {}

        def num_cached_tokens(sequence: Sequence) -> int:
            found[sequence.id] = self.pages.match_prefix(sequence)
            return found[sequence.id].num_tokens

        sequence = self.waiting.next(num_cached_tokens)
        if sequence is None:
            return None
        if sequence.is_prefilling and not num_free_chunks and self._batches is None:
            return None  # a batch starts as a whole
        match = found.get(sequence.id) or self.pages.match_prefix(sequence)
        will_fit = self._admission_control.will_fit
        if not (self.pages.has_room(sequence, match) and will_fit(sequence, match, self.running)):
            self._is_refused = True
            return None
        self.waiting.pop(sequence)
        if not sequence.num_preemptions:  # finding its own pages again is no cache hit
            self.counters.num_prompt_tokens += len(sequence.tokens)
            self.counters.num_cached_tokens += match.num_tokens
        self._slots.start(sequence, match)
        return sequence

    def _fork_from_leaders(self) -> None:
        """Starts those that wait for a leader's prompt, once it is computed but for its last
        token.
        """
        for leader in [s for s in self.running if s.keeps_last and not s.scores]:
            if leader.num_computed_tokens == len(leader.tokens) - 1:
                leader.keeps_last = False
                for sequence in [s for s in self.waiting if s.leader is leader]:
                    self.waiting.remove(sequence)
                    sequence.leader = None
                    self.fork(leader, sequence)

    def _make_room(self) -> None:
        """Nothing can run: where beams wait for others of their search that find no room, preempts
        the last in rank. So the first search always continues: its beams fit when nothing else runs
        (`_check_fits`).
        """
        is_in_flight = any(s.num_rows_in_flight for s in (*self.running, *self.waiting))
        if self.running and not self._slots.admissions and not is_in_flight:
            self.preempt(self.running[-1])
        self._is_refused = False

    def _schedule_sequences(self, step: StepBuilder, may_start: bool) -> None:
        """Schedules what fits of the running sequences, then of those that can start."""
        is_chunked = self._engine.chunked_prefill
        for sequence in list(self.running):  # by rank: one that is preempted has no chunk yet
            if is_chunked or sequence.is_prefilling:
                self._schedule_sequence(sequence, step)
        while may_start and (admitted := self._admit_next(step.num_free_chunks)):
            if is_chunked or admitted.is_prefilling:
                self._schedule_sequence(admitted, step)
        if not is_chunked and not step.prefill:  # by rank again, prompts of one token included
            for sequence in [s for s in self.running if not s.is_prefilling]:
                self._schedule_sequence(sequence, step)

    def _schedule_sequence(self, sequence: Sequence, step: StepBuilder) -> None:
        """Schedules a sequence's next tokens on pages of their own, preempting the last in rank,
        and so perhaps the sequence itself, where there are none.
        """
        num_tokens = step.num_tokens(sequence)
        if not num_tokens or sequence.slot is None:  # preempted while the step was scheduled
            return
        while not self.pages.allocate(sequence, num_tokens):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return
        step.add(sequence, sequence.slot, num_tokens)

    def _finish_schedule(self, step: StepBuilder) -> StepSchedule:
        """The step that was scheduled, with all admissions and transfers that are due."""
        counters, cache = self.counters, self.pages.prefix_cache
        counters.num_steps += 1
        counters.num_prefilled_tokens += sum(chunk.length for chunk in step.prefill)
        counters.num_offloaded_pages = cache.num_offloaded_pages
        counters.num_restored_pages = cache.num_restored_pages
        counters.peak_running = max(counters.peak_running, len(self.running))
        num_rows = len(step.decode)
        if self._batches is not None:
            num_rows = self._batches.num_decode_rows(num_rows, len(self.running))
        shape = step.shape(self.shapes, num_rows)
        decode = sorted(step.decode, key=lambda chunk: -chunk.start)  # as plain attention wants it
        admissions, self._slots.admissions = tuple(self._slots.admissions), []
        transfers = self.pages.finish_schedule()
        return StepSchedule(shape, tuple(decode), tuple(step.prefill), admissions, transfers)
