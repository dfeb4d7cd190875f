"""Requests: how to continue a prompt, each field declared once. Integers and text only."""

import dataclasses
from typing import Any

from configs.errors import InputError, shown
from inference.field_kinds import Biases, Choice, Kind, Number, Switch, Text, Texts, TokenIds

MAX_STOP_IDS = 16  # that `min_tokens` bans: every step compares all of them with all tokens
MAX_REQUEST_STOP_IDS = 128
MAX_BIASES = 300  # entries of a logit bias
MAX_CHOICES = 16  # answers to one prompt over HTTP
POOLINGS = ("last", "mean")

_INT32, _INT64 = 2**31, 2**63
_TEXT_BODIES = ("completions", "chat")
_BODIES = (*_TEXT_BODIES, "responses", "messages")


@dataclasses.dataclass(frozen=True)
class Field:
    """What a field of a request is, wherever it occurs.

    Attributes:
        default: its value in Python where nothing sets it.
        kind: the values that Python accepts.
        doc: a sentence for `--help`, `/docs` and readers of `SamplingParams`.
        wire: its name over HTTP, where that is another.
        bodies: the HTTP bodies that have it: completions, chat, responses, messages, embeddings.
        wire_kind: the values that HTTP accepts; None: those of Python.
        wire_default: its value where an HTTP body leaves it out; None: that of Python.
        has_flag: whether `--name` sets it on command lines.
        former: the name that it had until version 0.2, which is refused.
        trace: its name among a span's `gen_ai.request` attributes; empty: it is not traced.
        is_traced_always: also where it has its default.
        dtype: of its value in a step (`inference/sampling/parameters.py`); empty: it has none.
    """

    default: Any
    kind: Kind
    doc: str
    wire: str = ""
    bodies: tuple[str, ...] = ()
    wire_kind: Kind | None = None
    wire_default: object = None
    has_flag: bool = False
    former: str = ""
    trace: str = ""
    is_traced_always: bool = False
    dtype: str = ""

    def read(self, name: str, value: object) -> object:
        """Returns the value as Python holds it; None stands for a default that is None or empty.

        Raises:
            InputError: the value is not valid; names the field.
        """
        if value is None and self.default in (None, ()):
            return self.default
        return self.kind.read(name, value)


def _field(default: object, kind: Kind, doc: str, **more: Any) -> Any:
    return dataclasses.field(default=default, metadata={"field": Field(default, kind, doc, **more)})


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. `inference/sampling/sampler.py` has the order of filters.

    Lists, arrays and numpy's scalars are kept as Python's tuples and numbers; a value that is not
    valid is an InputError that names its field.
    """

    max_new_tokens: int = _field(
        128,
        Number(int, 0),
        "Tokens to generate at most; 0, in Python and completions, only reads the prompt.",
        wire="max_tokens",
        bodies=_TEXT_BODIES,
        wire_kind=Number(int, 0, _INT32 - 1),
        has_flag=True,
        trace="max_tokens",
        is_traced_always=True,
    )
    temperature: float = _field(
        0.0,
        Number(float, 0, 100),
        "Divides the logits: 0 is greedy, higher values make unlikely tokens likelier.",
        bodies=_BODIES,
        wire_kind=Number(float, 0, 2),
        wire_default=1.0,
        has_flag=True,
        trace="temperature",
        is_traced_always=True,
        dtype="float32",
    )
    top_k: int = _field(
        0,
        Number(int, 0, _INT32 - 1),
        "Keeps the k most likely tokens; 0 (over HTTP also -1) keeps all.",
        bodies=_BODIES,
        wire_kind=Number(int, -1, _INT32 - 1),
        has_flag=True,
        trace="top_k",
        dtype="int32",
    )
    top_p: float = _field(
        1.0,
        Number(float, 0, 1, is_open=True),
        "Keeps the smallest set of most likely tokens whose probabilities sum to p; 1 keeps all.",
        bodies=_BODIES,
        has_flag=True,
        trace="top_p",
        is_traced_always=True,
        dtype="float32",
    )
    min_p: float = _field(
        0.0,
        Number(float, 0, 1),
        "Keeps tokens at least this likely relative to the most likely one; 0 keeps all.",
        bodies=_BODIES,
        has_flag=True,
        dtype="float32",
    )
    epsilon_cutoff: float = _field(
        0.0,
        Number(float, 0, 1),
        "Keeps tokens of at least this probability among those that the other filters keep "
        "(Hewitt et al. 2022, arXiv 2210.15191), and always the most likely one; 0 keeps all.",
        bodies=_BODIES,
        has_flag=True,
        dtype="float32",
    )
    repetition_penalty: float = _field(
        1.0,
        Number(float, 0, 100, is_open=True),
        "Divides the positive logits of tokens of prompt and answer, and multiplies the negative; "
        "1 is none.",
        bodies=_BODIES,
        wire_kind=Number(float, 0, 2, is_open=True),
        has_flag=True,
        former="repetition",
        dtype="float32",
    )
    presence_penalty: float = _field(
        0.0,
        Number(float, -2, 2),
        "Subtracted once from the logit of each token in the answer.",
        bodies=_BODIES,
        has_flag=True,
        former="presence",
        trace="presence_penalty",
        is_traced_always=True,
        dtype="float32",
    )
    frequency_penalty: float = _field(
        0.0,
        Number(float, -2, 2),
        "Subtracted from a token's logit for each time the token is in the answer.",
        bodies=_BODIES,
        has_flag=True,
        former="frequency",
        trace="frequency_penalty",
        is_traced_always=True,
        dtype="float32",
    )
    logit_bias: tuple[tuple[int, float], ...] = _field(
        (),
        Biases(Number(float, -(10**6), 10**6)),  # far beyond any logit, and a float32
        "Numbers to add to the logits of tokens, by token id.",
        bodies=_BODIES,
        wire_kind=Biases(Number(float, -100, 100), MAX_BIASES),
    )
    allowed_token_ids: tuple[int, ...] | None = _field(
        None,
        TokenIds(),
        "The only tokens that may be sampled.",
        bodies=_BODIES,
        wire_kind=TokenIds(1, 65536),
        former="allowed_ids",
    )
    banned_token_ids: tuple[int, ...] = _field(
        (), TokenIds(), "Tokens that are never sampled.", former="banned_ids"
    )
    min_tokens: int = _field(
        0,
        Number(int, 0, _INT32 - 1),
        "Until this many tokens are generated, end and stop tokens are banned and stop strings "
        "ignored.",
        bodies=_BODIES,
        has_flag=True,
        dtype="int32",
    )
    stop: tuple[str, ...] = _field(
        (),
        Texts(),
        "A text that ends the answer, which excludes it (a list, or a repeated flag, has several).",
        bodies=(*_TEXT_BODIES, "responses"),
        wire_kind=Texts(64, 256),
        has_flag=True,
    )
    stop_token_ids: tuple[int, ...] = _field(
        (),
        TokenIds(),
        "Tokens that end the answer, in addition to the model's own.",
        bodies=_BODIES,
        wire_kind=TokenIds(None, MAX_REQUEST_STOP_IDS),
        former="stop_ids",
    )
    ignore_eos: bool = _field(
        False,
        Switch(),
        "The model's own end tokens do not end the answer.",
        bodies=_BODIES,
        has_flag=True,
    )
    seed: int | None = _field(
        None,
        Number(int, -_INT64, 2 * _INT64 - 1),
        "Seed of the random stream (64 bits): the same request with it gets the same tokens.",
        bodies=_BODIES,
        wire_kind=Number(int, -_INT64, _INT64 - 1),
        trace="seed",
    )
    priority: int = _field(
        0,
        Number(int, -_INT64, _INT64 - 1),
        "Requests of a lower value are handled earlier (a server orders those of one API key).",
        bodies=(*_BODIES, "embeddings"),
        wire_kind=Number(int, -_INT32, _INT32 - 1),
    )
    n: int = _field(
        1,
        Number(int, 1),
        "Answers to each prompt.",
        bodies=_TEXT_BODIES,
        wire_kind=Number(int, 1, MAX_CHOICES),
        has_flag=True,
        trace="choice.count",
    )
    best_of: int | None = _field(
        None,
        Number(int, 1),
        "Answers to sample; the n with the highest mean log-probability a token are returned, "
        "best first.",
        bodies=_TEXT_BODIES,
        wire_kind=Number(int, 1, MAX_CHOICES),
        has_flag=True,
    )
    vote: bool = _field(
        False,
        Switch(),
        "Answers of best_of are ranked by how many of them say the same in the end: what "
        "\\boxed{} holds, else the last number, else the last line (Wang et al. 2022, "
        "arXiv 2203.11171).",
        bodies=_TEXT_BODIES,
        has_flag=True,
    )
    beam_width: int = _field(
        0,
        Number(int, 0),
        "Beams of a beam search, which returns its n best hypotheses; 0 samples instead.",
        has_flag=True,
    )
    length_penalty: float = _field(
        1.0,
        Number(float, -10, 10),
        "A hypothesis of m tokens scores its log-probability / m**length_penalty.",
        has_flag=True,
    )
    early_stopping: bool = _field(
        False,
        Switch(),
        "A beam search ends with its beam_width-th hypothesis; otherwise, when its best beam "
        "scores no better than the worst of them.",
        has_flag=True,
    )
    speculate: bool = _field(
        True,
        Switch(),
        "Drafts are verified for this request, where the engine drafts; its tokens are the same "
        "without.",
        bodies=_BODIES,
    )
    prompt_budget: int | None = _field(
        None,
        Number(int, 1),
        "Tokens of the prompt that stay cached, in whole pages, chosen by the attention of the "
        "prompt's end (SnapKV, Li et al. 2024, arXiv 2404.14469); lossy.",
        has_flag=True,
    )
    grammar: str | None = _field(
        None, Text(), "The grammar of the whole text (`inference/text/grammar.py` writes it)."
    )
    thinks: bool = _field(
        False,
        Switch(),
        "The answer may begin with a thought, as the model's chat template marks it: the grammar "
        "is of the text behind it.",
    )
    thinking_budget: int | None = _field(
        None,
        Number(int, 0),
        "Tokens of an answer's thought at most, which is then closed (with `thinks`).",
        wire="thinking_token_budget",
        bodies=("responses",),  # and chats, whose other fields completions have, too
        wire_kind=Number(int, 0, _INT32 - 1),
    )
    adapter: str | None = _field(
        None, Text(), "The adapter, by name, with which the model answers; None: the model alone."
    )
    cache_salt: str | None = _field(
        None,
        Text(),
        "Only requests of the same salt share cached prefixes, which TTFT would reveal.",
        bodies=(*_BODIES, "embeddings"),
        wire_kind=Text(256),
    )
    skip_special_tokens: bool = _field(
        True,
        Switch(),
        "The text leaves special tokens out; the token that ends it never is text.",
        bodies=_BODIES,
    )
    shown_special_ids: tuple[int, ...] = _field(
        (), TokenIds(), "Special tokens that are text even where others are left out of it."
    )
    pooling: str | None = _field(
        None,
        Choice(POOLINGS),
        "With max_new_tokens=0: makes a vector of the final hidden state of the last token, or of "
        "their mean; otherwise the prompt is scored.",
    )

    def __post_init__(self) -> None:
        for name, field in FIELDS.items():
            object.__setattr__(self, name, field.read(name, getattr(self, name)))
        limit = MAX_STOP_IDS // 2 if self.min_tokens else MAX_REQUEST_STOP_IDS
        if len(self.stop_token_ids) > limit:
            where = " with min_tokens" if self.min_tokens else ""
            raise InputError(
                f"stop_token_ids are at most {limit}{where}, not {len(self.stop_token_ids)}"
            )
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
                    "beam_width takes no temperature, penalties, biases, min_tokens, "
                    "allowed_token_ids, banned_token_ids, grammar, thinking_budget, stop strings "
                    "or best_of: leave those at their defaults"
                )
            if self.n > self.beam_width:
                raise InputError(f"n is at most beam_width={self.beam_width}, not {shown(self.n)}")
        elif self.n > self.num_samples:
            raise InputError(f"n is at most best_of={self.best_of}, not {shown(self.n)}")
        if self.vote and self.best_of is None:
            raise InputError("vote counts answers that best_of samples: give that as well")
        if not self.max_new_tokens and (self.beam_width or self.num_samples > 1):
            raise InputError(
                "a prompt that is only read (max_new_tokens=0) has no answers: leave n=1"
            )
        if self.pooling is not None and self.max_new_tokens:
            raise InputError(
                f"pooling makes a vector of a prompt: give max_new_tokens=0, not "
                f"{self.max_new_tokens}"
            )
        if self.thinking_budget is not None and not self.thinks:
            raise InputError("thinking_budget goes with thinks=True: other answers have no thought")
        if self.grammar is not None and self.ignore_eos:
            raise InputError("ignore_eos and a grammar, which ends a text, exclude each other")
        if not self.max_new_tokens and self.prompt_budget is not None:
            raise InputError("a prompt that is only read is read whole: leave prompt_budget out")

    @property
    def num_samples(self) -> int:
        return self.n if self.best_of is None else self.best_of

    @property
    def num_running(self) -> int:
        """Sequences that decode at the same time for it."""
        return max(self.num_samples, self.beam_width)

    @property
    def needs_counts(self) -> bool:
        """Whether penalties must know which tokens occurred."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the argmax of the model's own logits."""
        return (
            self.temperature == 0
            and not self.needs_counts
            and not (self.logit_bias or self.banned_token_ids or self.min_tokens)
            and self.allowed_token_ids is None
            and not self.is_constrained
        )

    @property
    def is_constrained(self) -> bool:
        """Whether tokens before one say what it may be."""
        return self.grammar is not None or self.thinking_budget is not None


FIELDS: dict[str, Field] = {
    field.name: field.metadata["field"] for field in dataclasses.fields(SamplingParams)
}
WIRE_NAMES = {name: field.wire or name for name, field in FIELDS.items()}
FORMER_NAMES = {field.former: name for name, field in FIELDS.items() if field.former}
