"""Errors in Anthropic's shape, for the paths of its API."""

import msgspec
from msgspec import Struct
from starlette.responses import Response

from inference.server.failures import request_id
from inference.server.protocol.errors import ApiError

PATH = "/v1/messages"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class MessagesErrorFacts(Struct):
    """An error: its type, and a message that begins with the wrong field."""

    type: str
    message: str


class MessagesError(Struct, tag_field="type", tag="error"):
    """The body of an error, or the last event of a stream that failed. A request that could not be
    read has no id.
    """

    error: MessagesErrorFacts
    request_id: str | None


def has_path(path: str) -> bool:
    """Whether errors of a path have Anthropic's shape."""
    return path == PATH or path.startswith(f"{PATH}/")


def body(error: ApiError) -> bytes:
    """The body of an error of the current request."""
    kind = _TYPES.get(error.status, "invalid_request_error")
    message, param = error.message, error.param
    if param and not message.startswith(param):
        message = f"{param}: {message}"
    facts = MessagesErrorFacts(kind, message)
    return msgspec.json.encode(MessagesError(facts, request_id.get() or None))


def event(error: ApiError) -> bytes:
    """The last event of a stream that failed."""
    return b"event: error\ndata: " + body(error) + b"\n\n"


def response(error: ApiError, path: str) -> Response:
    """The answer to a request for a path: an error in the shape of its API."""
    if not has_path(path):
        return error.response()
    return Response(body(error), error.status, error.headers, "application/json")
