"""Messages between the two processes of a server: frames of msgpack, each after its length.

Both sides decode into declared types only: anything else is an error.
"""

import json
import struct
from typing import Any

import msgspec

from inference.classifier import Classifier
from inference.outputs import RequestOutput
from inference.request import SamplingParams
from inference.text.tokenizer import Tokenizer

MAX_FRAME_BYTES = 256 << 20  # the largest is a tokenizer with its vocabulary
_LENGTH = struct.Struct("!I")
HEADER_BYTES = _LENGTH.size


class ConnectionClosed(Exception):
    """The other process has gone, or closed its end."""


class Message(msgspec.Struct, tag=True, array_like=True):
    """The content of a frame, tagged with its class."""


# --- to the engine --------------------------------------------------------------------------------


class Add(Message):
    """A prompt to continue, or to read (`max_new_tokens=0`).

    Attributes:
        id: of the request, chosen by the client.
        num_top_logprobs: alternatives of each token that are sent back; None: no log-probabilities.
        output: tokens with which the answer (`params.n` is 1) begins.
    """

    id: int
    tokens: list[int]
    params: SamplingParams
    num_top_logprobs: int | None = None
    output: list[int] = []


class Abort(Message):
    """Ends a request; an unknown id has no effect."""

    id: int


class Retain(Message):
    """A conversation will go on: see `Engine.retain`."""

    tokens: list[int]
    cache_salt: str | None = None
    adapter: str | None = None


class Pause(Message):
    """No step begins until `Resume`; requests are added as usual."""

    id: int


class Resume(Message):
    """Ends a pause."""

    id: int


class Sleep(Message):
    """Frees the device's memory: see `Engine.sleep`. No request may be added until `Wake`."""

    id: int
    keeps_weights: bool


class NewSource(Message):
    """Where other weights are.

    Attributes:
        path: as `--model` takes it, or a step of Orbax's; None: of the model that was started with.
        version: of these weights; None: the next.
    """

    path: str | None = None
    version: int | None = None


class Wake(Message):
    """Ends a sleep: see `Engine.wake`. `source`: of other weights; None: those that were kept."""

    id: int
    source: NewSource | None = None


class UpdateWeights(Message):
    """Other weights: see `Engine.update_params`. They are read beside steps."""

    id: int
    source: NewSource
    keeps_pages: bool = False


class LoadAdapter(Message):
    """Another adapter, or none by this name any more: see `AdapterTable`. `path` is that of its
    directory, None: unload it.
    """

    id: int
    name: str
    path: str | None


class Stop(Message):
    """Ends the engine's process."""


# --- from the engine ------------------------------------------------------------------------------


class TextFacts(msgspec.Struct):
    """A `Tokenizer` as data, from which another process builds the same.

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
        return cls(
            json.dumps(tokenizer.to_json(), ensure_ascii=False), tokenizer.vocab_size,
            tokenizer.special_tokens, tokenizer.template, tokenizer.templates,
        )  # fmt: skip

    def tokenizer(self) -> Tokenizer:
        import tokenizers  # which takes a while

        return Tokenizer(
            tokenizers.Tokenizer.from_str(self.backend), self.vocab_size, self.special_tokens,
            self.template, self.templates,
        )  # fmt: skip


class PlanFacts(msgspec.Struct):
    """Data of the served model for the planner's page.

    Attributes:
        model: as `render.describe` returns it.
        machine: as `render.describe_chip` returns it; None: unknown.
        start: settings that the page opens with.
    """

    model: dict[str, Any]
    machine: dict[str, Any] | None
    start: dict[str, str | float]


class Loaded(Message):
    """The weights are loaded; steps are being compiled until `Ready`.

    Attributes:
        model: name of the model.
        fingerprint: of the code and the configuration; a seed gives the same tokens only under the
            same fingerprint.
        max_context: tokens of a prompt and its answer.
        max_seqs: sequences that one group of chips decodes in a batch.
        max_top_logprobs: alternatives of a token that the engine can report.
        accepts_seeds: requests may have a seed.
        accepts_grammars: requests may have a grammar.
        text: the tokenizer; None: the model takes token ids only.
        vocab_size: token ids are below it.
        num_groups: groups of chips, each with all weights.
        pooling: of embeddings, as in `SamplingParams`; None: no embeddings.
        embedding_width: dimensions of an embedding.
        classifier: the head that labels and scores texts, if the model has one.
        plan: None: the planner does not support the model.
        cache: configuration of the pages, under vLLM's names.
        adapters: names of those that requests may choose.
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
    classifier: Classifier | None = None
    num_groups: int = 1
    plan: PlanFacts | None = None
    cache: dict[str, str] = {}
    adapters: tuple[str, ...] = ()

    @property
    def num_slots(self) -> int:
        """Sequences that the engine runs at once."""
        return self.max_seqs * self.num_groups


class Ready(Message):
    """Requests are served from here on."""


class Outputs(Message):
    """Outputs of a step; ids are those of `Add`."""

    outputs: list[RequestOutput]


class Refused(Message):
    """A request that the engine rejects, and the reason as the client gets it."""

    id: int
    reason: str


class Controlled(Message):
    """Ends a `Control` message, whose id this is.

    Attributes:
        weight_version: of the weights from here on.
        error: why nothing was changed; "" where it was carried out.
    """

    id: int
    weight_version: int
    error: str = ""


# Tokens of a step up to which it is counted in one of `Heartbeat.iteration_tokens`.
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Heartbeat(Message):
    """State of the engine, and counters since its start; shows that the loop is alive.

    Decoding steps are counted in `decode_steps`, `decode_step_seconds` and `decode_step_bytes`,
    steps with prompts in `prefill_steps` and `prefill_step_seconds`. Unknown counters are absent:
    bytes where several chips share a step, `predicted_decode_step_seconds` where the machine is not
    calibrated. Predicted and measured seconds are of the same steps.

    Attributes:
        num_running, num_waiting: sequences with and without a slot.
        cache_used: share of all pages that running sequences use.
        counters: by name; they only grow.
        num_deferred: waiting sequences that wait for others of their request, not for room.
        oldest_waiting_s: since the oldest sequence came that never ran.
        page_waste: share of token places in used pages that are empty.
        page_sharing: share of pages saved by sharing, of those needed without it.
        read_bandwidth: bytes a second that the machine reads; None: unknown.
        iteration_tokens: steps by their tokens, up to each of `ITERATION_TOKENS`, and beyond.
        accepted_per_position: how often the first, second, ... draft was accepted.
        prefill_processes: that are connected; None: prompts are computed in the engine's.
        prefill_bandwidth: planned bytes a second of the connection to each; None: unknown.
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
    prefill_processes: int | None = None
    prefill_bandwidth: float | None = None


class Busy(Message):
    """The loop waits for a compilation, or for weights to be moved."""


class Joining(Message):
    """What several hosts wait for before they load the model: 'waits for host 1'; "" once they are
    together.
    """

    waits: str


class HostLost(Message):
    """The engine's process ends, because another host has; why, with the host's number."""

    why: str


Control = Pause | Resume | Sleep | Wake | UpdateWeights | LoadAdapter
ToEngine = Add | Abort | Retain | Control | Stop
FromEngine = Loaded | Ready | Outputs | Refused | Controlled | Heartbeat | Busy | Joining | HostLost

_ENCODER = msgspec.msgpack.Encoder()
TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
FROM_ENGINE: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: Message) -> bytes:
    """Encodes a message as a frame."""
    data = _ENCODER.encode(message)
    return _LENGTH.pack(len(data)) + data


def length(header: bytes | bytearray) -> int:
    """Bytes that follow a header; raises `ConnectionClosed` if more than any message has."""
    (num_bytes,) = _LENGTH.unpack(header)
    if num_bytes > MAX_FRAME_BYTES:
        raise ConnectionClosed(f"a frame of {num_bytes} bytes")
    return int(num_bytes)
