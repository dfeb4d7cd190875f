"""POST /infill: fills a gap, with llama.cpp's fields; a completion with a suffix otherwise."""

from collections.abc import Sequence
from contextlib import aclosing

import msgspec
from starlette.responses import Response

from inference.server.endpoints.answers import Piece
from inference.server.endpoints.completions import Completions
from inference.server.endpoints.envelope import whole
from inference.server.protocol.caller import Caller
from inference.server.protocol.dialects.table import MAX_INT
from inference.server.protocol.dialects.translate import renamed
from inference.server.protocol.errors import ApiError, invalid
from inference.server.protocol.event_stream import Events
from inference.server.protocol.fields import CompletionRequest, InfillRequest
from inference.server.protocol.responses import InfillAnswer
from inference.server.service import Service
from inference.text.infill import Gap

_NAMES = {"prompt": "input_prefix", "suffix": "input_suffix"}
_SHARED = set(CompletionRequest.__struct_fields__) & set(InfillRequest.__struct_fields__)
_ENCODER = msgspec.json.Encoder()


class Filling:
    """An answer to /infill."""

    def __init__(self, service: Service, request: InfillRequest, caller: Caller):
        """Reads the request; an `ApiError` names a wrong field."""
        if (request.n or 1) > 1:
            raise invalid("n", "is 1 here: send POST /v1/completions with a suffix")
        if request.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "is not a field of /infill: send a completion")
        fields = {name: getattr(request, name) for name in _SHARED}
        if request.max_tokens is None:
            fields["max_tokens"] = MAX_INT
        completion = CompletionRequest(**fields)
        files = tuple((file.filename or "", file.text) for file in request.input_extra or ())
        prefix = request.input_prefix + (request.prompt or "")
        gap = Gap(prefix, request.input_suffix, files, request.suffix_first)
        self._completions = Completions(service, completion, caller, gap)
        self._has_files = bool(files)
        self._has_ids = bool(request.return_token_ids)
        self._model = request.model or service.model_name

    async def prepare(self) -> None:
        """Encodes the texts; an `ApiError` names a wrong field."""
        try:
            await self._completions.prepare()
        except ApiError as error:
            is_full = self._has_files and error.code == "context_length_exceeded"
            raise renamed(error, _NAMES | ({"prompt": "input_extra"} if is_full else {})) from None

    async def answer(self) -> Response:
        """Returns the whole answer; an `ApiError` says that the engine cannot."""
        pieces = [piece async for piece in self._completions.pieces()]
        answer = self._part("".join(piece.text for piece in pieces), pieces[-1])
        if self._has_ids:
            self._add_ids(answer, pieces)
        return whole(answer)

    async def events(self) -> Events:
        """Yields the answer as it comes; errors as `answer`."""
        unsent: list[Piece] = []
        async with aclosing(self._completions.pieces()) as pieces:
            async for piece in pieces:
                unsent.append(piece)
                if piece.is_visible:
                    part = self._part(piece.text, piece)
                    self._add_ids(part, unsent)
                    yield b"data: " + _ENCODER.encode(part) + b"\n\n"
                    unsent = []

    def _add_ids(self, part: InfillAnswer, pieces: Sequence[Piece]) -> None:
        part.weight_versions = []
        for piece in pieces:
            part.tokens += piece.token_ids
            piece.add_versions(part.weight_versions)

    def _part(self, text: str, piece: Piece) -> InfillAnswer:
        """The answer's part whose last piece this is, without its tokens."""
        usage, word = self._completions.usage, piece.stop_reason
        assert usage.prompt_tokens_details is not None
        cuts = {None: "none", "length": "limit", "abort": "limit"}
        stop_type = cuts.get(piece.finish_reason, "eos")
        return InfillAnswer(
            text, [], piece.finish_reason is not None, self._model, usage.prompt_tokens,
            usage.prompt_tokens_details.cached_tokens, usage.completion_tokens,
            "word" if isinstance(word, str) else stop_type, word if isinstance(word, str) else "",
        )  # fmt: skip
