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

import functools
import heapq
import itertools
import logging
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Tokens

import numpy as np

from configs.engine import Config
from configs.errors import InputError
from inference.kv_pages import prompt_pages
from inference.kv_pages.prefix_cache import EQUAL_COSTS, Match, PageCosts
from inference.scheduling.adapter_slots import AdapterSlots
from inference.scheduling.adaptive_drafts import AdaptiveDrafts
from inference.scheduling.admission_control import LengthStatistics
from inference.scheduling.batch_policy import WholeBatches
from inference.scheduling.data_shard import DataShard
from inference.scheduling.queue import WaitingQueue, rank
from inference.scheduling.sequence import (
    Adapter,
    FinishReason,
    Sequence,
    SequenceFault,
    Status,
    blame,
    cache_key,
)
from inference.scheduling.step_output import Commit, StepOutput, StepResults
from inference.scheduling.step_schedule import (
    Counters,
    Decisions,
    ShardBuilder,
    StepSchedule,
    shape_of,
)
from inference.scheduling.step_shapes import enumerate_shapes

_STEPS_TO_LOOK_AGAIN = 16  # for room: windows slide, outputs turn out longer or shorter

_log = logging.getLogger(__name__)


class Scheduler:
    """The queue of an engine, and the slots and pages of its data shards.

    Attributes:
        shapes: that a step may have, cheapest first.
        shards: one for each group of chips that computes rows of its own.
        waiting: sequences that no shard runs.
        commits: that no outputs were made of yet, oldest first.
        counters: of what was done.
        draft_policy: chooses how many drafts a step verifies; None: `engine.drafts.num_drafts`.
    """

    def __init__(
        self,
        config: Config,
        costs: PageCosts = EQUAL_COSTS,
        snapshot_tokens: int = 0,
    ):
        """`costs`, `snapshot_tokens`: as `PageManager` takes them."""
        self.draft_policy: AdaptiveDrafts | None = None
        self._config = config
        self._engine = config.engine
        self.shapes = enumerate_shapes(config.engine)
        self._lengths = LengthStatistics()
        self._new_shard = functools.partial(
            DataShard, config, costs=costs, lengths=self._lengths, snapshot_tokens=snapshot_tokens
        )  # fmt: skip
        self.shards = tuple(map(self._new_shard, range(config.mesh.num_groups)))
        self.waiting = WaitingQueue(config.engine.scheduling.max_overtakes)
        self._adapters = AdapterSlots(config.engine.adapters.slots)
        self.commits: deque[Commit] = deque()
        self.counters = Counters()
        usable = self.shards[0].pages.pool.num_usable_pages  # of each shard
        self._num_usable_pages = usable[: len(config.num_pages)]
        self._batches: WholeBatches | None = None
        if config.engine.scheduling.policy != "continuous":
            self._batches = WholeBatches(config, self._num_usable_pages)
        self._is_refused = False  # the next to admit found no room, and none has left since

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) or any(shard.running for shard in self.shards)

    @property
    def running(self) -> list[Sequence]:
        """Sequences that have a slot, by rank."""
        return list(heapq.merge(*(shard.running for shard in self.shards), key=rank))

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence; raises InputError if it could not finish even alone."""
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
        if self.shards[parent.shard].fork(parent, child):
            self._adapters.take(child)
        else:
            self.waiting.add(child)

    def retain(
        self, tokens: Tokens[int], cache_salt: str | None = None, adapter: Adapter | None = None
    ) -> None:
        """Lets what is cached of a conversation outlive other prefixes until it goes on: its prompt
        and its answer, with the salt and the adapter of its requests.
        """
        if self._engine.cache.prefix_cache:
            key = cache_key(self._engine.cache, 0, cache_salt, adapter)
            for shard in self.shards:
                shard.pages.prefix_cache.retain(tokens, key)

    def apply(self, decisions: Decisions) -> None:
        """Does what a search decided when its beams were committed; nothing of them is in
        flight.

        Raises:
            SequenceFault: slots and pages may be left half changed.
        """
        for sequence, reason in decisions.ended:
            self.finish(sequence, reason)
        for parent, child in decisions.forks:
            try:
                self.fork(parent, child)
            except BaseException as error:
                raise blame(child, error) from error
        for sequence, token, logprob in decisions.chosen:
            try:
                sequence.choose(token, logprob)
                self.shards[sequence.shard].rewrite(sequence)
            except BaseException as error:
                raise blame(sequence, error) from error

    def preempt(self, sequence: Sequence) -> None:
        """Frees slot and pages of a running sequence, which resumes from what stays cached. Of
        steps in flight only its sampled tokens will count.
        """
        sequence.history.num_preemptions += 1
        self.counters.num_preemptions += 1
        self._stop(sequence)
        sequence.suspend()
        self.waiting.add(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence in whatever state it is and frees its slot and pages.

        Raises:
            SequenceFault: slots and pages may be left half changed.
        """
        if sequence.status is Status.FINISHED:
            return
        try:
            if sequence.status is Status.WAITING:
                self.waiting.remove(sequence)
            else:
                self._stop(sequence)
        except BaseException as error:
            raise blame(sequence, error) from error
        sequence.status, sequence.finish_reason = Status.FINISHED, reason
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and not sequence.is_only_read:
            self._lengths.record(sequence.num_output_tokens)
        if not self._engine.cache.prefix_cache:
            for shard in self.shards:
                shard.pages.drop(sequence)

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """As `finish`, with a commit that says so: its last one, where outputs are still to be made
        of that.
        """
        if sequence.status is Status.FINISHED:
            return
        for commit in reversed(self.commits):
            if commit.sequence is sequence and commit.outputs is None:
                commit.reason = reason
                break
        else:
            self.commits.append(Commit(sequence, len(sequence.tokens), [], [], [], None, reason))
        self.finish(sequence, reason)

    def fail(self, fault: SequenceFault) -> None:
        """Ends the sequence that a fault lies in.

        Raises:
            SequenceFault: slots and pages may be left half changed.
        """
        id, cause = fault.sequence.id, fault.__cause__
        _log.error("sequence %d ends with an error", id, exc_info=cause)
        self.end(fault.sequence, FinishReason.ERROR)

    def start_over(self, sequences: Iterable[Sequence]) -> None:
        """Nothing is in flight or cached, and these sequences wait, but for those that have ended.
        All that was known of slots and pages is made anew: an interrupt may have left any of it
        half done.
        """
        self.shards = tuple(map(self._new_shard, range(len(self.shards))))
        self.waiting = WaitingQueue(self._engine.scheduling.max_overtakes)
        self._adapters = AdapterSlots(self._engine.adapters.slots)
        self._is_refused = False
        for sequence in sequences:
            if sequence.status is not Status.FINISHED:
                self.waiting.add(sequence)
                try:
                    sequence.start_over()
                except BaseException as error:
                    self.fail(blame(sequence, error))

    def schedule(self, now: float = 0.0, is_open: bool = False) -> StepSchedule | None:
        """Schedules the next step; None where nothing can run.

        Args:
            now: seconds, on the clock of `Sequence.history.arrival_s`.
            is_open: more requests will come, which whole batches may wait for.
        """
        self._fork_from_leaders()
        running = self.running
        decoding = [sequence for sequence in running if not sequence.is_prefilling]
        if decoding and all(s.needs_commit and s.in_flight.num_tokens for s in decoding):
            return None  # a step without them would only split the batch
        may_start = self._batches is None or self._batches.may_start(
            self.waiting, bool(running), now, is_open
        )
        max_drafts = self._engine.drafts.num_drafts
        if self.draft_policy is not None:
            num_rows = max((len(s.running) for s in self.shards), default=0)
            if self._batches is not None:
                num_rows = self._batches.num_decode_rows(num_rows, num_rows)
            is_alone = len(decoding) == len(running)
            max_drafts = self.draft_policy.choose(decoding, num_rows, is_alone)
        builders = [ShardBuilder(self._engine, bool(decoding), max_drafts) for _ in self.shards]
        self._schedule_sequences(running, builders, may_start)
        if not any(builder.decode or builder.prefill for builder in builders):
            self._make_room()
            return None
        for admission in itertools.chain.from_iterable(shard.admissions for shard in self.shards):
            if admission.sequence.history.started_s is None:
                admission.sequence.history.started_s = now
        return self._finish_schedule(builders)

    @property
    def choosing(self) -> list[Sequence]:
        """Sequences whose prompt is computed as far as it takes to choose the pages that stay."""
        if not self._engine.requests.prompt_budgets:
            return []
        whole = (sequence for sequence in self.running if sequence.is_whole)
        return [s for s in whole if s.num_computed_tokens == s.num_prompt_tokens - 1]

    def shorten(self, sequence: Sequence, weight_S: np.ndarray) -> None:
        """Gives up pages of a prompt, by the attention of its end, as `prompt_pages.choose` takes
        it.
        """
        try:
            dropped = prompt_pages.choose(
                weight_S, sequence.num_prompt_tokens, sequence.budget.num_excess_tokens,
                self._config.page_tokens,
            )  # fmt: skip
            self.shards[sequence.shard].pages.shorten(sequence, dropped)
        except BaseException as error:
            raise blame(sequence, error) from error
        self._is_refused = False

    def commit(self, schedule: StepSchedule, output: StepOutput[np.ndarray]) -> list[Commit]:
        """Takes the output of the oldest step that is not committed into its sequences; returns the
        commits of those that have new tokens or candidates or have ended, which are among
        `commits`, too. What is wrong with one of them ends it.

        Raises:
            SequenceFault: slots and pages may be left half changed.
        """
        committed: list[Commit] = []
        results = StepResults(schedule, output)
        for row, chunk in schedule.rows:
            sequence = chunk.sequence
            in_flight = sequence.in_flight
            in_flight.num_rows -= 1
            in_flight.num_tokens -= chunk.most_emitted
            in_flight.num_drafts -= chunk.most_accepted
            if sequence.status is Status.FINISHED:
                continue
            if num_drafted := results.num_drafted(row):
                self.counters.num_drafts += num_drafted
                self.counters.verified[results.num_levels(row), results.num_accepted(row)] += 1
            try:
                if self.draft_policy is not None and (num_verified := chunk.most_accepted):
                    self.draft_policy.verified(sequence, num_verified, results.num_accepted(row))
                commit = results.commit(row, chunk)
            except BaseException as error:
                self.fail(blame(sequence, error))
                continue
            if commit is not None:
                self.commits.append(commit)  # noted first, then written
                committed.append(commit)
            try:
                if commit is not None:
                    commit.write()
                if commit is not None and commit.reason is not None:
                    self.finish(sequence, commit.reason)
                elif sequence.status is Status.RUNNING:
                    self.shards[sequence.shard].pages.cache(sequence)
            except BaseException as error:
                raise blame(sequence, error) from error
        return committed

    def check_integrity(self) -> None:
        """Raises RuntimeError where slots or pages do not add up."""
        for shard in self.shards:
            shard.check_integrity()
        self._adapters.check_integrity(self.running)
        if any(s.pages or s.slot is not None for s in self.waiting):
            raise RuntimeError("a waiting sequence holds pages or a slot")

    def _stop(self, sequence: Sequence) -> None:
        self.shards[sequence.shard].stop(sequence)
        self._adapters.give_back(sequence)
        self._is_refused = False

    def _check_fits(self, sequence: Sequence) -> None:
        """Limits a new sequence to context and pages; raises InputError where it cannot finish."""
        longest, usable = self._config.max_context, self._num_usable_pages
        sequence.max_length = sequence.max_positions = min(sequence.max_length, longest)
        width = max(1, sequence.params.beam_width)

        def fits(num_positions: int) -> bool:
            peak = self._config.peak_pages(num_positions)
            return all(width * n <= limit for n, limit in zip(peak, usable, strict=True))

        if sequence.speculates and self._engine.drafts.has_tree:
            with_nodes = min(sequence.max_length + self._engine.drafts.num_drafts, longest)
            if fits(with_nodes):  # else trees shrink where the answer ends
                sequence.max_positions = with_nodes
        if not fits(sequence.max_length):
            what = f"a request of {sequence.max_length} tokens"
            if width > 1:  # resumed beams may share nothing
                what = f"a beam search of {width} beams of {sequence.max_length} tokens"
            raise InputError(
                f"{what} never fits into the cache of {min(usable)} pages; raise "
                "engine.cache.cache_bytes"
            )

    def _admit_next(self, builders: list[ShardBuilder]) -> Sequence | None:
        """Starts the next waiting sequence, if it can, on the shard that then has the least to
        compute: one that is nearly idle, or one that has the prompt's prefix cached.
        """
        is_same = self._is_refused and self.counters.num_steps % _STEPS_TO_LOOK_AGAIN
        free = [index for index, shard in enumerate(self.shards) if shard.free_slots]
        if not self.waiting or not free or is_same:
            return None

        @functools.cache
        def match(sequence: Sequence, index: int) -> Match:
            return self.shards[index].pages.match_prefix(sequence)

        def num_cached_tokens(sequence: Sequence) -> int:
            return max(match(sequence, index).num_tokens for index in free)

        sequence = self.waiting.next(num_cached_tokens, self._adapters.can_take)
        if sequence is None:
            return None
        ready = free
        needs_chunks = sequence.is_prefilling and sequence.sender is None
        if needs_chunks and self._batches is None:  # a batch starts as a whole
            ready = [index for index in free if builders[index].num_free_chunks]
        loads = {
            index: self.shards[index].num_outstanding_tokens - match(sequence, index).num_tokens
            for index in ready
        }
        for index in sorted(ready, key=loads.__getitem__):
            if self.shards[index].will_fit(sequence, match(sequence, index)):
                try:
                    self._start(sequence, index, match(sequence, index))
                except BaseException as error:
                    raise blame(sequence, error) from error
                return sequence
        self._is_refused = ready == free
        return None

    def _start(self, sequence: Sequence, index: int, match: Match) -> None:
        self.waiting.pop(sequence)
        if sequence.prefix.num_hit_tokens is None:  # finding its own pages again is no cache hit
            self.counters.num_prompt_tokens += len(sequence.tokens)
            self.counters.num_cached_tokens += match.num_tokens
        self.shards[index].start(sequence, match)
        self._adapters.take(sequence)
        if sequence.sender is not None:  # siblings need not wait for a step that has no row of it
            self._fork_from_leaders()

    def _fork_from_leaders(self) -> None:
        """Starts those that wait for a leader's prompt, once it is computed but for its last
        token.
        """
        leaders = (s for s in self.running if s.keeps_last and not (s.scores or s.sends_pages))
        for leader in list(leaders):
            if leader.num_computed_tokens == len(leader.tokens) - 1 and not leader.is_whole:
                leader.keeps_last = False
                for sequence in [s for s in self.waiting if s.leader is leader]:
                    self.waiting.remove(sequence)
                    sequence.leader = None
                    self.fork(leader, sequence)

    def _make_room(self) -> None:
        """Nothing can run: where beams wait for others of their search that find no room, preempts
        the last in rank. So the first search always continues: its beams fit when nothing else runs
        (`_check_fits`). Prompts that are computed wait for other chips to take them.
        """
        running = self.running
        is_in_flight = any(s.in_flight.num_rows for s in (*running, *self.waiting))
        is_admitted = any(shard.admissions for shard in self.shards)
        is_sending = any(s.sends_pages for s in running)
        if running and not (is_admitted or is_in_flight or is_sending):
            self.preempt(running[-1])
        self._is_refused = False

    def _schedule_sequences(
        self, running: list[Sequence], builders: list[ShardBuilder], may_start: bool
    ) -> None:
        is_chunked = self._engine.scheduling.chunked_prefill
        for sequence in running:  # by rank: one that is preempted has no chunk yet
            if is_chunked or sequence.is_prefilling:
                self._schedule_sequence(sequence, builders)
        while may_start and (admitted := self._admit_next(builders)):
            if is_chunked or admitted.is_prefilling:
                self._schedule_sequence(admitted, builders)
            may_start = admitted.slot is not None  # else its drafts found no room, nor would others
        if not is_chunked and not any(builder.prefill for builder in builders):
            for sequence in self.running:  # by rank again, prompts of one token included
                if not sequence.is_prefilling:
                    self._schedule_sequence(sequence, builders)

    def _schedule_sequence(self, sequence: Sequence, builders: list[ShardBuilder]) -> None:
        """Schedules a sequence's next tokens on pages of their own, preempting the last in rank of
        its shard, and so perhaps the sequence itself, where there are none.
        """
        shard, builder = self.shards[sequence.shard], builders[sequence.shard]
        try:
            num_tokens = builder.num_tokens(sequence)
            if not num_tokens or sequence.slot is None:  # preempted while the step was scheduled
                return
            while not shard.pages.allocate(sequence, num_tokens):
                victim = shard.running[-1]
                self.preempt(victim)
                if victim is sequence:
                    return
            builder.add(sequence, num_tokens)
            if snapshot := shard.pages.snapshot(sequence):
                builder.keep(sequence, snapshot)
        except BaseException as error:
            raise blame(sequence, error) from error

    def _finish_schedule(self, builders: list[ShardBuilder]) -> StepSchedule:
        """The step that was scheduled, with all admissions and transfers that are due."""
        counters = self.counters
        num_running = [len(shard.running) for shard in self.shards]
        counters.num_steps += 1
        counters.num_passes += sum(len(builder.decode) for builder in builders)
        counters.num_prefilled_tokens += sum(
            chunk.length for builder in builders for chunk in builder.prefill
        )
        counters.peak_running = max(counters.peak_running, sum(num_running))
        num_rows = max(len(builder.decode) for builder in builders)
        if self._batches is not None:
            num_rows = self._batches.num_decode_rows(num_rows, max(num_running))
        schedule = StepSchedule(
            shape_of(builders, self.shapes, num_rows),
            tuple(
                builder.schedule(shard.take_admissions(), shard.pages.finish_schedule())
                for shard, builder in zip(self.shards, builders, strict=True)
            ),
            self._adapters.take_loads(),
        )
        for transfer in itertools.chain.from_iterable(schedule.transfers):
            counters.num_offloaded_pages += transfer.to_host
            counters.num_restored_pages += not transfer.to_host
        return schedule
