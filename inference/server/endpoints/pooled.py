"""Vectors of prompts: what embeddings, labels and scores are made of."""

import dataclasses

from configs.errors import InputError
from inference.request import SamplingParams
from inference.server import traces
from inference.server.client.generation import Generation
from inference.server.frames import Loaded
from inference.server.protocol import sampling
from inference.server.protocol.caller import Caller
from inference.server.protocol.embeddings import PooledRequest
from inference.server.protocol.errors import ApiError, invalid, unusable
from inference.server.protocol.responses import Usage
from inference.server.service import Service


def check(service: Service, request: PooledRequest, caller: Caller) -> Loaded:
    """Returns the engine's facts; raises an `ApiError` unless it makes vectors for this request."""
    service.check_room(caller, priority=request.priority or 0)
    service.adapter_of(request.model)
    if service.facts.pooling is None:
        raise ApiError(400, "this server makes no embeddings", code="unsupported")
    return service.facts


def fit(
    request: PooledRequest, tokens: list[int], facts: Loaded, param: str, name: str
) -> list[int]:
    """Cuts a prompt as the request says.

    Args:
        param: the field of the request that holds its text.
        name: of the prompt, for errors.

    Raises:
        ApiError: 400, it is empty, or exceeds the context.
    """
    side = request.truncation_side or "right"
    tokens = sampling.cut(tokens, request.truncate_prompt_tokens, facts.max_context, side)
    if not tokens:
        raise invalid(param, "is empty: at least one token is needed")
    if len(tokens) > facts.max_context:
        context = f"the context of this model is {facts.max_context} tokens"
        why = f"{context}, and {name} has {len(tokens)}"
        raise unusable(param, why, "context_length_exceeded")
    return tokens


async def vectors(
    service: Service, request: PooledRequest, prompts: list[list[int]], pooling: str, caller: Caller
) -> list[bytes]:
    """Pools prompts, no more at a time than there are slots, so that other requests get some.

    Returns:
        float32s of each, as `RequestOutput.embedding`.

    Raises:
        ApiError: there is no room for them, or the engine fails.
    """
    params = _params(request, pooling, caller.name)
    params = dataclasses.replace(params, adapter=service.adapter_of(request.model))
    num_running = min(len(prompts), service.facts.num_slots)
    service.check_room(caller, num_running, priority=params.priority)
    num_tokens = sum(map(len, prompts))
    traces.current().begin(service.model_name, params, Usage(num_tokens, 0, num_tokens))
    pooled, queue = [b""] * len(prompts), enumerate(prompts)
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
                pooled[key] = output.embedding
                await ask()
    return pooled


def _params(request: PooledRequest, pooling: str, client: str) -> SamplingParams:
    try:
        return SamplingParams(
            max_new_tokens=0, pooling=pooling,
            priority=request.priority or 0,
            cache_salt=sampling.salt(client, request.cache_salt),
        )  # fmt: skip
    except InputError as error:
        raise sampling.invalid(str(error)) from None
