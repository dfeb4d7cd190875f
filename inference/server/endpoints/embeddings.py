"""POST /v1/embeddings: vectors of texts, or of token ids."""

import asyncio
from typing import Any

import msgspec
from starlette.responses import Response

from configs.errors import InputError
from inference.request import SamplingParams
from inference.server import traces
from inference.server.client.generation import Generation
from inference.server.endpoints.envelope import whole
from inference.server.protocol import parse, sampling
from inference.server.protocol.caller import Caller
from inference.server.protocol.embeddings import (
    MAX_INPUTS,
    Embedding,
    EmbeddingRequest,
    Embeddings,
    EmbeddingUsage,
    vector,
)
from inference.server.protocol.errors import ApiError, invalid, unusable
from inference.server.protocol.responses import Usage
from inference.server.service import Service

_ENCODER = msgspec.json.Encoder()


async def embeddings(service: Service, request: EmbeddingRequest, caller: Caller) -> Response:
    """Create embeddings: vectors of texts.

    Raises:
        ApiError: a field is wrong, or the engine cannot answer.
    """
    service.check_room(caller, priority=request.priority or 0)
    parse.check_model(request.model, service.model_name)
    facts = service.facts
    if facts.pooling is None:
        raise ApiError(400, "this server makes no embeddings", code="unsupported")
    if (request.dimensions or 0) > facts.embedding_width:
        raise invalid("dimensions", f"is at most {facts.embedding_width} for this model")
    inputs = parse.prompts(request.input, "input", MAX_INPUTS)
    async with caller.deadline.enforce():
        prompts = [
            await _tokens(service, request, index, input) for index, input in enumerate(inputs)
        ]
    params = _params(request, facts.pooling, caller.name)
    vectors = await _vectors(service, prompts, params, caller)
    num_tokens = sum(map(len, prompts))
    data: Any = await _encoded(vectors, request)
    return whole(Embeddings(data, service.model_name, EmbeddingUsage(num_tokens, num_tokens)))


async def _encoded(vectors: list[bytes], request: EmbeddingRequest) -> list[msgspec.Raw]:
    """Encodes vectors one by one and lets other requests run: all together may take a second."""
    encoded = []
    for index, values in enumerate(vectors):
        embedding = Embedding(index, vector(values, request.dimensions, request.encoding_format))
        encoded.append(msgspec.Raw(_ENCODER.encode(embedding)))
        await asyncio.sleep(0)
    return encoded


async def _tokens(
    service: Service, request: EmbeddingRequest, index: int, input: str | list[int]
) -> list[int]:
    facts = service.facts
    if isinstance(input, str):
        add_special = request.add_special_tokens is not False
        tokens = await service.texts.encode(input, "input", add_special)
    else:
        tokens = parse.check_ids(input, facts.vocab_size, "input")
    side = request.truncation_side or "right"
    tokens = sampling.cut(tokens, request.truncate_prompt_tokens, facts.max_context, side)
    if not tokens:
        raise invalid("input", "is empty: at least one token is needed")
    if len(tokens) > facts.max_context:
        context = f"the context of this model is {facts.max_context} tokens"
        why = f"{context}, and input {index} has {len(tokens)}"
        raise unusable("input", why, "context_length_exceeded")
    return tokens


def _params(request: EmbeddingRequest, pooling: str, client: str) -> SamplingParams:
    try:
        return SamplingParams(
            max_new_tokens=0, pooling=pooling,
            priority=request.priority or 0,
            cache_salt=sampling.salt(client, request.cache_salt),
        )  # fmt: skip
    except InputError as error:
        raise sampling.invalid(str(error)) from None


async def _vectors(
    service: Service, prompts: list[list[int]], params: SamplingParams, caller: Caller
) -> list[bytes]:
    """Embeds prompts, no more at a time than there are slots, so that other requests get some."""
    num_running = min(len(prompts), service.facts.num_slots)
    service.check_room(caller, num_running, priority=params.priority)
    num_tokens = sum(map(len, prompts))
    traces.current().begin(service.model_name, params, Usage(num_tokens, 0, num_tokens))
    vectors, queue = [b""] * len(prompts), enumerate(prompts)
    with Generation(service.client, caller) as generation:

        async def ask() -> None:
            if (prompt := next(queue, None)) is not None:
                await generation.add(*prompt, params)
                service.metrics.count_prompt(len(prompt[1]))

        for _ in range(num_running):
            await ask()
        while generation.is_open:
            key, output = await generation.next()
            if output.finish_reason == "error":
                service.metrics.corrupted()
                why = "the model gave no finite numbers"
                raise ApiError(500, why, code="model_error", may_retry=False)
            if output.finish_reason is not None:
                vectors[key] = output.embedding
                await ask()
    return vectors
