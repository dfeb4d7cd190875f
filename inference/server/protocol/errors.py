"""Errors as clients get them, in OpenAI's shape."""

import dataclasses
import math
import re
from collections.abc import Iterable

import msgspec
from starlette.responses import Response


class ErrorFacts(msgspec.Struct):
    """An error: a message, its type, the wrong field, and a code for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """The body of an error, or the event before `[DONE]` of a stream that failed."""

    error: ErrorFacts


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
RETRY_S = 1
_MAX_RETRY_S = 600


@dataclasses.dataclass(eq=False)
class ApiError(Exception):
    """An error that a client gets.

    Attributes:
        status: of HTTP.
        message: for people; contains no path, no address, and only a few words of the input.
        param: the wrong field.
        code: for programs.
        may_retry: the same request may succeed later.
        retry_s: seconds after which there may be room; None: unknown.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    may_retry: bool = True
    retry_s: float | None = None

    def __str__(self) -> str:
        return self.message

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer: how to authenticate, when or whether to retry, and whether the
        connection closes.
        """
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        if self.status in (429, 503):
            if self.retry_s is None:
                return {"retry-after": str(RETRY_S)}
            return {"retry-after": str(min(max(math.ceil(self.retry_s), 1), _MAX_RETRY_S))}
        headers = {"connection": "close"} if self.status in (408, 413) else {}
        return headers if self.may_retry else headers | {"x-should-retry": "false"}

    def body(self) -> bytes:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return msgspec.json.encode(ErrorBody(ErrorFacts(self.message, kind, self.param, self.code)))

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, "application/json")

    def renamed(self, param: str) -> "ApiError":
        """The same error of a field that has another name in the client's request."""
        message = self.message
        if self.param and message.startswith(self.param):
            message = param + message[len(self.param) :]
        return dataclasses.replace(self, message=message, param=param)

    def renamed_by(self, names: Iterable[tuple[str, str]]) -> "ApiError":
        """The same error in a request with other names: (pattern of a field here, its name there),
        of which the first that matches counts.
        """
        for here, there in names:
            if self.param and re.match(here, self.param):
                return self.renamed(re.sub(here, there, self.param, count=1))
        return self


def invalid(param: str, why: str, code: str = "invalid_value") -> ApiError:
    """A 400 for a wrong field; its message is the field's name and `why`."""
    return ApiError(400, f"{param} {why}", param, code)


def unusable(param: str, why: str, code: str = "invalid_value") -> ApiError:
    """As `invalid`, where `why` is a sentence of its own."""
    return ApiError(400, f"{param}: {why}", param, code)


def missing(param: str) -> ApiError:
    """A 400 for a field that the request has to have."""
    return invalid(param, "is required", "missing_required_parameter")


def unavailable(why: str, retry_s: float | None = None) -> ApiError:
    """A 503; `retry_s`: seconds until the request may be served, if known."""
    return ApiError(503, why, code="unavailable", retry_s=retry_s)
