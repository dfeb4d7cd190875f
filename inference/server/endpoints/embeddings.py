"""POST /v1/embeddings: vectors of texts, or of token ids."""

import asyncio
from typing import Any

import msgspec
from starlette.responses import Response

from inference.server.endpoints import pooled
from inference.server.endpoints.envelope import whole
from inference.server.protocol import parse
from inference.server.protocol.caller import Caller
from inference.server.protocol.embeddings import (
    MAX_INPUTS,
    Embedding,
    EmbeddingRequest,
    Embeddings,
    PooledUsage,
    vector,
)
from inference.server.protocol.errors import invalid
from inference.server.service import Service

_ENCODER = msgspec.json.Encoder()


async def embeddings(service: Service, request: EmbeddingRequest, caller: Caller) -> Response:
    """Create embeddings: vectors of texts.

    Raises:
        ApiError: a field is wrong, or the engine cannot answer.
    """
    facts = pooled.check(service, request, caller)
    assert facts.pooling is not None
    if (request.dimensions or 0) > facts.embedding_width:
        raise invalid("dimensions", f"is at most {facts.embedding_width} for this model")
    inputs = parse.prompts(request.input, "input", MAX_INPUTS)
    async with caller.deadline.enforce():
        prompts = [
            pooled.fit(
                request, await encode(service, input, request.add_special_tokens), facts, "input",
                f"input {index}",
            )
            for index, input in enumerate(inputs)
        ]  # fmt: skip
    vectors = await pooled.vectors(service, request, prompts, facts.pooling, caller)
    data: Any = await _encoded(vectors, request)
    return whole(Embeddings(data, request.model or service.model_name, PooledUsage.of(prompts)))


async def encode(service: Service, input: str | list[int], add_special: bool | None) -> list[int]:
    """Token ids of the field `input`; raises an `ApiError` (400)."""
    if isinstance(input, str):
        return await service.texts.encode(input, "input", add_special is not False)
    return parse.check_ids(input, service.facts.vocab_size, "input")


async def _encoded(vectors: list[bytes], request: EmbeddingRequest) -> list[msgspec.Raw]:
    """Encodes vectors one by one and lets other requests run: all together may take a second."""
    encoded = []
    for index, values in enumerate(vectors):
        embedding = Embedding(index, vector(values, request.dimensions, request.encoding_format))
        encoded.append(msgspec.Raw(_ENCODER.encode(embedding)))
        await asyncio.sleep(0)
    return encoded
