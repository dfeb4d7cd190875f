"""What is asked, and how far it has come. Integers and text only."""

import dataclasses
import enum
import math
import numbers
from collections.abc import Hashable
from collections.abc import Sequence as Tokens

from configs.engine import EngineConfig
from configs.errors import InputError
from inference.kv_pages.radix_tree import Node

MAX_STOP_IDS = 16
_MAX_BIAS = 1e6  # far beyond any logit, and a float32


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. Filters apply in the order of `inference/runtime/sampling.py`.

    Attributes:
        max_new_tokens: tokens to generate at most; 0 scores the prompt instead.
        temperature: 0 is greedy.
        top_k, top_p, min_p: kept candidates: the k most likely, the smallest set of mass p, those
            at least min_p times as likely as the best. 0, 1 and 0 keep all.
        repetition, presence, frequency: penalties on tokens seen (prompt and output; output; output
            by count).
        logit_bias: {token id: addend}.
        allowed_ids, banned_ids: only these, never these.
        min_tokens: end and stop tokens are banned, and stop strings ignored, before as many were
            generated.
        stop: strings that end the text (excluded from it).
        stop_ids: tokens that end the sequence, beside the model's own.
        ignore_eos: the model's own end tokens do not end the sequence.
        seed: 64-bit; the same request with the same seed gives the same tokens, whatever runs
            beside it.
        priority: requests of a higher one are admitted first and preempted last.
        n: answers to return.
        best_of: answers to sample, of which the n with the highest mean log-probability a token are
            returned, best first; None samples n and returns them in the order of their seeds.
        beam_width: beams of a beam search, which returns its n best hypotheses; 0 samples instead.
        length_penalty: a hypothesis of m tokens scores its log-probability / m**length_penalty.
        early_stopping: a beam search ends with its `beam_width`-th hypothesis; otherwise, when its
            best beam scores no better than the worst of them.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_ids: tuple[int, ...] | None = None
    banned_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    priority: int = 0
    n: int = 1
    best_of: int | None = None
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: bool = False

    def __post_init__(self) -> None:
        limits = {
            "max_new_tokens": (0, math.inf),
            "temperature": (0, 100),
            "top_k": (0, 2**31 - 1),
            "top_p": (0, 1),
            "min_p": (0, 1),
            "presence": (-2, 2),
            "frequency": (-2, 2),
            "repetition": (0, 100),
            "min_tokens": (0, 2**31 - 1),
            "n": (1, math.inf),
            "beam_width": (0, math.inf),
            "length_penalty": (-10, 10),
        }
        whole = ("max_new_tokens", "top_k", "min_tokens", "n", "beam_width")
        for name, (low, high) in limits.items():
            value, is_whole = getattr(self, name), name in whole
            kind = int if is_whole else (int, float)
            is_number = isinstance(value, kind) and not isinstance(value, bool)
            if not (is_number and low <= value <= high):  # NaN fails both
                noun = "whole number" if is_whole else "number"
                bounds = f"from {low} on" if high == math.inf else f"from {low} to {high}"
                raise InputError(f"{name} is a {noun} {bounds}, not {value!r}")
        for name in ("top_p", "repetition"):
            if not getattr(self, name):
                raise InputError(f"{name} is above 0")
        seed = 0 if self.seed is None else self.seed
        if not (isinstance(seed, int) and -(2**63) <= seed < 2**64):
            raise InputError(f"seed is a 64-bit integer, not {self.seed!r}")
        if not isinstance(self.priority, int):
            raise InputError(f"priority is a whole number, not {self.priority!r}")
        if isinstance(self.stop, str) or not all(self.stop):
            raise InputError("stop is a tuple of strings, each of at least one character")
        if len(self.stop_ids) > MAX_STOP_IDS // 2:
            raise InputError(f"at most {MAX_STOP_IDS // 2} stop_ids, not {len(self.stop_ids)}")
        ids = (*self.stop_ids, *self.banned_ids, *(self.allowed_ids or ()), *dict(self.logit_bias))
        if not all(isinstance(id, numbers.Integral) for id in ids):
            raise InputError("stop_ids, banned_ids, allowed_ids and logit_bias name token ids")
        if not all(isinstance(bias, int | float) for _, bias in self.logit_bias):
            raise InputError("a logit bias is a number")
        if any(not -_MAX_BIAS <= bias <= _MAX_BIAS for _, bias in self.logit_bias):
            raise InputError(
                f"a logit bias is a number from -{_MAX_BIAS:g} to {_MAX_BIAS:g}; banned_ids bans "
                "a token"
            )
        self._check_answers()

    def _check_answers(self) -> None:
        if not isinstance(self.early_stopping, bool):
            raise InputError(f"early_stopping is true or false, not {self.early_stopping!r}")
        if self.best_of is not None and not (isinstance(self.best_of, int) and self.best_of >= 1):
            raise InputError(f"best_of is a whole number from 1 on, not {self.best_of!r}")
        if self.beam_width:
            if not self.is_greedy or self.stop or self.best_of is not None:
                raise InputError(
                    "beam_width takes no temperature, penalties, biases, min_tokens, allowed_ids, "
                    "banned_ids, stop strings or best_of: leave those at their defaults"
                )
            if self.n > self.beam_width:
                raise InputError(f"n is at most beam_width={self.beam_width}, not {self.n}")
        elif self.n > self.num_samples:
            raise InputError(f"n is at most best_of={self.best_of}, not {self.n}")
        if not self.max_new_tokens and (self.beam_width or self.num_samples > 1):
            raise InputError("a prompt that is scored (max_new_tokens=0) has no answers: leave n=1")

    @property
    def num_samples(self) -> int:
        """Answers to sample."""
        return self.n if self.best_of is None else self.best_of

    @property
    def num_running(self) -> int:
        """Sequences that run side by side for it."""
        return max(self.num_samples, self.beam_width)

    @property
    def needs_counts(self) -> bool:
        """Whether penalties must know which tokens occurred."""
        return self.repetition != 1 or self.presence != 0 or self.frequency != 0

    @property
    def is_greedy(self) -> bool:
        """Whether plain argmax of the model's own logits is what is asked."""
        return (
            self.temperature == 0
            and not self.needs_counts
            and not (self.logit_bias or self.banned_ids or self.min_tokens)
            and self.allowed_ids is None
        )


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


@dataclasses.dataclass(eq=False)
class Sequence:
    """One running request: its tokens and what is computed of them.

    More than `MAX_STOP_IDS` end tokens are an InputError.

    `tokens[:num_computed_tokens]` are in the cache, `[:num_scheduled_tokens]` once the steps in
    flight are done; the rest (after the prompt is computed: one token) is still to be fed.

    Attributes:
        id: names the sequence to callers.
        params: what was asked.
        tokens: prompt, then output.
        num_prompt_tokens: length of the prompt.
        eos_ids: the model's end tokens that count for this request.
        seed: 64-bit key of the random stream.
        slot: row of the device state while running.
        pages: one page list a group; entry i holds positions [i, i + 1) * page_tokens, 0 where
            given back.
        logprobs: of each output token, the model's own.
        top_logprobs: alternatives of each output token as (ids, log-probabilities).
        prompt_logprobs: of each prompt token after the first, for requests that score.
        drafts: tokens proposed for the next step, to be verified.
        leader: computes the prompt for this one too, which is forked from it then.
        candidates: of a beam that is computed to its end, (ids, log-probabilities) of the most
            likely next tokens; the search chooses among those of all its beams.
        needs_commit: the host must see what was sampled before it plans what comes next.
        arrival_s: when it was queued, on the caller's clock.
        num_rows_in_flight: rows of steps that were planned and not committed yet.
        num_awaited_tokens: tokens that these rows will sample, unknown to the host.
        num_cached_tokens: tokens whose pages were there when it last took a slot: found in the
            prefix cache, or shared with what it was forked from.
        num_preemptions: times it gave up slot and pages.
        num_overtakes: later arrivals that were admitted before it.
        cache_key: names the prefixes it may share; None shares none.
        node: its deepest page that the prefix cache knows.
        scores: whether the prompt is scored instead of continued.
        keeps_last: whether the newest token is not to be fed: a scored prompt's predicts nothing, a
            leader's waits until others are forked.
    """

    id: int
    params: SamplingParams
    tokens: list[int]
    num_prompt_tokens: int
    eos_ids: frozenset[int] = frozenset()
    seed: int = 0
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    slot: int | None = None
    num_computed_tokens: int = 0
    pages: list[list[int]] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    top_logprobs: list[tuple[Tokens[int], Tokens[float]]] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[float] = dataclasses.field(default_factory=list)
    prompt_top_logprobs: list[tuple[Tokens[int], Tokens[float]]] = dataclasses.field(
        default_factory=list
    )
    drafts: tuple[int, ...] = ()
    leader: "Sequence | None" = None
    candidates: tuple[Tokens[int], Tokens[float]] | None = None
    needs_commit: bool = False
    arrival_s: float = 0.0
    num_scheduled_tokens: int = 0
    num_rows_in_flight: int = 0
    num_awaited_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_overtakes: int = 0
    cache_key: Hashable | None = None
    node: Node | None = None
    scores: bool = dataclasses.field(init=False)
    keeps_last: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.scores = self.keeps_last = self.params.max_new_tokens == 0
        if len(self.end_ids) > MAX_STOP_IDS:
            raise InputError(
                f"at most {MAX_STOP_IDS} tokens end a sequence, the model's own and stop_ids "
                f"together, not {len(self.end_ids)}"
            )

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end the sequence: the model's own that count, and the request's."""
        return self.eos_ids | set(self.params.stop_ids)

    @property
    def output_tokens(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        """How many tokens were generated."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Tokens to feed that no step has been planned for, an awaited one included."""
        known = len(self.tokens) + self.num_awaited_tokens
        return known - self.num_scheduled_tokens - self.keeps_last

    @property
    def is_prefilling(self) -> bool:
        """Whether more than the newest token is still to be fed."""
        return self.keeps_last or self.num_pending_tokens > 1

    @property
    def max_tokens(self) -> int:
        """Length the sequence can reach."""
        return self.num_prompt_tokens + self.params.max_new_tokens

    def is_end(self, token: int) -> bool:
        """Whether a generated token ends the sequence."""
        return token in self.eos_ids or token in self.params.stop_ids


def cache_key(engine: EngineConfig, id: int) -> Hashable | None:
    """`Sequence.cache_key` of a request: all share prefixes, or, without a prefix cache, each finds
    its own pages on the host again.
    """
    if engine.prefix_cache:
        return "shared"
    return id if engine.preemption != "recompute" else None


def derived_seed(seed: int, index: int) -> int:
    """Seed of a request's answer number `index`; the first one's is the request's own.

    Steps of the golden ratio, a Weyl sequence as in SplitMix64 (Steele et al. 2014): seeds of one
    request differ, and neighbouring requests' do not meet.
    """
    return (seed + index * 0x9E3779B97F4A7C15) % 2**64
