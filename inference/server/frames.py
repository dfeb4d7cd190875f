"""What the two processes of a server tell each other: frames of msgpack, each behind its length.

Both sides decode into declared types: what is none of these is an error and nothing else.
"""

import json
import struct
from typing import Any, TypeVar

import msgspec

from inference.outputs import RequestOutput
from inference.request import SamplingParams
from inference.text.tokenizer import Tokenizer

MAX_FRAME_BYTES = 256 << 20  # the largest is a tokenizer with its vocabulary
_LENGTH = struct.Struct("!I")
HEADER_BYTES = _LENGTH.size


class ConnectionClosed(Exception):
    """The other process has gone, or closed its end."""


class Message(msgspec.Struct, tag=True, array_like=True):
    """A frame's content; its class is part of it."""


# --- to the engine --------------------------------------------------------------------------------


class Add(Message):
    """A prompt to continue, or to read (`max_new_tokens=0`).

    Attributes:
        id: names it from here on; the other side chooses it.
        num_top_logprobs: alternatives of each token that are sent back; None: no log-probabilities.
        output: tokens that the one answer begins with.
    """

    id: int
    tokens: list[int]
    params: SamplingParams
    num_top_logprobs: int | None = None
    output: list[int] = []


class Abort(Message):
    """Nobody waits for a request any more; an unknown id has no effect."""

    id: int


class Stop(Message):
    """Ends the engine's process."""


# --- from the engine ------------------------------------------------------------------------------


class TextFacts(msgspec.Struct):
    """A tokenizer as data (`Tokenizer`): what it takes to make another of it.

    Attributes:
        backend: a `tokenizer.json`.
        vocab_size, special_tokens, template, templates: as `Tokenizer` has them.
    """

    backend: str
    vocab_size: int
    special_tokens: dict[str, str]
    template: str | None
    templates: dict[str, str]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "TextFacts":
        """A tokenizer as data."""
        return cls(
            json.dumps(tokenizer.to_json(), ensure_ascii=False), tokenizer.vocab_size,
            tokenizer.special_tokens, tokenizer.template, tokenizer.templates,
        )  # fmt: skip

    def tokenizer(self) -> Tokenizer:
        """Another of it."""
        import tokenizers  # which takes a while

        return Tokenizer(
            tokenizers.Tokenizer.from_str(self.backend), self.vocab_size, self.special_tokens,
            self.template, self.templates,
        )  # fmt: skip


class PlanFacts(msgspec.Struct):
    """What the planner's page computes with, of what is served.

    Attributes:
        model: as `render.describe` describes it.
        machine: as `render.describe_chip` does; None: nothing is known of it.
        start: settings that the page opens with.
    """

    model: dict[str, Any]
    machine: dict[str, Any] | None
    start: dict[str, str | float]


class Loaded(Message):
    """The weights are there; steps are being compiled until `Ready`.

    Attributes:
        model: its name.
        fingerprint: of the code and the configuration: with another one, a seed may give other
            tokens.
        max_context: tokens of a prompt and its answer.
        max_seqs: sequences that run side by side on one group of chips.
        max_top_logprobs: alternatives of a token that this engine was built to report.
        accepts_seeds: whether requests may name a seed.
        accepts_grammars: whether they may have a grammar.
        text: None: it serves token ids alone.
        vocab_size: token ids are below it.
        num_groups: of chips that hold all weights.
        pooling: how vectors are made of prompts, by `SamplingParams`; None: they are not.
        embedding_width: numbers of such a vector.
        plan: None: it cannot be planned.
        cache: how its pages are set up, by vLLM's names.
    """

    model: str
    fingerprint: str
    max_context: int
    max_seqs: int
    max_top_logprobs: int
    accepts_seeds: bool
    accepts_grammars: bool
    vocab_size: int
    text: TextFacts | None
    pooling: str | None = None
    embedding_width: int = 0
    num_groups: int = 1
    plan: PlanFacts | None = None
    cache: dict[str, str] = {}

    @property
    def num_slots(self) -> int:
        """Sequences that run side by side."""
        return self.max_seqs * self.num_groups


class Ready(Message):
    """Requests are served from here on."""


class Outputs(Message):
    """What a step brought; ids are those of `Add`."""

    outputs: list[RequestOutput]


class Refused(Message):
    """A request that this engine does not serve, and why, in words for its sender."""

    id: int
    reason: str


# Tokens of a step up to which it is counted in one of `Heartbeat.iteration_tokens`.
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Heartbeat(Message):
    """The loop is alive, and what its engine holds and has done so far.

    Of counters, steps that only decode have `decode_steps`, `decode_step_seconds` and
    `decode_step_bytes`, those with prompts `prefill_steps` and `prefill_step_seconds`; what cannot
    be told is absent: bytes where several chips divide them, `predicted_decode_step_seconds` where
    this machine was never calibrated. Those counted in both are the same steps.

    Attributes:
        num_running, num_waiting: sequences with and without a slot.
        cache_used: share of the pages that hold something of running sequences.
        counters: by name; they only grow.
        num_deferred: of those that wait, the ones that do not wait for room.
        oldest_waiting_s: since the first of those came that never ran.
        page_waste: share of the tokens that these pages have room for that are not there yet.
        page_sharing: share of the pages that the running sequences would need more, had each its
            own.
        read_bandwidth: bytes a second that the machine reads; None: unknown.
        iteration_tokens: steps by their tokens, up to each of `ITERATION_TOKENS`, and beyond.
        accepted_per_position: how often the first, second, ... draft was accepted.
    """

    num_running: int = 0
    num_waiting: int = 0
    cache_used: float = 0.0
    counters: dict[str, float] = {}
    num_deferred: int = 0
    oldest_waiting_s: float = 0.0
    page_waste: float = 0.0
    page_sharing: float = 0.0
    read_bandwidth: float | None = None
    iteration_tokens: list[int] = []
    accepted_per_position: list[int] = []


class Compiling(Message):
    """The engine compiles, and its loop waits for that."""


ToEngine = Add | Abort | Stop
FromEngine = Loaded | Ready | Outputs | Refused | Heartbeat | Compiling

_ENCODER = msgspec.msgpack.Encoder()
TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
FROM_ENGINE: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

Frame = TypeVar("Frame", ToEngine, FromEngine)


def encode(message: Message) -> bytes:
    """A message as it is sent."""
    data = _ENCODER.encode(message)
    return _LENGTH.pack(len(data)) + data


def length(header: bytes | bytearray) -> int:
    """Bytes that follow a header.

    Raises:
        ConnectionClosed: no message is as long: the other side does not speak this protocol.
    """
    (found,) = _LENGTH.unpack(header)
    if found > MAX_FRAME_BYTES:
        raise ConnectionClosed(f"a frame of {found} bytes")
    return int(found)
