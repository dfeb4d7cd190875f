"""A sequence while it is served: its tokens, and how many of them are computed. Integers only."""

import dataclasses
import enum
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Protocol

from configs.errors import InputError, is_fault
from configs.settings.adapters import NO_SLOT
from configs.settings.cache import CacheConfig
from configs.settings.requests import OBSERVED_TOKENS
from inference.kv_pages.radix_tree import Node
from inference.outputs import Alternatives
from inference.request import MAX_STOP_IDS, SamplingParams

if TYPE_CHECKING:
    import numpy as np


class Status(enum.Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Constraint(Protocol):
    """What may follow the tokens of a sequence, such as a grammar says.

    Attributes:
        room: tokens that may follow whatever they are; of the next one it depends on them.
        has_failed: nothing may follow, since a token was not permitted.
        failure: why the constraints of its request leave none, in words.
        is_complete: nothing can follow.
    """

    @property
    def room(self) -> int: ...
    @property
    def has_failed(self) -> bool: ...
    @property
    def failure(self) -> str: ...
    @property
    def is_complete(self) -> bool: ...

    def mask(self) -> "np.ndarray":
        """u32[ceil(V / 32)], bit v % 32 of word v // 32: token v may follow."""

    def accept(self, token: int) -> None:
        """This one does."""

    def start_over(self, tokens: Items[int]) -> None:
        """These do, and nothing else did."""


@dataclasses.dataclass(eq=False, slots=True)
class InFlight:
    """Work of a sequence in steps that were scheduled and not committed yet.

    Attributes:
        num_rows: of these steps.
        num_tokens: that the rows will sample at most, unknown to the host.
        num_drafts: of these tokens, accepted drafts, all of which may be rejected instead.
    """

    num_rows: int = 0
    num_tokens: int = 0
    num_drafts: int = 0


class Adapter(Protocol):
    """What changes the model for some sequences.

    Attributes:
        digest: names what it makes of a prompt.
    """

    @property
    def digest(self) -> str: ...


@dataclasses.dataclass(eq=False, slots=True)
class AdapterUse:
    """The adapter of a sequence.

    Attributes:
        weights: None: the model alone.
        slot: of the device's, while the sequence runs.
    """

    weights: Adapter | None = None
    slot: int = NO_SLOT


@dataclasses.dataclass(eq=False, slots=True)
class Results:
    """What the model computed of a sequence, with its own log-probabilities.

    Attributes:
        logprobs: of each output token.
        top_logprobs: alternatives of each output token as (ids, log-probabilities).
        prompt_logprobs: of each prompt token after the first, for requests that score.
        prompt_top_logprobs: alternatives of these.
        pooled: sum of the final hidden states that were pooled so far, f64[D].
    """

    logprobs: list[float] = dataclasses.field(default_factory=list)
    top_logprobs: list[Alternatives] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[float] = dataclasses.field(default_factory=list)
    prompt_top_logprobs: list[Alternatives] = dataclasses.field(default_factory=list)
    pooled: "np.ndarray | None" = None


@dataclasses.dataclass(eq=False, slots=True)
class Prefix:
    """What a sequence shares with the prefix cache.

    Attributes:
        key: namespace of the prefixes that it may share; None shares none.
        node: its deepest page in the cache.
        num_offered_pages: its first, full pages, which were offered to the cache.
        boundaries: numbers of prompt tokens after which snapshots of its states are due, in order.
        num_passed_snapshots: its first pages whose snapshots it needs no more.
        num_cached_tokens: tokens whose pages were there when it last took a slot: matched in the
            cache, or shared with the sequence that it was forked from.
        num_hit_tokens: of its prompt, those when it first took a slot; None: it has not yet.
    """

    key: Hashable | None = None
    node: Node | None = None
    num_offered_pages: int = 0
    boundaries: list[int] = dataclasses.field(default_factory=list)
    num_passed_snapshots: int = 0
    num_cached_tokens: int = 0
    num_hit_tokens: int | None = None


@dataclasses.dataclass(eq=False, slots=True)
class Budget:
    """Tokens of a prompt that a sequence gives up (`kv_pages/prompt_pages.py`).

    Attributes:
        num_excess_tokens: to give up in whole pages, once all of the prompt but its last token is
            computed.
        num_dropped_tokens: given up since it took a slot; in groups without a window later tokens
            are cached at their position less these.
    """

    num_excess_tokens: int = 0
    num_dropped_tokens: int = 0


@dataclasses.dataclass(eq=False, slots=True)
class History:
    """What happened to a sequence.

    Attributes:
        arrival_s: when it was queued, on the caller's clock.
        started_s: when its first tokens were scheduled; None: not yet.
        num_preemptions: times it gave up slot and pages.
        num_overtakes: later arrivals that were admitted before it.
        params_versions: of the weights that computed its tokens, its scores or pages that it may
            have read, in order.
        version_starts: (index of an output token, version) where the weights of its tokens change.
    """

    arrival_s: float = 0.0
    started_s: float | None = None
    num_preemptions: int = 0
    num_overtakes: int = 0
    params_versions: tuple[int, ...] = ()
    version_starts: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(eq=False, slots=True)
class Sequence:
    """Tokens that grow, and how many of them are computed. A request has one or several.

    `tokens[:num_computed_tokens]` are in the cache, at most `[:num_scheduled_tokens]` once the
    steps in flight are done; the rest (after the prompt is computed: one token) is still to be fed.

    Attributes:
        id: names the sequence to callers.
        params: how to continue it.
        tokens: prompt, then output.
        num_prompt_tokens: length of the prompt.
        eos_ids: the model's end tokens that count for this request.
        seed: 64-bit key of the random stream.
        shard: the data shard that has its slot and pages while it runs.
        slot: row of that shard's device state while running.
        pages: one page list a group; entry i holds positions [i, i + 1) * page_tokens, 0 where
            given back.
        drafts: tokens proposed for the next step, to be verified.
        speculates: whether the device proposes drafts, which the host never sees.
        leader: a sequence that computes the prompt for this one, too: this one is forked from it,
            or receives its pages from other chips.
        sends_pages: whether it is such a leader on other chips, and does nothing else.
        num_unsent_tokens: of such a leader, tokens whose pages it does not send, because they were
            cached where it is to be received.
        candidates: of a beam that is computed to its end, (ids, log-probabilities) of the most
            likely next tokens; the search chooses among those of all its beams.
        constraint: of the output, where the request has one; it has seen all output tokens.
        needs_commit: the next tokens are scheduled only after the sampled ones are committed.
        max_length: tokens it can reach, prompt included; a scheduler lowers it to its max_context.
        max_positions: positions of the cache that it can fill, with nodes of a draft tree behind
            its last token; a scheduler sets it.
        scores: whether the prompt is scored instead of continued.
        pools: whether a vector is made of the prompt instead.
        keeps_last: whether the newest token is not to be fed: a scored prompt's predicts nothing, a
            leader's waits until the others are forked.

    Raises:
        InputError: more than `MAX_STOP_IDS` tokens end it, and `min_tokens` bans them.
    """

    id: int
    params: SamplingParams
    tokens: list[int]
    num_prompt_tokens: int
    eos_ids: frozenset[int] = frozenset()
    seed: int = 0
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    shard: int = 0
    slot: int | None = None
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0
    pages: list[list[int]] = dataclasses.field(default_factory=list)
    drafts: tuple[int, ...] = ()
    speculates: bool = False
    leader: "Sequence | None" = None
    sends_pages: bool = False
    num_unsent_tokens: int = 0
    candidates: Alternatives | None = None
    constraint: Constraint | None = None
    needs_commit: bool = False
    in_flight: InFlight = dataclasses.field(default_factory=InFlight)
    prefix: Prefix = dataclasses.field(default_factory=Prefix)
    results: Results = dataclasses.field(default_factory=Results)
    budget: Budget = dataclasses.field(default_factory=Budget)
    adapter: AdapterUse = dataclasses.field(default_factory=AdapterUse)
    history: History = dataclasses.field(default_factory=History)
    max_length: int = dataclasses.field(init=False)
    max_positions: int = dataclasses.field(init=False)
    scores: bool = dataclasses.field(init=False)
    pools: bool = dataclasses.field(init=False)
    keeps_last: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.max_length = self.num_prompt_tokens + self.params.max_new_tokens
        self.max_positions = self.max_length
        self.pools = self.params.pooling is not None
        self.scores = self.keeps_last = self.params.max_new_tokens == 0 and not self.pools
        self.keeps_last |= self.sends_pages and not self.pools
        if self.params.min_tokens and len(self.end_ids) > MAX_STOP_IDS:
            raise InputError(
                f"min_tokens bans at most {MAX_STOP_IDS} tokens, the model's own end tokens and "
                f"stop_token_ids together, not {len(self.end_ids)}"
            )

    def lead(self, others: Iterable["Sequence"]) -> None:
        """Computes the prompt for other sequences of the request too, except for its last token: a
        prompt of one token has nothing to share.
        """
        if self.num_prompt_tokens > 1:
            for other in others:
                other.leader, self.keeps_last = self, True

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end the sequence: the model's own that count, and the request's."""
        return self.eos_ids | set(self.params.stop_token_ids)

    @property
    def output_tokens(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    @property
    def failure(self) -> str:
        """Why its constraints ended it with an error, in words; empty where they did not."""
        limit = self.constraint if self.finish_reason is FinishReason.ERROR else None
        return "" if limit is None else limit.failure

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Tokens to feed that no step is scheduled for, sampled ones in flight included."""
        num_tokens = len(self.tokens) + self.in_flight.num_tokens
        return num_tokens - self.num_scheduled_tokens - self.keeps_last

    @property
    def is_prefilling(self) -> bool:
        """Whether more than the newest token is still to be fed, or the prompt to be shortened."""
        return self.is_only_read or self.keeps_last or self.num_pending_tokens > 1 or self.is_whole

    @property
    def is_only_read(self) -> bool:
        """Whether nothing is generated: the prompt is scored, or pooled."""
        return self.scores or self.pools

    @property
    def needs_every_token(self) -> bool:
        """Whether its result is one of all prompt tokens, so that none of them may be cached."""
        return self.scores or self.params.pooling == "mean"

    @property
    def queued_s(self) -> float:
        """Seconds that it waited for its first slot; 0 where it still does."""
        started_s = self.history.started_s
        return 0.0 if started_s is None else started_s - self.history.arrival_s

    @property
    def is_whole(self) -> bool:
        """Whether pages of its prompt are still to be given up."""
        return self.budget.num_dropped_tokens < self.budget.num_excess_tokens

    @property
    def embedding(self) -> "np.ndarray":
        """The vector of a prompt that has ended with one, f32[D]."""
        assert self.results.pooled is not None
        count = self.num_prompt_tokens if self.params.pooling == "mean" else 1
        return (self.results.pooled / count).astype("float32")

    @property
    def num_unobserved_tokens(self) -> int:
        """Of its prompt: those before the tokens that choose its pages."""
        return self.num_prompt_tokens - 1 - OBSERVED_TOKENS

    @property
    def sender(self) -> "Sequence | None":
        """The leader on other chips, once it has pages to send: all of the prompt but its last
        token is in them.
        """
        leader = self.leader
        if leader is None or not leader.sends_pages or leader.status is not Status.RUNNING:
            return None
        return leader if leader.num_computed_tokens == len(leader.tokens) - 1 else None

    @property
    def num_certain_tokens(self) -> int:
        """Tokens in the cache once the steps in flight are done, whatever they reject."""
        return self.num_scheduled_tokens - self.in_flight.num_drafts

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens that may still be sampled, whatever is accepted of those in flight."""
        return self.max_length - len(self.tokens) - self.in_flight.num_tokens

    @property
    def is_constrained(self) -> bool:
        """Whether its constraint says what the tokens in flight may be."""
        return self.constraint is not None and self.constraint.room < self.in_flight.num_tokens

    def note_params(self, version: int) -> None:
        if version not in self.history.params_versions:
            self.history.params_versions += (version,)

    def note_version(self, version: int) -> None:
        """Its next output tokens come from weights of this version."""
        starts = self.history.version_starts
        if not starts or starts[-1][1] != version:
            before = tuple(start for start in starts if start[0] < self.num_output_tokens)
            self.history.version_starts = (*before, (self.num_output_tokens, version))

    def note_hit(self) -> None:
        """Counts the cached prompt tokens at its first slot; pages that match later are its own."""
        if self.prefix.num_hit_tokens is None:
            self.prefix.num_hit_tokens = min(self.prefix.num_cached_tokens, self.num_prompt_tokens)

    def choose(self, token: int, logprob: float) -> None:
        """Continues with one of the candidates."""
        assert self.candidates is not None
        results = self.results
        self.tokens, results.logprobs, results.top_logprobs, self.candidates = (  # all, or none
            [*self.tokens, token], [*results.logprobs, logprob],
            [*results.top_logprobs, self.candidates], None,
        )  # fmt: skip

    def suspend(self) -> None:
        """Waits without slot and pages."""
        self.status, self.drafts = Status.WAITING, ()
        self.results.prompt_logprobs, self.results.prompt_top_logprobs = [], []
        self.results.pooled = None
        if self.is_only_read:
            self.history.params_versions = ()

    def start_over(self) -> None:
        """Waits with nothing computed, nor in flight, whatever was."""
        self.suspend()
        self.slot, self.pages, self.prefix.node = None, [], None
        self.num_computed_tokens = self.num_scheduled_tokens = self.budget.num_dropped_tokens = 0
        self.in_flight = InFlight()
        if self.constraint is not None:
            self.constraint.start_over(self.output_tokens)

    def is_end(self, token: int) -> bool:
        return token in self.eos_ids or token in self.params.stop_token_ids


class SequenceFault(Exception):
    """Something is wrong with one sequence, which is to end; the cause says what."""

    def __init__(self, sequence: Sequence, cause: BaseException):
        super().__init__(f"sequence {sequence.id}: {cause!r}")
        self.sequence, self.__cause__ = sequence, cause


def blame(sequence: Sequence, error: BaseException) -> SequenceFault:
    """What an exception is that comes while a sequence has its turn.

    Raises:
        BaseException: the exception itself, where it ends more than that: an interrupt, an exit.
    """
    if isinstance(error, SequenceFault):
        return error
    if not is_fault(error):
        raise error
    return SequenceFault(sequence, error)


def cache_key(
    cache: CacheConfig, id: int, salt: str | None = None, adapter: Adapter | None = None
) -> Hashable | None:
    """`Prefix.key` of a request: those of one salt and adapter share prefixes. Without a prefix
    cache a request finds only its own pages again, on the host.
    """
    if cache.prefix_cache:
        if salt is None and adapter is None:
            return "shared"
        return "salted", salt, adapter and adapter.digest
    return id if cache.preemption != "recompute" else None


def derived_seed(seed: int, index: int) -> int:
    """Seed of a request's answer number `index`; the first one's is the request's own.

    Steps of the golden ratio, a Weyl sequence as in SplitMix64 (Steele et al. 2014): seeds of one
    request differ, and neighbouring requests' do not meet.
    """
    return (seed + index * 0x9E3779B97F4A7C15) % 2**64
