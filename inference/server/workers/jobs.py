"""Jobs of a worker and their results, as frames of the same kind as the engine's."""

from typing import Any

import msgspec

from inference.server.frames import Message, TextFacts
from inference.text.infill import Gap

_MB = 1 << 20
_BASE_S, _MB_S = 2.0, 4.0  # of processor time; most texts take half a second a MB
_TEMPLATE_S = 3.0  # for the process that renders templates, which has its own limits
_BASE_BYTES, _MB_BYTES = 256 * _MB, 256 * _MB


class Load(Message):
    """The tokenizer; the first message."""

    text: TextFacts


class Encode(Message):
    """Arguments of `Tokenizer.encode`."""

    text: str
    add_special: bool


class EncodeChat(Message):
    """Arguments of `Tokenizer.apply_chat_template`."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = {}
    continues: bool = False
    documents: list[dict[str, str]] | None = None


class EncodeInfill(Message):
    """Arguments of `Infill.encode`."""

    gap: Gap
    add_special: bool
    limit: int | None = None


class EncodePair(Message):
    """Arguments of `pairs.encode`."""

    query: str
    document: str
    variables: dict[str, object] = {}


class Decode(Message):
    """Token ids to decode, special ones included."""

    ids: list[int]


class Compile(Message):
    """A grammar to compile, as a check."""

    grammar: str


class Convert(Message):
    """A grammar of llama.cpp to convert to Lark (`grammar.of_gbnf`)."""

    grammar: str


class WriteTag(Message):
    """A structural tag whose grammar is to be written (`formats.of_json`)."""

    tag: str


class Done(Message):
    """The result of a job: token ids, a text, or nothing."""

    value: list[int] | str | None = None


class JobFailed(Message):
    """The error of a job, as the client gets it; `is_last`: the worker ends."""

    reason: str
    is_last: bool = False


Job = Encode | EncodeChat | EncodeInfill | EncodePair | Decode | Compile | Convert | WriteTag
ToWorker = Load | Job
FromWorker = Done | JobFailed

TO_WORKER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def limit_s(job: Job, num_bytes: int) -> float:
    """Limit of processor time of a job of `num_bytes`, in seconds."""
    template_s = _TEMPLATE_S * isinstance(job, EncodeChat | EncodePair)
    return _BASE_S + template_s + num_bytes // _MB * _MB_S


def limit_bytes(num_bytes: int) -> int:
    """Limit of memory of a job of `num_bytes`."""
    return _BASE_BYTES + num_bytes // _MB * _MB_BYTES


def too_large(num_bytes: int) -> JobFailed:
    """The error of a job that needed more memory than `num_bytes`."""
    return JobFailed(f"it takes more than {num_bytes // _MB} MB of memory to process", is_last=True)
