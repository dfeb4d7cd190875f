"""What is asked of the engine: how to continue a prompt. Integers and text only."""

import dataclasses
import math
import numbers
import operator
from collections.abc import Callable, Mapping
from typing import Any

from configs.errors import InputError, shown

MAX_STOP_IDS = 16  # that `min_tokens` bans: every step compares all of them with all tokens
MAX_OWN_STOP_IDS = 128  # of a request
MAX_BIASES = 300  # entries of a logit bias
POOLINGS = ("last", "mean")

_Reader = Callable[[str, Any], Any]  # (name, value) of a field -> the value as it is kept


def _plain(value: Any) -> Any:
    """Arrays and their scalars, of any library, as Python's own lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def _number(kind: type[int] | type[float], low: float, high: float = math.inf) -> _Reader:
    def read(name: str, value: Any) -> int | float:
        value = _plain(value)
        wanted = numbers.Integral if kind is int else numbers.Real
        is_number = isinstance(value, wanted) and not isinstance(value, bool)
        if not (is_number and low <= value <= high):  # NaN fails both
            noun = "whole number" if kind is int else "number"
            bounds = f"from {low} on" if high == math.inf else f"from {low} to {high}"
            raise InputError(f"{name} is a {noun} {bounds}, not {shown(value)}")
        return kind(value)

    return read


def _switch(name: str, value: Any) -> bool:
    value = _plain(value)
    if not isinstance(value, bool):
        raise InputError(f"{name} is true or false, not {shown(value)}")
    return value


def _items(value: Any) -> tuple[Any, ...]:
    """Those of a list, an array or another iterable; a TypeError for what is none of these."""
    value = _plain(value)
    if isinstance(value, str | bytes | Mapping):
        raise TypeError
    return tuple(value)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    try:
        texts = _items(value)
        if not all(isinstance(text, str) and text for text in texts):
            raise TypeError
    except TypeError:
        raise InputError(
            f"{name} is a list of strings, each of at least one character, not {shown(value)}"
        ) from None
    for text in texts:
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise InputError(f"{name} {shown(text)} can never match: it has no UTF-8 form")
    return texts


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InputError(f"{name} is a text of at least one character, not {shown(value)}")
    return value


def _pooling(name: str, value: Any) -> str:
    if value not in POOLINGS:
        raise InputError(f"{name} is one of {', '.join(POOLINGS)}, not {shown(value)}")
    return str(value)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    try:
        ids = _items(value)
        if any(isinstance(id, bool) for id in ids):
            raise TypeError
        return tuple(map(operator.index, ids))
    except TypeError:
        raise InputError(f"{name} is a list of token ids, not {shown(value)}") from None


def _biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    try:
        pairs = [(id, bias) for id, bias in (value.items() if hasattr(value, "items") else value)]
    except (TypeError, ValueError):
        raise InputError(f"{name} maps token ids to numbers, not {shown(value)}") from None
    ids = _ids(name, [id for id, _ in pairs])
    return tuple(
        (id, _BIAS(f"{name} of {shown(id)}", bias))
        for id, (_, bias) in zip(ids, pairs, strict=True)
    )


def _or(absent: Any, read: _Reader) -> _Reader:
    """As `read`, and `absent` for None."""
    return lambda name, value: absent if value is None else read(name, value)


_BIAS = _number(float, -(10**6), 10**6)  # far beyond any logit, and a float32
_READERS: dict[str, _Reader] = {
    "max_new_tokens": _number(int, 0),
    "temperature": _number(float, 0, 100),
    "top_k": _number(int, 0, 2**31 - 1),
    "top_p": _number(float, 0, 1),
    "min_p": _number(float, 0, 1),
    "repetition": _number(float, 0, 100),
    "presence": _number(float, -2, 2),
    "frequency": _number(float, -2, 2),
    "logit_bias": _or((), _biases),
    "allowed_ids": _or(None, _ids),
    "banned_ids": _or((), _ids),
    "min_tokens": _number(int, 0, 2**31 - 1),
    "stop": _or((), _texts),
    "stop_ids": _or((), _ids),
    "ignore_eos": _switch,
    "seed": _or(None, _number(int, -(2**63), 2**64 - 1)),
    "priority": _number(int, -(2**63), 2**63 - 1),
    "n": _number(int, 1),
    "best_of": _or(None, _number(int, 1)),
    "beam_width": _number(int, 0),
    "length_penalty": _number(float, -10, 10),
    "early_stopping": _switch,
    "speculate": _switch,
    "prompt_budget": _or(None, _number(int, 1)),
    "grammar": _or(None, _text),
    "cache_salt": _or(None, _text),
    "skip_special_tokens": _switch,
    "pooling": _or(None, _pooling),
}


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. `inference/sampling/sampler.py` has the order of filters.

    Lists, arrays and numpy's scalars are kept as Python's tuples and numbers; a value that is not
    valid is an InputError that names its field.

    Attributes:
        max_new_tokens: tokens to generate at most; 0 reads the prompt instead: it is scored, or
            `pooling` makes a vector of it.
        temperature: 0 is greedy.
        top_k, top_p, min_p: kept candidates: the k most likely, the smallest set of mass p, those
            at least min_p times as likely as the best. 0, 1 and 0 keep all.
        repetition, presence, frequency: penalties on tokens seen (prompt and output; output; output
            by count).
        logit_bias: {token id: addend}, kept as pairs.
        allowed_ids, banned_ids: only these, never these.
        min_tokens: until this many are generated, end and stop tokens are banned and stop strings
            ignored.
        stop: strings that end the text (excluded from it).
        stop_ids: tokens that end the sequence, beside the model's own.
        ignore_eos: the model's own end tokens do not end the sequence.
        seed: 64-bit; the same request with the same seed gives the same tokens, whatever runs
            beside it.
        priority: requests of a lower value are admitted first and preempted last.
        n: answers to return.
        best_of: answers to sample, of which the n with the highest mean log-probability a token are
            returned, best first; None samples n and returns them in the order of their seeds.
        beam_width: beams of a beam search, which returns its n best hypotheses; 0 samples instead.
        length_penalty: a hypothesis of m tokens scores its log-probability / m**length_penalty.
        early_stopping: a beam search ends with its `beam_width`-th hypothesis; otherwise, when its
            best beam scores no better than the worst of them.
        speculate: drafts are verified for it, where the engine proposes any; its tokens are the
            same without.
        prompt_budget: tokens of the prompt that stay cached, in whole pages, once it is computed
            but for its last token: those that its end attends to most (SnapKV, Li et al. 2024,
            arXiv 2404.14469). A lossy choice; None keeps all.
        grammar: what the whole text has to be, as `inference/text/grammar.py` writes it.
        cache_salt: only requests of the same find each other's cached prefixes, which a shorter
            time to the first token would give away.
        skip_special_tokens: the text leaves special tokens out; the one that ends it never is text.
        pooling: of the final hidden states of a prompt, those of the 'last' token or the 'mean' of
            all; goes with max_new_tokens=0. None scores the prompt.
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
    speculate: bool = True
    prompt_budget: int | None = None
    grammar: str | None = None
    cache_salt: str | None = None
    skip_special_tokens: bool = True
    pooling: str | None = None

    def __post_init__(self) -> None:
        for name, read in _READERS.items():
            object.__setattr__(self, name, read(name, getattr(self, name)))
        for name in ("top_p", "repetition"):
            if not getattr(self, name):
                raise InputError(f"{name} is above 0")
        most = MAX_STOP_IDS // 2 if self.min_tokens else MAX_OWN_STOP_IDS
        if len(self.stop_ids) > most:
            where = " with min_tokens" if self.min_tokens else ""
            raise InputError(f"stop_ids are at most {most}{where}, not {len(self.stop_ids)}")
        if self.stop and 0 < self.max_new_tokens < self.min_tokens:
            raise InputError(
                f"stop can never match: min_tokens={self.min_tokens} ignores it beyond "
                f"max_new_tokens={self.max_new_tokens}"
            )
        self._check_answers()

    def _check_answers(self) -> None:
        if self.beam_width:
            if not self.is_greedy or self.stop or self.best_of is not None:
                raise InputError(
                    "beam_width takes no temperature, penalties, biases, min_tokens, allowed_ids, "
                    "banned_ids, grammar, stop strings or best_of: leave those at their defaults"
                )
            if self.n > self.beam_width:
                raise InputError(f"n is at most beam_width={self.beam_width}, not {shown(self.n)}")
        elif self.n > self.num_samples:
            raise InputError(f"n is at most best_of={self.best_of}, not {shown(self.n)}")
        if not self.max_new_tokens and (self.beam_width or self.num_samples > 1):
            raise InputError(
                "a prompt that is only read (max_new_tokens=0) has no answers: leave n=1"
            )
        if self.pooling is not None and self.max_new_tokens:
            raise InputError(
                f"pooling makes a vector of a prompt: give max_new_tokens=0, not "
                f"{self.max_new_tokens}"
            )
        if self.grammar is not None and self.ignore_eos:
            raise InputError("ignore_eos and a grammar, which ends a text, exclude each other")
        if not self.max_new_tokens and self.prompt_budget is not None:
            raise InputError("a prompt that is only read is read whole: leave prompt_budget out")

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
            and self.grammar is None
        )
