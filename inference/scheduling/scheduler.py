"""Who runs next, how many tokens each, on which pages. Integers only: no device, no randomness;
time comes in as an argument.

Running sequences decode in every step; what the prefill rectangle can take goes to prompts. A
waiting sequence starts where its policy allows, where its pages are free, and where the lengths to
be expected say that all who run find room until they end (`lookahead`). When pages run out
nevertheless, the last in rank gives its own up and is resumed later.

Answers to one prompt are forked from the first of them, where the prompt ends. Beams of one search
wait for each other, running or not: who is preempted is computed again from its tokens, and only
then does the search choose how all go on. Should that leave nobody who can run, the last in rank
makes room for those who wait.

A step may be planned while the one before it is still in flight: then positions count as computed,
and each sampling row as one token whose value the device knows.
"""

import math
from bisect import insort
from collections.abc import Callable
from typing import Any

from configs.engine import Config
from configs.errors import InputError
from inference.kv_pages.page_manager import Pages
from inference.kv_pages.prefix_cache import Match
from inference.request import FinishReason, Sequence, Status
from inference.scheduling import admission_control, queue
from inference.scheduling.admission_control import Demand, LengthStatistics
from inference.scheduling.step_schedule import Admission, Counters, Plan, Row
from inference.scheduling.step_shapes import choose, enumerate_shapes

_STEPS_TO_LOOK_AGAIN = 16  # for room: windows slide, answers turn out longer or shorter
_PREEMPTIONS_TO_YIELD = 2  # after as many a sequence starts only where all its tokens find room


class Scheduler:
    """Queue, slots and pages of an engine."""

    def __init__(self, config: Config, spills: Callable[[int], bool] = lambda num_tokens: True):
        """`spills`: as `Pages` takes it."""
        self._config = config
        self._engine = config.engine
        self.shapes = enumerate_shapes(config.engine)
        self.pages = Pages(config, spills)
        self.waiting = queue.Waiting(config.engine.max_overtakes)
        self.running: list[Sequence] = []  # by rank
        self.counters = Counters()
        self._lengths = LengthStatistics()
        self._free_slots = list(range(config.engine.max_seqs - 1, -1, -1))
        self._admissions: list[Admission] = []
        self._max_tiles = max(config.engine.prefill_tiles)
        self._is_refused = False  # who is next found no room, and nobody has left since
        self._batch_rows = 0  # decode rows that a policy of whole batches holds to the end

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

    def schedule(self, now: float = 0.0, is_open: bool = False) -> Plan | None:
        """Plans the next step; None where nothing can run.

        Args:
            now: seconds, on the clock of `Sequence.arrival_s`.
            is_open: more requests will come, which whole batches may wait for.
        """
        for leader in [s for s in self.running if s.keeps_last and not s.scores]:
            if leader.num_computed_tokens == len(leader.tokens) - 1:
                self._fork_siblings(leader)
        decoding = [sequence for sequence in self.running if not sequence.is_prefilling]
        if decoding and all(s.needs_commit and s.num_awaited_tokens for s in decoding):
            return None  # a step without them would only split the batch
        decode: list[Row] = []
        tiles: list[Row] = []
        may_admit = self._may_admit(now, is_open)
        most_tiles = self._most_tiles(bool(decoding))
        is_chunked = self._engine.chunked_prefill
        for sequence in list(self.running):  # by rank: whoever is preempted is not planned yet
            if is_chunked or sequence.is_prefilling:
                self._plan_sequence(sequence, decode, tiles, most_tiles)
        while may_admit and (admitted := self._next_to_admit(self._num_free(most_tiles, tiles))):
            if is_chunked or admitted.is_prefilling:
                self._plan_sequence(admitted, decode, tiles, most_tiles)
        if not is_chunked and not tiles:  # by rank again, a prompt of one token among them
            for sequence in [s for s in self.running if not s.is_prefilling]:
                self._plan_sequence(sequence, decode, tiles, most_tiles)
        if not decode and not tiles:
            self._make_way()
            return None
        decode.sort(key=lambda row: row.start, reverse=True)  # as plain attention wants them
        scored = any(row.sequence.scores for row in tiles)
        if self._engine.policy != "continuous":
            self._batch_rows = max(self._batch_rows, len(self.running))
        num_rows = max(len(decode), self._batch_rows if decode else 0)
        shape = choose(self.shapes, num_rows, len(tiles), scored)
        transfers = self.pages.unpin()
        admissions, self._admissions = tuple(self._admissions), []
        self.counters.num_steps += 1
        self.counters.num_prefilled_tokens += sum(row.length for row in tiles)
        prefix = self.pages.prefix
        self.counters.num_spilled_pages = prefix.num_spilled_pages
        self.counters.num_restored_pages = prefix.num_restored_pages
        self.counters.peak_running = max(self.counters.peak_running, len(self.running))
        return Plan(shape, tuple(decode), tuple(tiles), admissions, transfers)

    def commit(self, plan: Plan, output: Any) -> list[tuple[Sequence, list[int]]]:
        """Takes a step's results into the sequences; returns each sequence's new tokens.

        Args:
            plan: the step, the oldest one that is not committed.
            output: `tokens[R, W]`, `num_emitted[R]`, `finite[R]` and log-probabilities as numpy
                arrays (`step.Output`).
        """
        news: list[tuple[Sequence, list[int]]] = []
        finite, num_emitted = output.finite.tolist(), output.num_emitted.tolist()
        sampled = list(zip(output.tokens.tolist(), output.logprobs.tolist(), strict=True))
        first_tile = plan.shape.decode[0]
        for row, where in [
            *((row, r) for r, row in enumerate(plan.decode)),
            *((row, first_tile + r) for r, row in enumerate(plan.tiles)),
        ]:
            sequence = row.sequence
            sequence.num_rows_in_flight -= 1
            sequence.num_awaited_tokens -= row.emits
            if sequence.status is Status.FINISHED:
                continue
            if not finite[where]:
                self.finish(sequence, FinishReason.ERROR)
                news.append((sequence, []))
                continue
            emitted = num_emitted[where]
            if sequence.status is Status.RUNNING:
                num_fed = row.length if where >= first_tile else emitted
                sequence.num_computed_tokens += num_fed
                sequence.num_scheduled_tokens -= row.length - num_fed  # rejected drafts
                sequence.drafts = ()
                if sequence.scores:
                    self._commit_scores(sequence, row, where - first_tile, output)
            if emitted and sequence.params.beam_width:  # the search chooses, not the device
                ids, values = output.top_ids[where, 0], output.top_logprobs[where, 0]
                sequence.candidates = ids.tolist(), values.tolist()
                emitted = 0
            tokens = self._commit_tokens(sequence, emitted, *sampled[where])
            if output.top_ids.shape[-1]:
                for w in range(len(tokens)):
                    ids, values = output.top_ids[where, w], output.top_logprobs[where, w]
                    sequence.top_logprobs.append((ids.tolist(), values.tolist()))
            if sequence.status is Status.RUNNING:
                self.pages.name(sequence)
            if tokens or sequence.candidates or sequence.status is Status.FINISHED:
                news.append((sequence, tokens))
        return news

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence in whatever state it is and takes back what it holds."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        else:
            self._leave(sequence)
        sequence.status, sequence.finish_reason = Status.FINISHED, reason
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and not sequence.scores:
            self._lengths.record(sequence.num_output_tokens)
        if not self._engine.prefix_cache:
            self.pages.forget(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Takes slot and pages from a running sequence; it resumes from what is kept of them. Of
        steps in flight only its sampled tokens will count.
        """
        sequence.num_preemptions += 1
        self.counters.num_preemptions += 1
        self._suspend(sequence)

    def start_over(self) -> None:
        """The device lost its cache: nothing is in flight, nothing is kept, all who ran wait."""
        for sequence in list(self.running):
            self._suspend(sequence)
        for sequence in self.waiting:
            sequence.num_rows_in_flight = sequence.num_awaited_tokens = 0
        self.pages.unpin()
        self.pages.prefix.clear()

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Starts `child`, a second continuation of its parent's tokens. Shares full pages, copies
        the open one; without room it waits.

        Raises:
            InputError: it could not finish even alone.
        """
        self._check_fits(child)
        child.num_computed_tokens = min(parent.num_computed_tokens, len(child.tokens) - 1)
        child.num_scheduled_tokens = child.num_computed_tokens
        is_settled = not self._config.model.has_states or (
            not parent.num_rows_in_flight
            and parent.num_computed_tokens == child.num_computed_tokens
        )
        is_written = parent.slot is not None and all(
            admission.sequence is not parent for admission in self._admissions
        )
        copies = None
        if is_written and is_settled and self._free_slots:
            copies = self.pages.fork(parent, child)
        if copies is None:
            child.num_computed_tokens = child.num_scheduled_tokens = 0
            self.waiting.add(child)
            return
        if not self._engine.prefix_cache:  # its pages go by the parent's key
            child.cache_key = None
        self._admissions.append(Admission(child, self._enter(child), parent.slot, copies))

    def choose(self, sequence: Sequence, token: int) -> None:
        """Goes on with a token that the host chose, whatever the device sampled; nothing of the
        sequence is in flight.
        """
        sequence.tokens.append(token)
        sequence.candidates = None
        if sequence.slot is not None and all(a.sequence is not sequence for a in self._admissions):
            self._admissions.append(Admission(sequence, sequence.slot, sequence.slot))

    def check_integrity(self) -> None:
        """Raises RuntimeError where slots or pages do not add up."""
        self.pages.check_integrity(self.running)
        slots = [s.slot for s in self.running if s.slot is not None]
        if sorted([*slots, *self._free_slots]) != list(range(self._engine.max_seqs)):
            raise RuntimeError(f"slots {slots} and free slots {self._free_slots} do not add up")
        if any(s.pages or s.slot is not None for s in self.waiting):
            raise RuntimeError("a waiting sequence holds pages or a slot")

    def _check_fits(self, sequence: Sequence) -> None:
        longest, width = self._longest(sequence), max(1, sequence.params.beam_width)
        peak = self._config.peak_pages(longest)
        usable = self.pages.pool.num_usable_pages
        if any(width * n > most for n, most in zip(peak, usable, strict=True)):
            what = f"a request of {longest} tokens"
            if width > 1:  # resumed beams may share nothing
                what = f"a beam search of {width} beams of {longest} tokens"
            raise InputError(
                f"{what} never fits into the cache of {min(usable)} pages; raise engine.cache_bytes"
            )

    def _longest(self, sequence: Sequence) -> int:
        """Tokens that a sequence can reach here."""
        return min(sequence.max_tokens, self._config.max_context)

    def _fork_siblings(self, leader: Sequence) -> None:
        """Starts those who wait for a leader's prompt, which is computed but for its last token."""
        leader.keeps_last = False
        for sibling in [s for s in self.waiting if s.leader is leader]:
            self.waiting.remove(sibling)
            sibling.leader = None
            self.fork(leader, sibling)

    def _make_way(self) -> None:
        """Nobody can run: where beams wait for others of their search that find no room, the last
        in rank gives its own up. The first search gets along so: `_check_fits` has seen to it that
        its beams fit when nobody else runs.
        """
        is_in_flight = any(s.num_rows_in_flight for s in (*self.running, *self.waiting))
        if self.running and not self._admissions and not is_in_flight:
            self.preempt(self.running[-1])
        self._is_refused = False

    def _may_admit(self, now: float, is_open: bool) -> bool:
        """Whether the policy lets waiting sequences start."""
        if self._engine.policy == "continuous" or not self.waiting:
            return True
        if self.running:
            return False
        self._batch_rows = 0
        used, num_ready = [0] * self.pages.pool.num_groups, 0
        for sequence in self.waiting:
            longest = self._longest(sequence)
            used = [a + b for a, b in zip(used, self._config.peak_pages(longest), strict=True)]
            usable = self.pages.pool.num_usable_pages
            if num_ready == self._engine.max_seqs or any(map(int.__gt__, used, usable)):
                num_room = num_ready
                break
            num_ready += 1
        else:
            num_room = self._engine.max_seqs
        oldest = min(sequence.arrival_s for sequence in self.waiting)
        return queue.may_start(self._engine, num_ready, num_room, now - oldest, is_open)

    def _most_tiles(self, is_decoding: bool) -> int:
        """Tiles this step may have: the budget holds where somebody decodes."""
        budget = self._engine.prefill_budget
        if budget is None or not is_decoding or not self._engine.chunked_prefill:
            return self._max_tiles
        return min(self._max_tiles, budget // self._engine.tile_tokens)

    def _num_free(self, most_tiles: int, tiles: list[Row]) -> int:
        """Tiles that are left for one more prompt."""
        most_prompts = self._engine.max_prefill_seqs
        if most_prompts is not None and len({row.sequence.id for row in tiles}) >= most_prompts:
            return 0
        return most_tiles - len(tiles)

    def _next_to_admit(self, num_free_tiles: int) -> Sequence | None:
        """Starts the next waiting sequence, if it can."""
        is_same = self._is_refused and self.counters.num_steps % _STEPS_TO_LOOK_AGAIN
        if not self.waiting or not self._free_slots or is_same:
            return None
        is_batch = self._engine.policy != "continuous"  # which starts as a whole
        found: dict[int, Match] = {}

        def num_cached_tokens(sequence: Sequence) -> int:
            found[sequence.id] = self.pages.find(sequence)
            return found[sequence.id].num_tokens

        sequence = self.waiting.next(num_cached_tokens)
        if sequence is None or (sequence.is_prefilling and not num_free_tiles and not is_batch):
            return None
        match = found.get(sequence.id) or self.pages.find(sequence)
        if not self.pages.has_room(sequence, match) or not self._will_fit(sequence, match):
            self._is_refused = True
            return None
        self.waiting.take(sequence)
        self.pages.take(sequence, match)
        if not sequence.num_preemptions:  # to find one's own pages again is no hit
            self.counters.num_prompt_tokens += len(sequence.tokens)
            self.counters.num_cached_tokens += match.num_tokens
        self._admissions.append(Admission(sequence, self._enter(sequence)))
        return sequence

    def _will_fit(self, candidate: Sequence, match: Match) -> bool:
        """Whether the running sequences and one more find pages until they end, as far as the
        lengths of earlier ones tell. Who was preempted repeatedly starts only where even the
        longest answers fit, and so is not preempted again.
        """
        if not self.running:
            return True
        is_patient = candidate.num_preemptions >= _PREEMPTIONS_TO_YIELD
        if is_patient:
            ahead = [s for s in self.running if queue.rank(s) < queue.rank(candidate)]
        else:
            ahead = self.running
        page = self._config.page_tokens
        windows = [group.spec.window for group in self._config.model.page_groups]

        def demand(sequence: Sequence, num_cached_tokens: int) -> Demand:
            most = self._room(sequence)
            remaining = most
            if not is_patient:
                remaining = self._lengths.remaining(sequence.num_output_tokens, most)
            shared = num_cached_tokens // page
            return Demand(
                len(sequence.tokens) + sequence.num_awaited_tokens,
                max(0, remaining - 1),
                tuple(shared if window is None else 0 for window in windows),
            )

        demands = [demand(s, s.num_cached_tokens) for s in ahead]
        demands.append(demand(candidate, match.num_tokens))
        peak = admission_control.peak_pages(demands, windows, page)
        shared = self.pages.num_shared(self.running, match)
        usable = self.pages.pool.num_usable_pages
        return all(a + b <= n for a, b, n in zip(peak, shared, usable, strict=True))

    def _enter(self, sequence: Sequence) -> int:
        slot = self._free_slots.pop()
        sequence.slot, sequence.status = slot, Status.RUNNING
        insort(self.running, sequence, key=queue.rank)
        return slot

    def _leave(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.pages.let_go(sequence)
        self._is_refused = False
        self._free_slots.append(sequence.slot)
        self.running.remove(sequence)
        for admission in self._admissions:
            if admission.sequence is sequence:
                self.pages.cancel(admission.page_copies)
        self._admissions = [a for a in self._admissions if a.sequence is not sequence]
        sequence.slot = None

    def _suspend(self, sequence: Sequence) -> None:
        self._leave(sequence)
        sequence.status, sequence.drafts = Status.WAITING, ()
        sequence.prompt_logprobs.clear()
        sequence.prompt_top_logprobs.clear()
        self.waiting.add(sequence)

    def _plan_sequence(
        self, sequence: Sequence, decode: list[Row], tiles: list[Row], most_tiles: int
    ) -> None:
        """Adds what the next step feeds of a sequence: a decode row, or tiles of its prompt."""
        if sequence.candidates or (sequence.needs_commit and sequence.num_awaited_tokens):
            return
        if not sequence.is_prefilling:
            room = self._room(sequence)
            if room < 1:  # its last token is in flight
                return
            length = 1 + min(len(sequence.drafts), self._engine.num_drafts, room - 1)
            slot = self._hold_pages(sequence, length)
            if slot is not None:
                decode.append(_fed(sequence, slot, 0, length, emits=True))
            return
        size, pending = self._engine.tile_tokens, sequence.num_pending_tokens
        num_fed = min(pending, size * self._num_free(most_tiles, tiles))
        if num_fed < 1:
            return
        slot = self._hold_pages(sequence, num_fed)
        if slot is None:
            return
        is_last = num_fed == pending and not sequence.keeps_last
        for at in range(0, num_fed, size):
            emits = is_last and at + size >= num_fed
            tiles.append(_fed(sequence, slot, at, min(size, num_fed - at), emits))

    def _room(self, sequence: Sequence) -> int:
        """Tokens that may still be generated, beside those in flight."""
        return self._longest(sequence) - len(sequence.tokens) - sequence.num_awaited_tokens

    def _hold_pages(self, sequence: Sequence, num_tokens: int) -> int | None:
        """Makes sure the next tokens have pages, preempting the last in rank; the sequence's slot,
        or None where it was preempted itself.
        """
        if sequence.slot is None:  # preempted earlier in this very plan
            return None
        while not self.pages.hold(sequence, num_tokens):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return None
        return sequence.slot

    def _commit_scores(self, sequence: Sequence, row: Row, tile: int, output: Any) -> None:
        logprobs = output.target_logprobs[tile, : row.length].tolist()
        if not all(map(math.isfinite, logprobs)):  # a window may have hidden it from the last token
            return self.finish(sequence, FinishReason.ERROR)
        sequence.prompt_logprobs += logprobs
        if output.target_top_ids.shape[-1]:
            ids, values = output.target_top_ids[tile], output.target_top_logprobs[tile]
            sequence.prompt_top_logprobs += list(
                zip(ids[: row.length].tolist(), values[: row.length].tolist(), strict=True)
            )
        if not sequence.num_pending_tokens and not sequence.num_rows_in_flight:
            self.finish(sequence, FinishReason.LENGTH)

    def _commit_tokens(
        self, sequence: Sequence, emitted: int, tokens: list[int], logprobs: list[float]
    ) -> list[int]:
        """Takes sampled tokens in, up to one that ends the sequence; returns those."""
        longest = self._longest(sequence)
        for w in range(emitted):
            sequence.tokens.append(tokens[w])
            sequence.logprobs.append(logprobs[w])
            if sequence.is_end(tokens[w]):
                self.finish(sequence, FinishReason.STOP)
            elif len(sequence.tokens) >= longest:
                self.finish(sequence, FinishReason.LENGTH)
            if sequence.status is Status.FINISHED:
                return tokens[: w + 1]
        return tokens[:emitted]


def _fed(sequence: Sequence, slot: int, offset: int, length: int, emits: bool) -> Row:
    """A row of a plan, counted as under way."""
    row = Row(sequence, slot, sequence.num_scheduled_tokens, offset, length, emits)
    sequence.num_scheduled_tokens += length
    sequence.num_rows_in_flight += 1
    sequence.num_awaited_tokens += emits
    return row
