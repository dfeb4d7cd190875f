"""The common form of completions and chats: fields of the head, chunks, usage."""

import dataclasses
import secrets
import string
import time
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from inference.server.protocol.fields import Sampling, StreamOptions
from inference.server.protocol.responses import AnswerBody, Usage
from inference.server.service import Service

_OBFUSCATED_BYTES = 128  # where lengths are hidden, the choices of a chunk are padded to a multiple
_LETTERS = string.ascii_letters + string.digits
_ENCODER = msgspec.json.Encoder()


@dataclasses.dataclass(frozen=True)
class AnswerHeader:
    """The fields that all chunks of an answer share.

    Attributes:
        kind, chunk_kind: `object` of the answer, and of a chunk.
        model: as clients name it.
        created: seconds since 1970.
    """

    id: str
    kind: str
    chunk_kind: str
    model: str
    created: int
    fingerprint: str
    options: StreamOptions

    @classmethod
    def new(
        cls,
        service: Service,
        prefix: str,
        kind: str,
        request: Sampling,
        chunk_kind: str | None = None,
    ) -> "AnswerHeader":
        return cls(
            f"{prefix}-{secrets.token_hex(14)}",
            kind,
            chunk_kind or kind,
            service.model_name,
            int(time.time()),
            service.facts.fingerprint,
            request.stream_options or StreamOptions(),
        )

    def answer(self, choices: list[Any], usage: Usage) -> AnswerBody:
        return self._answer(self.kind, choices, usage)

    def chunk(
        self, choices: list[Any], usage: Usage, prompt_token_ids: list[int] | UnsetType = UNSET
    ) -> bytes:
        """An event with new choices; a chat's first event has the ids of the prompt."""
        stream_usage: Usage | None | UnsetType = UNSET
        if self.options.include_usage:
            stream_usage = usage if self.options.continuous_usage_stats else None
        return self._event(choices, stream_usage, prompt_token_ids)

    def last(self, usage: Usage) -> bytes:
        """The event after the last chunk, with the usage; empty unless the request has it."""
        return self._event([], usage) if self.options.include_usage else b""

    def _event(
        self,
        choices: list[Any],
        usage: Usage | None | UnsetType,
        prompt_token_ids: list[int] | UnsetType = UNSET,
    ) -> bytes:
        answer = self._answer(self.chunk_kind, choices, usage)
        answer.prompt_token_ids = prompt_token_ids
        if self.options.include_obfuscation and choices:
            num_missing = -len(_ENCODER.encode(choices)) % _OBFUSCATED_BYTES
            answer.obfuscation = "".join(secrets.choice(_LETTERS) for _ in range(num_missing))
        return b"data: " + _ENCODER.encode(answer) + b"\n\n"

    def _answer(self, kind: str, choices: list[Any], usage: Usage | None | UnsetType) -> AnswerBody:
        return AnswerBody(self.id, kind, self.created, self.model, choices, usage, self.fingerprint)


def whole(body: msgspec.Struct | dict[str, object]) -> Response:
    """A JSON answer."""
    return Response(_ENCODER.encode(body), media_type="application/json")
