"""The endpoints, and their description (OpenAPI 3.1)."""

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from inference.server.endpoints import console, generate, status, tokens
from inference.server.endpoints.anthropic import bodies as anthropic_bodies
from inference.server.endpoints.anthropic import errors as anthropic_errors
from inference.server.endpoints.anthropic.errors import MessagesError
from inference.server.endpoints.anthropic.fields import CountTokensRequest, MessagesRequest
from inference.server.endpoints.anthropic.respond import count_tokens
from inference.server.endpoints.embeddings import embeddings
from inference.server.endpoints.envelope import whole
from inference.server.endpoints.field_descriptions import DESCRIPTIONS
from inference.server.endpoints.responses import bodies
from inference.server.endpoints.responses.fields import ResponsesRequest
from inference.server.protocol import fields, responses
from inference.server.protocol.embeddings import EmbeddingRequest, Embeddings
from inference.server.protocol.errors import ErrorBody
from inference.server.service import Service

_REFERENCE = "#/components/schemas/{name}"


@dataclasses.dataclass(frozen=True)
class Operation:
    """An endpoint.

    Attributes:
        path: in Starlette's syntax.
        work: the handler; takes the service, and the path's parameters, or a body and its `Caller`.
        body: type of a POST's body; None: a GET.
        answer, event: types of the answer's JSON, and of a stream's events; None: undescribed.
        example: a body.
        error: type of an error's body.
    """

    path: str
    work: Callable[..., Awaitable[Response]]
    body: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | None = None
    event: Any = None  # a type, or a union
    example: dict[str, object] | None = None
    error: type[msgspec.Struct] = ErrorBody


async def openapi(service: Service) -> Response:
    """Retrieve this description (OpenAPI 3.1)."""
    return whole(describe())


OPERATIONS = (
    Operation("/v1/models", status.models, None, responses.Models),
    Operation("/v1/models/{id:path}", status.model, None, responses.ServedModel),
    Operation("/health", status.health),
    Operation("/ready", status.ready),
    Operation("/load", status.load),
    Operation("/version", status.version),
    Operation("/metrics", status.show_metrics),
    Operation("/tokenizer_info", tokens.tokenizer_info),
    Operation("/openapi.json", openapi),
    Operation("/console/events", console.figures, event=console.Figures),
    Operation("/console/plan", console.plan),
    Operation(
        "/v1/chat/completions", generate.chat, fields.ChatRequest, responses.ChatCompletion,
        responses.ChatChunk,
        {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64},
    ),
    Operation(
        "/v1/responses", generate.responses, ResponsesRequest, bodies.ResponseBody,
        bodies.AnyEvent, {"input": "Why is the sky blue?", "max_output_tokens": 64},
    ),
    Operation(
        anthropic_errors.PATH, generate.messages, MessagesRequest, anthropic_bodies.MessageBody,
        anthropic_bodies.AnyEvent,
        {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64},
        MessagesError,
    ),
    Operation(
        f"{anthropic_errors.PATH}/count_tokens", count_tokens, CountTokensRequest,
        anthropic_bodies.TokenCount,
        example={"messages": [{"role": "user", "content": "Why is the sky blue?"}]},
        error=MessagesError,
    ),
    Operation(
        "/v1/completions", generate.completions, fields.CompletionRequest, responses.TextCompletion,
        responses.TextCompletion, {"prompt": "Once upon a time", "max_tokens": 32},
    ),
    Operation(
        "/infill", generate.infill, fields.InfillRequest, responses.InfillAnswer,
        responses.InfillAnswer,
        {"input_prefix": "def add(a, b):\n", "input_suffix": "\n\nprint(add(1, 2))\n",
         "max_tokens": 32},
    ),
    Operation(
        "/v1/embeddings", embeddings, EmbeddingRequest, Embeddings,
        example={"input": ["A ridge", "where two slopes meet"]},
    ),
    Operation(
        "/tokenize", tokens.tokenize, fields.TokenizeRequest, responses.Tokenized,
        example={"prompt": "A ridge"},
    ),
    Operation(
        "/detokenize", tokens.detokenize, fields.DetokenizeRequest, responses.Detokenized,
        example={"tokens": [65, 66]},
    ),
)  # fmt: skip


def describe() -> dict[str, object]:
    """Describes all operations in OpenAPI."""
    kinds = [kind for op in OPERATIONS for kind in (op.body, op.answer, op.event) if kind]
    kinds = list(dict.fromkeys([*kinds, *(op.error for op in OPERATIONS)]))
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    by_kind = dict(zip(kinds, schemas, strict=True))
    for name in (op.body.__name__ for op in OPERATIONS if op.body):
        for field, schema in components[name]["properties"].items():
            if field in DESCRIPTIONS:
                schema["description"] = DESCRIPTIONS[field]
    paths = {op.path.replace(":path", ""): _described(op, by_kind) for op in OPERATIONS}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Ridgeline", "version": "1"},
        "servers": [{"url": "./"}],  # relative to this description, for any prefix of a proxy
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"key": []}, {"api_key": []}],
    }


def _described(operation: Operation, by_kind: Mapping[type, object]) -> dict[str, object]:
    content: dict[str, object] = {}
    if operation.answer is not None:
        content["application/json"] = {"schema": by_kind[operation.answer]}
    if operation.event is not None:
        schema = {"anyOf": [by_kind[operation.event], by_kind[operation.error]]}
        content["text/event-stream"] = {"schema": schema}  # of the data of an event
    failed = {"application/json": {"schema": by_kind[operation.error]}}
    described: dict[str, object] = {
        "summary": (operation.work.__doc__ or "").strip().splitlines()[0],
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "default": {"description": "What went wrong.", "content": failed},
        },
    }
    if "{id" in operation.path:
        name = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
        described["parameters"] = [name]
    if operation.body is None:
        return {"get": described}
    body = {"application/json": {"schema": by_kind[operation.body], "example": operation.example}}
    return {"post": described | {"requestBody": {"required": True, "content": body}}}
