"""The common form of completions and chats: fields of the head, chunks, usage."""

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


class AnswerHeader:
    """The fields that all chunks of an answer share."""

    def __init__(
        self, service: Service, request: Sampling, prefix: str, kind: str, chunk_suffix: str = ""
    ):
        """`prefix`: of the answer's id; `kind`: its `object`, which in chunks has the suffix."""
        self._kind, self._chunk_kind = kind, kind + chunk_suffix
        self._options = request.stream_options or StreamOptions()
        self._fields: dict[str, Any] = {
            "id": f"{prefix}-{secrets.token_hex(14)}",
            "created": int(time.time()),
            "model": request.model or service.model_name,
            "system_fingerprint": service.facts.fingerprint,
        }

    def answer(self, choices: list[Any], usage: Usage) -> AnswerBody:
        return AnswerBody(object=self._kind, choices=choices, usage=usage, **self._fields)

    def chunk(
        self, choices: list[Any], usage: Usage, prompt_token_ids: list[int] | UnsetType = UNSET
    ) -> bytes:
        """An event with new choices; a chat's first event has the ids of the prompt."""
        stream_usage: Usage | None | UnsetType = UNSET
        if self._options.include_usage:
            stream_usage = usage if self._options.continuous_usage_stats else None
        return self._event(choices, stream_usage, prompt_token_ids)

    def last(self, usage: Usage) -> bytes:
        """The event after the last chunk, with the usage; empty unless the request has it."""
        return self._event([], usage) if self._options.include_usage else b""

    def _event(
        self,
        choices: list[Any],
        usage: Usage | None | UnsetType,
        prompt_token_ids: list[int] | UnsetType = UNSET,
    ) -> bytes:
        answer = AnswerBody(
            object=self._chunk_kind, choices=choices, usage=usage,
            prompt_token_ids=prompt_token_ids, **self._fields,
        )  # fmt: skip
        if self._options.include_obfuscation and choices:
            num_missing = -len(_ENCODER.encode(choices)) % _OBFUSCATED_BYTES
            answer.obfuscation = "".join(secrets.choice(_LETTERS) for _ in range(num_missing))
        return b"data: " + _ENCODER.encode(answer) + b"\n\n"


def whole(body: msgspec.Struct | dict[str, object]) -> Response:
    """A JSON answer."""
    return Response(_ENCODER.encode(body), media_type="application/json")
