"""What a client is told that went wrong, in OpenAI's shape."""

import math

import msgspec


class ErrorFacts(msgspec.Struct):
    """What went wrong: for people, of which kind, in which field, and for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """The body of every answer that is an error, and a stream's last event but one."""

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


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: of HTTP.
        message: for people; holds no path, no address, and no more than a few words of the input.
        param: the field that is wrong.
        code: for programs.
        may_retry: whether a client that sends it again may fare better.
        retry_s: seconds after which one may that was refused for lack of room; None: nobody knows.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        may_retry: bool = True,
        retry_s: float | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.may_retry = may_retry
        self.retry_s = retry_s

    @property
    def headers(self) -> dict[str, str]:
        """Of the answer: how to authenticate, when to come again, or that OpenAI's clients should
        not, and not to send the rest of a body.
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
        """As JSON."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return msgspec.json.encode(ErrorBody(ErrorFacts(self.message, kind, self.param, self.code)))


def invalid(param: str, why: str, code: str = "invalid_value") -> ApiError:
    """A field of the request is wrong: the message is its name and why."""
    return ApiError(400, f"{param} {why}", param, code)


def unavailable(why: str, retry_s: float | None = None) -> ApiError:
    """The request would be served at another moment, after so many seconds perhaps."""
    return ApiError(503, why, code="unavailable", retry_s=retry_s)
