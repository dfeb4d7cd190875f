"""POST /classify: labels of texts, or of a conversation."""

import asyncio
import secrets
import time

import numpy as np
from starlette.responses import Response

from inference.server.endpoints import pooled
from inference.server.endpoints.embeddings import encode
from inference.server.endpoints.envelope import whole
from inference.server.protocol import parse, tools
from inference.server.protocol.caller import Caller
from inference.server.protocol.classification import Classified, ClassifyRequest, Labels
from inference.server.protocol.embeddings import MAX_INPUTS, PooledUsage
from inference.server.protocol.errors import ApiError, invalid
from inference.server.service import Service


async def classify(service: Service, request: ClassifyRequest, caller: Caller) -> Response:
    """Label texts, or a conversation.

    Raises:
        ApiError: a field is wrong, or the engine cannot answer.
    """
    facts = pooled.check(service, request, caller)
    classifier = facts.classifier
    if classifier is None:
        raise ApiError(
            400, "this model has no labels: it is no sequence classifier", code="unsupported"
        )
    async with caller.deadline.enforce():
        prompts = [
            pooled.fit(
                request, classifier.read_part(tokens), facts,
                "input" if request.messages is None else "messages", f"text {index}",
            )
            for index, tokens in enumerate(await _tokens(service, request))
        ]  # fmt: skip
    vectors = await pooled.vectors(service, request, prompts, "last", caller)
    data = []
    for index, values in enumerate(vectors):
        values_L = classifier.logits(np.frombuffer(values, "<f4"))
        if request.use_activation is not False:
            values_L = classifier.probabilities(values_L)
        label = classifier.labels[int(values_L.argmax())]
        data.append(Labels(index, label, values_L.tolist(), len(classifier.labels)))
        await asyncio.sleep(0)  # other requests run: with many labels all texts may take seconds
    id = f"classify-{secrets.token_hex(14)}"
    usage = PooledUsage.of(prompts)
    return whole(Classified(id, int(time.time()), request.model or service.model_name, data, usage))


async def _tokens(service: Service, request: ClassifyRequest) -> list[list[int]]:
    if (request.input is None) == (request.messages is None):
        raise invalid("input", "or messages has to be given, and not both")
    if request.messages is None:
        inputs = parse.prompts(request.input, "input", MAX_INPUTS)
        return [await encode(service, input, request.add_special_tokens) for input in inputs]
    tools.check_variables(request.chat_template_kwargs)
    variables = request.chat_template_kwargs or {}
    begins, continues = bool(request.add_generation_prompt), bool(request.continue_final_message)
    if begins and continues:
        raise invalid("continue_final_message", "and add_generation_prompt exclude each other")
    return [await service.texts.encode_chat(request.messages, begins, None, variables, continues)]
