"""What both kinds of answers have in common: their head, chunks, and counts of tokens."""

import dataclasses
import secrets
import string
import time
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from inference.server.protocol.fields import Sampling, StreamOptions
from inference.server.protocol.responses import Answer, Usage
from inference.server.service import Service

_OBFUSCATED_BYTES = 128  # what is new takes a multiple of it where lengths are hidden
_LETTERS = string.ascii_letters + string.digits
_ENCODER = msgspec.json.Encoder()


@dataclasses.dataclass(frozen=True)
class Header:
    """The fields that all chunks of an answer share.

    Attributes:
        id: of the answer.
        kind: what the answer is; of a chunk, `chunk_kind`.
        model: as clients name it.
        created: seconds since 1970.
        fingerprint: of the engine.
        options: of the stream.
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
    ) -> "Header":
        """Of an answer that begins now."""
        return cls(
            f"{prefix}-{secrets.token_hex(14)}",
            kind,
            chunk_kind or kind,
            service.model_name,
            int(time.time()),
            service.facts.fingerprint,
            request.stream_options or StreamOptions(),
        )

    def answer(self, choices: list[Any], usage: Usage) -> Answer:
        """All of it."""
        return self._answer(self.kind, choices, usage)

    def chunk(
        self, choices: list[Any], usage: Usage, prompt_token_ids: list[int] | UnsetType = UNSET
    ) -> bytes:
        """An event with what is new; that of a chat's prompt comes with the first."""
        told: Usage | None | UnsetType = UNSET
        if self.options.include_usage:
            told = usage if self.options.continuous_usage_stats else None
        return self._event(choices, told, prompt_token_ids)

    def last(self, usage: Usage) -> bytes:
        """The event behind the last chunk that counts tokens, where that is asked for."""
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

    def _answer(self, kind: str, choices: list[Any], usage: Usage | None | UnsetType) -> Answer:
        return Answer(self.id, kind, self.created, self.model, choices, usage, self.fingerprint)


def whole(body: msgspec.Struct | dict[str, Any]) -> Response:
    """An answer in one piece."""
    return Response(_ENCODER.encode(body), media_type="application/json")
