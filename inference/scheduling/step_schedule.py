"""What one step does, and how that is put together before it runs: integers only."""

import collections
import dataclasses
from collections.abc import Sequence as Items

from configs.engine import EngineConfig
from inference.kv_pages.prefix_cache import Transfer
from inference.scheduling.sequence import Adapter, FinishReason, Sequence
from inference.scheduling.step_shapes import StepShape, choose


@dataclasses.dataclass(frozen=True)
class ScheduledChunk:
    """Consecutive tokens of one sequence in one row of a rectangle.

    `start` is the position of its first token, `offset` that position counted from the sequence's
    length on the device when the step begins, with drafts in flight no more than that; rows that
    `emit` end with a sampled token. `num_drafts` of its tokens are drafts, of which at most
    `most_accepted` stay: of a tree as many as follow each other. `num_dropped` tokens of its prompt
    are in the cache no more.
    """

    sequence: Sequence
    slot: int
    start: int
    offset: int
    length: int
    emits: bool
    num_drafts: int = 0
    most_accepted: int = 0
    num_dropped: int = 0

    @property
    def most_emitted(self) -> int:
        """Tokens that the row samples at most."""
        return self.emits + self.most_accepted

    @property
    def most_kept(self) -> int:
        """Tokens of it that stay in the cache at most."""
        return self.length - self.num_drafts + self.most_accepted


@dataclasses.dataclass(frozen=True)
class Admission:
    """What is written into a slot: its sequence starts; or it is forked from the one in `source`,
    with pages to copy as (group, from, to); or, from its own slot, continues with another token.
    Where other chips have computed its prompt, `sender` is the leader there, and what it sends is
    likewise (group, from, to). `snapshot` holds the states that it starts with, 0: none does.
    """

    sequence: Sequence
    slot: int
    source: int | None = None
    page_copies: tuple[tuple[int, int, int], ...] = ()
    sender: Sequence | None = None
    sent_pages: tuple[tuple[int, int, int], ...] = ()
    snapshot: int = 0


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A copy to make of the states in a slot, after so many tokens of its sequence."""

    slot: int
    num_tokens: int
    number: int


@dataclasses.dataclass(frozen=True)
class ShardSchedule:
    """What one data shard does in a step: first pages are transferred, and those that other chips
    send, then slots are written, then the chunks run, and snapshots are made of what they leave.
    """

    decode: tuple[ScheduledChunk, ...] = ()
    prefill: tuple[ScheduledChunk, ...] = ()
    admissions: tuple[Admission, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()


@dataclasses.dataclass(frozen=True)
class StepSchedule:
    """One step: adapters to load into slots, and what each data shard does, in rectangles of one
    shape.
    """

    shape: StepShape
    shards: tuple[ShardSchedule, ...]
    adapter_loads: tuple[tuple[int, Adapter], ...] = ()

    @property
    def rows(self) -> list[tuple[int, ScheduledChunk]]:
        """Each chunk with its row among those of both rectangles, shard after shard."""
        rows: list[tuple[int, ScheduledChunk]] = []
        for index, shard in enumerate(self.shards):
            first = index * self.shape.num_rows
            rows += enumerate(shard.decode, first)
            rows += enumerate(shard.prefill, first + self.shape.decode[0])
        return rows

    @property
    def row_sizes(self) -> tuple[tuple[int, int], ...]:
        """(query tokens, tokens in the cache with its last) of each chunk."""
        chunks = (chunk for _, chunk in self.rows)
        return tuple((c.length, c.start + c.length - c.num_dropped) for c in chunks)

    @property
    def awaits_tokens(self) -> bool:
        """Whether constraints have to see tokens of steps before it, to say what may come."""
        return any(
            chunk.emits
            and chunk.sequence.is_constrained
            and chunk.sequence.in_flight.num_tokens > chunk.most_emitted
            for _, chunk in self.rows
        )

    @property
    def has_admissions(self) -> bool:
        return any(shard.admissions for shard in self.shards)

    @property
    def snapshots(self) -> tuple[tuple[Snapshot, ...], ...]:
        """Of each shard, in their order."""
        return tuple(shard.snapshots for shard in self.shards)

    @property
    def transfers(self) -> tuple[tuple[Transfer, ...], ...]:
        """Of each shard, in their order."""
        return tuple(shard.transfers for shard in self.shards)


class ShardBuilder:
    """A data shard's part of a step while it is scheduled: the chunks it has so far, and what it
    may still take.
    """

    def __init__(self, engine: EngineConfig, is_decoding: bool, most_drafts: int):
        """`is_decoding`: any sequence waits for its next token, so that `prefill_budget` holds;
        `most_drafts`: of each of them.
        """
        self._drafts, self._most_drafts = engine.drafts, most_drafts
        self._most_prompts = engine.scheduling.max_prefill_seqs
        self._chunk_tokens = engine.shapes.chunk_tokens
        self._max_chunks = max(engine.shapes.prefill_chunks)
        budget = engine.scheduling.prefill_budget
        if budget is not None and is_decoding and engine.scheduling.chunked_prefill:
            self._max_chunks = min(self._max_chunks, budget // self._chunk_tokens)
        self.decode: list[ScheduledChunk] = []
        self.prefill: list[ScheduledChunk] = []
        self.snapshots: list[Snapshot] = []

    @property
    def num_free_chunks(self) -> int:
        """Prefill chunks that one more prompt may have."""
        if self._most_prompts is not None:
            prompts = {chunk.sequence.id for chunk in self.prefill}
            if len(prompts) >= self._most_prompts:
                return 0
        return self._max_chunks - len(self.prefill)

    def num_tokens(self, sequence: Sequence) -> int:
        """Tokens of a sequence that the shard can take: its newest and drafts, or some of its
        prompt; 0 where something has to be committed first.
        """
        if sequence.candidates or (sequence.needs_commit and sequence.in_flight.num_tokens):
            return 0
        if sequence.is_prefilling:
            room = self._chunk_tokens * self.num_free_chunks
            if sequence.is_whole:
                num_unread = sequence.num_prompt_tokens - 1 - sequence.num_scheduled_tokens
                room = min(room, num_unread)
            if sequence.prefix.boundaries:  # a snapshot is made of what a step leaves
                room = min(room, sequence.prefix.boundaries[0] - sequence.num_scheduled_tokens)
            return max(0, min(sequence.num_pending_tokens, room))
        remaining = sequence.num_remaining_tokens
        if remaining < 1:  # its last token is in flight
            return 0
        num_drafts = self._num_drafts(sequence)
        if remaining > 1 and self._drafts.has_tree:  # whole to the end, which the host cuts off
            num_positions = sequence.max_positions - sequence.num_scheduled_tokens
            return 1 + min(num_drafts, num_positions - 1)
        return 1 + min(num_drafts, remaining - 1)

    def _num_drafts(self, sequence: Sequence) -> int:
        """Drafts of a sequence, none behind a token that its constraint has to see."""
        most = self._most_drafts
        num_drafts = most if sequence.speculates else min(len(sequence.drafts), most)
        if sequence.constraint is None:
            return num_drafts
        room = sequence.constraint.room - sequence.in_flight.num_tokens - 1
        if self._drafts.has_tree:  # which is whole, or not at all
            return num_drafts if room >= self._drafts.levels else 0
        return max(0, min(num_drafts, room))

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """Adds the next tokens of a sequence that has a slot and pages for them."""
        if not sequence.is_prefilling:
            num_drafts = num_tokens - 1
            most_accepted = min(num_drafts, self._drafts.levels)
            self.decode.append(_chunk(sequence, 0, num_tokens, True, num_drafts, most_accepted))
            return
        size = self._chunk_tokens
        is_last = num_tokens == sequence.num_pending_tokens
        is_last &= not (sequence.keeps_last or sequence.is_only_read)
        for at in range(0, num_tokens, size):
            emits = is_last and at + size >= num_tokens
            length = min(size, num_tokens - at)
            self.prefill.append(_chunk(sequence, at, length, emits))

    def keep(self, sequence: Sequence, snapshot: int) -> None:
        """Adds the snapshot to make of a sequence's states, once the step has run."""
        assert sequence.slot is not None
        self.snapshots.append(Snapshot(sequence.slot, sequence.num_scheduled_tokens, snapshot))

    def schedule(
        self, admissions: tuple[Admission, ...], transfers: tuple[Transfer, ...]
    ) -> ShardSchedule:
        # Longest context first, as plain attention wants it.
        decode = sorted(self.decode, key=lambda chunk: chunk.num_dropped - chunk.start)
        return ShardSchedule(
            tuple(decode), tuple(self.prefill), admissions, transfers, tuple(self.snapshots)
        )


def shape_of(
    shards: Items[ShardBuilder], shapes: tuple[StepShape, ...], num_decode_rows: int
) -> StepShape:
    """The cheapest shape for each shard's chunks, with so many decode rows."""
    prefill = [chunk for shard in shards for chunk in shard.prefill]
    decode = [chunk for shard in shards for chunk in shard.decode]
    num_chunks = max(len(shard.prefill) for shard in shards)
    is_scored = any(chunk.sequence.scores for chunk in prefill)
    emitting = (chunk for chunk in (*decode, *prefill) if chunk.emits)
    is_greedy = all(chunk.sequence.params.is_greedy for chunk in emitting)
    width = max((chunk.length for chunk in decode), default=1)
    return choose(shapes, num_decode_rows, num_chunks, is_scored, is_greedy, width)


def _chunk(
    sequence: Sequence,
    offset: int,
    length: int,
    emits: bool,
    num_drafts: int = 0,
    most_accepted: int = 0,
) -> ScheduledChunk:
    """A sequence's next tokens, counted as scheduled."""
    assert sequence.slot is not None
    chunk = ScheduledChunk(
        sequence, sequence.slot, sequence.num_scheduled_tokens, offset, length, emits, num_drafts,
        most_accepted, sequence.budget.num_dropped_tokens,
    )  # fmt: skip
    sequence.num_scheduled_tokens += chunk.most_kept
    in_flight = sequence.in_flight
    in_flight.num_rows += 1
    in_flight.num_drafts += most_accepted
    in_flight.num_tokens += chunk.most_emitted
    return chunk


@dataclasses.dataclass(frozen=True)
class Decisions:
    """What a request decides between steps; the scheduler applies it in the order of the fields.

    Attributes:
        ended: sequences, and why they end.
        forks: sequences, and the continuation of each that starts as a sequence of its own.
        chosen: sequences whose next token the host chooses: the token and its log-probability.
    """

    ended: tuple[tuple[Sequence, FinishReason], ...] = ()
    forks: tuple[tuple[Sequence, Sequence], ...] = ()
    chosen: tuple[tuple[Sequence, int, float], ...] = ()


@dataclasses.dataclass
class Counters:
    """What a scheduler has done so far."""

    num_steps: int = 0
    num_prompt_tokens: int = 0  # of admitted sequences, each once
    num_cached_tokens: int = 0  # of these, found in the prefix cache
    num_prefilled_tokens: int = 0  # that went through prefill chunks
    num_preemptions: int = 0
    num_offloaded_pages: int = 0  # copied to the host
    num_restored_pages: int = 0  # copied back
    peak_running: int = 0
    num_passes: int = 0  # decode rows: each yields a token and the drafts that it accepts
    num_drafts: int = 0  # that were verified
    # Rows by (most drafts that they could accept, drafts that they did), where there were any.
    verified: collections.Counter[tuple[int, int]] = dataclasses.field(
        default_factory=collections.Counter
    )

    @property
    def num_accepted(self) -> int:
        return sum(count * accepted for (_, accepted), count in self.verified.items())

    @property
    def acceptance(self) -> list[float]:
        """How often the first, second, ... draft was accepted, of those that were verified behind
        accepted ones.
        """
        rates, n = [], 0
        while tried := sum(
            count for (levels, accepted), count in self.verified.items() if levels > n <= accepted
        ):
            right = sum(count for (_, accepted), count in self.verified.items() if accepted > n)
            rates.append(right / tried)
            n += 1
        return rates


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One step as it ran: its shape, (query tokens, context tokens) of each row, wall time since
    the step before it was done or it was launched itself, and the host's work for it.
    """

    shape: StepShape
    rows: tuple[tuple[int, int], ...]
    seconds: float
    host_s: float
