"""The endpoints, and their description (OpenAPI 3.1)."""

import dataclasses
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from inference.server.batches import bodies as batch_bodies
from inference.server.endpoints import (
    batches,
    console,
    control,
    files,
    generate,
    scoring,
    status,
    tokens,
)
from inference.server.endpoints.anthropic import bodies as anthropic_bodies
from inference.server.endpoints.anthropic import errors as anthropic_errors
from inference.server.endpoints.anthropic.errors import MessagesError
from inference.server.endpoints.anthropic.fields import CountTokensRequest, MessagesRequest
from inference.server.endpoints.anthropic.respond import count_tokens
from inference.server.endpoints.classification import classify
from inference.server.endpoints.embeddings import embeddings
from inference.server.endpoints.envelope import whole
from inference.server.endpoints.field_descriptions import DESCRIPTIONS
from inference.server.endpoints.responses import bodies
from inference.server.endpoints.responses.fields import ResponsesRequest
from inference.server.protocol import control as control_fields
from inference.server.protocol import fields, responses
from inference.server.protocol.classification import Classified, ClassifyRequest
from inference.server.protocol.control import EngineStatus
from inference.server.protocol.embeddings import EmbeddingRequest, Embeddings
from inference.server.protocol.errors import ErrorBody
from inference.server.protocol.scoring import Reranked, RerankRequest, ScoreRequest, Scores
from inference.server.service import Service

_REFERENCE = "#/components/schemas/{name}"


@dataclasses.dataclass(frozen=True)
class Operation:
    """An endpoint.

    Attributes:
        path: in Starlette's syntax.
        work: the handler; takes the service and the path's parameters. Before these it takes a body
            and its `Caller`; or the HTTP request with a form, and the name of the client's key; or
            this name and a query.
        method: of HTTP.
        body: type of a JSON body.
        form: type of a form.
        query: type of the query, where the answer depends on the key.
        answer, event: types of the answer's JSON, and of a stream's events; None: undescribed.
        example: a body.
        error: type of an error's body.
    """

    path: str
    work: Callable[..., Awaitable[Response]]
    method: str = "GET"
    body: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | None = None
    event: Any = None  # a type, or a union
    example: dict[str, object] | None = None
    form: type[msgspec.Struct] | None = None
    query: type[msgspec.Struct] | None = None
    error: type[msgspec.Struct] = ErrorBody


async def openapi(service: Service) -> Response:
    """Retrieve this description (OpenAPI 3.1)."""
    return whole(describe(operations_of(service)))


OPERATIONS = (
    Operation("/v1/models", status.models, answer=responses.Models),
    Operation("/v1/models/{id:path}", status.model, answer=responses.ServedModel),
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
        "/v1/chat/completions", generate.chat, "POST", fields.ChatRequest, responses.ChatCompletion,
        responses.ChatChunk,
        {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64},
    ),
    Operation(
        "/v1/responses", generate.responses, "POST", ResponsesRequest, bodies.ResponseBody,
        bodies.AnyEvent, {"input": "Why is the sky blue?", "max_output_tokens": 64},
    ),
    Operation(
        anthropic_errors.PATH, generate.messages, "POST", MessagesRequest,
        anthropic_bodies.MessageBody, anthropic_bodies.AnyEvent,
        {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64},
        MessagesError,
    ),
    Operation(
        f"{anthropic_errors.PATH}/count_tokens", count_tokens, "POST", CountTokensRequest,
        anthropic_bodies.TokenCount,
        example={"messages": [{"role": "user", "content": "Why is the sky blue?"}]},
        error=MessagesError,
    ),
    Operation(
        "/v1/completions", generate.completions, "POST", fields.CompletionRequest,
        responses.TextCompletion, responses.TextCompletion,
        {"prompt": "Once upon a time", "max_tokens": 32},
    ),
    Operation(
        "/infill", generate.infill, "POST", fields.InfillRequest, responses.InfillAnswer,
        responses.InfillAnswer,
        {"input_prefix": "def add(a, b):\n", "input_suffix": "\n\nprint(add(1, 2))\n",
         "max_tokens": 32},
    ),
    Operation(
        "/v1/embeddings", embeddings, "POST", EmbeddingRequest, Embeddings,
        example={"input": ["A ridge", "where two slopes meet"]},
    ),
    *(
        Operation(
            path, scoring.rerank, "POST", RerankRequest, Reranked,
            example={"query": "What is a ridge?", "documents": ["Two slopes meet.", "A lake."]},
        )
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    *(
        Operation(
            path, scoring.score, "POST", ScoreRequest, Scores,
            example={"text_1": "What is a ridge?", "text_2": ["Two slopes meet.", "A lake."]},
        )
        for path in ("/v1/score", "/score")
    ),
    *(
        Operation(
            path, classify, "POST", ClassifyRequest, Classified,
            example={"input": "A fine ridge"},
        )
        for path in ("/classify", "/v1/classify")
    ),
    Operation(
        "/tokenize", tokens.tokenize, "POST", fields.TokenizeRequest, responses.Tokenized,
        example={"prompt": "A ridge"},
    ),
    Operation(
        "/detokenize", tokens.detokenize, "POST", fields.DetokenizeRequest, responses.Detokenized,
        example={"tokens": [65, 66]},
    ),
    Operation(
        "/v1/files", files.create, "POST", answer=batch_bodies.FileBody, form=batch_bodies.FileForm
    ),
    Operation(
        "/v1/files", files.listed, answer=batch_bodies.FileList, query=batch_bodies.FileQuery
    ),
    Operation(
        "/v1/files/{id}", files.retrieve, answer=batch_bodies.FileBody, query=batch_bodies.NoQuery
    ),
    Operation(
        "/v1/files/{id}", files.delete, "DELETE", answer=batch_bodies.DeletedFile,
        query=batch_bodies.NoQuery,
    ),
    Operation("/v1/files/{id}/content", files.content, query=batch_bodies.NoQuery),
    Operation(
        "/v1/batches", batches.create, "POST", batch_bodies.BatchRequest, batch_bodies.BatchBody,
        example={"input_file_id": "file-...", "endpoint": "/v1/chat/completions",
                 "completion_window": "24h"},
    ),
    Operation(
        "/v1/batches", batches.listed, answer=batch_bodies.BatchList, query=batch_bodies.BatchQuery
    ),
    Operation(
        "/v1/batches/{id}", batches.retrieve, answer=batch_bodies.BatchBody,
        query=batch_bodies.NoQuery,
    ),
    Operation(
        "/v1/batches/{id}/cancel", batches.cancel, "POST", answer=batch_bodies.BatchBody,
        query=batch_bodies.NoQuery,
    ),
)  # fmt: skip
# They exist with keys of their own only.
CONTROL = (
    Operation(
        "/is_sleeping", control.is_sleeping, answer=EngineStatus, query=control_fields.ControlQuery
    ),
    *(
        Operation(f"/{work.__name__}", work, "POST", answer=EngineStatus, query=query)
        for work, query in (
            (control.pause, control_fields.PauseQuery),
            (control.resume, control_fields.ControlQuery),
            (control.sleep, control_fields.SleepQuery),
            (control.wake_up, control_fields.WakeQuery),
        )
    ),
    Operation(
        "/update_weights", control.update_weights, "POST", control_fields.UpdateRequest,
        EngineStatus, example={"path": "checkpoints/step_100"},
    ),
    Operation(
        "/v1/load_lora_adapter", control.load_lora_adapter, "POST",
        control_fields.LoadAdapterRequest, EngineStatus,
        example={"lora_name": "poet", "lora_path": "adapters/poet"},
    ),
    Operation(
        "/v1/unload_lora_adapter", control.unload_lora_adapter, "POST",
        control_fields.UnloadAdapterRequest, EngineStatus, example={"lora_name": "poet"},
    ),
)  # fmt: skip


def operations_of(service: Service) -> tuple[Operation, ...]:
    """The operations that a server has."""
    return OPERATIONS + CONTROL if service.has_control else OPERATIONS


def describe(operations: Sequence[Operation] = OPERATIONS) -> dict[str, object]:
    """Describes operations in OpenAPI."""
    kinds = [k for op in operations for k in (op.body, op.form, op.answer, op.event) if k]
    kinds = list(dict.fromkeys([*kinds, *(op.error for op in operations)]))
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    by_kind = dict(zip(kinds, schemas, strict=True))
    for name in (op.body.__name__ for op in operations if op.body):
        for field, schema in components[name]["properties"].items():
            if field in DESCRIPTIONS:
                schema["description"] = DESCRIPTIONS[field]
    paths: defaultdict[str, dict[str, object]] = defaultdict(dict)
    for op in operations:
        paths[op.path.replace(":path", "")][op.method.lower()] = _described(op, by_kind)
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
    parameters = [_parameter("id", "path", {"type": "string"})] * ("{id" in operation.path)
    if operation.query is not None:
        schema = msgspec.json.schema(operation.query)["$defs"][operation.query.__name__]
        parameters += [_parameter(n, "query", own) for n, own in schema["properties"].items()]
    if parameters:
        described["parameters"] = parameters
    requested: dict[str, object] = {}
    if operation.body is not None:
        body = {"schema": by_kind[operation.body], "example": operation.example}
        requested["application/json"] = body
    if operation.form is not None:
        requested["multipart/form-data"] = {"schema": by_kind[operation.form]}
    if requested:
        described["requestBody"] = {"required": True, "content": requested}
    return described


def _parameter(name: str, place: str, schema: object) -> dict[str, object]:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}
