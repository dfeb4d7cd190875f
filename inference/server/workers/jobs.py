"""What a worker is asked, and what it answers: frames of the same kind as the engine's."""

from typing import Any

import msgspec

from inference.server.frames import Message, TextFacts

_MB = 1 << 20
_BASE_S, _MB_S = 2.0, 4.0  # of processor time; a text takes half a second a MB, odd ones longer
_TEMPLATE_S = 3.0  # the template's process has limits of its own
_BASE_BYTES, _MB_BYTES = 256 * _MB, 256 * _MB


class Load(Message):
    """The tokenizer, before anything else."""

    text: TextFacts


class Encode(Message):
    """Token ids of a text, as `Tokenizer.encode`."""

    text: str
    add_special: bool


class EncodeChat(Message):
    """Token ids of a conversation, as `Tokenizer.apply_chat_template`."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = {}
    continues: bool = False
    documents: list[dict[str, str]] | None = None


class Decode(Message):
    """The text of token ids, special ones included."""

    ids: list[int]


class Compile(Message):
    """Whether a grammar can be compiled."""

    grammar: str


class Convert(Message):
    """A grammar of llama.cpp's in Lark, as `grammar.of_gbnf`."""

    grammar: str


class Done(Message):
    """What came of a job: token ids, a text, or nothing."""

    value: list[int] | str | None = None


class JobFailed(Message):
    """Why nothing came of it, in words for whoever asked; `is_last`: the worker ends."""

    reason: str
    is_last: bool = False


Job = Encode | EncodeChat | Decode | Compile | Convert
ToWorker = Load | Job
FromWorker = Done | JobFailed

TO_WORKER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def limit_s(job: Job, num_bytes: int) -> float:
    """Seconds of processor time that a job of so many bytes may take."""
    return _BASE_S + _TEMPLATE_S * isinstance(job, EncodeChat) + num_bytes // _MB * _MB_S


def limit_bytes(num_bytes: int) -> int:
    """Memory that a job of so many bytes may take."""
    return _BASE_BYTES + num_bytes // _MB * _MB_BYTES


def too_long(seconds: float) -> JobFailed:
    """The job was ended after so many."""
    return JobFailed(f"it takes more than {seconds:g} s to process")


def too_large(num_bytes: int) -> JobFailed:
    """The job was ended when it wanted more memory than this."""
    return JobFailed(f"it takes more than {num_bytes // _MB} MB of memory to process", is_last=True)
