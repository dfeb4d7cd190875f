"""Who runs next, how many tokens each, on which pages. Integers only: no device, no clock, no
randomness.

First come, first served. Running sequences decode in every step; what the prefill rectangle can
take goes to prompts in the order of arrival. When pages run out, the youngest sequence gives its
own back and is computed again later.
"""

import dataclasses
import math
from collections import deque
from typing import Any

from configs.engine import Config
from configs.errors import InputError
from inference.page_pool import PagePool
from inference.request import FinishReason, Sequence, Status
from inference.shapes import StepShape, choose, enumerate_shapes


@dataclasses.dataclass(frozen=True)
class Row:
    """Consecutive tokens of one sequence in one row of a rectangle.

    `offset` counts from the sequence's committed length; `emits` rows end with a sampled token.
    """

    sequence: Sequence
    slot: int
    offset: int
    length: int
    emits: bool


@dataclasses.dataclass(frozen=True)
class Admission:
    """A sequence takes a slot; `source` is the slot it was forked from, with pages to copy as
    (group, from, to).
    """

    sequence: Sequence
    slot: int
    source: int | None = None
    page_copies: tuple[tuple[int, int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one step does."""

    shape: StepShape
    decode: tuple[Row, ...]
    tiles: tuple[Row, ...]
    admissions: tuple[Admission, ...]


class Scheduler:
    """Queues, slots and pages of an engine."""

    def __init__(self, config: Config):
        self._config = config
        self.shapes = enumerate_shapes(config.engine)
        self.pool = PagePool(config.num_pages)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self._free_slots = list(range(config.engine.max_seqs - 1, -1, -1))
        self._admissions: list[Admission] = []
        self._max_tiles = max(config.engine.prefill_tiles)

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
        self.waiting.append(sequence)

    def schedule(self) -> Plan | None:
        """Plans the next step; None where nothing can run."""
        decode: list[Row] = []
        tiles: list[Row] = []
        for sequence in list(self.running):  # oldest first: whoever is preempted is not planned yet
            self._plan_sequence(sequence, decode, tiles)
        while self._can_admit(self._max_tiles - len(tiles)):
            self._plan_sequence(self._admit(), decode, tiles)
        if not decode and not tiles:
            return None
        rows = [*decode, *tiles]
        scored = any(row.sequence.scores for row in tiles)
        greedy = all(row.sequence.params.is_greedy for row in rows)
        sampler = "greedy" if greedy else "full"
        shape = choose(self.shapes, len(decode), len(tiles), scored, sampler)
        admissions, self._admissions = tuple(self._admissions), []
        return Plan(shape, tuple(decode), tuple(tiles), admissions)

    def commit(self, plan: Plan, output: Any) -> list[tuple[Sequence, list[int]]]:
        """Takes a step's results into the sequences; returns each sequence's new tokens.

        Args:
            plan: the step.
            output: `tokens[R, W]`, `num_emitted[R]`, `finite[R]` and log-probabilities as numpy
                arrays (`step.Output`).
        """
        news: list[tuple[Sequence, list[int]]] = []
        first_tile = plan.shape.decode[0]
        for row, where in [
            *((row, r) for r, row in enumerate(plan.decode)),
            *((row, first_tile + r) for r, row in enumerate(plan.tiles)),
        ]:
            sequence = row.sequence
            if sequence.status is not Status.RUNNING:
                continue
            if not output.finite[where]:
                self.finish(sequence, FinishReason.ERROR)
                news.append((sequence, []))
                continue
            emitted = int(output.num_emitted[where])
            sequence.num_computed_tokens += row.length if where >= first_tile else emitted
            sequence.drafts = ()
            if sequence.scores:
                self._commit_scores(sequence, row, where - first_tile, output)
            tokens = self._commit_tokens(sequence, where, emitted, output)
            if sequence.status is Status.RUNNING:
                self._give_back(sequence)
            if tokens or sequence.status is Status.FINISHED:
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

    def preempt(self, sequence: Sequence) -> None:
        """Takes pages and slot from a running sequence; it is computed again from its tokens."""
        self._leave(sequence)
        sequence.status, sequence.num_computed_tokens, sequence.drafts = Status.WAITING, 0, ()
        sequence.prompt_logprobs.clear()
        sequence.prompt_top_logprobs.clear()
        self.waiting.appendleft(sequence)

    def preempt_all(self) -> None:
        """Preempts every running sequence, keeping their order: the device lost its cache."""
        for sequence in reversed(list(self.running)):
            self.preempt(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Starts `child`, a second continuation of its parent's tokens. Shares full pages, copies
        the open one; without room it waits.

        Raises:
            InputError: it could not finish even alone.
        """
        self._check_fits(child)
        page = self._config.engine.page_tokens
        is_open = parent.num_computed_tokens % page != 0
        room = self.pool.can_allocate((int(is_open),) * self.pool.num_groups)
        is_written = parent.slot is not None and all(
            admission.sequence is not parent for admission in self._admissions
        )
        if not (is_written and self._free_slots and room):
            self.waiting.append(child)
            return
        copies = []
        for group, pages in enumerate(parent.pages):
            full, rest = pages[: parent.num_computed_tokens // page], []
            self.pool.share(group, [p for p in full if p])
            if is_open:
                rest = self.pool.allocate(group, 1)
                copies.append((group, pages[len(full)], rest[0]))
            child.pages.append(full + rest)
        child.num_computed_tokens = parent.num_computed_tokens
        slot = self._enter(child)
        self._admissions.append(Admission(child, slot, parent.slot, tuple(copies)))

    def check_integrity(self) -> None:
        """Raises RuntimeError where slots or pages do not add up."""
        self.pool.check_integrity([s.pages for s in self.running])
        slots = [s.slot for s in self.running if s.slot is not None]
        if sorted([*slots, *self._free_slots]) != list(range(self._config.engine.max_seqs)):
            raise RuntimeError(f"slots {slots} and free slots {self._free_slots} do not add up")
        if any(s.pages or s.slot is not None for s in self.waiting):
            raise RuntimeError("a waiting sequence holds pages or a slot")

    def _check_fits(self, sequence: Sequence) -> None:
        longest = min(sequence.max_tokens, self._config.max_context)
        peak = self._config.peak_pages(longest)
        if any(n > usable for n, usable in zip(peak, self.pool.num_usable_pages, strict=True)):
            raise InputError(
                f"a request of {longest} tokens never fits into the cache of "
                f"{min(self.pool.num_usable_pages)} pages; raise engine.cache_bytes"
            )

    def _can_admit(self, num_free_tiles: int) -> bool:
        if not self.waiting or not self._free_slots:
            return False
        sequence = self.waiting[0]
        if sequence.is_prefilling and not num_free_tiles:
            return False
        longest = min(sequence.max_tokens, self._config.max_context)
        needs = self._config.peak_pages(min(len(sequence.tokens) + 1, longest))
        return self.pool.can_allocate(needs)

    def _admit(self) -> Sequence:
        sequence = self.waiting.popleft()
        sequence.pages = [[] for _ in range(self.pool.num_groups)]
        self._admissions.append(Admission(sequence, self._enter(sequence)))
        return sequence

    def _enter(self, sequence: Sequence) -> int:
        slot = self._free_slots.pop()
        sequence.slot, sequence.status = slot, Status.RUNNING
        self.running.append(sequence)
        return slot

    def _leave(self, sequence: Sequence) -> None:
        for group, pages in enumerate(sequence.pages):
            self.pool.release(group, pages)
        assert sequence.slot is not None
        self._free_slots.append(sequence.slot)
        self.running.remove(sequence)
        self._admissions = [a for a in self._admissions if a.sequence is not sequence]
        sequence.pages, sequence.slot = [], None

    def _plan_sequence(self, sequence: Sequence, decode: list[Row], tiles: list[Row]) -> None:
        """Adds what the next step feeds of a sequence: a decode row, or tiles of its prompt."""
        if not sequence.is_prefilling:
            most = min(self._config.engine.num_drafts, self._room(sequence) - 1)
            length = 1 + min(len(sequence.drafts), most)
            slot = self._hold_pages(sequence, length)
            if slot is not None:
                decode.append(Row(sequence, slot, 0, length, emits=True))
            return
        size, pending = self._config.engine.tile_tokens, sequence.num_pending_tokens
        num_fed = min(pending, size * (self._max_tiles - len(tiles)))
        slot = self._hold_pages(sequence, num_fed) if num_fed else None
        if slot is None:
            return
        is_last = num_fed == pending and not sequence.scores
        for at in range(0, num_fed, size):
            emits = is_last and at + size >= num_fed
            tiles.append(Row(sequence, slot, at, min(size, num_fed - at), emits))

    def _room(self, sequence: Sequence) -> int:
        """Tokens that may still be generated."""
        return min(sequence.max_tokens, self._config.max_context) - len(sequence.tokens)

    def _hold_pages(self, sequence: Sequence, num_tokens: int) -> int | None:
        """Makes sure the next tokens have pages, preempting the youngest; the sequence's slot, or
        None where it was preempted itself.
        """
        if sequence.slot is None:  # preempted earlier in this very plan
            return None
        page, stop = self._config.engine.page_tokens, sequence.num_computed_tokens + num_tokens
        needs = [max(0, -(-stop // page) - len(pages)) for pages in sequence.pages]
        while not self.pool.can_allocate(needs):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return None
        for group, n in enumerate(needs):
            sequence.pages[group] += self.pool.allocate(group, n)
        return sequence.slot

    def _give_back(self, sequence: Sequence) -> None:
        """Frees the pages that have slid out of their group's window."""
        page = self._config.engine.page_tokens
        groups = self._config.model.page_groups
        for g, (group, pages) in enumerate(zip(groups, sequence.pages, strict=True)):
            index = group.spec.live_from(sequence.num_computed_tokens) // page - 1
            while index >= 0 and pages[index]:
                self.pool.release(g, [pages[index]])
                pages[index] = 0
                index -= 1

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
        if not sequence.num_pending_tokens:
            self.finish(sequence, FinishReason.LENGTH)

    def _commit_tokens(
        self, sequence: Sequence, where: int, emitted: int, output: Any
    ) -> list[int]:
        tokens: list[int] = []
        for w in range(emitted):
            token = int(output.tokens[where, w])
            tokens.append(token)
            sequence.tokens.append(token)
            sequence.logprobs.append(float(output.logprobs[where, w]))
            if output.top_ids.shape[-1]:
                top = output.top_ids[where, w].tolist(), output.top_logprobs[where, w].tolist()
                sequence.top_logprobs.append(top)
            if sequence.is_end(token):
                self.finish(sequence, FinishReason.STOP)
            elif self._room(sequence) <= 0:
                self.finish(sequence, FinishReason.LENGTH)
            if sequence.status is Status.FINISHED:
                break
        return tokens
